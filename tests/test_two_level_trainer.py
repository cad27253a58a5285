"""ScapeStrategy with ``local_group_size`` above 1: FSDP2 inside the node, SCAPE between nodes."""

from __future__ import annotations

import io
import logging
import os
import warnings
from typing import Any

import pytest
import torch
from launcher import needs_compiler
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from trainer_helpers import MARKS, WIDTH, Recorder, Regression, loader, make_trainer, ours
from two_level_helpers import whole

from lightning_scape import ScapeMonitor, ScapeStrategy
from lightning_scape.core.words import show_bytes

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


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
            if self.kind == "meta, sharded":
                fully_shard(self.blocks[0], mesh=self.trainer.strategy.device_mesh["shard"])
        if self.kind == "by the user":
            for block in self.blocks:
                fully_shard(block, mesh=self.trainer.strategy.device_mesh["shard"])

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

    test_step = validation_step

    def train_dataloader(self) -> DataLoader:
        return loader(samples=4 * 4 * 4)

    val_dataloader = test_dataloader = train_dataloader


def strategy(size: Any, sparsity: float = 0.0, **options: Any) -> ScapeStrategy:
    warmup = {"sparsity_warmup_steps": 0} if sparsity else {}
    return ScapeStrategy(sparsity, local_group_size=size, wire_dtype="fp32", clip_norm="local", **warmup, **options)


def wholes(module: nn.Module) -> Tensor:
    return torch.cat([whole(parameter).double().flatten() for parameter in module.parameters()])


def _fit(rank: int, size: Any, model: dict[str, Any], how: dict[str, Any]) -> Tensor:
    how = dict(how)
    chosen = strategy(size, how.pop("sparsity", 0.0), **how.pop("options", {}))
    module = Blocks(**model)
    trainer = make_trainer(chosen, max_epochs=2, **how)
    trainer.fit(module)
    assert (type(module).__name__ != "Blocks") == (size != 1)
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": rank}
    return wholes(module)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipping": ({}, {"gradient_clip_val": 0.5}),
    "accumulation, a scheduler, fewer gathers": (
        {"scheduler": "sequential"},
        {"accumulate_grad_batches": 2, "options": {"reshard_after_forward": False}},
    ),
    "activation checkpointing, a frozen block": ({"kind": "checkpointing"}, {}),
    "tied weights": ({"kind": "tied and frozen"}, {}),
    "sharded by the user": ({"kind": "by the user"}, {}),
}


