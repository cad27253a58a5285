"""The examples besides the main one, in short form: each trains, and leaves what it says it leaves."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RunRanks = Callable[..., list[Any]]
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def run_example(rank: int, world_size: int, name: str, *options: str) -> str:
    """What the script prints on this rank; the ranks are there already, so it starts none."""
    os.chdir(ROOT)
    sys.argv = [str(EXAMPLES / name), *options]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


def test_the_fabric_loop_learns_and_saves(run_ranks: RunRanks, tmp_path: Path) -> None:
    options = ("--steps=41", "--batch=4", "--context=32", f"--save={tmp_path / 'end.ckpt'}")
    output = run_ranks(run_example, 2, "fabric_loop.py", *options)[0]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[0] > 5.0
    assert losses[-1] < losses[0] - 1.0
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["optimizer"]["scape"]["step"] == 41
    assert len(saved["optimizer"]["scape"]["residuals"]) == 2


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--sparsity=1.5", "`sparsity` must be a number in [0, 1), got 1.5. "),
        ("--steps=0", "argument --steps: must be a whole number >= 1, got '0'"),
        ("--precision=7", "Precision '7' is invalid"),
    ],
)
def test_the_fabric_loop_refuses_wrong_options(
    option: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fabric_loop.py", option])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "fabric_loop.py"), run_name="__main__")
    assert ended.value.code == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_the_transformers_example_explains_itself_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--help ended in a ModuleNotFoundError."""
    script = EXAMPLES / "finetune_transformers.py"
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "--accumulate" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [script.name])
    with pytest.raises(SystemExit, match="must find transformers, got no transformers: pip install transformers"):
        runpy.run_path(str(script), run_name="__main__")


def test_a_transformers_model_trains_and_is_saved_in_its_own_format(run_ranks: RunRanks, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="examples/finetune_transformers.py needs transformers")
    options = ("--steps=30", "--batch=4", "--context=32", "--lr=3e-3", f"--out={tmp_path}")
    output = run_ranks(run_example, 2, "finetune_transformers.py", *options)[0]
    loss = float(re.search(r"validation loss ([\d.]+)", output)[1])
    assert loss < math.log(256) - 1.0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == 256
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "scape/density" in metrics.read_text().splitlines()[0]
