"""How ScapeStrategy is asked for: options, LightningCLI, launchers."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import typing
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from trainer_helpers import BATCHES, MARKS, Regression, weights
from warm_python import warm_python

from lightning_scape import (
    FabricScapeStrategy,
    MethodStrategy,
    ScapeConfig,
    ScapeStrategy,
    SparseLoCoConfig,
    SparseLoCoStrategy,
)
from lightning_scape.hosts import rendezvous

pytestmark = MARKS

# ------------------------------------------------------------------------------------------------ options


def test_every_option_of_the_config_is_an_argument_of_the_same_type_and_default() -> None:
    arguments = inspect.signature(ScapeStrategy.__init__).parameters
    hints, rules = typing.get_type_hints(ScapeStrategy.__init__), typing.get_type_hints(ScapeConfig)
    for field in fields(ScapeConfig):
        assert arguments[field.name].default == field.default
        assert hints[field.name] == rules[field.name]
    assert set(arguments) <= set(hints) | {"self"}
    with pytest.raises(TypeError, match="sparsty"):  # what goes on to the host's strategy is not swallowed there
        ScapeStrategy(sparsty=0.9)  # type: ignore[call-arg]


def test_options_reach_the_config_by_name_by_position_and_as_a_whole() -> None:
    assert ScapeStrategy(0.9).config == ScapeStrategy(sparsity=0.9).config == ScapeConfig(sparsity=0.9)
    config = ScapeConfig(sparsity=0.9, dense_steps=3, residual_device=torch.device("cpu"))
    assert ScapeStrategy(config=config).config is config
    assert ScapeStrategy(config=config, dense_steps=3, residual_device="cpu").config is config


def test_an_option_given_differently_in_config_and_by_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"dense_steps=4 \(config: 3\).*Drop"):
        ScapeStrategy(config=ScapeConfig(dense_steps=3), dense_steps=4)
    with pytest.raises(TypeError, match=r"must be a ScapeConfig or None, got \{"):
        ScapeStrategy(config={"sparsity": 0.9})


@pytest.mark.parametrize(
    ("give", "told"),
    [
        (lambda: ScapeStrategy(0.99, config=ScapeConfig(sparsity=0.9)), r"sparsity=0.99 \(config: 0.9\)"),
        (lambda: FabricScapeStrategy(max_skipped=10, config=ScapeConfig(max_skipped=3)), r"=10 \(config: 3\)"),
        (lambda: MethodStrategy(ScapeConfig(sparsity=0.9), sparsity=0.99), r"sparsity=0.99 \(config: 0.9\)"),
        (lambda: SparseLoCoStrategy(30, config=SparseLoCoConfig(sync_every=9)), r"sync_every=30 \(config: 9\)"),
    ],
)
def test_so_is_one_that_is_given_as_its_default(give: Any, told: str) -> None:
    """It was passed over, and the run went by ``config``."""
    with pytest.raises(ValueError, match=rf"{told}.*Drop"):
        give()


def test_none_counts_as_not_given() -> None:
    config = ScapeConfig(sparsity_warmup_steps=0, update="adams")
    assert ScapeStrategy(config=config, sparsity_warmup_steps=None, update=None).config is config
    with pytest.raises(ValueError, match=r"update='adams' \(config: None\)"):
        ScapeStrategy(config=ScapeConfig(), update="adams")
    with pytest.raises(ValueError, match=r"sparsity_warmup_steps=0 \(config: None\)"):
        ScapeStrategy(config=ScapeConfig(), sparsity_warmup_steps=0)


def test_an_option_outside_its_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`sparsity` must be a number in \[0, 1\), got 1.5"):
        ScapeStrategy(sparsity=1.5)


def test_the_trainer_of_pytorch_lightning_gets_a_clear_error() -> None:
    foreign = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match="from lightning.pytorch import Trainer") as raised:
        foreign.Trainer(strategy=ScapeStrategy(sparsity=0.9), accelerator="cpu")
    assert "ScapeStrategy(sparsity=0.9)" in str(raised.value)
    assert "must be" in str(raised.value)


# ------------------------------------------------------------------------------------------------ LightningCLI


def run_cli(folder: Path, strategy: str) -> LightningCLI:
    (folder / "config.yaml").write_text(f"trainer:\n  accelerator: cpu\n  logger: false\n  strategy: {strategy}\n")
    arguments = ["--config", str(folder / "config.yaml")]
    return LightningCLI(Regression, args=arguments, run=False, save_config_callback=None)


def test_a_yaml_file_sets_every_kind_of_option(tmp_path: Path) -> None:
    options = (
        "{sparsity: 0.9, dense_steps: 2, wire_dtype: fp32, bias_correction: true,"
        " residual_device: cpu, block_size: 50, start_method: fork, timeout: '0:10:00'}"
    )
    cli = run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {options}}}")
    assert cli.trainer.strategy.config == ScapeConfig(
        sparsity=0.9,
        dense_steps=2,
        wire_dtype="fp32",
        bias_correction=True,
        residual_device="cpu",
        block_size=50,
    )
    assert cli.trainer.strategy._start_method == "fork"


@pytest.mark.few(3)
@pytest.mark.parametrize("warmup", [None, 0, 7])
@pytest.mark.parametrize("update", [None, "adamw", "adams"])
def test_a_yaml_file_may_leave_warm_up_and_update_open(tmp_path: Path, warmup: int | None, update: str | None) -> None:
    options = f"{{sparsity_warmup_steps: {'null' if warmup is None else warmup}, update: {update or 'null'}}}"
    cli = run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {options}}}")
    assert cli.trainer.strategy.config == ScapeConfig(sparsity_warmup_steps=warmup, update=update)


@pytest.mark.few(1)
@pytest.mark.parametrize("device", ["", ", residual_device: cpu"])
def test_a_yaml_file_may_give_the_config_as_a_block(tmp_path: Path, device: str) -> None:
    config = f"{{sparsity: 0.9, wire_dtype: fp32{device}}}"
    cli = run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {{config: {config}}}}}")
    expected = ScapeConfig(sparsity=0.9, wire_dtype="fp32", residual_device="cpu" if device else None)
    assert cli.trainer.strategy.config == expected


def test_a_yaml_file_may_give_just_the_name(tmp_path: Path) -> None:
    assert isinstance(run_cli(tmp_path, "scape").trainer.strategy, ScapeStrategy)


def _cli_fit(rank: int, world_size: int, folder: str) -> tuple[float, Tensor]:
    os.chdir(folder)
    arguments = ["fit", "--config", f"{folder}/config.yaml"]
    cli = LightningCLI(Regression, args=arguments)
    return cli.trainer.strategy.config.sparsity, weights(cli.model)


def test_a_cli_run_trains_and_the_configuration_it_saves_runs_again(run_ranks: Any, tmp_path: Path) -> None:
    strategy = "{class_path: lightning_scape.ScapeStrategy, init_args: {sparsity: 0.9}}"
    options = "accelerator: cpu, devices: 2, max_epochs: 1, limit_val_batches: 0, enable_checkpointing: false"
    plugins = "[{class_path: trainer_helpers.GivenRanks}]"
    (tmp_path / "config.yaml").write_text(f"trainer: {{strategy: {strategy}, plugins: {plugins}, {options}}}\n")
    first = run_ranks(_cli_fit, 2, str(tmp_path))
    (saved,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    saved.rename(tmp_path / "config.yaml")
    second = run_ranks(_cli_fit, 2, str(tmp_path))
    for sparsity, trained in (*first, *second):
        assert sparsity == 0.9
        assert torch.equal(trained, first[0][1])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("{sparsity: dense}", "sparsity"),
        ("{sparsity: 2.0}", r"`sparsity` must be a number in \[0, 1\), got 2.0"),
        ("{wire_dtype: fp8}", "wire_dtype"),
        ("{update: sgd}", "update"),
        ("{sparsity_warmup_steps: 0.5}", "sparsity_warmup_steps"),
        ("{sparcity: 0.9}", "sparcity"),
    ],
)
def test_a_wrong_value_in_a_yaml_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, complaint: str
) -> None:
    with pytest.raises((SystemExit, ValueError)) as raised:
        run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {options}}}")
    assert re.search(complaint, capsys.readouterr().err + str(raised.value))


# ------------------------------------------------------------------------------------------------ launching

SCRIPT = """
import sys
from pathlib import Path
from lightning.pytorch import Trainer
from lightning_scape import ScapeStrategy
from trainer_helpers import Regression, ours, weights

