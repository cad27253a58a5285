"""FabricScapeStrategy under Lightning Fabric, on real ranks; and that it trains as the Trainer and the optimizer do."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import launcher
import lightning as L
import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from warm_python import warm_python

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
)
from lightning_scape.checkpoint import saver
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.tensors import OnItsWay
from lightning_scape.scape.clipping import GradientClipping
from lightning_scape.scape.first_message import FirstMessage

RunRanks = Callable[..., list[Any]]
WIDTH = 9
CONFIG = ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0)


def build_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.Tanh(), nn.Linear(33, 2))


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :2].sin()).square().mean()


def build_fabric(world_size: int, precision: Any = "32-true", config: ScapeConfig = CONFIG) -> L.Fabric:
    fabric = L.Fabric(
        accelerator="cpu", devices=world_size, strategy=FabricScapeStrategy(config=config), precision=precision
    )
    fabric.launch()
    return fabric


def assert_replicas_equal(model: nn.Module) -> None:
    for parameter in model.parameters():
        everyone = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, parameter.detach().contiguous())
        for other in everyone:
            assert torch.equal(other, parameter)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---------------------------------------------------------------------------------------------- three ways, one result


def train_fabric(rank: int, world_size: int, steps: int, together: bool = True) -> list[Tensor]:
    fabric = build_fabric(world_size)
    model = build_model(seed=3 + rank)  # setup makes ranks equal to rank 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if together:
        model, optimizer = fabric.setup(model, optimizer)
    else:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer)
    for step in range(steps):
        for half, batch in enumerate(batch_of(rank, step).chunk(2)):
            with fabric.no_backward_sync(model, enabled=half == 0):
                fabric.backward(loss_of(model, batch) / 2)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        assert norm is not None
        assert norm > 0
        optimizer.step()
        optimizer.zero_grad()
        assert_replicas_equal(model)
    assert optimizer.stats.step == steps
    return values(model)


def train_plain(rank: int, world_size: int, steps: int) -> list[Tensor]:
    model = build_model()
    optimizer = ScapeOptimizer.from_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), CONFIG)
    for step in range(steps):
        for batch in batch_of(rank, step).chunk(2):
            (loss_of(model, batch) / 2).backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


class Batches(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Tensor]:
        for step in range(self.steps):
            yield from batch_of(dist.get_rank(), step).chunk(2)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train_trainer(rank: int, world_size: int, steps: int) -> list[Tensor]:
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=ScapeStrategy(config=CONFIG),
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Batches(steps), batch_size=None))
    return values(module)


def test_fabric_trainer_and_plain_optimizer_end_bitwise_equal(run_ranks: RunRanks) -> None:
    fabric = run_ranks(train_fabric, 2, 7)[1]
    apart = run_ranks(train_fabric, 2, 7, False)[0]
    plain = run_ranks(train_plain, 2, 7)[0]
    trainer = run_ranks(train_trainer, 2, 7)[0]
    for a, b, c, d in zip(fabric, apart, plain, trainer, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a, d)


# ------------------------------------------------------------------------------------------- precision, checkpoints


def stop_and_go(rank: int, world_size: int, folder: str, precision: str, model_first: bool) -> None:
    def step_through(fabric: L.Fabric, model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            fabric.backward(loss_of(model, batch_of(rank, step).to(next(model.parameters()).dtype)))
            optimizer.step()
            optimizer.zero_grad()

    fabric = build_fabric(world_size, precision)
    model = build_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    step_through(fabric, model, optimizer, range(4))
    fabric.save(Path(folder) / "c.ckpt", {"model": model, "optimizer": optimizer, "step": 4})
    step_through(fabric, model, optimizer, range(4, 9))

    again = build_model(seed=9)
    again, other = fabric.setup(again, torch.optim.AdamW(again.parameters(), lr=1e-2))
    parts = {"model": again, "optimizer": other} if model_first else {"optimizer": other, "model": again}
    state = {**parts, "step": 0}
    fabric.load(Path(folder) / "c.ckpt", state, weights_only=True)
    assert state["step"] == 4
    step_through(fabric, again, other, range(4, 9))
    for a, b in zip(values(model), values(again), strict=True):
        assert torch.equal(a, b)
    assert_replicas_equal(again)


@pytest.mark.few(1)
@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "64-true"])
def test_resume_is_exact_in_every_precision_and_order_of_loading(
    run_ranks: RunRanks, tmp_path: Path, precision: str, model_first: bool
) -> None:
    run_ranks(stop_and_go, 2, str(tmp_path), precision, model_first)


def load_raw_weights(rank: int, world_size: int, path: str) -> list[Tensor]:
    fabric = build_fabric(world_size, "bf16-true", ScapeConfig(sparsity=0.0))
    model = build_model(seed=8)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-6))
    fabric.load_raw(path, model)
    fabric.backward(loss_of(model, batch_of(rank, 0).bfloat16()))
    optimizer.step()
    return values(model)


def test_weights_loaded_after_set_up_are_the_ones_trained(run_ranks: RunRanks, tmp_path: Path) -> None:
    source = build_model(seed=5).bfloat16()
    torch.save(source.state_dict(), tmp_path / "raw.pt")
    for mine, loaded in zip(run_ranks(load_raw_weights, 2, str(tmp_path / "raw.pt"))[0], values(source), strict=True):
        torch.testing.assert_close(mine, loaded, rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------------------------ clipping, errors


def clip(rank: int, world_size: int) -> None:
    fabric = build_fabric(world_size)
    model = build_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(loss_of(model, batch_of(rank, 0)))
    assert fabric.clip_gradients(model, optimizer, clip_val=0.1) is None
    optimizer.step()
    optimizer.zero_grad()
    fabric.backward(loss_of(model, batch_of(rank, 1)) * (float("nan") if rank else 1.0))
    with pytest.raises(ValueError, match="`norm_type` must be 2 under SCAPE, got 1.0"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)
    with pytest.raises(RuntimeError, match="must be finite, got nan .on every rank"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert not fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isfinite()
    before = values(model)
    if rank:
        optimizer.step()
    else:
        with pytest.warns(UserWarning, match="step skipped on all ranks"):
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


def test_clipping_returns_the_norm_and_tells_all_ranks_of_a_nan(run_ranks: RunRanks) -> None:
    run_ranks(clip, 2)


def test_on_cuda_a_norm_that_must_be_finite_is_refused_by_the_next_step() -> None:
    """Where reading it at once would stop the host; what a device has found is set by hand here."""
    clipping = GradientClipping(ScapeConfig(), FirstMessage(Communicator.alone(), Communicator.alone(), 1))
    # Its scale, whether ranks were together, and how many were told to stop.
    clipping.found_inf = OnItsWay(torch.tensor([1.0, 1.0, 0.0])), True, None
    clipping.wait_found_inf()
    assert not clipping.last_skipped
    clipping.found_inf = OnItsWay(torch.tensor([0.0, 1.0, 1.0])), True, None
    with pytest.raises(RuntimeError, match="must be finite, got NaN or inf in the step before, which was skipped"):
        clipping.wait_found_inf()
    assert clipping.last_skipped
    assert clipping.first_message.stopping
    clipping.wait_found_inf()  # said once


def set_up_sgd(rank: int, world_size: int) -> None:
    fabric = build_fabric(world_size)
    model = build_model()
    fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_unsupported_optimizer_is_refused_on_every_rank(run_ranks: RunRanks) -> None:
    for error in run_ranks(set_up_sgd, 2, expect_errors=True):
        assert isinstance(error, TypeError)
        assert "must be torch.optim.AdamW" in str(error)


@pytest.mark.parametrize("strategy", [FabricScapeStrategy, FabricSparseLoCoStrategy])
def test_a_scheduler_in_the_place_of_an_optimizer_is_refused(strategy: Any) -> None:
    """`fabric.setup(model, optimizer, scheduler)` was an AttributeError of a StepLR without `param_groups`."""
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy())
    fabric.launch()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(TypeError, match=r"must set up optimizers of torch's, got StepLR.*scheduler=scheduler"):
        fabric.setup(model, optimizer, scheduler)


def test_the_name_scape_stands_for_the_default_strategy() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy="scape")
    assert isinstance(fabric.strategy, FabricScapeStrategy)
    assert fabric.strategy.config == ScapeConfig()


def train_compiled(rank: int, world_size: int, backend: str | None) -> list[Tensor]:
    fabric = build_fabric(world_size)
    model = build_model()
    wrapped = model if backend is None else torch.compile(model, backend=backend)  # then set up, as LitGPT does
    wrapped, optimizer = fabric.setup(wrapped, torch.optim.AdamW(model.parameters(), lr=1e-2))
    # A precompiled header pays for itself over many kernels, not over these.
    quick = {"cpp_cache_precompile_headers": False}
    quick = quick if hasattr(torch._inductor.config, "cpp_cache_precompile_headers") else {}  # not in torch 2.7
    with torch._inductor.config.patch(quick):
        for step in range(5):
            fabric.backward(loss_of(wrapped, batch_of(rank, step)))
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


@pytest.mark.slow  # test_two_level_trainer.py compiles for each quick run
@launcher.needs_compiler
def test_a_compiled_model_agrees_with_an_eager_one_within_rounding(run_ranks: RunRanks, compiler_cache: Path) -> None:
    (compiled,) = run_ranks(train_compiled, 1, "inductor", timeout=170)  # two ranks: test_litgpt.py, slow
    assert list(compiler_cache.rglob("*.so"))  # it was compiled
    (eager,) = run_ranks(train_compiled, 1, None)
    for mine, theirs in zip(compiled, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_one_device_trains_and_a_traced_model_agrees_with_an_eager_one() -> None:
    traced, eager = train_compiled(0, 1, "aot_eager"), train_compiled(0, 1, None)
    for mine, theirs in zip(traced, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def step_scheduler(rank: int, world_size: int) -> list[float]:
    fabric = build_fabric(world_size)
    model = build_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates = []
    for step in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        fabric.backward(loss_of(model, batch_of(rank, step)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return rates


def test_a_scheduler_built_on_the_returned_optimizer_steers_it(run_ranks: RunRanks) -> None:
    assert run_ranks(step_scheduler, 2)[0] == [1.0, 1.0, 0.5, 0.5, 0.25]


# ------------------------------------------------------------------------------------------ the warm-up, the first line


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 4950),
        ({"total_steps": 7}, 4950),
        ({"update": "adams"}, 1000),
        ({"update": "adams", "total_steps": 7}, 7),
        ({"update": "adams", "total_steps": 5000}, 1000),
        ({"sparsity_warmup_steps": 0}, 0),
    ],
)
def test_the_warm_up_goes_by_the_update_and_that_of_adams_by_the_run(options: dict[str, Any], steps: int) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricScapeStrategy(**options))
    fabric.launch()
    model = build_model()
    _, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert optimizer.schedule.warmup_steps == steps


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_steps_that_are_none_are_an_error(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"`total_steps` must be None or a whole number >= 1, got {steps}"):
        FabricScapeStrategy(total_steps=steps)


FIRST_LINE = """
import os, sys, torch, lightning as L
from lightning_scape import AdamS, FabricScapeStrategy
fabric = L.Fabric(accelerator="cpu", devices=2, strategy=FabricScapeStrategy(total_steps=600))
fabric.launch()

