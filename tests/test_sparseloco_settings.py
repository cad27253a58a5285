"""What must be equal on all ranks when SparseLoCo exchanges, and is not: all are told, and nothing is folded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_sparseloco import SPARSE, flat, gradient, model
from torch import Tensor, nn

from lightning_scape import SparseLoCo
from lightning_scape.sparseloco.phase import Settings

Told = tuple[str, Tensor, Tensor]


def _set(rank: int, world_size: int, name: str, values: tuple[Any, ...]) -> Told:
    """A setting changes in the second window, to each rank's own value; error, and parameters before and after."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE)
    said, before, starts = "", flat(net), torch.zeros(0)
    for step in range(5):
        gradient(net, rank, step)
        if step == 4:
            optimizer.param_groups[0][name] = values[rank]
            assert loco.state is not None
            starts = loco.state.start.clone()
        optimizer.step()
    try:
        gradient(net, rank, 9)
        before = flat(net)
        loco.sync()
    except ValueError as error:
        said = str(error)
    assert loco.state is not None
    assert torch.equal(starts, loco.state.start)
    assert loco.progress.in_window > 0
    loco.close()
    return said, before, flat(net)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("lr", (0.01, 0.02), "lr of group 0 = 0.01 on rank 0; lr of group 0 = 0.02 on rank 1"),
    ],
)
def test_settings_that_differ_are_an_error_on_every_rank_and_nothing_is_folded(
    run_ranks: Any, name: str, values: tuple[Any, ...], told: str
) -> None:
    for said, before, after in run_ranks(_set, 2, name, values, timeout=60):
        assert f"must have the same settings on all ranks, got {told}" in said
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("lr", math.nan, "learning rate must be finite")],
)
def test_settings_that_no_optimizer_can_train_with_are_an_error(
    run_ranks: Any, name: str, value: Any, told: str
) -> None:
    for said, *_ in run_ranks(_set, 2, name, (value, value), timeout=60):
        assert told in said


def _two(rank: int, world_size: int) -> str:
    nets = [model(), model()]
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in nets]
    locos = [SparseLoCo(optimizer, **{**SPARSE, "sync_every": 2}) for optimizer in optimizers]
    try:
        for step in range(4):
            order = (0, 1) if step < 3 or rank == 0 else (1, 0)
            for which in order:
                gradient(nets[which], rank, step)
                optimizers[which].step()
    except RuntimeError as error:
        assert len(locos) == 2
        return str(error)
    return ""


def test_optimizers_stepped_in_another_order_are_told_apart(run_ranks: Any) -> None:
    """Of the same shape: each took the other's message for its own, without a word."""
    for said in run_ranks(_two, 2, timeout=60):
        assert "got SparseLoCo number 1 on rank 0; SparseLoCo number 2 on rank 1" in said


def test_what_an_optimizer_works_out_for_itself_is_no_setting() -> None:
    """Prodigy and its like keep a step size of each rank's own in their groups."""

    class Adapts(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 1.0) -> None:
            super().__init__(params, lr)
            self.param_groups[0]["d"] = 1e-6

    optimizer = Adapts(nn.Linear(2, 2).parameters())
    settings = Settings.of(optimizer, [0])
    assert dict(settings.values) == {"lr of group 0": 1.0, "weight_decay of group 0": 0.0, "momentum of group 0": 0.0}
    optimizer.param_groups[0]["d"] = 0.5
    assert Settings.of(optimizer, [0]).digest == settings.digest
    optimizer.param_groups[0]["lr"] = torch.tensor(2.0)
    assert dict(Settings.of(optimizer, [0]).values)["lr of group 0"] == 2.0
