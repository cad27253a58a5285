"""A Hugging Face causal LM under the Lightning Trainer with SCAPE.

    pip install -c configs/constraints.txt transformers
    python examples/finetune_transformers.py            # a tiny Llama of random weights, two CPU processes
    python examples/finetune_transformers.py --model EleutherAI/pythia-70m --accelerator cuda --devices 8

Any model that `AutoModelForCausalLM` loads will do. The text is the Python standard library: in bytes for the tiny
model, in the model's own tokens otherwise.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from python_source import VOCABULARY, PythonSource
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lightning_scape import ScapeMonitor, ScapeStrategy


class CausalLM(L.LightningModule):
    def __init__(self, name: str | None, context: int, lr: float) -> None:
        super().__init__()
        self.context, self.lr, self.tokenizer = context, lr, None
        if name:
            self.model = AutoModelForCausalLM.from_pretrained(name)
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        else:
            shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
            self.model = LlamaForCausalLM(LlamaConfig(VOCABULARY, max_position_embeddings=context + 1, **shape))

    def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        """Bytes as the model's own tokens, [b, context]."""
        if self.tokenizer is None:
            return batch
        texts = [bytes(row.tolist()).decode(errors="replace") for row in batch]
        tokens = self.tokenizer(texts, truncation=True, padding="max_length", max_length=self.context)
        return torch.tensor(tokens["input_ids"])

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.loss(tokens)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        self.log("val_loss", self.loss(tokens), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        # Biases and norms are not decayed: SCAPE keeps the groups as they are.
        groups = [
            {"params": [p for p in self.parameters() if p.requires_grad and p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.requires_grad and p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a Hugging Face causal LM; none is a tiny random Llama")
    for name, default in (("steps", 200), ("devices", 2), ("batch", 8), ("context", 64), ("accumulate", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--out", type=Path, default=Path("out/transformers"))
    args = parser.parse_args()

    L.seed_everything(0)
    module = CausalLM(args.model, args.context, args.lr)
    trainer = L.Trainer(
        strategy=ScapeStrategy(sparsity=args.sparsity),  # was: "ddp"
        accelerator=args.accelerator,
        devices=args.devices,
        precision=args.precision,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        limit_val_batches=10,
        val_check_interval=args.steps * args.accumulate,
        log_every_n_steps=10,
        default_root_dir=args.out,
        logger=CSVLogger(args.out),
        callbacks=[ScapeMonitor(every_n_steps=10)],
    )
    bytes_of_a_token = 1 if module.tokenizer is None else 6  # some are cut off
    trainer.fit(module, datamodule=PythonSource(args.batch, bytes_of_a_token * args.context))
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.3f} nats per token")
        module.model.save_pretrained(args.out / "model")  # the ordinary format: load it anywhere


if __name__ == "__main__":
    main()