def train():
    model = torch.nn.Linear(30, 30)
    optimizers = torch.optim.AdamW([model.weight]), AdamS([model.bias])
    model, *optimizers = fabric.setup(model, *optimizers)
    fabric.print("set up", file=sys.stderr, flush=True)
    for _ in range(3):
        fabric.backward(model(torch.randn(4, 30)).sum())
        for optimizer in optimizers:
            optimizer.step()
    fabric.save(sys.argv[1], {"model": model, "optimizers": optimizers[0]})

train()
"""


def test_two_lines_of_rank_0_say_at_the_first_step_what_holds_for_all_optimizers(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    (tmp_path / "script.py").write_text(FIRST_LINE)
    command = [warm_python(), str(tmp_path / "script.py"), str(tmp_path / "checkpoint")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)
    said = [line for line in done.stderr.splitlines() if line == "set up" or "SCAPE: " in line]
    assert len(said) == 3, done.stderr
    assert said[2].startswith("SCAPE: this run of 600 steps will send ")
    assert re.fullmatch(
        r"SCAPE: sends 1% of the entries per step \(sparsity=0.99\), [0-9]+ B per rank and step beside the norm's"
        r" message, after a warm-up of 4,950 steps \(this run of 600 ends at 7.5%\). Update: AdamW's, your lr, betas"
        r" and eps hold; AdamS's, as in SCAPE's paper."
        r' To change: FabricScapeStrategy\(sparsity=..., sparsity_warmup_steps=0, update="adamw"\).',
        said[1],
    )


def _warned_at_the_first_step(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    fabric = L.Fabric(accelerator="cpu", strategy=FabricScapeStrategy(sparsity_warmup_steps=0, **options))
    fabric.launch()
    model, optimizer = fabric.setup(layer := nn.Linear(9, 1), torch.optim.AdamW(layer.parameters()))
    fabric.backward(model(torch.ones(2, 9)).sum())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(each.message) for each in caught if "updated at least" in str(each.message)]


def test_a_run_that_is_too_short_is_told_where_its_length_is_known(run_ranks: Any) -> None:
    for options, told in (({}, 0), ({"total_steps": 120}, 1)):
        assert len(run_ranks(_warned_at_the_first_step, 1, options)[0]) == told


def continue_for_longer(rank: int, world_size: int, folder: str) -> list[int]:
    warmups = []
    for steps in (20, 50):
        strategy = FabricScapeStrategy(sparsity=0.9, total_steps=steps, update="adams")
        fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        model = build_model()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if warmups:
            fabric.load(f"{folder}/checkpoint", {"model": model, "optimizer": optimizer})
        fabric.backward(loss_of(model, batch_of(rank, 0)))
        optimizer.step()
        fabric.save(f"{folder}/checkpoint", {"model": model, "optimizer": optimizer})
        warmups.append(optimizer.schedule.warmup_steps)
    return warmups


def test_a_run_that_goes_on_for_longer_keeps_the_warm_up_that_it_began_with(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks(continue_for_longer, 2, str(tmp_path)) == [[20, 20]] * 2


# ------------------------------------------------------------------------------------------- launching, scaling, ending


def test_the_strategy_can_be_sent_to_spawned_processes() -> None:
    sent = pickle.loads(pickle.dumps(FabricScapeStrategy(sparsity=0.9, start_method="spawn")))
    assert sent.config == ScapeConfig(sparsity=0.9)
    assert not list(sent.known.modules)


def overflow_on_one_rank(rank: int, world_size: int) -> list[bool]:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    strategy = FabricScapeStrategy(config=CONFIG, timeout=timedelta(seconds=60))
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=[plugin])
    fabric.launch()
    model = build_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    moved = []
    for step in range(3):
        before = values(model)
        loss = loss_of(model, batch_of(rank, step)) * (float("inf") if step == 1 and rank == 1 else 1.0)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, values(model), strict=True)))
    assert_replicas_equal(model)
    return moved


def test_an_overflow_on_one_rank_skips_the_step_on_all(run_ranks: RunRanks) -> None:
    for moved in run_ranks(overflow_on_one_rank, 2):
        assert moved == [True, False, True]


def save_from_two(rank: int, world_size: int, folder: Path) -> None:
    write, slow = saver.write_directory, [rank == 1]

    def write_slowly(*arguments: Any) -> None:
        if slow and slow.pop():  # the first one, while rank 0 already waits in it
            time.sleep(1)
        write(*arguments)

    saver.write_directory = write_slowly
    saved = {}
    for name in ("first", "second"):
        strategy = FabricScapeStrategy(config=CONFIG, state_dict_type="sharded", async_save=True)
        fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(build_model(seed=len(saved)))
        fabric.save(folder / name, {"model": model})
        saved[name] = fabric, model
    for name, (fabric, model) in saved.items():
        fabric.strategy.wait_for_checkpoint()
        before = values(model)
        next(model.parameters()).data.zero_()
        fabric.load(folder / name, {"model": model})
        assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


def test_two_strategies_that_save_in_the_background_wait_for_one_another(run_ranks: RunRanks, tmp_path: Path) -> None:
    """They use one group, on which only one checkpoint's messages may be under way."""
    run_ranks(save_from_two, 2, tmp_path)


LAST_SAVE = """
import resource, signal, sys, torch, lightning as L
from lightning_scape import FabricScapeStrategy
strategy = FabricScapeStrategy(state_dict_type="sharded", async_save=True)
fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
fabric.launch()
model = torch.nn.Linear(300, 300)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
fabric.backward(model(torch.randn(1, 300)).sum())
optimizer.step()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # a disk that is full
fabric.save(sys.argv[1], {"model": model, "optimizer": optimizer})
"""


@pytest.mark.few(0)
def test_a_last_background_save_that_fails_is_told_at_the_end(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LAST_SAVE, str(tmp_path / "last")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)
    assert "The last checkpoint was not written" in done.stderr
    assert not (tmp_path / "last").exists()


def test_that_an_optimizer_begins_anew_when_it_is_set_up_again_is_said() -> None:
    fabric, model = build_fabric(1), build_model()
    adamw = torch.optim.AdamW(model.parameters())
    net, optimizer = fabric.setup(model, adamw)
    fabric.backward(loss_of(net, batch_of(0, 0)))
    optimizer.step()
    with pytest.warns(UserWarning, match="begins anew, got a second fit or set-up of the same AdamW"):
        fabric.setup(model, adamw)
