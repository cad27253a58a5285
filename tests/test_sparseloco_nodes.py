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
from lightning_scape.checkpoint.inspection import verify
from lightning_scape.checkpoint.saver import Content, SavedContent, Saver
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.local_shards import local

SHAPES = ((5, 3), (7,), (1, 4))
"""Rows that do not divide by two, and one row: a rank of each node holds nothing of it."""
EXACT: dict[str, Any] = {"density": 1.0, "bits": None, "error_decay": 1.0, "sync_every": 3}
SPARSE: dict[str, Any] = {"density": 1 / 8, "block_size": 8, "bits": 2, "sync_every": 3, "reduction": "sharded"}


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


def _averaging(rank: int, world_size: int, options: dict[str, Any]) -> Tensor:
    holder, optimizer, loco = build(2, {**EXACT, **options})
    go_on(holder, optimizer, 2, 0, 6)
    assert loco.progress.exchanges == 2
    assert loco.communicator.world_size == loco.node.world_size == 2
    return flat(holder)


def test_everything_sent_is_plain_averaging_of_the_nodes(run_ranks: Any) -> None:
    ends = run_ranks(_averaging, 4, {"reduction": "sharded"})
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


def _owed(loco: SparseLoCo, blocks: Tensor) -> Tensor:
    pieces = loco.layout.everything().pieces
    return torch.cat([blocks.view(-1)[piece.of_blocks(loco.layout.block_size)] for piece in pieces])


