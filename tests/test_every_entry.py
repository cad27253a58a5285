"""Every entry for which any rank has a gradient moves again and again: the second half of "nothing is lost"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from two_level_helpers import Holder, make_mesh, sharded

from lightning_scape import ScapeConfig, ScapeOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import scape_simple  # noqa: E402 - examples are scripts
from scape_simple import Scape  # noqa: E402

Pattern = Callable[[int, int, int], Tensor]
RunRanks = Callable[..., list[Any]]
PLAIN = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}


def each_on_one(numel: int, ranks: int, block: int) -> Tensor:
    """Each entry has its gradient on one rank alone: those of a shard on the rank behind its owner."""
    owner = torch.arange(numel) // block * ranks // -(-numel // block)
    return torch.stack([((owner + 1) % ranks == rank).float() for rank in range(ranks)])


def all_on_one(numel: int, ranks: int, block: int) -> Tensor:
    """Only the last rank has gradients, of either sign."""
    signs = 1.0 - 2 * (torch.arange(numel) % 2)
    return torch.stack([signs * (rank == ranks - 1) for rank in range(ranks)])


def parts_of_blocks(numel: int, ranks: int, block: int) -> Tensor:
    """Each rank has gradients in a part of each block, the last of them at its end; the rest has none on any rank."""
    part = torch.arange(numel) % block * (ranks + 1) // block
    return torch.stack([(part == rank + 1).float() for rank in range(ranks)])


class Exact(Scape):
    """With fp32 on the wire."""

    def take(self, at: Tensor) -> Tensor:
        there = self.residual.gather(2, at := at.expand(self.ranks, -1, -1))
        self.residual.scatter_(2, at, torch.zeros_like(there))
        return there


class OwnersAlone(Scape):
    """Without turns: each mask by its owner."""

    def new_mask(self, q: int) -> Tensor:
        return scape_simple.largest(self.owned(self.residual), q)


def still(kind: type[Scape], sparsity: float, ranks: int, pattern: Pattern, rounds: int = 2) -> tuple[int, int]:
    """How many entries have moved, and should, after so many rounds of N ceil(B/q) steps with equal gradients."""
    block, quota = ScapeConfig(sparsity=sparsity).quota
    numel = ranks * block - 7  # the last block has pads
    parameter = torch.zeros(numel)
    scape = kind([parameter], ranks, min(sparsity, 0.99), **PLAIN)
    scape.warmup = 0
    if scape.block != block:  # the page knows no longer ones
        scape.block, scape.quota, scape.residual = block, quota, torch.zeros(ranks, ranks, block)
        scape.m, scape.v, scape.error, scape.last = (torch.zeros(ranks, block) for _ in range(4))
        scape.last = scape.last.long()
    gradients = pattern(numel, ranks, scape.block)
    for _ in range(rounds * ranks * -(-scape.block // scape.quota)):
        scape.step([[own] for own in gradients])
    should = gradients.abs().sum(0) > 0
    assert not parameter[~should].any()
    return int((parameter != 0).sum()), int(should.sum())


CELLS = [
    (0.9, 2, each_on_one, Scape),
    (0.9, 3, all_on_one, Exact),
    (0.9, 5, parts_of_blocks, Scape),
    (0.95, 2, all_on_one, Exact),
    (0.95, 3, parts_of_blocks, Scape),
    (0.95, 5, each_on_one, Exact),
    (0.98, 2, parts_of_blocks, Exact),
    (0.98, 3, each_on_one, Scape),
    (0.98, 5, all_on_one, Scape),
    (0.99, 2, each_on_one, Exact),
    (0.99, 3, all_on_one, Scape),
    (0.99, 5, parts_of_blocks, Exact),
    (0.999, 2, all_on_one, Scape),
    (0.999, 3, each_on_one, Exact),
]


@pytest.mark.parametrize(("sparsity", "ranks", "pattern", "kind"), CELLS)
def test_every_entry_with_a_gradient_on_any_rank_moves(
    sparsity: float, ranks: int, pattern: Pattern, kind: type[Scape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2 N ceil(B/q) steps. :mod:`test_scape_simple` holds the page equal to the package."""
    if kind is Exact:
        monkeypatch.setattr(scape_simple, "in_bits", lambda values: values.clone())
    moved, should = still(kind, sparsity, ranks, pattern)
    assert moved == should


