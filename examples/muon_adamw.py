"""Matrices by Muon, all else by AdamW, as one optimizer: under SparseLoCo this is MuLoCo (arXiv 2505.23725)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class MuonAdamW(torch.optim.Optimizer):
    """One learning rate serves both: Muon's steps are scaled to be as large as AdamW's.

    Args:
        named_parameters: of the model.
        lr: of both.
        betas: AdamW's.
        weight_decay: of both.
        by_adamw: parts of the names of matrices that AdamW trains better: embeddings, the output layer.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        by_adamw: Iterable[str] = ("wte", "lm_head"),
    ) -> None:
        apart, matrices, others = [*by_adamw], [], []
        for name, parameter in named_parameters:
            by_muon = parameter.dim() == 2 and not any(part in name for part in apart)
            (matrices if by_muon else others).append(parameter)
        self.muon = torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, lr, betas, weight_decay=weight_decay)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of both."""
        loss = None if closure is None else closure()
        for part, group in zip((self.muon, self.adamw), self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]  # new ones after a load
            part.step()
        return loss