def _conservation(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """With SGD: the way gone plus what is owed, the mean of all pseudo-gradients, and what two messages lost."""
    holder, optimizer, loco = build(2, {**SPARSE, "error_decay": 1.0}, sgd=True)
    first, lost = rows(holder), []
    for wire in (loco.exchange.wire, loco.exchange.back):

        def watched(blocks: Tensor, wire: Any = wire, take: Any = wire.take) -> Tensor:
            there = blocks.double()
            message = take(blocks)
            entries, sent = wire.read(message), torch.zeros_like(there)
            entries._replace(values=entries.values.double()).add_to(sent)
            lost.append(float((sent + blocks.double() - there).abs().max()))
            return message

        object.__setattr__(wire, "take", watched)
    go_on(holder, optimizer, 2, 0, 6)
    assert loco.state is not None
    assert len(lost) == 4
    owner = torch.zeros_like(loco.state.error)
    owner[loco.layout.rows_of(loco.communicator.rank)] = loco.state.owner_error
    owed = _owed(loco, loco.state.error) / 2 + _owed(loco, owner)
    dist.all_reduce(owed, group=loco.communicator.process_group)
    way = first - rows(holder)
    plain = Holder(SHAPES)
    total = [torch.zeros_like(p) for p in plain.held]
    for step in range(6):
        for sum_, gradient in zip(total, mean_gradient(plain, range(4), step), strict=True):
            sum_ += 0.01 * gradient
    plain.set_gradients(total)
    holder.set_gradients(total)
    moved = torch.cat([local(p.grad).flatten() for p in holder.held if p.grad is not None])
    return way, owed, moved, max(lost)


def test_nothing_is_lost_between_nodes(run_ranks: Any) -> None:
    for way, owed, moved, lost in run_ranks(_conservation, 4):
        assert lost == 0.0
        assert float(owed.abs().max()) > 0
        torch.testing.assert_close(way + owed, moved, rtol=1e-4, atol=1e-6)


def save(loco: SparseLoCo, path: Path, kind: str) -> None:
    if kind == "whole":
        loco.consolidate_state_dict()
        if dist.get_rank() == 0:
            torch.save(loco.state_dict(), path)
    else:
        content = Content(optimizers={"loco": loco.sharded_state_dict()})
        Saver(asynchronous=False).save(path, content, Communicator())
    dist.barrier()


def read(path: Path, kind: str) -> Any:
    if kind == "whole":
        return torch.load(path, weights_only=True)
    return SavedContent(path, Communicator()).optimizers["loco"]


def _resume(rank: int, world_size: int, folder: str, kind: str, overlap: int, after: int) -> tuple[Tensor, Tensor]:
    options, path = {**SPARSE, "overlap_steps": overlap}, Path(folder) / "saved"
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


@pytest.mark.parametrize(("kind", "overlap", "after"), [("whole", 0, 4), ("sharded", 2, 4)])
def test_training_goes_on_bit_for_bit_on_the_same_mesh(
    run_ranks: Any, tmp_path: Path, kind: str, overlap: int, after: int
) -> None:
    ends = run_ranks(_resume, 4, str(tmp_path), kind, overlap, after)
    for straight, resumed in ends:
        assert torch.equal(straight, resumed)
    assert not torch.equal(ends[0][0], ends[2][0])  # inside a window nodes differ


def _reshard(rank: int, world_size: int, folder: str, kind: str, before: int, now: int) -> list[list[Tensor]]:
    """Whole starting point, mean of what ranks and owners owe, mean parameters, and a moment; before and after."""
    path, found = Path(folder) / "saved", []
    holder, optimizer, loco = build(before, SPARSE)
    go_on(holder, optimizer, before, 0, 4)
    save(loco, path, kind)
    other, second, again = build(now, SPARSE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.load_state_dict(read(path, kind))
    for net, inner, each in ((holder, optimizer, loco), (other, second, again)):
        state, shape = each.state, torch.empty(0)
        assert state is not None
        owner = torch.zeros_like(state.error)
        owner[each.layout.rows_of(each.communicator.rank)] = state.owner_error
        here = rows(net)
        moments = torch.cat([local(inner.state[p]["exp_avg"]).flatten() for p in net.held])
        parts = [_owed(each, state.start) if len(here) else shape, _owed(each, state.error), _owed(each, owner), here]
        # By rank: whoever reads them puts rows together.
        gathered: list[Any] = [None] * world_size
        lengths = [local(p).numel() for p in net.held]
        dist.all_gather_object(gathered, (parts, moments, lengths))
        found.append(_put_together(gathered, before if net is holder else now))
    return found


def _put_together(gathered: list[Any], nodes: int) -> list[Tensor]:
    size = len(gathered) // nodes
    replicas = []
    for node in range(nodes):
        ranks = gathered[node * size : (node + 1) * size]
        whole = []
        for number in range(5):
            tensors = [(*parts, moments)[number].split(lengths) for parts, moments, lengths in ranks]
            whole.append(torch.cat([piece for pieces in zip(*tensors, strict=True) for piece in pieces]))
        replicas.append(whole)
    start, error, owner, here, _ = (torch.stack(each) for each in zip(*replicas, strict=True))
    return [start[0], error.mean(dim=0), owner.sum(dim=0), here.mean(dim=0), replicas[0][4]]


@pytest.mark.parametrize(("kind", "before", "now"), [("sharded", 4, 2), ("whole", 2, 1)])
def test_another_mesh_takes_up_the_same_means(run_ranks: Any, tmp_path: Path, kind: str, before: int, now: int) -> None:
    """Flat ranks, two nodes, one node: starting point and owed sums carry over, a rank's rows get their own moments."""
    for saved, loaded in run_ranks(_reshard, 4, str(tmp_path), kind, before, now):
        for was, is_ in zip(saved, loaded, strict=True):
            torch.testing.assert_close(is_, was, rtol=1e-5, atol=1e-6)
        assert bool(saved[1].any()) == (before > 1)  # a node alone owes nothing


def _faults(rank: int, world_size: int) -> tuple[int, Tensor]:
    holder, optimizer, loco = build(2, {**SPARSE, "max_skipped": 2})
    go_on(holder, optimizer, 2, 0, 3)
    if rank == 3:  # one rank's rows only
        with torch.no_grad():
            local(holder.held[0]).view(-1)[0] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go_on(holder, optimizer, 2, 3, 6)
    return loco.dropped.total, rows(holder)


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
