"""What a checkpoint promises beyond the matrix: other trainings go on from it, and an unfit one changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from optimizer_helpers import parameters, set_gradients, values
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_helpers import MARKS, WIDTH, GivenRanks, Regression, gathered, loader, make_trainer, weights

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCoStrategy,
)
from lightning_scape.checkpoint import files
from lightning_scape.checkpoint.saver import consolidate, verify

RunRanks = Callable[..., list[Any]]
pytestmark = MARKS
METHODS = ["scape", "sparseloco"]
KINDS = ["full", "sharded"]


def strategy(method: str, kind: str = "full", **options: Any) -> Any:
    if method == "sparseloco":
        return SparseLoCoStrategy(**{"sync_every": 5, "density": 0.25, "state_dict_type": kind, **options})
    return ScapeStrategy(**{"sparsity": 0.8, "sparsity_warmup_steps": 0, "state_dict_type": kind, **options})


def fit(method: str, kind: str, module: Any, ckpt_path: Any = None, **options: Any) -> Any:
    trainer = make_trainer(strategy(method, kind), **options)
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


# ------------------------------------------------------------------------------------------------ a plain loop


def build(options: dict[str, Any]) -> tuple[list[Any], ScapeOptimizer]:
    params = parameters(dtype=options.get("dtype", torch.float32))
    groups = [{"params": params[:2], "lr": 3e-2}, {"params": params[2:], "weight_decay": 0.0}]
    config = {name: value for name, value in options.items() if name != "dtype"}
    config = {"sparsity": 0.9, "sparsity_warmup_steps": 0, **config}
    return params, ScapeOptimizer(groups, lr=1e-2, config=ScapeConfig(**config))


def train(params: list[Any], optimizer: ScapeOptimizer, rank: int, steps: range) -> list[Tensor]:
    """Number 3 has no gradient in every third step, number 1 has its own on rank 0; step 4 is not finite on rank 1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in steps:
            set_gradients(params, rank, step)
            params[3].grad = None if step % 3 == 1 else params[3].grad
            params[1].grad = None if rank else params[1].grad
            if (step, rank) == (4, 1):
                params[0].grad.fill_(float("nan"))
            optimizer.clip_grad_norm(20.0)
            optimizer.step()
    return values(params)


OPTIONS: list[dict[str, Any]] = [
    {"update": "adamw"},
    {"update": "adams", "dtype": torch.bfloat16},
    {"update": "adamw", "dtype": torch.bfloat16, "sparsity": 0.99},
    {"update": "adamw", "sparsity_warmup_steps": None},
    {"update": "adamw", "dtype": torch.float64, "wire_dtype": "fp32"},
]


def stop_and_go(rank: int, world_size: int, folder: str) -> int:
    """Saved by ``state_dict``, as a script under torchrun may, after each of some steps."""
    for number, options in enumerate(OPTIONS):
        params, optimizer = build(options)
        for step in range(7):
            train(params, optimizer, rank, range(step, step + 1))
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                content = {"optimizer": optimizer.state_dict(), "model": values(params)}
                torch.save(content, f"{folder}/{number}-{step}")
        expected = train(params, optimizer, rank, range(7, 10))
        dist.barrier()
        for step in (0, 3, 4, 6):
            again, other = build(options)
            content = torch.load(f"{folder}/{number}-{step}", weights_only=True)
            for parameter, value in zip(again, content["model"], strict=True):
                parameter.data.copy_(value)
            other.load_state_dict(content["optimizer"])
            found = train(again, other, rank, range(step + 1, 10))
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (options, step)
            assert [group["lr"] for group in other.param_groups] == [3e-2, 1e-2]
    return len(OPTIONS)


def test_a_plain_loop_resumes_bit_for_bit_with_every_option(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(stop_and_go, 2, str(tmp_path)) == [len(OPTIONS)] * 2


def take_saved(params: list[Any], dense: torch.optim.Optimizer) -> ScapeOptimizer:
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    optimizer.load_state_dict(dense.state_dict())
    return optimizer


def take_over(params: list[Any], dense: torch.optim.Optimizer) -> ScapeOptimizer:
    return ScapeOptimizer.from_optimizer(dense, ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))


@pytest.mark.parametrize("kind", ["saved", "stepped"])
def test_a_moment_of_adamw_carries_over(kind: str) -> None:
    """From a saved state, or from an AdamW that has stepped; where nothing has a gradient there is nothing."""
    params, twins = parameters(), parameters()
    dense = torch.optim.AdamW(twins)
    for step in range(3):
        set_gradients(twins, 0, step)
        twins[0].grad = None
        dense.step()
    moments = {index: dense.state[twin]["exp_avg"].clone() for index, twin in enumerate(twins[1:], 1)}
    take = take_saved if kind == "saved" else take_over
    with pytest.warns(UserWarning, match=r"moments and step \(3\) carry over"):
        optimizer = take(params, dense)
    whole = optimizer.state_dict()["state"]
    assert not whole[0]["exp_avg"].any()
    for index, moment in moments.items():
        assert torch.equal(whole[index]["exp_avg"], moment)


