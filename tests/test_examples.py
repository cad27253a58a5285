"""The examples besides the main one, in short form: each trains, and leaves what it says it leaves."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from warm_python import warm_python

from lightning_scape import ScapeConfig

RunRanks = Callable[..., list[Any]]
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
CLI_FILE = ROOT / "configs" / "lightning_cli.yaml"


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


def test_the_lightning_cli_file_trains_through_its_script(run_ranks: RunRanks, tmp_path: Path) -> None:
    pytest.importorskip("litgpt", reason="examples/lightning_cli.py needs litgpt")
    short = {
        "trainer.max_steps": 4,
        "trainer.val_check_interval": 4,
        "trainer.limit_val_batches": 1,
        "trainer.default_root_dir": tmp_path,
        "trainer.strategy.init_args.sparsity": 0.8,
        "data.max_bytes": 2_000_000,
    }
    options = [f"--{key}={value}" for key, value in short.items()]
    run_ranks(run_example, 2, "lightning_cli.py", "fit", f"--config={CLI_FILE}", *options)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=True)
    assert state["global_step"] == 4
    assert state["optimizer_states"][0]["scape"]["config"]["sparsity"] == 0.8
    assert f"of {sum(weight.numel() for weight in state['state_dict'].values()):,} parameters" in CLI_FILE.read_text()
    (saved,) = tmp_path.rglob("config.yaml")
    content, expected = yaml.safe_load(saved.read_text()), yaml.safe_load(CLI_FILE.read_text())
    given = expected["trainer"]["strategy"]["init_args"]
    assert {name: content["trainer"]["strategy"]["init_args"][name] for name in given} == {**given, "sparsity": 0.8}
    assert content["model"] == expected["model"]
    assert content["data"]["context_length"] == expected["data"]["context_length"] == 128


def test_the_lightning_cli_trains_without_a_file(run_ranks: RunRanks, tmp_path: Path) -> None:
    """The model's longest context was shorter than the data's windows."""
    pytest.importorskip("litgpt", reason="examples/lightning_cli.py needs litgpt")
    short = {"strategy": "scape", "max_steps": 2, "devices": 1, "accelerator": "cpu", "default_root_dir": tmp_path}
    options = [f"--trainer.{key}={value}" for key, value in short.items()]
    run_ranks(run_example, 1, "lightning_cli.py", "fit", "--data.max_bytes=2000000", "--data.batch_size=2", *options)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 2


def test_the_lightning_cli_file_gives_every_option_and_explains_every_key() -> None:
    lines = CLI_FILE.read_text().splitlines()
    given = yaml.safe_load(CLI_FILE.read_text())["trainer"]["strategy"]["init_args"]
    assert ScapeConfig(**given) == ScapeConfig(sparsity=0.9)
    assert set(given) == {field.name for field in fields(ScapeConfig)}
    for line in lines:
        if re.match(r"\s+\w+: *\S", line) and not line.strip().startswith("class_path"):
            assert re.search(r"# .*\(.*default: .*\)$", line), line


@pytest.mark.slow
def test_the_tour_goes_from_the_doctor_to_a_plan(tmp_path: Path) -> None:
    for name in ("litgpt", "matplotlib"):
        pytest.importorskip(name, reason=f"examples/tour.py needs {name}")
    launched = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")
    environ = {name: value for name, value in os.environ.items() if name not in launched} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "tour.py"), "--short"],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "not empty" not in done.stdout  # the folders of a first run are its own
    _, run, whole, plan = re.split(r"The run so far:|The whole run:|A plan for", done.stdout)
    told = re.findall(r"(\d) ranks, step (\d+): loss ([\d.]+), density ([\d.]+)", whole)
    assert [(ranks, step) for ranks, step, _, _ in told] == [("2", "1"), ("2", "20"), ("3", "21"), ("3", "40")]
    assert re.findall(r"(\d) ranks, step (\d+)", run) == [("2", "1"), ("2", "20")]
    assert float(told[-1][2]) < float(told[0][2]) - 1.0
    assert [float(density) for *_, density in told][0] > 0.5 > float(told[1][3])
    assert "Use SCAPE 0.99: a step takes" in plan
    report = tmp_path / "out" / "tour" / "report" / "report.html"
    assert "where a run went on from a checkpoint" in report.read_text()
    assert (tmp_path / "out" / "tour" / "loss_over_bytes.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_litgpt_script_goes_from_pretraining_to_an_answer(tmp_path: Path) -> None:
    pytest.importorskip("litgpt", reason="examples/litgpt_finetune.sh needs litgpt")
    launched = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")
    environ = {name: value for name, value in os.environ.items() if name not in launched}
    environ |= {"PYTHON": sys.executable, "STEPS": "6", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "litgpt_finetune.sh"), str(tmp_path)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    stages = {name: tmp_path / name / "final" / "hyperparameters.yaml" for name in ("base", "continued", "finetuned")}
    sparsities = {name: yaml.safe_load(file.read_text())["scape"]["sparsity"] for name, file in stages.items()}
    assert sparsities == {"base": 0.9, "continued": 0.99, "finetuned": 0.9}
    assert "3 + 4 =" in done.stdout.split("== 4.")[1]


@pytest.mark.timeout(400)
def test_lm_eval_and_litgpt_agree_on_the_bits_per_byte_of_a_checkpoint(tmp_path: Path) -> None:
    for name in ("litgpt", "lm_eval", "transformers"):
        pytest.importorskip(name, reason=f"examples/evaluate_litgpt.py needs {name}: pip install -e '.[evaluate]'")
    environ = os.environ | {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}

    def run(*command: object) -> str:
        arguments = [warm_python(), *map(str, command)]
        done = subprocess.run(
            arguments, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=190, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    short = ("--devices=1", "--train.max_tokens=40960", "--train.lr_warmup_steps=2", "--eval.max_iters=1")
    run(
        "-m", "lightning_scape.tools.cli", "pretrain", "--config=configs/tiny_cpu.yaml", *short, f"--out_dir={tmp_path}"
    )
    checkpoint = tmp_path / "final"
    before = sorted(checkpoint.iterdir())
    output = run(EXAMPLES / "evaluate_litgpt.py", checkpoint, "--max-bytes=5000")
    rows = {row[0]: row[1:] for row in re.findall(r"(\w+) +(as it is|rewritten) +([\d.]+) +([\d.]+) +\S+\n", output)}
    assert {name: row[0] for name, row in rows.items()} == {"wikitext": "rewritten", "pile_10k": "as it is"}
    for _, theirs, ours in rows.values():
        assert float(theirs) == pytest.approx(float(ours), abs=2e-5)  # printed with five digits
        assert 4.0 < float(theirs) < 7.5  # 8 is a guess
    assert sorted(checkpoint.iterdir()) == before


def test_every_byte_is_scored_once_in_the_windows_of_the_docstring() -> None:
    windows = runpy.run_path(str(EXAMPLES / "evaluate_litgpt.py"))["windows"]
    inputs, targets = windows("abcdef", 4)
    assert [bytes(row) for row in inputs.tolist()] == [b"\0abc", b"bcde"]
    assert targets.tolist() == [[*b"abcd"], [-100, -100, *b"ef"]]
    for length in range(1, 10):
        text = "".join(chr(ord("a") + index) for index in range(length))
        assert bytes(token for row in windows(text, 4)[1].tolist() for token in row if token >= 0) == text.encode()


def test_the_evaluation_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed = runpy.run_path(str(EXAMPLES / "evaluate_litgpt.py"))["check_installed"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "lm_eval" else name)
    with pytest.raises(SystemExit, match=r"got no lm_eval: pip install .*\[evaluate\]"):
        check_installed()


def test_the_evaluation_turns_other_architectures_away() -> None:
    litgpt = pytest.importorskip("litgpt", reason="examples/evaluate_litgpt.py needs litgpt")
    llama_config = runpy.run_path(str(EXAMPLES / "evaluate_litgpt.py"))["llama_config"]
    with pytest.raises(ValueError, match="Only models of Llama's architecture.*'LayerNorm'.*'GptNeoxMLP'"):
        llama_config(litgpt.Config.from_name("pythia-14m"))
