"""Numerical faults and bad files on nodes of several ranks: the same errors on every rank, and nothing is spoilt."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_faults import ALL_RANKS, ONE_RANK
from test_two_level import assert_nodes_equal, build
from two_level_helpers import Holder, gradient, make_mesh, sharded

from lightning_scape.checkpoint.saver import Content, SavedContent, Saver
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.local_shards import local

SHAPES = ((40, 7), (40,), (2, 40))


def _train_through(rank: int, world_size: int, clip: bool) -> None:
    mesh = make_mesh(2)
    holder, plain = sharded(Holder(SHAPES), mesh), Holder(SHAPES)
    optimizer = build(holder, mesh, update="adamw", max_skipped=3)
    script = [(name, True) for name in ONE_RANK] + [(name, False) for name in ALL_RANKS]
    for step in range(3 * len(script)):
        holder.set_gradients(gradient(plain, rank, step))
        (name, alone), skips = script[step // 3], False
        if step % 3 == 2:
            fault, skips = ONE_RANK[name]
            if rank == 1 or not alone:  # in this rank's rows only
                if name == "no gradient":
                    fault(list(holder.held))
                else:
                    fault([SimpleNamespace(grad=local(parameter.grad)) for parameter in holder.held])
        if clip:
            optimizer.clip_grad_norm(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        optimizer.zero_grad()
        assert optimizer.stats is not None
        assert optimizer.stats.skipped is skips, name
        assert_nodes_equal(holder, mesh)
        optimizer.drain()
        state = optimizer.engine.state
        assert state is not None
        for held in (state.residual, state.exp_avg, state.exp_avg_sq, *optimizer.engine.parameters.local):
            assert held is None or bool(held.isfinite().all()), name


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [True, False])
def test_no_fault_on_one_rank_parts_the_nodes_or_spoils_what_is_kept(run_ranks: Any, clip: bool) -> None:
    run_ranks(_train_through, 4, clip)


def _diverge(rank: int, world_size: int) -> str:
    mesh = make_mesh(2)
    holder = sharded(Holder(SHAPES), mesh)
    optimizer = build(holder, mesh)
    if rank == 3:
        with torch.no_grad():
            local(holder.held[1])[0] += 1
    holder.set_gradients(gradient(Holder(SHAPES), rank, 0))
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_rows_that_differ_between_nodes_are_an_error_on_every_rank(run_ranks: Any) -> None:
    for said in run_ranks(_diverge, 4):
        assert "All ranks must hold bitwise equal parameters, got 'parameter 1'" in said


def _bad_files(rank: int, world_size: int, folder: str) -> list[str]:
    mesh, ranks = make_mesh(2), Communicator()
    holder = sharded(Holder(SHAPES), mesh)
    optimizer = build(holder, mesh)
    holder.set_gradients(gradient(Holder(SHAPES), rank, 0))
    optimizer.step()
    content = Content({"model": holder.state_dict()}, {"optimizer": optimizer.sharded_state_dict()}, {})
    path = Path(folder) / "saved"
    Saver(False).save(path, content, ranks)
    other = sharded(Holder(((40, 7), (40,), (2, 41))), mesh)
    said = []
    unfit = build(other, mesh)
    for state in (SavedContent(path, ranks).optimizers["optimizer"], {"state": {}, "param_groups": []}):
        try:
            unfit.load_state_dict(state)
        except ValueError as error:
            said.append(str(error))
    ranks.raise_on_all_ranks(lambda: None)
    if rank == 2:  # a byte in the middle of another rank's file
        file = path / "__1_0.distcp"
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
    ranks.raise_on_all_ranks(lambda: None)
    try:
        SavedContent(path, ranks)
    except Exception as error:
        said.append(str(error))
    return said


@pytest.mark.few(0)
def test_states_that_do_not_fit_and_damaged_files_are_errors_on_every_rank(run_ranks: Any, tmp_path: Path) -> None:
    for said in run_ranks(_bad_files, 4, str(tmp_path)):
        assert len(said) == 3
        assert "must have shape (2, 41), got (2, 40)" in said[0]
        assert "must have 1 parameter groups, got 0" in said[1]
        assert "__1_0.distcp" in said[2]
