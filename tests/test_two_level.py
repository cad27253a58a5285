"""Nodes of several ranks: FSDP2 inside the node, SCAPE between nodes; alone, under the Trainer and Fabric."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from trainer_helpers import MARKS, WIDTH, GivenRanks, Regression, loader, make_trainer
from two_level_helpers import Holder, gradient, make_mesh, mean_gradient, node_of, sharded, whole

from lightning_scape import AdamS, FabricScapeStrategy, ScapeConfig, ScapeOptimizer, ScapeStrategy, SparseLoCoStrategy
from lightning_scape.core.local_shards import local

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*does not have many workers")]

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


def _train_dense(rank: int, world_size: int, update: str) -> None:
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


@pytest.mark.parametrize("update", ["adamw", "adams"])
def test_full_density_equals_the_dense_optimizer(run_ranks: Any, update: str) -> None:
    run_ranks(_train_dense, 4, update)


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


@pytest.mark.parametrize("sparsity", [0.9, 0.99])
def test_two_levels_equal_flat_scape_of_the_nodes_bitwise(run_ranks: Any, sparsity: float) -> None:
    assert run_ranks(_compare_with_flat, 4, sparsity, {"update": "adamw"}) == [0.0] * 4


def test_clipped_they_equal_it_within_the_rounding_of_the_norm(run_ranks: Any) -> None:
    options = {"update": "adamw", "clip_norm": "local", "clip": 3.0}
    # A factor that differs in the last place moves a parameter by some millionths of a step of 0.01.
    assert max(run_ranks(_compare_with_flat, 4, 0.9, options)) < 1e-6


# ------------------------------------------------------------------------------------------------ 3. bytes and memory


def _count(rank: int, world_size: int) -> tuple[int, int, int, int]:
    mesh = make_mesh(2)
    shapes = [(64, 100), (30, 10)]
    holder, flat = sharded(Holder(shapes), mesh), Holder(shapes)
    options = {"wire_dtype": "fp32", "sparsity": 0.99, "clip_norm": "local"}
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


def _skip(rank: int, world_size: int) -> None:
    mesh = make_mesh(2)
    holder, plain = sharded(Holder(SHAPES), mesh), Holder(SHAPES)
    optimizer = build(holder, mesh)
    for step in range(4):
        gradients = gradient(plain, rank, step)
        if step == 2 and rank == 3:
            gradients[0][:] = float("nan")
        holder.set_gradients(gradients)
        before = holder.whole()
        optimizer.step()
        stood = all(torch.equal(old, new) for old, new in zip(before, holder.whole(), strict=True))
        assert stood == (step == 2)
    optimizer.drain()
    assert_nodes_equal(holder, mesh)


@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_a_step_is_skipped_on_all_ranks_if_one_has_no_finite_gradient(run_ranks: Any) -> None:
    run_ranks(_skip, 4)


# ------------------------------------------------------------------------------------------------ the Trainer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Blocks(Regression):
    """Two blocks in a list; the options make what a user may do."""

    def __init__(self, kind: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind
        if "user" in kind:  # who shards a module before the strategy sees it must see to it that ranks start equal
            torch.manual_seed(0)
        if "meta" not in kind:
            self.net = self.make()

    def make(self) -> nn.Module:
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tail = nn.Linear(WIDTH, 3)
        self.extra = nn.Linear(WIDTH, 3)
        if "tied" in self.kind:
            self.extra.weight = self.tail.weight
            self.blocks[1].up.weight = self.blocks[0].up.weight
            self.tail.bias.requires_grad_(False)
        if self.kind == "checkpointing":
            self.blocks[0].requires_grad_(False)
        return nn.Identity()

    def configure_model(self) -> None:
        if "meta" in self.kind and not hasattr(self, "blocks"):
            with self.trainer.init_module(empty_init=True):
                self.net = self.make()
        if self.kind == "by the user":
            for block in self.blocks:
                fully_shard(block, mesh=self.trainer.strategy.device_mesh["shard"])
        if self.kind == "compiled":
            for block in self.blocks:
                block.compile(backend="aot_eager")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        hidden = inputs
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.kind == "checkpointing" else block(hidden)
        loss = nn.functional.mse_loss(self.tail(hidden) + self.extra(hidden), targets)
        self.log("constant", 1.0)
        return loss * float("inf") if self.inf_at == batch_idx and self.global_rank == 3 else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        hidden = self.blocks[1](self.blocks[0](batch[0]))
        self.log("val_loss", nn.functional.mse_loss(self.tail(hidden), batch[1]), sync_dist=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return loader(samples=4 * 4 * 4)

    val_dataloader = train_dataloader


class Manual(Blocks):
    """Two optimizers that the module steps itself: the second in every other batch."""

    def __init__(self, kind: str = "") -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        ends = [*self.tail.parameters(), *self.extra.parameters()]
        return torch.optim.AdamW(self.blocks.parameters(), 1e-2), torch.optim.Adam(ends, 2e-2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        blocks, ends = self.optimizers()
        for optimizer in (blocks, ends) if batch_idx % 2 else (blocks,):
            optimizer.step()
            optimizer.zero_grad()


def strategy(size: Any, sparsity: float = 0.0, **options: Any) -> ScapeStrategy:
    warmup = {"sparsity_warmup_steps": 0} if sparsity else {}
    return ScapeStrategy(sparsity, local_group_size=size, wire_dtype="fp32", clip_norm="local", **warmup, **options)


def wholes(module: nn.Module) -> Tensor:
    return torch.cat([whole(parameter).double().flatten() for parameter in module.parameters()])


def _fit(size: Any, kind: Any, model: dict[str, Any], how: dict[str, Any]) -> Tensor:
    module, how = kind(**model), dict(how)
    make_trainer(strategy(size, **how.pop("options", {})), max_epochs=2, **how).fit(module)
    return wholes(module)


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "clipping": (Blocks, {}, {"gradient_clip_val": 0.5}),
    "accumulation, a scheduler, fewer gathers": (
        Blocks,
        {"scheduler": "sequential"},
        {"accumulate_grad_batches": 2, "options": {"reshard_after_forward": False}},
    ),
    "activation checkpointing, a frozen block": (Blocks, {"kind": "checkpointing"}, {}),
    "tied weights": (Blocks, {"kind": "tied and frozen"}, {}),
    "sharded by the user": (Blocks, {"kind": "by the user"}, {}),
    "compiled blocks": (Blocks, {"kind": "compiled"}, {}),
    "manual, two optimizers": (Manual, {}, {}),
}


def _fit_all(rank: int, world_size: int) -> None:
    """At density 1 nodes of two ranks end as flat ranks do."""
    for case, (kind, model, how) in CASES.items():
        as_it_is = {"by the user": "as the user's", "compiled": ""}
        alone = {name: as_it_is.get(value, value) for name, value in model.items()}
        flat = _fit(1, kind, alone, {**how, "options": {}})
        nodes = _fit(2, kind, model, how)
        # Sums over ranks in another order. Clipping: by the root mean square of the nodes' norms, or of the ranks'.
        close = {"rtol": 0.05, "atol": 0.02} if "gradient_clip_val" in how else {"rtol": 1e-4, "atol": 2e-5}
        torch.testing.assert_close(nodes, flat, **close, msg=lambda text, case=case: f"{case}: {text}")
        everyone = [torch.empty_like(nodes) for _ in range(world_size)]
        dist.all_gather(everyone, nodes)
        assert all(torch.equal(nodes, other) for other in everyone), case


def test_at_density_1_the_trainer_trains_as_on_flat_ranks(run_ranks: Any) -> None:
    run_ranks(_fit_all, 4)


def _sparse(rank: int, world_size: int) -> list[Tensor]:
    found = []
    for precision, dtype in {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}.items():
        module = Blocks(inf_at=1)
        how: dict[str, Any] = {"precision": precision, "gradient_clip_val": 1.0, "limit_val_batches": 1.0}
        trainer = make_trainer(strategy(2, 0.9), max_epochs=3, **how)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        assert trainer.callback_metrics["val_loss"] > 0
        # Evaluation has let go of what it gathered: these are the rows, also for the next fit.
        assert all(hasattr(parameter, "device_mesh") for parameter in module.parameters())
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        found.append(wholes(module))
    return found


@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_in_each_precision_a_skip_on_one_rank_is_one_on_all(run_ranks: Any) -> None:
    everyone = run_ranks(_sparse, 4)
    for values in zip(*everyone, strict=True):
        assert bool(values[0].isfinite().all())
        assert all(torch.equal(values[0], other) for other in values)


def _from_meta(rank: int, world_size: int) -> tuple[Tensor, list[str]]:
    module = Blocks("meta, tied")
    for _ in range(2):
        make_trainer(strategy("node", 0.9), max_epochs=1, limit_val_batches=1).fit(module)
    assert module.extra.weight is module.tail.weight
    return wholes(module), [type(each).__name__ for each in module.modules() if type(each).__name__.startswith("FSDP")]


def test_a_model_of_one_node_is_made_from_the_meta_device(run_ranks: Any) -> None:
    first, second = run_ranks(_from_meta, 2)  # two fits of one module
    assert torch.equal(first[0], second[0])
    assert bool(first[0].isfinite().all())
    assert first[1] == ["FSDPBlocks"]  # both blocks use one matrix, so the root holds both


class Drops(Blocks):
    """Uses one layer never, and its second block in the first two steps alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        unused = torch.cat([wholes(self.extra), wholes(self.blocks[1])])
        self.stood = batch_idx == 3 and torch.equal(self.before, unused)
        self.before = unused

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.blocks[0](batch[0])
        hidden = self.blocks[1](hidden) if batch_idx < 2 else hidden
        return nn.functional.mse_loss(self.tail(hidden), batch[1])


