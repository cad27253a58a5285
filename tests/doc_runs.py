"""Runs a block of Python of the documentation: what a rank's process imports, so that it imports little."""

from __future__ import annotations

import os
from typing import Any

import torch
from doc_pages import Block
from torch import Tensor, nn

SHORT = {
    '"nccl"': '"gloo"',
    '"cuda", (4, 8)': '"cpu", (2, 1)',
    "devices=8": "devices=2",
    "devices=1, num_nodes=8": "devices=2",
    "max_epochs=5": "max_epochs=1",
    "torch.randn(4096, 32)": "torch.randn(128, 32)",
}
"""What makes a block run on two CPU processes."""


class Model(nn.Module):
    """What a page calls ``model``: it has blocks, and its forward pass gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch).relu()
        return self.head(batch).square().mean()


def execute(rank: int, world_size: int, block: Block, folder: str) -> bool:
    """Runs a block where the names that pages take for granted are there; True at its end."""
    os.chdir(folder)
    torch.distributed.init_process_group = lambda *args, **kwargs: None  # the ranks are there already
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {"model": model, "batches": [torch.randn(4, 16) for _ in range(3)], "__name__": "__main__"}
    text = block.text
    for long, short in SHORT.items():
        text = text.replace(long, short)
    exec(compile(text, block.name, "exec"), names)
    if (optimizer := names.get("optimizer")) is not None and hasattr(optimizer, "drain"):
        optimizer.drain()
    return True
