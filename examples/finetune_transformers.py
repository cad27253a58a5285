"""A Hugging Face causal LM under the Lightning Trainer with SCAPE: LitGPT is not needed.

    pip install transformers
    python examples/finetune_transformers.py            # a tiny Llama of random weights, two CPU processes
    python examples/finetune_transformers.py --model EleutherAI/pythia-70m --accelerator cuda --devices 8

Any model that `AutoModelForCausalLM` loads will do. The text is the Python standard library, in bytes for the tiny
model and tokenized as the model wants it otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from python_source import PythonSource
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_scape import ScapeMonitor, ScapeStrategy

if TYPE_CHECKING:  # --help works without it
    from transformers import LlamaForCausalLM


def check_installed() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit("This example must find transformers, got no transformers: pip install transformers")


class CausalLM(L.LightningModule):
    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        super().__init__()
        self.model, self.lr = model, lr

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        # Biases and norms are not decayed; SCAPE keeps the groups as they are.
        groups = [
            {"params": [p for p in self.parameters() if p.requires_grad and p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.requires_grad and p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95))
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Retokenized(IterableDataset[Tensor]):
    """Batches of bytes as batches of the model's own tokens, `[b, context]`."""

    def __init__(self, batches: DataLoader[Tensor], tokenizer: Any, context: int) -> None:
        self.batches, self.tokenizer, self.context = batches, tokenizer, context

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.batches:
            texts = [bytes(row.tolist()).decode(errors="replace") for row in batch]
            tokens = self.tokenizer(texts, truncation=True, padding="max_length", max_length=self.context)
            yield torch.tensor(tokens["input_ids"])


class Source(PythonSource):
    """PythonSource, in the model's tokens where it has a tokenizer."""

    def __init__(self, tokenizer: Any, context: int, **options: Any) -> None:
        super().__init__(context_length=context if tokenizer is None else 6 * context, **options)
        self.tokenizer, self.context = tokenizer, context

    def train_dataloader(self) -> Any:
        return self._retokenized(super().train_dataloader())

    def val_dataloader(self) -> Any:
        return self._retokenized(super().val_dataloader())

    def _retokenized(self, batches: DataLoader[Tensor]) -> Any:
        if self.tokenizer is None:
            return batches
        return DataLoader(Retokenized(batches, self.tokenizer, self.context), batch_size=None)


def tiny_llama(context: int) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=context + 1, **shape))


def positive(text: str) -> int:
    """An option that must be a whole number >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}. Use 1 or more.")
    return int(text)


def build_trainer(options: argparse.Namespace) -> L.Trainer:
    return L.Trainer(
        strategy=ScapeStrategy(sparsity=options.sparsity),  # was: "ddp"
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        limit_val_batches=10,
        val_check_interval=options.steps * options.accumulate,
        log_every_n_steps=10,
        default_root_dir=options.out,
        logger=L.pytorch.loggers.CSVLogger(options.out),
        callbacks=[ScapeMonitor(every_n_steps=10)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a Hugging Face causal LM; none is a tiny random Llama")
    for name, default in (("steps", 200), ("devices", 2), ("batch", 8), ("context", 64), ("accumulate", 1)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--out", default="out/transformers")
    options = parser.parse_args()
    check_installed()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        trainer = build_trainer(options)
    except (ValueError, MisconfigurationException) as error:  # an option that Lightning or ScapeConfig refuses
        parser.error(str(error))

    tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else None
    if tokenizer is not None and tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else tiny_llama(options.context)
    trainer.fit(CausalLM(model, options.lr), datamodule=Source(tokenizer, options.context, batch_size=options.batch))
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['val_loss']):.3f} nats per token")
        model.save_pretrained(os.path.join(options.out, "model"))  # the ordinary format: load it anywhere


if __name__ == "__main__":
    main()
