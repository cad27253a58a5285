"""Ranks never train apart without a word: what differs between them is an error on all, and nothing is folded.

An error of the user's own comes out as it is; the launcher then ends the job, as under DDP.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from launcher import RankError
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trainer_helpers import BATCHES, MARKS, WIDTH, GivenRanks, Regression, TwoOptimizers, make_trainer, weights

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCo,
    SparseLoCoStrategy,
)

pytestmark = MARKS
RunRanks = Callable[..., list[Any]]
SOON = 30.0
"""Seconds: nobody waits for a collective's timeout, which is longer."""


def strategy(method: str, **options: Any) -> Any:
    if method == "sparseloco":
        return SparseLoCoStrategy(sync_every=4, **options)
    return ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0, **options)


def texts(errors: list[Any]) -> list[str]:
    assert all(isinstance(error, Exception) and not isinstance(error, RankError) for error in errors), errors
    return [str(error) for error in errors]


def mistake(*_: Any, **__: Any) -> Any:
    raise KeyError("one rank's mistake")


# ------------------------------------------------------------------------------- other steps, orders, hyperparameters


def make(entries: int = 300) -> tuple[nn.Parameter, ScapeOptimizer]:
    parameter = nn.Parameter(torch.ones(entries))
    config = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0)
    return parameter, ScapeOptimizer([parameter], lr=0.1, config=config)


def another_order(rank: int, step: int, pairs: list[Any]) -> Iterator[Any]:
    yield from reversed(pairs) if (rank, step) == (1, 2) else pairs


def a_step_left_out(rank: int, step: int, pairs: list[Any]) -> Iterator[Any]:
    for pair in pairs:
        if (rank, step) != (1, 2):
            yield pair


def set_on_rank_1(**values: Any) -> Any:
    def change(rank: int, step: int, pairs: list[Any]) -> Iterator[Any]:
        if (rank, step) == (1, 2):
            pairs[0][1].param_groups[0].update(values)
        yield from pairs

    return change


def clipped_on_rank_0(rank: int, step: int, pairs: list[Any]) -> Iterator[Any]:
    for pair in pairs:
        if rank == 0 and step == 2:
            pair[1].clip_grad_norm(1.0)
        yield pair


APART: dict[str, tuple[Any, str]] = {
    "order": (another_order, "the optimizer's number is 0 on rank 0 and 1 on rank 1"),
    "left out": (a_step_left_out, "the number of gradients that no step used is 0 on rank 0 and 1 on rank 1"),
    "lr": (set_on_rank_1(lr=0.05), "lr of group 0 is 0.1 on rank 0 and 0.05 on rank 1"),
    "betas": (set_on_rank_1(betas=(0.9, 0.99)), "betas of group 0 is (0.9, 0.95) on rank 0 and (0.9, 0.99) on rank 1"),
    "decay": (set_on_rank_1(weight_decay=0.0), "weight_decay of group 0 is 0.1 on rank 0 and 0.0 on rank 1"),
    "clipping": (clipped_on_rank_0, "max_norm is 1.0 on rank 0 and None on rank 1"),
}


def step_apart(rank: int, world_size: int, case: str) -> None:
    pairs = [make(300), make(5000)]
    for step in range(5):
        for parameter, optimizer in pairs:
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for parameter, optimizer in APART[case][0](rank, step, pairs):
            before = parameter.detach().clone()
            try:
                optimizer.step()
            except (RuntimeError, ValueError):
                assert torch.equal(parameter, before)
                raise


@pytest.mark.parametrize("case", APART)
def test_ranks_that_step_apart_are_an_error_and_nothing_is_folded(run_ranks: RunRanks, case: str) -> None:
    for text in texts(run_ranks(step_apart, 2, case, expect_errors=True, timeout=SOON)):
        assert APART[case][1] in text


def exchange_apart(rank: int, world_size: int) -> None:
    parameter = nn.Parameter(torch.ones(300))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    SparseLoCo(optimizer, sync_every=3)
    for step in range(7):
        parameter.grad = torch.full((300,), float(rank + step))
        if (rank, step) == (1, 4):
            optimizer.param_groups[0]["lr"] = 0.05
        optimizer.step()