def spoil(state: dict[str, Any], kind: str) -> Any:
    facts, dense = state["scape"]["facts"], {name: value for name, value in state.items() if name != "scape"}
    if kind == "shape":
        facts["shapes"][1] = [6]
    if kind == "memory":
        facts["strides"][0] = [1, 40]
    if kind == "entries":
        del state["scape"]["tensors"]["residual.0.3"]
    if kind == "groups":
        state["param_groups"].pop()
    if kind == "foreign":
        return {"weights": 1}
    if kind == "sgd":
        return {**dense, "state": {0: {"momentum_buffer": None}}}
    if kind == "second moment":
        del dense["state"][2]["exp_avg_sq"]
        return dense
    return state


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", r"shapes must be \(5,\) for 'parameter 1', got \(6,\)"),
        ("memory", "strides must be .* got"),
        ("entries", "all 2100 entries of 'residual.0.3', got 0"),
        ("groups", "different number of parameter groups"),  # torch says it
        ("foreign", r"must have `state` and `param_groups`, got \['weights'\]"),
        ("sgd", "must hold exp_avg of 'parameter 0'"),
        ("second moment", "exp_avg_sq of 'parameter 2'"),
    ],
)
def test_an_unfit_state_is_refused_and_changes_nothing(kind: str, words: str) -> None:
    params, optimizer = build({"update": "adamw"})
    train(params, optimizer, 0, range(4))
    twins, twin = build({"update": "adamw"})
    train(twins, twin, 0, range(4))
    spoiled, other = build({"update": "adamw"})
    train(spoiled, other, 0, range(2))
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(spoil(other.state_dict(), kind))
    ends = [train(params, optimizer, 0, range(4, 8)), train(twins, twin, 0, range(4, 8))]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# ------------------------------------------------------------------------------------------------ other ranks


def adamws_part(path: str) -> dict[int, dict[str, Tensor]]:
    """What torch's AdamW would read of a full file, by parameter."""
    content = torch.load(path, weights_only=True)
    (state,) = content["optimizer_states"]
    return {
        index: {name: torch.as_tensor(entry[name]) for name in ("exp_avg", "exp_avg_sq", "step")}
        for index, entry in state["state"].items()
    }


def save_both(rank: int, world_size: int, folder: str) -> None:
    for kind in KINDS:
        fit("scape", kind, Regression(), max_epochs=2).save_checkpoint(f"{folder}/{kind}.ckpt")


def load_and_save(rank: int, world_size: int, folder: str) -> list[str]:
    """Goes on for no step, and saves what it holds as a file."""
    said = []
    for kind in KINDS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = fit("scape", "full", Regression(), f"{folder}/{kind}.ckpt", max_epochs=None, max_steps=6)
        said += [str(each.message) for each in caught if "ranks" in str(each.message)]
        trainer.save_checkpoint(f"{folder}/{kind}-of-{world_size}.ckpt")
    return said


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_another_number_of_ranks_holds_the_same_moments(
    run_ranks: RunRanks, tmp_path: Path, before: int, after: int
) -> None:
    run_ranks(save_both, before, str(tmp_path))
    consolidate_to(tmp_path / "sharded.ckpt", tmp_path / "one.ckpt")
    said = run_ranks(load_and_save, after, str(tmp_path))[0]
    assert any(f"{before} rank" in text for text in said)
    whole = adamws_part(f"{tmp_path}/full.ckpt")
    assert any(entry["exp_avg"].any() for entry in whole.values())
    for name in ("one", f"full-of-{after}", f"sharded-of-{after}"):
        found = adamws_part(f"{tmp_path}/{name}.ckpt")
        for index, entry in whole.items():
            assert all(torch.equal(value, found[index][key]) for key, value in entry.items()), name


def consolidate_to(directory: Path, file: Path) -> None:
    """As ``lightning-scape consolidate`` does."""
    torch.save(consolidate(directory), file)


# ------------------------------------------------------------------------------------------------ dense training


