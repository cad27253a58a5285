"""One rank is told to stop: all stop after the same step, whatever each of them is doing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sparseloco import SPARSE, gradient, model

from lightning_scape import SparseLoCo
from lightning_scape.comm import stop_word
from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.stop_word import StopWord


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_word, "POLL_SECONDS", 0.02)


def _stop(rank: int, world_size: int, told: tuple[int, ...], messages_at: int) -> int:
    """Ranks of different speed; rank 0 waits in a message of step ``messages_at`` while others are steps behind."""
    stop_word.POLL_SECONDS = 0.02
    word = StopWord(Communicator())
    for step in range(1, 200):
        if step == messages_at:
            dist.barrier()
        time.sleep(0.005 * (rank + 1))
        if step == 5 and rank in told:
            word.say()
        if word.ends():
            assert word.ends()  # it stays so
            return step
    return 0


@pytest.mark.parametrize(("told", "messages_at"), [((2,), 8), ((0, 1, 2), 6)])
def test_all_ranks_stop_after_the_same_step(run_ranks: Any, told: tuple[int, ...], messages_at: int) -> None:
    steps = run_ranks(_stop, 3, told, messages_at, timeout=30)
    assert len(set(steps)) == 1
    assert 5 <= steps[0] < 100


def test_a_rank_alone_stops_after_its_step() -> None:
    word = StopWord(Communicator.alone())
    assert not word.ends()
    word.say()
    assert word.ends()


def _between_exchanges(rank: int, world_size: int, overlap: int) -> tuple[int, int]:
    stop_word.POLL_SECONDS = 0.02
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **{**SPARSE, "sync_every": 1000 if not overlap else 5}, overlap_steps=overlap)
    for step in range(400):
        time.sleep(0.002)
        gradient(net, rank, step)
        if step == 3 and rank == 1:
            loco.request_stop()
        optimizer.step()
        if loco.stop_requested:
            break
    loco.sync()
    loco.close()
    return loco.progress.steps, loco.progress.exchanges


@pytest.mark.parametrize("overlap", [0, 2])
def test_sparseloco_need_not_wait_for_its_next_exchange(run_ranks: Any, overlap: int) -> None:
    first, second = run_ranks(_between_exchanges, 2, overlap, timeout=60)
    assert first == second
    assert first[0] < 400
