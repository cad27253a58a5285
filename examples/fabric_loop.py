"""SCAPE in a training loop of your own with Lightning Fabric: one argument.

python examples/fabric_loop.py                      # two CPU processes, half a minute, nothing to download
python examples/fabric_loop.py --devices 8 --accelerator cuda --precision bf16-mixed
"""

import argparse

import lightning as L
import torch
from python_source import VOCABULARY, PythonSource
from torch import Tensor, nn

from lightning_scape import FabricScapeStrategy, ScapeOptimizer


class ByteModel(nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self, context: int, width: int = 64) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=tokens.device)
        return self.head(self.blocks(self.bytes(tokens) + self.positions(places), mask=mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 200), ("devices", 2), ("batch", 8), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--save", help="write a checkpoint here at the end")
    args = parser.parse_args()

    strategy = FabricScapeStrategy(sparsity=args.sparsity)  # was: "ddp"
    fabric = L.Fabric(accelerator=args.accelerator, devices=args.devices, precision=args.precision, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = ByteModel(args.context)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95)))
    batches = fabric.setup_dataloaders(PythonSource(args.batch, args.context).train_dataloader())

    for step, batch in zip(range(args.steps), batches, strict=False):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps - 1:
            sent = ScapeOptimizer.of(optimizer).stats.bytes_total / 1e6
            fabric.print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}, sent {sent:.3f} MB")
    if args.save:
        fabric.save(args.save, {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
