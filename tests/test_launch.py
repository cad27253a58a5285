"""How a strategy is asked for, and how its ranks are started: options, LightningCLI, launchers, a notebook, SIGTERM."""

from __future__ import annotations

import copy
import inspect
import multiprocessing.connection
import os
import pickle
import re
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import launcher
import pytest
import torch
from host_runs import whole_weights
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from trainer_helpers import BATCHES, MARKS, Regression, make_trainer, weights

from lightning_scape import (
    FabricMethodStrategy,
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    MethodStrategy,
    ScapeConfig,
    ScapeStrategy,
    SparseLoCoConfig,
    SparseLoCoStrategy,
)

pytestmark = MARKS
STRATEGIES: list[tuple[Any, Any]] = [
    (ScapeStrategy, ScapeConfig),
    (FabricScapeStrategy, ScapeConfig),
    (SparseLoCoStrategy, SparseLoCoConfig),
    (FabricSparseLoCoStrategy, SparseLoCoConfig),
]

# ------------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(("strategy", "config"), STRATEGIES)
def test_every_option_of_a_config_is_an_argument_of_the_same_type_and_default(strategy: Any, config: Any) -> None:
    arguments = inspect.signature(strategy.__init__).parameters
    hints, rules = typing.get_type_hints(strategy.__init__), typing.get_type_hints(config)
    for field in fields(config):
        assert arguments[field.name].default == field.default
        assert hints[field.name] == rules[field.name]
    with pytest.raises(TypeError, match="sparsty"):  # what goes on to the host's strategy is not swallowed there
        strategy(sparsty=0.9)


def test_options_reach_the_config_by_name_by_position_and_as_a_whole() -> None:
    assert ScapeStrategy(0.9).config == ScapeStrategy(sparsity=0.9).config == ScapeConfig(sparsity=0.9)
    config = ScapeConfig(sparsity=0.9, max_skipped=3)
    assert ScapeStrategy(config=config).config is config
    assert ScapeStrategy(0.8, config=config).config == ScapeConfig(sparsity=0.8, max_skipped=3)
    assert MethodStrategy(config).config is FabricMethodStrategy(config).config is config
    with pytest.raises(ValueError, match=r"`sparsity` must be a number in .*, got 1.5"):
        ScapeStrategy(sparsity=1.5)


@pytest.mark.parametrize("option", ["find_unused_parameters", "gradient_as_bucket_view", "static_graph"])
def test_an_option_of_ddps_is_refused_as_not_needed(option: str) -> None:
    for strategy, _ in STRATEGIES:
        with pytest.raises(TypeError, match=option):
            strategy(**{option: True})


@pytest.mark.parametrize("strategy", [each for each, _ in STRATEGIES])
def test_a_strategy_may_be_copied_and_pickled(strategy: Any) -> None:
    given = strategy(start_method="spawn")
    assert pickle.loads(pickle.dumps(given)).config == given.config
    assert copy.deepcopy(given).config == given.config


# ------------------------------------------------------------------------------------------------ LightningCLI


def run_cli(folder: Path, strategy: str) -> LightningCLI:
    (folder / "config.yaml").write_text(f"trainer:\n  accelerator: cpu\n  logger: false\n  strategy: {strategy}\n")
    arguments = ["--config", str(folder / "config.yaml")]
    return LightningCLI(Regression, args=arguments, run=False, save_config_callback=None)


@pytest.mark.parametrize(
    ("name", "options", "config"),
    [
        (
            "ScapeStrategy",
            "{sparsity: 0.9, wire_dtype: fp32, update: null, sparsity_warmup_steps: 7, timeout: '0:10:00'}",
            ScapeConfig(sparsity=0.9, wire_dtype="fp32", sparsity_warmup_steps=7),
        ),
        ("ScapeStrategy", "{config: {sparsity: 0.9, max_skipped: 3}}", ScapeConfig(sparsity=0.9, max_skipped=3)),
        (
            "SparseLoCoStrategy",
            "{sync_every: 5, density: 0.25, bits: null}",
            SparseLoCoConfig(sync_every=5, density=0.25, bits=None),
        ),
    ],
)
def test_a_yaml_file_sets_every_kind_of_option(tmp_path: Path, name: str, options: str, config: Any) -> None:
    cli = run_cli(tmp_path, f"{{class_path: lightning_scape.{name}, init_args: {options}}}")
    assert cli.trainer.strategy.config == config


@pytest.mark.parametrize(("name", "config"), [("scape", ScapeConfig), ("sparseloco", SparseLoCoConfig)])
def test_a_yaml_file_may_give_just_the_name(tmp_path: Path, name: str, config: Any) -> None:
    assert run_cli(tmp_path, name).trainer.strategy.config == config()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [("{sparsity: dense}", "sparsity"), ("{sparsity: 2.0}", r"must be a number in .*, got 2.0"), ("{x: 1}", "x")],
)
def test_a_wrong_value_in_a_yaml_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, complaint: str
) -> None:
    with pytest.raises((SystemExit, ValueError)) as raised:
        run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {options}}}")
    assert re.search(complaint, capsys.readouterr().err + str(raised.value))


def cli_fit(rank: int, world_size: int, folder: str) -> tuple[float, Tensor]:
    os.chdir(folder)
    cli = LightningCLI(Regression, args=["fit", "--config", f"{folder}/config.yaml"])
    return cli.trainer.strategy.config.sparsity, weights(cli.model)


