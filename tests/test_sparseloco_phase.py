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


def _skips(rank: int, world_size: int, batches: int, overlap: int, early: bool) -> tuple[str, float]:
    """Rank 1 leaves one batch out, as GradScaler does with an overflow; what it is told, and after how long."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE, overlap_steps=overlap)
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
    ("batches", "overlap", "early", "told"),
    [
        (6, 0, False, "6 (3 since the last exchange) on ranks 0, 2; 5 (2 since the last exchange) on rank 1"),
        (7, 0, False, "7 (1 since the last exchange) on ranks 0, 2; 6 (0 since the last exchange) on rank 1"),
        (8, 2, False, "8 (2 since the last exchange) on ranks 0, 2; 7 (1 since the last exchange) on rank 1"),
        (6, 2, False, "6 (3 since the last exchange) on ranks 0, 2; 5 (2 since the last exchange) on rank 1"),
        (9, 0, True, "4 (1 since the last exchange) on ranks 0, 2; 3 (0 since the last exchange) on rank 1"),
    ],
)
def test_ranks_that_have_taken_different_numbers_of_steps_are_told_on_every_rank(
    run_ranks: Any, batches: int, overlap: int, early: bool, told: str
) -> None:
    """Windows ended a batch apart, and the last sync() waited until the timeout."""
    for said, seconds in run_ranks(_skips, 3, batches, overlap, early, timeout=60):
        assert f"must take the same number of steps, got {told}." in said
        assert "ShardedGradScaler" in said
        assert seconds < 30


def _synced(rank: int, world_size: int, overlap: int) -> tuple[list[Tensor], list[int], int, int]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE, overlap_steps=overlap)
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


@pytest.mark.parametrize("overlap", [0, 2])
def test_sync_exchanges_only_what_has_begun_and_counts_its_bytes(run_ranks: Any, overlap: int) -> None:
    first, second = run_ranks(_synced, 2, overlap)
    assert first[1] == second[1] == [1, 1, 2, 2, 3, 3]
    assert first[2] == second[2] == 12  # to one other rank
    for mine, theirs in zip(first[0], second[0], strict=True):
        assert torch.equal(mine, theirs)
