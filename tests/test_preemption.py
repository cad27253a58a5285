"""SIGTERM to one rank or to all: every rank ends after the same step, and saves and exits as with Lightning."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from trainer_helpers import BATCHES, MARKS, GivenRanks, Regression, make_trainer, weights
from warm_python import warm_python

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeStrategy,
    SparseLoCoStrategy,
)
from lightning_scape.comm import stop_word
from lightning_scape.hosts.preemption import Preemption

pytestmark = MARKS
EPOCHS = 20


class Told(Regression):
    """Ranks that are told get the signal in the middle of their batch number 3; the step before is their last alone."""

    def __init__(self, told: bool, pause: float) -> None:
        super().__init__()
        self.told, self.pause, self.handler = told, pause, signal.getsignal(signal.SIGTERM)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.pause)
        if self.told and self.trainer.fit_loop.total_batch_idx == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + self.global_rank)
        return super().training_step([torch.randn(each.shape, generator=generator) for each in batch], batch_idx)


def _strategy(method: str) -> ScapeStrategy:
    options: dict[str, Any] = {"timeout": 60, "resume": "auto"}
    if method == "scape":
        return ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0, **options)
    if method == "background":
        options |= {"state_dict_type": "sharded", "async_save": True}
        return ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0, **options)
    return SparseLoCoStrategy(sync_every=50, density=0.25, overlap_steps=2, **options)


def _fit(rank: int, folder: str, method: str, told: bool, **options: Any) -> tuple[Any, Any, int]:
    stop_word.POLL_SECONDS = 0.02
    module = Told(told, 0.01 if method == "sparseloco" else 0.0)
    saves = ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=10_000)
    trainer = make_trainer(
        _strategy(method), max_epochs=EPOCHS, callbacks=[saves], enable_checkpointing=True, **options
    )
    code: Any = None
    try:
        trainer.fit(module)
    except SIGTERMException as ended:
        code = (ended.code,)
    assert signal.getsignal(signal.SIGTERM) == module.handler
    assert not any(isinstance(callback, Preemption) for callback in trainer.callbacks)
    return module, code, trainer.global_step


def _preempted(rank: int, world_size: int, folder: str, method: str, told: tuple[int, ...]) -> Any:
    straight, _, steps = _fit(rank, f"{folder}/straight", method, False)
    _, code, stopped_at = _fit(rank, f"{folder}/stopped", method, rank in told)
    resumed, _, resumed_steps = _fit(rank, f"{folder}/stopped", method, False)
    assert steps == resumed_steps == EPOCHS * BATCHES
    return code, stopped_at, torch.equal(weights(straight), weights(resumed))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "told"),
    [("scape", (1,)), ("scape", (0, 1)), ("background", (0,)), ("sparseloco", (1,)), ("sparseloco", (0, 1))],
)
def test_all_ranks_end_after_the_same_step_and_the_next_start_goes_on_bit_for_bit(
    run_ranks: Any, tmp_path: Path, method: str, told: tuple[int, ...]
) -> None:
    """Lightning's handler broadcast between the messages of a step: every run waited for the whole timeout."""
    (code, steps, same), second = run_ranks(_preempted, 2, str(tmp_path), method, told, timeout=120)
    assert second == (code, steps, same)
    assert code == (None,)  # a SystemExit without a code, as with DDP: 0
    assert steps == 4 if method != "sparseloco" else 4 <= steps < EPOCHS * BATCHES
    assert same


def _accumulating(rank: int, world_size: int, folder: str) -> tuple[Any, int]:
    return _fit(rank, folder, "scape", rank == 1, accumulate_grad_batches=2)[1:]


def test_forked_ranks_that_end_without_a_word_end_with_an_error(tmp_path: Path) -> None:
    """Their launcher waits for the first rank's result; it waited for ever."""
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    done = subprocess.run([warm_python(), str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert "process 0 terminated with exit code 143" in done.stderr
    assert done.returncode == 1


FORKED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from lightning_scape import ScapeStrategy
from test_preemption import Told
from trainer_helpers import make_trainer

make_trainer(ScapeStrategy(start_method="fork"), devices=2, max_epochs=20).fit(Told(True, 0.0))
"""


@pytest.mark.few(0)
def test_a_fit_that_accumulates_ends_with_a_whole_step(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_accumulating, 2, str(tmp_path), timeout=60) == [((None,), 2)] * 2


def test_a_copy_of_the_callback_is_nobodys_handler() -> None:
    trainer = make_trainer()
    copied = copy.deepcopy(Preemption(trainer))
    copied.note(signal.SIGTERM, None)
    assert not trainer.received_sigterm


def _fabric(rank: int, world_size: int, method: str) -> int:
    stop_word.POLL_SECONDS = 0.02
    plan: Any = FabricScapeStrategy(sparsity=0.5) if method == "scape" else FabricSparseLoCoStrategy(sync_every=1000)
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=plan, plugins=[GivenRanks()])
    fabric.launch()
    net = nn.Linear(6, 4)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    before = signal.signal(signal.SIGTERM, lambda *_: plan.request_stop())
    try:
        for step in range(1, 500):
            time.sleep(0.002)
            fabric.backward(model(torch.randn(3, 6)).square().mean())
            if (rank, step) == (1, 5):
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.step()
            optimizer.zero_grad()
            if plan.stop_requested:
                dist.barrier()
                return step
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_a_loop_of_the_users_own_ends_on_all_ranks_at_once(run_ranks: Any, method: str) -> None:
    first, second = run_ranks(_fabric, 2, method, timeout=60)
    assert first == second
    assert 5 <= first < 500
