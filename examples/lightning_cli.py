"""LightningCLI: a whole training run in one file, SCAPE included.

pip install -e '.[litgpt,cli]'
python examples/lightning_cli.py fit --config configs/lightning_cli.yaml
python examples/lightning_cli.py fit --config configs/lightning_cli.yaml --trainer.strategy.init_args.sparsity 0.99
python examples/lightning_cli.py fit --trainer.strategy scape --trainer.max_steps 100     # without a file
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch import Tensor

from lightning_scape import PythonSource


class ByteGPT(L.LightningModule):
    """LitGPT's GPT over bytes.

    Args:
        n_layer: blocks.
        n_head: attention heads.
        n_embd: width.
        block_size: longest context; the command line takes it from data.context_length.
        lr: learning rate.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        n_layer: int = 2,
        n_head: int = 4,
        n_embd: int = 64,
        block_size: int = 128,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        shape = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
        self.model = GPT(Config(name="bytes", vocab_size=256, padded_vocab_size=256, rotary_percentage=1.0, **shape))
        self.lr, self.weight_decay = lr, weight_decay

    def _loss(self, batch: Tensor) -> Tensor:
        return chunked_cross_entropy(self.model(batch[:, :-1]), batch[:, 1:], chunk_size=0)

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=self.weight_decay)


class ByteCLI(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context_length", "model.block_size")


def main() -> None:
    ByteCLI(ByteGPT, PythonSource)


if __name__ == "__main__":
    main()