def test_local_steps_by_another_learning_rate_are_an_error_at_the_exchange(run_ranks: RunRanks) -> None:
    for text in texts(run_ranks(exchange_apart, 2, expect_errors=True, timeout=SOON)):
        assert "lr" in text
        assert "0.05" in text


def build_again_and_again(rank: int, world_size: int) -> int:
    """Each optimizer is dropped while a message of its own is under way, and the next has another length."""
    for turn in range(12):
        parameter, optimizer = make((500, 3000)[turn % 2])
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * turn + 10 * step + rank)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    return 12


def test_a_new_optimizer_never_meets_a_message_of_the_one_before(run_ranks: RunRanks) -> None:
    assert run_ranks(build_again_and_again, 2) == [12, 12]


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.taken: list[int] = []


class Guarded(ByHand):
    """Leaves a step out where its own gradients are not finite, as one may under DDP."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.manual_backward(loss * float("nan") if (batch_idx, self.global_rank) == (3, 1) else loss)
        if all(bool(parameter.grad.isfinite().all()) for parameter in self.parameters()):
            optimizer.step()
            self.taken.append(batch_idx)


class PassesOver(ByHand):
    """Rank 1 alone leaves a step out, by what no gradient says."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        if (batch_idx, self.global_rank) != (3, 1):
            self.optimizers().step()
            self.taken.append(batch_idx)
        self.zero_grad()


def fit_and_tell(rank: int, world_size: int, kind: Any) -> tuple[list[int], Tensor]:
    module = kind()
    make_trainer(strategy("scape", timeout=60)).fit(module)
    return module.taken, weights(module)


@pytest.mark.parametrize("kind", [Guarded, PassesOver])
def test_a_step_that_a_module_leaves_out_is_left_out_on_all_ranks_or_an_error_on_all(
    run_ranks: RunRanks, kind: Any
) -> None:
    ends = run_ranks(fit_and_tell, 2, kind, expect_errors=True, timeout=SOON)
    if any(isinstance(end, Exception) for end in ends):
        assert all("batch" in text or "step" in text for text in texts(ends))
    else:
        (first, one), (second, other) = ends
        assert first == second == [0, 1, 2, 4, 5]
        assert torch.equal(one, other)


