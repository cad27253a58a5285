"""Nodes of several ranks: FSDP2 inside the node, SCAPE between nodes, by the optimizer alone (plain torchrun)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from two_level_helpers import Holder, gradient, make_mesh, mean_gradient, node_of, sharded, whole

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer
from lightning_scape.core.local_shards import local, node_rows

SHAPES = ((37, 11), (5,), (1,), (13, 3, 2), (640,), (1, 9))
"""Two of them have a single row: on all ranks of a node but the first, their shard is empty."""


def build(holder: Holder, mesh: Any, lr: float = 1e-2, **options: Any) -> ScapeOptimizer:
    config = ScapeConfig(**{"sparsity": 0.9, "sparsity_warmup_steps": 0, "wire_dtype": "fp32", **options})
    group = mesh["replicate"].get_group()
    return ScapeOptimizer(holder.parameters(), lr, (0.9, 0.95), weight_decay=0.1, config=config, process_group=group)


def assert_nodes_equal(holder: Holder, mesh: Any) -> None:
    """The rows of every rank are bitwise those of the same rank of the other nodes."""
    for parameter in holder.held:
        rows = local(parameter.detach()).contiguous()
        others = [torch.empty_like(rows) for _ in range(mesh["replicate"].size())]
        dist.all_gather(others, rows, group=mesh["replicate"].get_group())
        for other in others:
            assert torch.equal(other, rows)


# ------------------------------------------------------------------------------------------------ 1. density 1 is dense


def _train_dense(rank: int, world_size: int, update: str, clip: float | None) -> None:
    mesh = make_mesh(2)
    holder, reference = sharded(Holder(SHAPES), mesh), Holder(SHAPES)
    optimizer = build(holder, mesh, sparsity=0.0, update=update, clip_norm="local")
    parameters = reference.parameters()
    dense: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, 1e-2, (0.9, 0.95), weight_decay=0.1)
        if update == "adamw"
        else AdamS(parameters, 1e-2, (0.9, 0.95), weight_decay=0.1)
    )
    for step in range(8):
        holder.set_gradients(mean_gradient(reference, node_of(rank, 2), step))
        reference.set_gradients(mean_gradient(reference, range(world_size), step))
        optimizer.step()
        dense.step()
        optimizer.zero_grad()
        assert_nodes_equal(holder, mesh)
    for mine, theirs in zip(holder.whole(), reference.held, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["adamw", "adams"])
def test_full_density_equals_the_dense_optimizer(run_ranks: Any, update: str) -> None:
    run_ranks(_train_dense, 4, update, None)


# ------------------------------------------------------------------------------------------------ 2. as flat SCAPE


def _compare_with_flat(rank: int, world_size: int, sparsity: float, options: dict[str, Any]) -> float:
    """The largest difference from flat SCAPE of two ranks whose gradients are the nodes' means.

    A node's rank owns half of the rows of its shard. The flat run has the same halves as parameters, in such an order
    that its two ranks own the same entries.
    """
    mesh = make_mesh(2)
    shape = (8, 1000)  # a shard of 4,000 entries, a half of 2,000: whole blocks of 250 and of 200
    halves = [slice(0, 2), slice(4, 6), slice(2, 4), slice(6, 8)]
    holder, flat = sharded(Holder([shape]), mesh), Holder([(2, 1000)] * 4)
    start = Holder([shape])
    for half, parameter in zip(halves, flat.held, strict=True):
        parameter.data.copy_(start.held[0].data[half])
    clip = options.pop("clip", None)
    two_level, one_level = (build(each, mesh, sparsity=sparsity, **options) for each in (holder, flat))
    worst = 0.0
    for step in range(20):
        (mean,) = mean_gradient(start, node_of(rank, 2), step)
        holder.set_gradients([mean])
        flat.set_gradients([mean[half] for half in halves])
        for optimizer in (two_level, one_level):
            if clip is not None:
                optimizer.clip_grad_norm(clip)
            optimizer.step()
            optimizer.zero_grad()
        assert_nodes_equal(holder, mesh)
        (mine,) = holder.whole()
        for half, parameter in zip(halves, flat.held, strict=True):
            worst = max(worst, float((mine[half] - parameter.detach()).abs().max()))
    two_level.drain()
    one_level.drain()
    return worst


@pytest.mark.few(1)
@pytest.mark.parametrize("sparsity", [0.9, 0.99])
def test_two_levels_equal_flat_scape_of_the_nodes_bitwise(run_ranks: Any, sparsity: float) -> None:
    assert run_ranks(_compare_with_flat, 4, sparsity, {"update": "adamw"}) == [0.0] * 4


@pytest.mark.few(0)
def test_clipped_they_equal_it_within_the_rounding_of_the_norm(run_ranks: Any) -> None:
    options = {"update": "adamw", "clip_norm": "local", "clip": 3.0}
    # A factor that differs in the last place moves a parameter by some millionths of a step of 0.01.
    assert max(run_ranks(_compare_with_flat, 4, 0.9, options)) < 1e-6


# ------------------------------------------------------------------------------------------------ 3. bytes and memory


def _count(rank: int, world_size: int) -> tuple[int, int, int, int]:
    mesh = make_mesh(2)
    shapes = [(64, 100), (30, 10)]
    holder, flat = sharded(Holder(shapes), mesh), Holder(shapes)
    options = {"wire_dtype": "bf16", "sparsity": 0.99}
    two_level = build(holder, mesh, **options)
    config = ScapeConfig(sparsity_warmup_steps=0, **options)
    one_level = ScapeOptimizer(flat.parameters(), config=config)
    for optimizer, each in ((two_level, holder), (one_level, flat)):
        for step in range(2):
            each.set_gradients(gradient(flat, rank, step))
            optimizer.step()
        optimizer.drain()
    assert two_level.engine.state is not None
    residual = two_level.engine.state.residual
    sent = [optimizer.stats.bytes_total for optimizer in (two_level, one_level)]
    return sent[0], sent[1], residual.numel() * residual.element_size(), sum(p.numel() for p in flat.parameters())


def test_a_node_sends_what_one_flat_rank_sends_and_a_residual_shrinks_with_the_node(run_ranks: Any) -> None:
    found = run_ranks(_count, 4)
    parameters = found[0][3]
    for node in (found[:2], found[2:]):
        # Half of what is sent stays in a group of two ranks, three quarters leave a rank in a group of four.
        assert sum(sent for sent, *_ in node) <= 1.05 * node[0][1]
        for _, _, residual, _ in node:
            # At most one block of 200 entries for each parameter, and one more to make shards equal.
            assert 4 * parameters / 2 <= residual + 4 * 200
            assert residual <= 4 * parameters / 2 + 4 * 200 * 3


# ------------------------------------------------------------------------------------------------ norm and skips


def _norms(rank: int, world_size: int) -> list[float]:
    mesh = make_mesh(2)
    shapes = [(300, 50), (7,), (1, 5)]
    holder, plain = sharded(Holder(shapes), mesh), Holder(shapes)
    holder.set_gradients(mean_gradient(plain, node_of(rank, 2), 0))
    found = [float(build(holder, mesh, clip_norm=rule).clip_grad_norm(1.0)) for rule in ("sketch", "local")]
    averaged = torch.cat([grad.flatten() for grad in mean_gradient(plain, range(world_size), 0)])
    nodes = [torch.cat([g.flatten() for g in mean_gradient(plain, ranks, 0)]) for ranks in ((0, 1), (2, 3))]
    by_node = torch.stack([grad.square().sum() for grad in nodes]).mean().sqrt()
    return [*found, float(averaged.norm()), float(by_node)]


def test_the_norm_is_that_of_all_ranks(run_ranks: Any) -> None:
    everyone = run_ranks(_norms, 4)
    sketched, by_rule, true, of_nodes = everyone[0]
    assert sketched == pytest.approx(true, rel=0.05)  # four standard deviations of the sketch
    assert by_rule == pytest.approx(of_nodes, rel=1e-5)
    assert all(found == everyone[0] for found in everyone)


def _skip(rank: int, world_size: int, bad: int) -> list[Any]:
    mesh = make_mesh(2)
    holder, plain = sharded(Holder(SHAPES), mesh), Holder(SHAPES)
    optimizer = build(holder, mesh)
    for step in range(4):
        gradients = gradient(plain, rank, step)
        if step == 2 and rank == bad:
            gradients[0][:] = float("nan")
        holder.set_gradients(gradients)
        before = holder.whole()
        optimizer.step()
        if step == 2:
            for old, new in zip(before, holder.whole(), strict=True):
                assert torch.equal(old, new)
    optimizer.drain()
    assert_nodes_equal(holder, mesh)
    return [optimizer.engine.clipping.skipped_total, int(optimizer.engine.state.step)]


@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_a_step_is_skipped_on_all_ranks_if_one_has_no_finite_gradient(run_ranks: Any) -> None:
    assert run_ranks(_skip, 4, 3) == [[1, 3]] * 4


# ------------------------------------------------------------------------------------------------ a backward pass


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, 1)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(self.frozen(inputs))


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 6, generator=generator)
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


def _train_model(rank: int, world_size: int, nodes: int) -> list[float]:
    mesh = make_mesh(nodes)
    model, reference = Tiny(), Tiny()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    config = ScapeConfig(sparsity=0.0, update="adamw", wire_dtype="fp32")
    group = mesh["replicate"].get_group() if nodes > 1 else None
    optimizer = ScapeOptimizer(model.parameters(), 1e-2, config=config, process_group=group)
    dense = torch.optim.AdamW(
        [p for p in reference.parameters() if p.requires_grad], 1e-2, (0.9, 0.95), weight_decay=0.1
    )
    for step in range(6):
        _loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.stack([_loss(reference, other, step) for other in range(world_size)]).mean().backward()
        dense.step()
        dense.zero_grad()
    difference = [
        float((whole(mine) - theirs.detach()).abs().max())
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    assert max(difference) < 2e-5  # sums over ranks in another order, in six steps of 0.01
    return difference


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 2), (2, 1)])
def test_training_equals_adamw_on_the_global_batch(run_ranks: Any, ranks: int, nodes: int) -> None:
    run_ranks(_train_model, ranks, nodes)


# ------------------------------------------------------------------------------------------------ bad input


def _refuse(rank: int, world_size: int, case: str) -> str:
    mesh = make_mesh(2)
    holder: nn.Module = Holder([(8, 4)])
    group = mesh["replicate"].get_group()
    options: dict[str, Any] = {}
    if case == "not sharded":
        options["local_group_size"] = 2
    elif case == "tensor parallel":
        holder = nn.Sequential(nn.Linear(4, 8))
        parallelize_module(holder, mesh["shard"], {"0": ColwiseParallel()})
        holder[0].bias = None
        fully_shard(holder, mesh=mesh["replicate"])
    elif case == "hybrid":
        fully_shard(holder, mesh=mesh)
    elif case == "mixed":
        holder = nn.Sequential(fully_shard(nn.Linear(4, 8), mesh=mesh["shard"]), nn.Linear(8, 4))
    elif case == "one rank only":
        fully_shard(holder, mesh=mesh["shard"])
        if rank == 3:
            for parameter in holder.parameters():
                parameter.requires_grad_(False)
    else:
        fully_shard(holder, mesh=mesh["shard"])
        group = {"no group": None, "wrong group": dist.group.WORLD}.get(case, group)
        options = {"local_group_size": 3} if case == "other size" else {}
    config = ScapeConfig(sparsity_warmup_steps=0, **options)
    try:
        ScapeOptimizer(holder.parameters(), config=config, process_group=group)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("not sharded", "`local_group_size` must be 1 for plain parameters, got 2"),
        ("tensor parallel", "a dimension of tensor parallelism is not supported"),
        ("hybrid", "the nodes' dimension is SCAPE's"),
        ("mixed", "All parameters must be sharded, or none"),
        ("no group", r"`process_group` must be the ranks with the same rows, .* got None: the mesh has 2 of 4"),
        ("wrong group", r"got ranks \[0, 1, 2, 3\] beside a node of"),
        ("other size", "must be the size of the shard mesh, 2, got 3"),
        ("one rank only", "At least one parameter must require grad"),
    ],
)
def test_what_cannot_be_trained_is_refused_on_every_rank(run_ranks: Any, case: str, message: str) -> None:
    for said in run_ranks(_refuse, 4, case):
        assert re.search(message, said), said


def test_rows_are_those_of_chunk() -> None:
    for rows in range(1, 12):
        for shards in (1, 2, 3, 4):
            parts = [list(node_rows(rows, shards, shard)) for shard in range(shards)]
            chunks = [part.tolist() for part in torch.arange(rows).chunk(shards)]
            assert parts == chunks + [[]] * (shards - len(chunks))


def test_a_mesh_of_one_dimension_is_enough(run_ranks: Any) -> None:
    run_ranks(_plain_mesh, 2)


def _plain_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    holder = Holder([(8, 40)])
    fully_shard(holder, mesh=mesh)
    optimizer = ScapeOptimizer(holder.parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
    holder.set_gradients(gradient(holder, 0, 0))
    optimizer.step()
    assert optimizer.communicator.world_size == 1


def _nothing_here(rank: int, world_size: int) -> None:
    mesh = make_mesh(2)
    holder, plain = sharded(Holder([(1, 400)]), mesh), Holder([(1, 400)])
    optimizer = build(holder, mesh, sparsity=0.99)
    for step in range(4):
        holder.set_gradients(mean_gradient(plain, node_of(rank, 2), step))
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert_nodes_equal(holder, mesh)
    optimizer.consolidate_state_dict(to=0)
    assert local(holder.held[0]).numel() == (0 if rank % 2 else 400)
    box = [optimizer.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    assert box[0]["state"][0]["exp_avg"].shape == (1, 400)
    build(sharded(Holder([(1, 400)]), mesh), mesh, sparsity=0.99).load_state_dict(box[0])


@pytest.mark.few(0)
def test_a_rank_may_hold_nothing_at_all(run_ranks: Any) -> None:
    run_ranks(_nothing_here, 4)