def test_if_owners_alone_made_the_masks_half_of_all_entries_would_never_move() -> None:
    """Two ranks, each with a gradient on the other's half only: only the first positions of each block move."""
    moved, should = still(OwnersAlone, 0.9, 2, each_on_one, rounds=20)
    assert moved < should / 2


def _distances(sparsity: float, ranks: int, rows_seen: int, steps: int) -> tuple[float, float]:
    """How far rows that one rank alone sees are from where they should be, under SCAPE and under DDP; they begin at 1.

    Each rank has ten rows of its own, a head or an expert, and sees so many of them in a step, with noise.
    """
    generator = torch.Generator().manual_seed(0)
    should = torch.randn(ranks, 10, 25, generator=generator)
    mine, theirs = torch.zeros_like(should), nn.Parameter(torch.zeros_like(should))
    settings = {"lr": 5e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    scape, dense = Scape([mine], ranks, sparsity, **settings), torch.optim.AdamW([theirs], **settings)
    scape.warmup = 0
    for _ in range(steps):
        noise = 0.3 * torch.randn(ranks, 10, 25, generator=generator)
        seen = torch.rand(ranks, 10, 1, generator=generator).argsort(1) < rows_seen
        whole = [(parameter.detach() - should + noise) * seen for parameter in (mine, theirs)]
        own = torch.eye(ranks)[:, :, None, None]
        scape.step([[part] for part in own * whole[0]])
        theirs.grad = whole[1] / ranks
        dense.step()
    return tuple(float((p.detach() - should).norm() / should.norm()) for p in (mine, theirs))


@pytest.mark.parametrize(
    ("sparsity", "ranks", "rows_seen", "steps"),
    [(0.9, 2, 10, 1500), (0.95, 3, 2, 3000), (0.98, 2, 2, 3000), (0.98, 3, 10, 2000)],
)
def test_what_one_rank_alone_sees_ends_where_ddp_ends(sparsity: float, ranks: int, rows_seen: int, steps: int) -> None:
    """Within a tenth of the way, without a warm-up."""
    ours, dense = _distances(sparsity, ranks, rows_seen, steps)
    assert dense < 0.15
    assert ours < dense + 0.1


def _train_for_real(rank: int, world_size: int, sparsity: float, wire: str | None) -> tuple[int, int]:
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update="adamw", wire_dtype=wire)
    block, sent = config.quota
    numel = world_size * block - 7
    parameter = nn.Parameter(torch.zeros(numel))
    optimizer = ScapeOptimizer([parameter], config=config, **PLAIN)
    gradients = each_on_one(numel, world_size, block)
    for _ in range(2 * world_size * -(-block // sent)):
        parameter.grad = gradients[rank].clone()
        optimizer.step()
    optimizer.drain()
    return int((parameter != 0).sum()), numel


@pytest.mark.parametrize(("sparsity", "ranks", "wire"), [(0.9, 2, None), (0.95, 3, "fp32")])
def test_so_it_is_with_real_ranks(run_ranks: RunRanks, sparsity: float, ranks: int, wire: str | None) -> None:
    for moved, should in run_ranks(_train_for_real, ranks, sparsity, wire):
        assert moved == should


def _train_nodes(rank: int, world_size: int, sparsity: float) -> tuple[int, int]:
    """Two nodes of two ranks; each row has a gradient on one node alone. Turns go by nodes."""
    mesh = make_mesh(2)
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update="adamw")
    block, sent = config.quota
    holder = Holder([(4, 2 * block + 11)])
    holder.held[0].data.zero_()
    holder = sharded(holder, mesh)
    optimizer = ScapeOptimizer(holder.parameters(), config=config, process_group=mesh["replicate"].get_group(), **PLAIN)
    gradient = torch.zeros(4, 2 * block + 11)
    gradient[(torch.arange(4) // 2 + torch.arange(4)) % 2 == rank // 2] = 1.0
    for _ in range(4 * -(-block // sent)):
        holder.set_gradients([gradient])
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    (found,) = holder.whole()
    return int((found != 0).sum()), found.numel()


def test_so_it_is_with_nodes(run_ranks: RunRanks) -> None:
    for moved, should in run_ranks(_train_nodes, 4, 0.9):
        assert moved == should
