"""`litgpt-scape pretrain --resume auto` after every process was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("litgpt", reason="the command line of LitGPT needs litgpt")
pytest.importorskip("jsonargparse")

from test_cli import ROOT, STEP, TINY, load, run_module
from warm_python import warm_python

from lightning_scape.tools import litgpt_cli

STEPS = 16
OPTIONS = (
    "pretrain",
    f"--config={TINY}",
    "--train.save_interval=2",
    "--eval.max_iters=2",
    f"--train.max_tokens={STEPS * STEP}",
)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    else:
        assert one == other


def run_until_killed(out: Path) -> None:
    """SIGKILL to all processes of the run as soon as its second checkpoint is there: the third is on its way."""
    launched = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK", "LT_STRATEGY", litgpt_cli.OPTIONS_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in launched}
    environ |= {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [warm_python(), "-m", "lightning_scape.tools.cli", *OPTIONS, f"--out_dir={out}"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        deadline = time.monotonic() + 120
        while not (out / "step-00000004" / "lit_model.pth").exists():
            assert time.monotonic() < deadline, "no checkpoint in two minutes"
            assert run.poll() is None, f"the run ended with {run.returncode}"
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL


@pytest.mark.few(0)
def test_a_run_that_was_killed_resumes_and_ends_bitwise_as_one_that_was_not(tmp_path: Path) -> None:
    run_module("lightning_scape.tools.cli", *OPTIONS, f"--out_dir={tmp_path / 'straight'}")
    run_until_killed(tmp_path / "killed")
    assert not (tmp_path / "killed" / "final").exists()
    output = run_module("lightning_scape.tools.cli", *OPTIONS, f"--out_dir={tmp_path / 'killed'}", "--resume=auto")
    assert "Resuming training from" in output
    straight, resumed = load(tmp_path / "straight" / "final"), load(tmp_path / "killed" / "final")
    assert straight["step_count"] == resumed["step_count"] == STEPS
    # Not the random generators: after loading, LitGPT makes a validation loader, which draws a seed. Its models draw
    # nothing.
    for part in ("model", "optimizer", "train_dataloader"):
        assert_equal(straight[part], resumed[part])
