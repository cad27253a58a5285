"""Ranks of SparseLoCo that are not at the same step, or no longer train the same parameters: all of them are told."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_sparseloco import SPARSE, flat, gradient, model
from torch import Tensor

from lightning_scape import SparseLoCo

# ------------------------------------------------------------------------------------------------ another step


def _skips(rank: int, world_size: int, batches: int, early: bool) -> tuple[str, float]:
    """Rank 1 leaves one batch out, as GradScaler does with an overflow; what it is told, and after how long."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE)
    began = time.monotonic()
    try:
        for step in range(batches):
            gradient(net, rank, step)
            if (rank, step) != (1, 1):
                optimizer.step()
            if early and step == 3:
                loco.sync()
        loco.sync()
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


@pytest.mark.parametrize(
    ("batches", "early", "told"),
    [
        (6, False, "6 (3 since the last exchange) on ranks 0, 2; 5 (2 since the last exchange) on rank 1"),
        (9, True, "4 (1 since the last exchange) on ranks 0, 2; 3 (0 since the last exchange) on rank 1"),
    ],
)
def test_ranks_that_have_taken_different_numbers_of_steps_are_told_on_every_rank(
    run_ranks: Any, batches: int, early: bool, told: str
) -> None:
    """Windows ended a batch apart, and the last sync() waited until the timeout."""
    for said, seconds in run_ranks(_skips, 3, batches, early, timeout=60):
        assert f"must take the same number of steps, got {told}." in said
        assert "ShardedGradScaler" in said
        assert seconds < 30


def _synced(rank: int, world_size: int) -> tuple[list[Tensor], list[int], int, int]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE)
    loco.sync()  # before the first step
    ends, exchanges = [], []
    for step in range(7):
        gradient(net, rank, step)
        optimizer.step()
        if step in (2, 4, 6):
            for _ in range(2):  # the second has nothing to do
                loco.sync()
                ends.append(flat(net))
                exchanges.append(loco.progress.exchanges)
    assert loco.stats is not None
    return ends, exchanges, loco.stats.bytes_norm, loco.stats.bytes_total


def test_sync_exchanges_only_what_has_begun_and_counts_its_bytes(run_ranks: Any) -> None:
    first, second = run_ranks(_synced, 2)
    assert first[1] == second[1] == [1, 1, 2, 2, 3, 3]
    assert first[2] == second[2] == 40  # to one other rank
    for mine, theirs in zip(first[0], second[0], strict=True):
        assert torch.equal(mine, theirs)


# ------------------------------------------------------------------------------------------------ other parameters


def _changes(rank: int, world_size: int, change: str, who: int | None) -> dict[str, Any]:
    """Changes the parameters after 4 steps of windows of 3, on one rank or on all, and wraps the optimizer anew."""
    net, extra = model(), torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE)
    error, told = "", 0
    for step in range(9):
        if step == 4 and rank == (rank if who is None else who):
            if change == "freeze":
                net[0].weight.requires_grad_(False)
            else:
                optimizer.add_param_group({"params": [extra]})
        gradient(net, rank, step)
        try:
            optimizer.step()
        except ValueError as raised:
            error, told = str(raised), step
            break
    together = flat(net)
    loco.sync()  # as it is told, or in `with`: has nothing to do, and raises nothing
    loco.close()
    found: dict[str, Any] = {"error": error, "told": told, "together": together, "again": flat(net)}
    if who is None:
        again = SparseLoCo(optimizer, **SPARSE)
        for step in range(9, 12):
            gradient(net, rank, step)
            optimizer.step()
        assert again.progress.exchanges == 1
        found["end"] = flat(net)
    return found


@pytest.mark.parametrize("change", ["freeze", "add"])
def test_other_parameters_are_an_error_at_the_next_step_and_the_optimizer_can_be_wrapped_anew(
    run_ranks: Any, change: str
) -> None:
    first, second = run_ranks(_changes, 2, change, None)
    for seen in (first, second):
        assert (
            "must be frozen, unfrozen and added before SparseLoCo wraps the optimizer, got others now" in seen["error"]
        )
        assert "got others now on ranks 0, 1. " in seen["error"]
        assert seen["told"] == 4
        assert torch.equal(seen["together"], first["together"])
        assert torch.equal(seen["together"], seen["again"])
        assert torch.equal(seen["end"], first["end"])


def test_parameters_that_change_on_one_rank_are_told_on_every_rank(run_ranks: Any) -> None:
    """The others waited until the timeout."""
    ranks = run_ranks(_changes, 2, "add", 1, timeout=60)
    for seen in ranks:
        assert "got others now on rank 1. " in seen["error"]
        assert torch.equal(seen["together"], ranks[0]["together"])
    assert ranks[1]["told"] == 4
    assert ranks[0]["told"] == 5  # where its window ends