def scale_alone(rank: int, world_size: int) -> tuple[Tensor, float]:
    """A plain loop with torch's GradScaler, by which each rank decides for itself."""
    parameter, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale((parameter * (torch.inf if (step, rank) == (1, 1) else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return parameter.detach(), float(scaler.get_scale())


def test_a_scaler_by_which_one_rank_skips_is_an_error_or_agrees(run_ranks: RunRanks) -> None:
    ends = run_ranks(scale_alone, 2, expect_errors=True, timeout=SOON)
    if any(isinstance(end, Exception) for end in ends):
        assert all("GradScaler" in text or "step" in text for text in texts(ends))
    else:
        assert torch.equal(ends[0][0], ends[1][0])


# ------------------------------------------------------------------------------------------- loaders of other lengths


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples without a known number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[Tensor]]:
        for number in range(self.samples):
            yield [torch.full((WIDTH,), float(number)), torch.zeros(3)]


class Own(Regression):
    """As many batches as it is told, by rank."""

    def __init__(self, batches: list[int], known: bool) -> None:
        super().__init__()
        self.batches, self.known = batches, known

    def train_dataloader(self) -> DataLoader[Any]:
        mine = self.batches[dist.get_rank()]
        if not self.known:
            return DataLoader(Stream(mine), batch_size=1)
        return DataLoader(TensorDataset(torch.ones(mine, WIDTH), torch.zeros(mine, 3)), batch_size=1)

    val_dataloader = train_dataloader


class OwnByHand(Own, TwoOptimizers):
    """Takes two steps in a batch."""


def fit_own(rank: int, world_size: int, method: str, batches: list[int], known: bool, options: dict[str, Any]) -> int:
    kind = strategy("scape", local_group_size=2) if method == "nodes" else strategy(method)
    trainer = make_trainer(kind, use_distributed_sampler=False, **{"max_epochs": 3, **options})
    trainer.fit((OwnByHand if method == "by hand" else Own)(batches, known))
    return int(trainer.global_step)


@pytest.mark.parametrize(
    ("method", "batches", "known", "options"),
    [
        ("scape", [6, 5], True, {}),
        ("scape", [5, 8], False, {"max_steps": 6}),
        ("scape", [6, 5], False, {"accumulate_grad_batches": 3}),  # as many steps, yet
        ("scape", [5, 4], False, {"limit_val_batches": 1}),
        ("sparseloco", [6, 5], True, {}),
        ("sparseloco", [6, 5], True, {"max_epochs": 1}),
        ("sparseloco", [6, 5], False, {}),
        ("nodes", [6, 5, 6, 5], False, {}),
    ],
)
def test_ranks_that_run_out_of_batches_apart_raise_together(
    run_ranks: RunRanks, method: str, batches: list[int], known: bool, options: dict[str, Any]
) -> None:
    ends = run_ranks(fit_own, len(batches), method, batches, known, options, expect_errors=True, timeout=SOON)
    for text in texts(ends):
        assert "as many training batches" in text


def stop_alone(rank: int, world_size: int, method: str) -> None:
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = rank == 1

    make_trainer(strategy(method), callbacks=[Stop()]).fit(Regression())


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_a_rank_that_stops_alone_is_an_error(run_ranks: RunRanks, method: str) -> None:
    ends = run_ranks(stop_alone, 2, method, expect_errors=True, timeout=SOON)
    assert "as many training batches" in str(ends[1])
    assert isinstance(ends[0], Exception)


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_ranks_that_end_together_train(run_ranks: RunRanks, method: str) -> None:
    assert run_ranks(fit_own, 2, "by hand", [5, 8], True, {"max_steps": 10}, timeout=SOON) == [10, 10]
    assert run_ranks(fit_own, 2, method, [5, 5], False, {}, timeout=SOON) == [15, 15]
    assert run_ranks(fit_own, 2, method, [6, 9], False, {"max_steps": 6}, timeout=SOON) == [6, 6]
    assert run_ranks(fit_own, 2, method, [9, 7], True, {"limit_train_batches": 5}, timeout=SOON) == [15, 15]


# ------------------------------------------------------------------------------------------------ setting up


class BuiltApart(Regression):
    """Rank 1 builds what ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "another module" and dist.get_rank() == 1:
            self.net[0] = nn.Linear(WIDTH, 6)

    def configure_optimizers(self) -> Any:
        if self.global_rank == 0 or self.kind == "another module":
            return super().configure_optimizers()
        if self.kind == "a mistake":
            mistake()
        return torch.optim.SGD(self.parameters()) if self.kind == "another optimizer" else None


def build_apart(rank: int, world_size: int, method: str, kind: str, path: str) -> None:
    more: dict[str, Any] = {"async_save": True} if kind == "another option" and rank else {}
    trainer = make_trainer(strategy(method, **more))
    trainer.fit(BuiltApart(kind), ckpt_path=path if kind == "another checkpoint" and rank == 0 else None)


@pytest.mark.parametrize(
    ("method", "kind", "words"),
    [
        ("scape", "another module", "on rank 1"),
        ("scape", "a mistake", "one rank's mistake"),
        ("scape", "none", "the number of optimizers is 1 on rank 0 and 0 on rank 1"),
        ("sparseloco", "another optimizer", "optimizers[0] is 'AdamW' on rank 0 and 'SGD' on rank 1"),
        ("scape", "another option", "async_save is False on rank 0 and True on rank 1"),
        ("scape", "another checkpoint", "on rank 0 and None on rank 1"),
    ],
)
def test_what_ranks_set_up_apart_is_an_error_on_all(
    run_ranks: RunRanks, tmp_path: Path, method: str, kind: str, words: str
) -> None:
    path = str(tmp_path / "a.ckpt")
    for text in texts(run_ranks(build_apart, 2, method, kind, path, expect_errors=True, timeout=SOON)):
        assert words in text


# ------------------------------------------------------------------------------------------------ saving and loading


class Saves(pl.Callback):
    """Saves in mid-fit, where one thing goes wrong on rank 1 (what cannot be pickled: on rank 0, which writes)."""

    def __init__(self, path: str, what: str) -> None:
        self.path, self.what, self.message = path, what, ""

    def state_dict(self) -> dict[str, Any]:
        return mistake() if self.what == "a callback's state" and dist.get_rank() == 1 else {}

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: Any) -> None:
        if self.what == "on_save_checkpoint" and trainer.global_rank == 1:
            mistake()
        if self.what == "what cannot be pickled":
            checkpoint["mine"] = lambda: None
        if self.what == "an optimizer left out" and trainer.global_rank == 1:
            checkpoint["optimizer_states"] = []
        if self.what == "a copy of an optimizer's state" and trainer.global_rank == 1:
            checkpoint["optimizer_states"] = [{**each} for each in checkpoint["optimizer_states"]]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.message = message_of(lambda: trainer.save_checkpoint(self.path))
            trainer.should_stop = True


def message_of(call: Callable[[], Any]) -> str:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - began < SOON
        return str(error)
    return ""


WRONG = {
    "a callback's state": "one rank's mistake",
    "on_save_checkpoint": "one rank's mistake",
    "what cannot be pickled": "lambda",
    "a copy of an optimizer's state": "must be saved as it is",
    "an optimizer left out": "the number of saved optimizers is 1 on rank 0 and 0 on rank 1",
}


def save_apart(rank: int, world_size: int, folder: str) -> dict[tuple[str, str], str]:
    found = {}
    for method, kind in (("scape", "full"), ("sparseloco", "sharded")):
        for what in WRONG:
            callback = Saves(f"{folder}/{method}-{what}.ckpt", what)
            make_trainer(strategy(method, state_dict_type=kind), callbacks=[callback]).fit(Regression())
            found[method, what] = callback.message
    return found


def test_what_fails_in_saving_on_one_rank_fails_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    for found in run_ranks(save_apart, 2, str(tmp_path)):
        for (method, what), message in found.items():
            assert WRONG[what] in message, (method, what, message)
    assert not list(tmp_path.rglob("*.ckpt"))


FABRICS: dict[str, Callable[..., Any]] = {
    "scape": lambda **options: FabricScapeStrategy(sparsity=0.5, **options),
    "sparseloco": lambda **options: FabricSparseLoCoStrategy(sync_every=2, **options),
}


class Broken:
    """Gives no state on rank 1."""

    def state_dict(self) -> Any:
        return mistake() if dist.get_rank() == 1 else {}

    def load_state_dict(self, _: Any) -> None: ...


def under_fabric(name: str, **options: Any) -> tuple[L.Fabric, nn.Module, dict[str, Any]]:
    """After one step: Fabric, the module, and a state to save and load."""
    plugins: Any = [GivenRanks()]
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FABRICS[name](**options), plugins=plugins)
    fabric.launch()
    model, optimizer = fabric.setup(module := nn.Linear(4, 2), torch.optim.AdamW(module.parameters()))
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    return fabric, module, {"model": model, "optimizer": optimizer, "note": 1}


def fabric_apart(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    for name, kind in (("scape", "sharded"), ("sparseloco", "full")):
        fabric, _, state = under_fabric(name, state_dict_type=kind)
        path, other = f"{folder}/{name}", {"broken": Broken(), **state}
        said.append(message_of(lambda f=fabric, p=path, o=other: f.save(p, o)))
        fabric.save(path, state)
    return said


def test_under_fabric_what_fails_on_one_rank_fails_on_all(run_ranks: RunRanks, tmp_path: Path) -> None:
    for said in run_ranks(fabric_apart, 2, str(tmp_path)):
        assert all("one rank's mistake" in text for text in said)


def save_what_cannot_be_pickled(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """On the one rank that holds it: rank 0's entry, or, of an optimizer inside a window, rank 1's option."""
    found = {}
    for name in FABRICS:
        for kind in ("full", "sharded"):
            for beside in (False, True):
                fabric, module, state = under_fabric(name, state_dict_type=kind, async_save=beside)
                path = f"{folder}/{name}-{kind}-{beside}"
                fabric.save(path, state)
                fabric.strategy.wait_for_checkpoint()
                saved, other = weights(module), {**state, "note": 2}
                if rank == 0 and name == "scape":
                    other["mine"] = lambda: None
                if rank == 1 and name == "sparseloco":
                    state["optimizer"].param_groups[0]["mine"] = lambda: None
                nn.init.zeros_(module.weight)
                found[path] = message_of(lambda f=fabric, p=path, o=other: f.save(p, o))
                state["optimizer"].param_groups[0].pop("mine", None)
                fabric.load(path, state)
                assert state["note"] == 1
                assert torch.equal(weights(module), saved)
    return found


def test_a_state_that_one_rank_cannot_pickle_is_an_error_on_all_and_what_was_saved_stays(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    for found in run_ranks(save_what_cannot_be_pickled, 2, str(tmp_path)):
        assert len(found) == 8
        for path, message in found.items():
            assert "lambda" in message, path
    assert {path.name for path in tmp_path.iterdir()} == {Path(path).name for path in found}


def give_each_rank_a_path(rank: int, world_size: int, folder: str) -> list[str]:
    """A save goes to rank 0's path, as Lightning's do; a load of several is none."""
    said = []
    for name, kind in (("scape", "sharded"), ("sparseloco", "full")):
        fabric, module, state = under_fabric(name, state_dict_type=kind)
        paths = [f"{folder}/{name}-of-{each}" for each in range(2)]
        fabric.save(paths[rank], state)
        assert [Path(path).exists() for path in paths] == [True, False]
        fabric.save(paths[1], state)
        nn.init.zeros_(module.weight)
        said.append(message_of(lambda f=fabric, p=paths, s=state: f.load(p[rank], s)))
        assert not module.weight.any()
        fabric.load(paths[0], state)
        assert module.weight.any()
    for kind in ("full", "sharded"):
        paths = [f"{folder}/{kind}-of-{each}" for each in range(2)]
        trainer = make_trainer(strategy("scape", state_dict_type=kind))
        trainer.fit(Regression())
        for path in paths:
            trainer.save_checkpoint(path)
        trainer = make_trainer(strategy("scape"))
        said.append(message_of(lambda t=trainer, p=paths: t.fit(Regression(), ckpt_path=p[rank])))
    return said


def test_a_load_of_other_paths_on_other_ranks_is_an_error_that_names_both(run_ranks: RunRanks, tmp_path: Path) -> None:
    for said in run_ranks(give_each_rank_a_path, 2, str(tmp_path)):
        for name, text in zip(("scape", "sparseloco", "full", "sharded"), said, strict=True):
            assert f"{tmp_path}/{name}-of-0' on rank 0" in text
            assert f"{tmp_path}/{name}-of-1' on rank 1" in text


class SavesAlone(pl.Callback):
    """``if trainer.is_global_zero: trainer.save_checkpoint(...)``."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def save_alone(rank: int, world_size: int, method: str, path: Path, step: int) -> None:
    make_trainer(strategy(method), callbacks=[SavesAlone(path, step)], limit_val_batches=1).fit(Regression())


@pytest.mark.parametrize(("method", "step"), [("scape", 2), ("scape", BATCHES), ("sparseloco", 3)])
def test_a_save_by_one_rank_alone_is_an_error_on_all(
    run_ranks: RunRanks, tmp_path: Path, method: str, step: int
) -> None:
    path = tmp_path / "a.ckpt"
    for text in texts(run_ranks(save_alone, 2, method, path, step, expect_errors=True, timeout=60.0)):
        assert "save" in text


# ------------------------------------------------------------------------------------------------ the user's own error


def fail_alone(rank: int, world_size: int, method: str, how: str) -> None:
    class Dies(Regression):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 3 and (self.global_rank == 1 or how == "all raise"):
                os.kill(os.getpid(), signal.SIGKILL) if how == "dies" else mistake()
            return super().training_step(batch, batch_idx)

    make_trainer(strategy(method, timeout=20)).fit(Dies())


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
@pytest.mark.parametrize("how", ["raises", "dies"])
def test_an_error_of_one_rank_comes_out_as_it_is_and_the_others_end(run_ranks: RunRanks, method: str, how: str) -> None:
    other, own = run_ranks(fail_alone, 2, method, how, expect_errors=True, timeout=60.0)
    assert isinstance(own, RankError if how == "dies" else KeyError)
    assert isinstance(other, Exception)  # its connection was cut


def fit_again(rank: int, world_size: int, method: str) -> Tensor:
    with pytest.raises(KeyError):
        fail_alone(rank, world_size, method, "all raise")
    model = Regression()
    make_trainer(strategy(method)).fit(model)
    return weights(model)


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_a_script_that_catches_an_error_of_all_ranks_trains_on(run_ranks: RunRanks, method: str) -> None:
    first, second = run_ranks(fit_again, 2, method, fresh=True, timeout=60.0)
    assert torch.equal(first, second)