def _drop(rank: int, world_size: int) -> None:
    for plan in (strategy(2, 0.9), SparseLoCoStrategy(sync_every=9, local_group_size=2)):
        module = Drops()
        make_trainer(plan).fit(module)
        assert module.stood


def test_what_no_rank_uses_in_a_step_is_left_alone(run_ranks: Any) -> None:
    run_ranks(_drop, 4)


def _refused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="must") as caught:
        make_trainer(strategy(3)).fit(Blocks())
    return str(caught.value)


def test_what_cannot_be_sharded_is_refused_on_every_rank(run_ranks: Any) -> None:
    for said in run_ranks(_refused, 2):
        assert "`local_group_size` must divide the ranks of a node, 2 (of 2 in all), got 3" in said


# ------------------------------------------------------------------------------------------------ Fabric


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.experts[dist.get_rank() % 2](inputs)


class Model(nn.Module):
    """With experts, every rank uses one of two, and leaves the other out of its graph."""

    def __init__(self, experts: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Chooser()] if experts else [nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 2)
        self.register_buffer("factor", torch.full((1,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + torch.tanh(block(inputs)) * self.factor
        return self.head(inputs)

    def reset_parameters(self) -> None:
        self.factor.fill_(0.5)


def make_fabric(size: Any, sparsity: float = 0.9) -> L.Fabric:
    config = ScapeConfig(
        sparsity=sparsity, sparsity_warmup_steps=0 if sparsity else None, wire_dtype="fp32", local_group_size=size
    )
    plan = FabricScapeStrategy(config=config)
    fabric = L.Fabric(accelerator="cpu", devices=4, strategy=plan, plugins=[GivenRanks()])
    fabric.launch()
    return fabric


def _train(fabric: L.Fabric, model: Any, optimizer: Any, steps: range) -> float:
    norm = 0.0
    for step in steps:
        for part in range(2):  # two micro-batches
            generator = torch.Generator().manual_seed(1000 * step + 10 * part + fabric.global_rank)
            inputs = torch.randn(4, 6, generator=generator)
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward((model(inputs) - inputs[:, :2] * 2).square().mean() / 2)
        norm = float(fabric.clip_gradients(model, optimizer, max_norm=10.0))
        optimizer.step()
        optimizer.zero_grad()
    return norm


def _fabric(rank: int, world_size: int, folder: str) -> None:
    for experts in (False, True):  # accumulation; and ranks of a node that use other experts
        found = []
        for size in (1, 2):
            fabric = make_fabric(size, sparsity=0.0)
            torch.manual_seed(0)
            model = Model(experts)
            ours = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
            norm = _train(fabric, *ours, range(4))
            found.append((norm, wholes(ours[0])))
        (flat_norm, flat), (norm, nodes) = found
        assert norm == pytest.approx(flat_norm, rel=0.1)  # two estimates
        torch.testing.assert_close(nodes, flat, rtol=1e-4, atol=1e-5)
    # A model from the meta device goes on exactly from a checkpoint, which one without the strategy loads, too.
    fabric = make_fabric(2)
    model = Model()
    ours = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    _train(fabric, *ours, range(3))
    fabric.save(f"{folder}/saved", {"model": ours[0], "optimizer": ours[1], "step": 3})
    _train(fabric, *ours, range(3, 6))
    with fabric.init_module(empty_init=True):
        empty = Model()
    assert next(empty.parameters()).device.type == "meta"
    again = fabric.setup(empty)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(again.parameters(), 1e-2))
    state = {"model": again, "optimizer": optimizer, "step": 0}
    fabric.load(f"{folder}/saved", state)
    assert state["step"] == 3
    _train(fabric, again, optimizer, range(3, 6))
    assert torch.equal(wholes(again), wholes(ours[0]))
    Model().load_state_dict(torch.load(f"{folder}/saved", weights_only=True)["model"])


def test_fabric_trains_on_nodes_as_on_flat_ranks(run_ranks: Any, tmp_path: Path) -> None:
    run_ranks(_fabric, 4, str(tmp_path))


def _apart(rank: int, world_size: int) -> None:
    mesh = make_mesh(2)
    holder = sharded(Holder(SHAPES), mesh)
    optimizer = build(holder, mesh)
    if rank == 3:
        with torch.no_grad():
            local(holder.held[0])[0] += 1
    holder.set_gradients(gradient(Holder(SHAPES), rank, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()


def test_rows_that_differ_between_nodes_are_an_error_on_every_rank(run_ranks: Any) -> None:
    for error in run_ranks(_apart, 4, expect_errors=True, timeout=60.0):
        assert re.search("All ranks must hold bitwise equal parameters, got 'parameter 0'", str(error)), repr(error)