def test_a_cli_run_trains_and_the_configuration_it_saves_runs_again(run_ranks: Any, tmp_path: Path) -> None:
    strategy = "{class_path: lightning_scape.ScapeStrategy, init_args: {sparsity: 0.9}}"
    options = "accelerator: cpu, devices: 2, max_epochs: 1, limit_val_batches: 0, enable_checkpointing: false"
    plugins = "[{class_path: trainer_helpers.GivenRanks}]"
    (tmp_path / "config.yaml").write_text(f"trainer: {{strategy: {strategy}, plugins: {plugins}, {options}}}\n")
    first = run_ranks(cli_fit, 2, str(tmp_path))
    (saved,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    saved.rename(tmp_path / "config.yaml")
    for sparsity, trained in (*first, *run_ranks(cli_fit, 2, str(tmp_path))):
        assert sparsity == 0.9
        assert torch.equal(trained, first[0][1])


# ------------------------------------------------------------------------------------------------ launchers

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import lightning_scape
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_helpers import Regression, make_trainer, weights

class Reporting(Regression):
    def on_train_end(self):
        text = f"step {self.trainer.global_step}, weights {weights(self).tolist()}"
        Path(__file__).with_name(f"rank-{self.global_rank}.txt").write_text(text)

class Told(Regression):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    folder = Path(__file__).parent
    make_trainer("scape", devices=2).fit(Reporting())
    saves = ModelCheckpoint(folder, "stopped", save_on_exception=True)
    trainer = make_trainer("scape", devices=2, max_epochs=1000, callbacks=[saves], enable_checkpointing=True)
    try:
        trainer.fit(Told())
    finally:
        (folder / f"stopped-{trainer.global_rank}.txt").write_text(str(trainer.global_step))
"""


def environment() -> dict[str, str]:
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("by", ["torchrun", "popen"])
def test_a_script_trains_and_ends_by_sigterm_to_one_rank_started_by(tmp_path: Path, by: str) -> None:
    """Its exit code is 0, as under DDP, and what all ranks have saved is of one step."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if by == "torchrun" else []
    command = [sys.executable, "-W", "ignore", *torchrun, str(script)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = ((tmp_path / f"rank-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    assert first.startswith(f"step {BATCHES}, ")
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("SCAPE: sends 1% of the")]
    assert len(said) == 2  # once a fit: by rank 0 alone
    steps = {(tmp_path / f"stopped-{rank}.txt").read_text() for rank in (0, 1)}
    assert len(steps) == 1
    assert 4 <= int(steps.pop()) < 10  # the system may tell the process a moment later
    assert (tmp_path / "stopped.ckpt").exists()


class Reports(Regression):
    """From the process that trained, which does not come back."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_train_end(self) -> None:
        Path(self.folder, f"rank-{self.global_rank}.txt").write_text(str(whole_weights(self).tolist()))


class Mistaken(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise KeyError("the column that the data lack")


def fit_by_start_methods(pipe: multiprocessing.connection.Connection, folder: str, strategies: list[Any]) -> None:
    """In a process of its own, in which no process group is."""
    found: list[str] = []
    for number, strategy in enumerate(strategies):
        place = Path(folder, str(number))
        place.mkdir()
        model = Reports(str(place))
        before = weights(model)
        make_trainer(strategy, devices=2).fit(model)
        found.append("trained" if not torch.equal(before, weights(model)) else "as before")
    try:
        make_trainer(strategies[0], devices=2).fit(Mistaken())
    except Exception as error:
        found.append(f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}")
    pipe.send(found)


def test_ranks_are_forked_for_a_notebook_or_spawned(tmp_path: Path) -> None:
    """The user's module is the trained one afterwards, and an error of the module comes out with its text."""
    strategies = [
        "scape_notebook",
        ScapeStrategy(sparsity=0.5, start_method="fork"),
        SparseLoCoStrategy(sync_every=2, start_method="fork"),
        ScapeStrategy(sparsity=0.5, start_method="spawn"),
        ScapeStrategy(sparsity=0.5, start_method="fork", local_group_size="node"),
    ]
    context = launcher.start_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=fit_by_start_methods, args=(theirs, str(tmp_path), strategies))
    process.start()
    theirs.close()
    assert ours.poll(150)
    *trained, error = ours.recv()
    process.join()
    assert trained == ["trained"] * len(strategies)
    assert error == "ProcessRaisedException: KeyError: 'the column that the data lack'"
    for folder in tmp_path.iterdir():
        first, second = (folder / f"rank-{rank}.txt" for rank in (0, 1))
        assert first.read_text() == second.read_text()


INTERACTIVE = """
import os, torch, lightning as L, lightning_scape
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

def train(fabric):
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return fabric.world_size

for strategy in ("scape", "scape_notebook"):
    print("trained on", L.Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(train))
"""


def test_an_interactive_session_trains() -> None:
    command = [sys.executable, "-i", "-W", "ignore", "-c", INTERACTIVE]
    options: dict[str, Any] = {"input": "", "capture_output": True, "text": True, "timeout": 150, "check": False}
    said = subprocess.run(command, env=environment(), **options)
    assert said.stdout.count("trained on 2") == 2, said.stderr
