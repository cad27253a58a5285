"""SparseLoCo between nodes of several ranks, whose replica FSDP2 shards: 2 nodes of 2 ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from two_level_helpers import Holder, make_mesh, mean_gradient, node_of, sharded

from lightning_scape import SparseLoCo
from lightning_scape.checkpoint.saver import Saver, verify
from lightning_scape.checkpoint.shards import read_directory
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.local_shards import local

SHAPES = ((5, 3), (7,), (1, 4))
"""Rows that do not divide by two, and one row: a rank of each node holds nothing of it."""
EXACT: dict[str, Any] = {"density": 1.0, "bits": None, "error_decay": 1.0, "sync_every": 3}
SPARSE: dict[str, Any] = {"density": 1 / 8, "bits": 2, "sync_every": 3}


def build(nodes: int, options: dict[str, Any], sgd: bool = False) -> tuple[Holder, torch.optim.Optimizer, SparseLoCo]:
    """On nodes of several ranks, or on flat ranks where there are as many nodes as ranks."""
    holder = Holder(SHAPES)
    group = None
    if nodes < dist.get_world_size():
        mesh = make_mesh(nodes)
        sharded(holder, mesh)
        group = mesh["replicate"].get_group() if nodes > 1 else None
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(holder.parameters(), 0.01)
    return holder, optimizer, SparseLoCo(optimizer, **options, process_group=group)


def go_on(
    holder: Holder, optimizer: torch.optim.Optimizer, nodes: int, first: int, stop: int, factor: float = 1.0
) -> None:
    plain = Holder(SHAPES)
    for step in range(first, stop):
        mean = mean_gradient(plain, node_of(dist.get_rank(), nodes), step)
        holder.set_gradients([gradient * factor for gradient in mean])
        optimizer.step()


def flat(holder: Holder) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in holder.whole()])


def rows(holder: Holder) -> Tensor:
    return torch.cat([local(parameter.detach()).flatten() for parameter in holder.held])


def _averaging(rank: int, world_size: int) -> Tensor:
    holder, optimizer, loco = build(2, EXACT)
    go_on(holder, optimizer, 2, 0, 6)
    assert loco.progress.exchanges == 2
    assert loco.communicator.world_size == loco.node.world_size == 2
    return flat(holder)


def test_everything_sent_is_plain_averaging_of_the_nodes(run_ranks: Any) -> None:
    ends = run_ranks(_averaging, 4)
    nets = [Holder(SHAPES) for _ in range(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), 0.01) for net in nets]
    for step in range(6):
        for node, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            net.set_gradients(mean_gradient(net, [2 * node, 2 * node + 1], step))
            optimizer.step()
        if step % 3 == 2:
            mean = torch.stack([flat(net) for net in nets]).mean(dim=0)
            for net in nets:
                torch.nn.utils.vector_to_parameters(mean.clone(), net.parameters())
    for end in ends:
        torch.testing.assert_close(end, flat(nets[0]), rtol=1e-5, atol=1e-6)
        assert torch.equal(end, ends[0])


def save(loco: SparseLoCo, path: Path, kind: str) -> None:
    if kind == "whole":
        loco.consolidate_state_dict()
        if dist.get_rank() == 0:
            torch.save(loco.state_dict(), path)
    else:
        Saver("sharded").save({"loco": loco.own_state()}, str(path), torch.save)
    dist.barrier()


def read(path: Path, kind: str) -> Any:
    if kind == "whole":
        return torch.load(path, weights_only=True)
    return read_directory(path, Communicator())["loco"]


def _resume(rank: int, world_size: int, folder: str, kind: str) -> tuple[Tensor, Tensor]:
    options, path, after = SPARSE, Path(folder) / "saved", 4
    holder, optimizer, loco = build(2, options)
    go_on(holder, optimizer, 2, 0, after)
    save(loco, path, kind)
    go_on(holder, optimizer, 2, after, 8)
    other, second, again = build(2, options)
    again.load_state_dict(read(path, kind))
    go_on(other, second, 2, after, 8)
    assert again.progress == loco.progress
    if rank == 0 and kind != "whole":
        verify(path)
    return rows(holder), rows(other)


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_training_goes_on_bit_for_bit_on_the_same_mesh(run_ranks: Any, tmp_path: Path, kind: str) -> None:
    ends = run_ranks(_resume, 4, str(tmp_path), kind)
    for straight, resumed in ends:
        assert torch.equal(straight, resumed)
    assert not torch.equal(ends[0][0], ends[2][0])  # inside a window nodes differ


def _faults(rank: int, world_size: int) -> tuple[int, Tensor]:
    holder, optimizer, loco = build(2, SPARSE)
    go_on(holder, optimizer, 2, 0, 3)
    if rank == 3:  # one rank's rows only
        with torch.no_grad():
            local(holder.held[0]).view(-1)[0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go_on(holder, optimizer, 2, 3, 6)
    return loco.progress.dropped, rows(holder)


def test_a_rank_that_is_not_finite_drops_the_window_on_all_ranks_of_all_nodes(run_ranks: Any) -> None:
    ends = run_ranks(_faults, 4)
    for dropped, end in ends:
        assert dropped == 1
        assert bool(end.isfinite().all())
    for one, other in ((0, 2), (1, 3)):
        assert torch.equal(ends[one][1], ends[other][1])


def _wrong(rank: int, world_size: int, fault: str) -> None:
    holder, mesh = Holder(SHAPES), make_mesh(2)
    sharded(holder, mesh)
    if fault == "rows" and rank == 2:
        with torch.no_grad():
            local(holder.held[1])[0] += 1
    group = None if fault == "group" else mesh["replicate"].get_group()
    optimizer = torch.optim.AdamW(holder.parameters())
    SparseLoCo(optimizer, process_group=group)
    go_on(holder, optimizer, 2, 0, 1)


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [("group", "`process_group` must be the ranks with the same rows"), ("rows", "must hold bitwise equal parameters")],
)
def test_what_is_wrong_is_said_on_every_rank(run_ranks: Any, fault: str, complaint: str) -> None:
    for error in run_ranks(_wrong, 4, fault, expect_errors=True):
        assert isinstance(error, (ValueError, RuntimeError))
        assert complaint in str(error)