def _fit_all(rank: int, world_size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Parameters after each case: of flat ranks, and of nodes of two."""
    found = {}
    for case, (model, how) in CASES.items():
        alone = {"kind": "as the user's"} if model.get("kind") == "by the user" else model
        found[case] = _fit(rank, 1, alone, {**how, "options": {}}), _fit(rank, 2, model, how)
    return found


@pytest.mark.few(0)
def test_at_density_1_it_trains_as_flat_ranks_do(run_ranks: Any) -> None:
    everyone = run_ranks(_fit_all, 4)
    for case, (_, how) in CASES.items():
        # Sums over ranks in another order. Clipping: by the root mean square of the nodes' norms, or of the ranks'.
        close = {"rtol": 0.05, "atol": 0.02} if "gradient_clip_val" in how else {"rtol": 1e-4, "atol": 2e-5}
        for found in everyone:
            flat, nodes = found[case]
            torch.testing.assert_close(nodes, flat, **close, msg=lambda text, case=case: f"{case}: {text}")
            assert torch.equal(nodes, everyone[0][case][1]), case


PRECISIONS = {"bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}


def _sparse(rank: int, world_size: int) -> dict[str, Tensor]:
    found = {}
    for precision, dtype in PRECISIONS.items():
        module = Blocks(inf_at=1)
        how = {"precision": precision, "gradient_clip_val": 1.0, "limit_val_batches": 1.0}
        trainer = make_trainer(strategy(2, 0.9), max_epochs=3, **how)
        trainer.fit(module)
        trainer.validate(module, verbose=False)
        assert trainer.callback_metrics["val_loss"] > 0
        engine = ours(trainer).engine
        assert engine.state is not None
        assert (engine.state.master is not None) == (precision == "bf16-true")
        assert engine.clipping.skipped_total == 3
        # Evaluation has let go of what it gathered: these are the rows, also for the next fit.
        assert all(hasattr(parameter, "device_mesh") for parameter in module.parameters())
        assert {parameter.dtype for parameter in module.parameters()} == {dtype}
        found[precision] = wholes(module)
    return found


@pytest.mark.few(0)
@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_precisions_and_a_skip_on_one_rank(run_ranks: Any) -> None:
    everyone = run_ranks(_sparse, 4)
    for precision in PRECISIONS:
        values = everyone[0][precision]
        assert bool(torch.isfinite(values).all())
        for found in everyone:
            assert torch.equal(found[precision], values)


def _from_meta(rank: int, world_size: int) -> tuple[Tensor, list[str]]:
    module = Blocks("meta, tied")
    for _ in range(2):
        trainer = make_trainer(strategy("node", 0.9), max_epochs=1, limit_val_batches=1)
        trainer.fit(module)
    assert module.extra.weight is module.tail.weight
    with pytest.raises(ValueError, match="on the meta device must be sharded by the strategy"):
        make_trainer(strategy("node", 0.9)).fit(Blocks("meta, sharded"))
    return wholes(module), [type(each).__name__ for each in module.modules() if type(each).__name__.startswith("FSDP")]


def test_a_model_of_one_node_is_made_from_the_meta_device_unit_by_unit(run_ranks: Any) -> None:
    first, second = run_ranks(_from_meta, 2)  # two fits of one module
    assert torch.equal(first[0], second[0])
    assert bool(torch.isfinite(first[0]).all())
    assert first[1] == ["FSDPBlocks"]  # both blocks use one matrix, so the root holds both


class Compiled(Blocks):
    def configure_model(self) -> None:
        for block in self.blocks:
            block.compile()


def _compiled(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    found = []
    for kind in (Blocks, Compiled):
        torch.manual_seed(0)
        module = kind("as the user's")
        make_trainer(strategy("node"), max_epochs=1).fit(module)
        found.append(wholes(module))
    return found[0], found[1]


@pytest.mark.few(0)
@needs_compiler
def test_compiled_blocks_train_as_plain_ones(run_ranks: Any) -> None:
    for plain, compiled in run_ranks(_compiled, 2):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


class Manual(Blocks):
    """Two optimizers that the module steps itself: the second in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        ends = [*self.tail.parameters(), *self.extra.parameters()]
        return torch.optim.AdamW(self.blocks.parameters(), 1e-2), torch.optim.Adam(ends, 2e-2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        blocks, ends = self.optimizers()
        self.clip_gradients(blocks, 1e3, "norm")  # flat ranks and nodes have other local norms
        for optimizer in (blocks, ends) if batch_idx % 2 else (blocks,):
            optimizer.step()
            optimizer.zero_grad()


def _manual(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    found = []
    # FSDP2 adds a second backward pass to a unit's gradients, which share their memory, one after the other.
    warnings.filterwarnings("error", "Gradients should stay")
    for size in (1, 2):
        module = Manual()
        make_trainer(strategy(size), max_epochs=2).fit(module)
        found.append(wholes(module))
    return found[0], found[1]


@pytest.mark.few(0)
def test_manual_optimization_with_two_optimizers_trains_as_on_flat_ranks(run_ranks: Any) -> None:
    everyone = run_ranks(_manual, 4)
    start = wholes(Manual())
    for flat, nodes in everyone:
        assert float((flat - start).abs().max()) > 0.01
        torch.testing.assert_close(nodes, flat, rtol=1e-4, atol=2e-5)
        assert torch.equal(nodes, everyone[0][1])


class ManualAlone(Regression):
    """Manual optimization of a model in which no module is a unit of its own, unless `wrap` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
            optimizer.step()


def _manual_alone(rank: int, world_size: int) -> tuple[str, Tensor, Tensor]:
    with pytest.raises(RuntimeError, match="must lie in modules that are gathered") as failure:
        make_trainer(strategy(2)).fit(ManualAlone())
    found = []
    for chosen in (strategy(1), strategy(2, wrap=["Linear"])):
        module = ManualAlone()
        make_trainer(chosen).fit(module)
        found.append(wholes(module))
    return str(failure.value), found[0], found[1]


def test_gradients_that_only_the_root_holds_are_an_error_in_manual_optimization(run_ranks: Any) -> None:
    for words, flat, nodes in run_ranks(_manual_alone, 2):
        assert "'net.0.weight'" in words
        assert "wrap=['Linear']" in words
        torch.testing.assert_close(nodes, flat, rtol=1e-4, atol=2e-5)


class Dying(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 3:
            os._exit(1)
        return super().training_step(batch, batch_idx)


def _fit_dying(rank: int, world_size: int) -> None:
    make_trainer(strategy(2, 0.9)).fit(Dying())


def test_a_rank_that_dies_ends_all_ranks_with_an_error_that_says_so(run_ranks: Any) -> None:
    *others, dead = run_ranks(_fit_dying, 4, expect_errors=True)
    assert "died without a result" in str(dead)
    for error in others:
        assert "All ranks must answer, got no answer" in str(error), repr(error)


def _size(rank: int, world_size: int, size: Any, wrap: tuple[str, ...], averages: bool) -> str:
    try:
        make_trainer(strategy(size, wrap=wrap), callbacks=[EMAWeightAveraging()] * averages).fit(Blocks())
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("size", "wrap", "averages", "message"),
    [
        (3, (), False, "`local_group_size` must divide the ranks of a node, 2 (of 2 in all), got 3"),
        (2, (), True, "callbacks must work on sharded parameters, got EMAWeightAveraging"),
        (2, ("Blok",), False, "`wrap` must name classes of the model's modules, got ['Blok']"),
    ],
)
def test_what_cannot_be_sharded_is_refused(
    run_ranks: Any, size: int, wrap: tuple[str, ...], averages: bool, message: str
) -> None:
    for said in run_ranks(_size, 2, size, wrap, averages):
        assert message in said


def test_wrap_is_a_list_of_names() -> None:
    with pytest.raises(ValueError, match="`wrap` must be a list of names"):
        ScapeStrategy(wrap="Block")


def _told(rank: int, world_size: int) -> tuple[str, dict[str, float]]:
    said, monitor = io.StringIO(), ScapeMonitor(1)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(logging.StreamHandler(said))
    trainer = make_trainer(strategy(2, 0.9), max_steps=2, callbacks=[monitor], logger=(logged := Recorder()))
    trainer.fit(Blocks())
    return said.getvalue(), logged.records[-1][1]


def test_what_a_run_sends_is_between_nodes_and_beside_hsdp(run_ranks: Any) -> None:
    """It told of twice HSDP's bytes, for ranks hold half of a replica, and called them DDP's."""
    said, metrics = run_ranks(_told, 4)[0]
    assert metrics["scape/bytes_run_dense"] == 2 * metrics["scape/bytes_dense"]
    dense = show_bytes(metrics["scape/bytes_run_dense"])
    assert f"from each rank to other nodes, checkpoints and clipping left out. HSDP would send {dense}, " in said
    assert f"HSDP would have sent {dense}, " in said