class Reporting(Regression):
    def on_train_end(self):  # in the process that trained: only popen and torchrun return to the script there
        report = Path(__file__).with_name(f"rank-{self.global_rank}.txt")
        report.write_text(f"step {ours(self.trainer).stats.step}, weights {weights(self).tolist()}")

if __name__ == "__main__":
    strategy = ScapeStrategy(sparsity=0.9, start_method=sys.argv[1])
    options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, limit_val_batches=0, **options)
    trainer.fit(Reporting())
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("launcher", ["torchrun", "popen", "spawn", "fork"])
def test_a_script_trains_on_two_ranks_started_by(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [warm_python()]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(script), "popen" if launcher == "torchrun" else launcher]
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = (tmp_path / f"rank-{rank}.txt" for rank in (0, 1))
    assert first.read_text() == second.read_text()
    assert first.read_text().startswith(f"step {BATCHES}, ")
    said = [line for line in (run.stdout + run.stderr).splitlines() if "SCAPE: " in line]
    assert len(said) == 2  # by default, and by rank 0 alone
    assert f"SCAPE: this run of {BATCHES} steps will send " in said[1]
    assert said[0].startswith("SCAPE: sends 10% of the entries per step (sparsity=0.9), ")
    assert f"after a warm-up of 1,424 steps (this run of {BATCHES} ends at " in said[0]


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("Timed out after 11 seconds waiting for clients. 2/3 clients joined.", r"\(2 are expected\)"),
        ("Failed to recv, got 0 bytes. Connection was likely closed.", r"\(2 are expected\)"),  # rank 0 gave up first
        ("[c10d] recvBytes failed: Connection reset by peer", r"\(2 are expected\)"),
        ("The client socket has timed out after 10000ms while trying to connect.", "MASTER_ADDR is the first node's"),
        ("Unable to find address for: eth7", "Set GLOO_SOCKET_IFNAME"),
    ],
)
def test_ranks_that_do_not_meet_are_told_what_to_check(problem: str, remedy: str) -> None:
    environment = SimpleNamespace(world_size=lambda: 2, global_rank=lambda: 1)
    expected = pytest.raises(dist.DistNetworkError, match=rf"All 2 ranks must meet at .* got on rank 1: .*{remedy}")
    with expected, rendezvous.explained_rendezvous(environment):
        raise dist.DistNetworkError(problem)


def test_other_errors_of_the_rendezvous_are_left_alone() -> None:
    environment = SimpleNamespace(world_size=lambda: 2, global_rank=lambda: 1)
    with pytest.raises(RuntimeError, match="^out of ports$"), rendezvous.explained_rendezvous(environment):
        raise RuntimeError("out of ports")