def there_and_back(rank: int, world_size: int, folder: str, kind: str) -> None:
    """DDP goes on from SCAPE's checkpoint, and SCAPE from DDP's."""
    module, path = Regression(), f"{folder}/c.ckpt"
    fit("scape", kind, module, max_steps=4, max_epochs=None).save_checkpoint(path)
    saved = weights(module)
    if kind == "sharded":
        if rank == 0:
            consolidate_to(Path(path), Path(folder, "one.ckpt"))
        dist.barrier()
        path = f"{folder}/one.ckpt"
    module = Regression()
    dense = make_trainer("ddp", max_steps=8, max_epochs=9)
    dense.fit(module, ckpt_path=path)
    assert dense.global_step == 8
    assert {float(state["step"]) for state in dense.optimizers[0].state.values()} == {8.0}
    assert 0 < float((weights(module) - saved).abs().max()) < 0.2  # four steps of AdamW at a rate of 0.01
    dense.save_checkpoint(f"{folder}/dense.ckpt")
    for method in METHODS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = Regression()
            trainer = fit(method, kind, module, f"{folder}/dense.ckpt", max_epochs=None, max_steps=10)
        assert trainer.global_step == 10
        assert torch.equal(*gathered(weights(module)))


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_goes_on_from_our_checkpoint_and_we_from_ddps(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    run_ranks(there_and_back, 2, str(tmp_path), kind)


def made_one(rank: int, world_size: int, folder: str) -> None:
    """The file of a directory goes on as the directory does."""
    for method in METHODS:
        path = f"{folder}/{method}.ckpt"
        fit(method, "sharded", Regression(), max_steps=4, max_epochs=None).save_checkpoint(path)
        if rank == 0:
            consolidate_to(Path(path), Path(f"{path}.one"))
            verify(f"{path}.one")
        dist.barrier()
        ends = []
        for each in (path, f"{path}.one"):
            module = Regression()
            fit(method, "full", module, each, max_steps=9, max_epochs=None)
            ends.append(weights(module))
        assert torch.equal(*ends), method


def test_a_directory_becomes_one_file(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(made_one, 2, str(tmp_path))


# ------------------------------------------------------------------------------------------------ hooks, callbacks


class Fresh(Regression):
    """Resumes the weights, and lets the optimizer begin anew."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []


def begin_the_optimizer_anew(rank: int, world_size: int, folder: str) -> None:
    for method in METHODS:
        for kind in KINDS:
            path = f"{folder}/{method}-{kind}.ckpt"
            first = Regression()
            fit(method, kind, first).save_checkpoint(path)
            module = Fresh()
            assert fit(method, kind, module, path, max_epochs=2).global_step == 12
            assert torch.equal(*gathered(weights(module)))
            again = Regression()
            fit(method, kind, again, path, max_epochs=2)
            assert not torch.equal(weights(module), weights(again))


def test_emptied_optimizer_states_keep_the_weights_and_begin_the_optimizer_anew(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks(begin_the_optimizer_anew, 2, str(tmp_path))


class EditsGroups(Regression):
    """Another weight decay is saved, and another learning rate is loaded, than the run had."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (state,) = checkpoint["optimizer_states"]
        for group in state["param_groups"]:
            group["weight_decay"] = 0.03

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (state,) = checkpoint["optimizer_states"]
        for group in state["param_groups"]:
            assert (group["lr"], group["weight_decay"]) == (1e-2, 0.03)
            group["lr"] = 3e-3


def edit_groups(rank: int, world_size: int, folder: str) -> None:
    for method in METHODS:
        for kind in KINDS:
            path = f"{folder}/{method}-{kind}.ckpt"
            fit(method, kind, EditsGroups()).save_checkpoint(path)
            trainer = fit(method, kind, EditsGroups(), path, max_epochs=2)  # which fails where ranks differ
            assert trainer.global_step == 12
            (group,) = trainer.optimizers[0].param_groups
            assert (group["lr"], group["weight_decay"]) == (3e-3, 0.03), (method, kind)


def test_hooks_change_parameter_groups_in_what_is_saved_and_loaded(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(edit_groups, 2, str(tmp_path))


def evaluate_what_was_saved(rank: int, world_size: int, folder: str) -> None:
    """By validate, and by the class, with weights alone or all; and a callback's own kind of writing."""
    module = Regression()
    callback = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1, save_last="link")
    options = {"callbacks": [callback], "enable_checkpointing": True, "plugins": [AsyncCheckpointIO()]}
    trainer = make_trainer(strategy("scape"), limit_val_batches=2, **options)
    trainer.fit(module)
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]
    trainer = make_trainer(strategy("scape", "sharded"), limit_val_batches=2)
    trainer.fit(module, ckpt_path=f"{folder}/step=6.ckpt")
    (expected,) = trainer.validate(module, verbose=False)
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    trainer.save_checkpoint(f"{folder}/all.ckpt")
    for path in ("weights.ckpt", "all.ckpt", "last.ckpt"):
        other = make_trainer(strategy("scape"), limit_val_batches=2)
        (found,) = other.validate(Regression(), ckpt_path=f"{folder}/{path}", verbose=False)
        assert found == expected
    loaded = Regression.load_from_checkpoint(f"{folder}/last.ckpt")
    assert torch.equal(weights(loaded), weights(module))


def test_what_was_saved_is_evaluated_and_loaded_by_its_class(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(evaluate_what_was_saved, 2, str(tmp_path))


class PartlyFrozen(Regression):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.net[0].requires_grad_(not frozen)


def freeze_other_parameters(rank: int, world_size: int, folder: str) -> None:
    """Of SCAPE: what is frozen before and after need not be the same."""
    for kind in KINDS:
        for before, after in ((False, True), (True, False)):
            path = f"{folder}/{kind}-{before}.ckpt"
            fit("scape", kind, PartlyFrozen(before)).save_checkpoint(path)
            module = PartlyFrozen(after)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert fit("scape", kind, module, path, max_epochs=2).global_step == 12
            assert torch.equal(*gathered(weights(module)))


def test_a_run_goes_on_with_other_parameters_frozen(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(freeze_other_parameters, 2, str(tmp_path))


class Drops(Regression):
    """Draws in each step, and in a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Dropout(0.3))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 12), "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(loader().dataset, batch_size=4, shuffle=True)


ENDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"every_n_train_steps": 1}, {"limit_val_batches": 2}),
    ({"every_n_train_steps": 1}, {"limit_val_batches": 2, "val_check_interval": 3}),
    ({"every_n_train_steps": 1}, {"limit_val_batches": 0}),
    ({}, {"limit_val_batches": 2}),
]
"""How the last step of an epoch was saved, and the Trainer's options."""


def end_an_epoch_and_go_on(rank: int, world_size: int, folder: str) -> None:
    """torch's loaders draw where they are set up, which a resumed fit does in another order and more often."""
    for number, (saved, options) in enumerate(ENDS):  # which are the host's: methods take turns
        method = METHODS[number % len(METHODS)]
        where = f"{folder}/{number}"
        torch.manual_seed(7 + rank)
        straight = Drops()
        keep = ModelCheckpoint(where, "{step}", save_top_k=-1, **saved)
        more = {"max_epochs": 2, **options}
        fit(method, "full", straight, callbacks=[keep], enable_checkpointing=True, **more)
        torch.manual_seed(1000 + rank)
        resumed = Drops()
        fit(method, "full", resumed, f"{where}/step=6.ckpt", **more)
        assert torch.equal(weights(straight), weights(resumed)), (method, saved, options)


def test_a_fit_resumed_at_an_epochs_end_draws_as_one_that_never_stopped(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(end_an_epoch_and_go_on, 2, str(tmp_path))


# ------------------------------------------------------------------------------------------------ Fabric


def another_order_and_nothing_else(rank: int, world_size: int, folder: str) -> None:
    """The optimizer may be loaded before the model, both before a set-up; a checkpoint may hold no optimizer."""
    for name, plan in (("scape", FabricScapeStrategy), ("sparseloco", FabricSparseLoCoStrategy)):
        for kind in KINDS:
            fabric = L.Fabric(accelerator="cpu", devices=2, strategy=plan(state_dict_type=kind), plugins=[GivenRanks()])
            fabric.launch()
            torch.manual_seed(1)
            net = nn.Linear(WIDTH, 3)
            model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            fabric.backward(model(torch.ones(2, WIDTH)).square().mean())
            optimizer.step()
            path = f"{folder}/{name}-{kind}"
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": 1})
            fabric.save(f"{path}-alone", {"model": model, "step": 1})
            held = weights(net)
            for parameter in net.parameters():
                nn.init.zeros_(parameter)
            state = {"optimizer": optimizer, "model": model, "step": 0}
            with mock.patch.object(files, "load_file", wraps=files.load_file) as read:
                fabric.load(path, state)
            opened = {Path(call.args[0]).name for call in read.call_args_list}
            # Another rank's only for what is not there: a starting point is rank 0's.
            own = {"meta.pt", f"rank-{rank}.pt", *(["rank-0.pt"] if name == "sparseloco" else [])}
            assert opened == (own if kind == "sharded" else {Path(path).name})
            late = nn.Linear(WIDTH, 3)  # before a set-up
            bare = torch.optim.AdamW(late.parameters())
            fabric.load(path, {"model": late, "optimizer": bare})
            assert all(state["exp_avg"].any() for state in bare.state.values())
            assert path not in Path("/proc/self/maps").read_text()  # of what was mapped, nothing is left
            assert state["step"] == 1
            assert torch.equal(weights(net), held)
            rest = fabric.load(f"{path}-alone", {"model": model})
            assert rest["step"] == 1
            with pytest.raises((KeyError, ValueError), match="optimizer"):
                fabric.load(f"{path}-alone", {"model": model, "optimizer": optimizer})


def test_fabric_loads_in_any_order_and_says_what_is_missing(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(another_order_and_nothing_else, 2, str(tmp_path))
