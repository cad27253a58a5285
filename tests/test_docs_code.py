"""Every command and every block of code in the README and in docs/ runs, in a short form, or says why it does not."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from doc_pages import ROOT, Block, blocks
from doc_runs import SHORT, execute

import lightning_scape
from lightning_scape.tools import commands, litgpt_cli

RunRanks = Callable[..., list[Any]]
PYTHON = [block for block in blocks("python") if block.not_run is None]
BASH = blocks("bash")

# ------------------------------------------------------------------------------------------------------------- Python

NEEDS_RANKS = re.compile(r"launch\(\)|process_group|init_device_mesh|\.fit\(|SparseLoCo\(")


@pytest.mark.few(2)
@pytest.mark.parametrize("block", [b for b in PYTHON if NEEDS_RANKS.search(b.text)], ids=lambda block: block.name)
def test_a_block_that_trains_runs_on_two_ranks(run_ranks: RunRanks, tmp_path: Path, block: Block) -> None:
    assert run_ranks(execute, 2, block, str(tmp_path)) == [True, True]


@pytest.mark.parametrize("block", [b for b in PYTHON if not NEEDS_RANKS.search(b.text)], ids=lambda block: block.name)
def test_a_block_without_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: Block) -> None:
    """With the numbers of devices and nodes that it gives: nothing is launched before the fit."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for long in list(SHORT):
        monkeypatch.delitem(SHORT, long)
    monkeypatch.setattr(torch.distributed, "init_process_group", None)
    assert execute(0, 1, block, str(tmp_path))


def test_what_shortens_a_block_is_used() -> None:
    trained = "".join(block.text for block in PYTHON if NEEDS_RANKS.search(block.text))
    assert [long for long in SHORT if long not in trained] == []


def test_yaml_blocks_hold_what_the_strategy_takes() -> None:
    for block in blocks("yaml"):
        strategy = yaml.safe_load(block.text)["trainer"]["strategy"]
        module, _, name = strategy["class_path"].rpartition(".")
        assert module == "lightning_scape"
        getattr(lightning_scape, name)(**strategy["init_args"])


# -------------------------------------------------------------------------------------------------------------- shell

RUN_BY = {
    "python3 -m venv": ".ci/run",
    "source .venv/bin/activate": ".ci/run",
    "pip install": ".ci/run",
    "python -m pytest": ".ci/run",
    "lightning-scape plan": "here",
    "lightning-scape --version": "here",
    "lightning-scape doctor": (
        "test_doctor.py: test_one_process_looks_at_its_host_and_says_how_to_look_at_the_network"
    ),
    "python examples/tour.py": "test_examples.py: test_the_tour_goes_from_the_doctor_to_a_plan",
    "python examples/fabric_loop.py": "test_examples.py: test_the_fabric_loop_learns_and_saves",
    "python examples/pretrain_python.py": "test_example.py: test_validation_loss_falls_under_scape",
    "python examples/pretrain_python.py --strategy ddp": (
        "test_example.py: test_scape_ends_near_dense_adamw_with_the_same_settings"
    ),
    "python examples/lightning_cli.py": "test_examples.py: test_the_lightning_cli_file_trains_through_its_script",
    "python examples/bench_gpu.py --device cpu --tiny": "test_bench_gpu.py: test_dry_run_writes_its_report",
    "python examples/evaluate_litgpt.py": (
        "test_examples.py: test_lm_eval_and_litgpt_agree_on_the_bits_per_byte_of_a_checkpoint"
    ),
    "examples/litgpt_finetune.sh": "test_examples.py: test_the_litgpt_script_goes_from_pretraining_to_an_answer",
    "litgpt-scape pretrain --config configs/tiny_cpu.yaml": (
        "test_cli.py: test_the_tiny_configuration_trains_on_two_processes_and_the_loss_falls"
    ),
    "litgpt-scape pretrain --config configs/tiny_cpu.yaml --resume auto": (
        "test_cli.py: test_a_resumed_run_takes_its_options_from_the_checkpoint_and_ends_bitwise_the_same"
    ),
    "litgpt-scape pretrain --config configs/tiny_cpu.yaml --scape.local_group_size node": (
        "test_two_level_litgpt.py: test_the_command_line_shards_over_a_node"
    ),
    "litgpt-scape pretrain --config configs/sparseloco_tiny_cpu.yaml": (
        "test_sparseloco_litgpt.py: test_litgpt_trains_and_resumes_with_the_options_of_the_checkpoint"
    ),
    "litgpt generate": "test_cli.py: test_plain_litgpt_generates_from_the_checkpoint",
    "litgpt convert_from_litgpt": (
        "test_cli.py: test_litgpt_converts_the_checkpoint_to_hugging_face_and_the_logits_agree"
    ),
}
"""By how a command begins (the longest counts): the test that runs it or its short form."""


def commands_of(block: Block) -> Iterator[list[str]]:
    """The single commands of a block, as words, without variables in front and the virtual environment's folder."""
    for line in block.text.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*|sudo", words[0]):
                words.pop(0)
            if words:
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def runner(words: list[str]) -> str | None:
    """Who runs the command, by `RUN_BY`."""
    line = " ".join(words)
    known = [start for start in RUN_BY if line == start or line.startswith(f"{start} ")]
    return RUN_BY[max(known, key=len)] if known else None


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.name)
def test_every_command_is_run_by_a_test_or_says_why_not(block: Block) -> None:
    if block.not_run is not None:
        assert len(block.not_run.split()) > 2
        for name in re.findall(r"tests/\w+\.py", block.not_run):
            assert (ROOT / name).is_file()
        return
    for words in commands_of(block):
        assert runner(words) is not None, (
            f"{shlex.join(words)}: no test is named in RUN_BY, and no <!-- not run: ... -->"
        )


def test_the_tests_that_run_commands_are_there() -> None:
    for start, where in RUN_BY.items():
        file, _, function = where.partition(": ")
        if function:
            assert f"def {function}(" in (ROOT / "tests" / file).read_text(), start
    starts = [" ".join(words) for block in BASH if block.not_run is None for words in commands_of(block)]
    assert [start for start in RUN_BY if not any(line.startswith(start) for line in starts)] == []


HERE = [words for block in BASH for words in commands_of(block) if runner(words) == "here"]


@pytest.mark.parametrize("words", [*{" ".join(words): words for words in HERE}.values()], ids=" ".join)
def test_what_runs_here_succeeds(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[0] == "lightning-scape"
    assert commands.main(words[1:]) == 0
    output = capsys.readouterr().out
    assert (lightning_scape.__version__ if words[1] == "--version" else "Use SCAPE 0.9") in output


def test_the_plan_that_a_page_shows_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = next(block for block in blocks("text") if block.page == "docs/planning.md")
    plans = [words for words in HERE if words[1] == "plan" and "--steps" not in words]
    (plan,) = {" ".join(words): words for words in plans}.values()
    assert commands.main(plan[1:]) == 0
    assert shown.text.removesuffix("...\n") in capsys.readouterr().out


# ------------------------------------------------------------------------------- options exist, also of what is not run


def problem(words: list[str]) -> str | None:
    """What of a command does not exist: a script, a file, an option; None if all is there."""
    check = CHECKS.get(words[0])
    if check is None:
        return None if (ROOT / words[0]).is_file() else f"unknown command {words[0]}"
    return check(words[1:])


def _flags(words: list[str]) -> list[str]:
    return [word.removeprefix("--").partition("=")[0] for word in words if word.startswith("--")]


def _python(words: list[str]) -> str | None:
    if words[0] == "-m":
        return None if importlib.util.find_spec(words[1]) else f"no module {words[1]}"
    path = ROOT / words[0]
    if not path.is_file():
        return f"no script {words[0]}"
    text = path.read_text().replace("_", "-")
    missing = [flag for flag in _flags(words) if flag.partition(".")[0].replace("_", "-") not in text]
    return f"{words[0]} has no {missing}" if missing else None


def _lightning_scape(words: list[str]) -> str | None:
    if words[0] == "--version":
        return None
    if words[0] not in commands.COMMANDS:
        return f"no command {words[0]}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        commands.main([words[0], "--help"])
    missing = [flag for flag in _flags(words) if f"--{flag}" not in printed.getvalue()]
    return f"{words[0]} has no {missing}" if missing else None


def _litgpt_scape(words: list[str]) -> str | None:
    try:
        _, words = litgpt_cli.split_arguments(words)
    except ValueError as error:
        return str(error)
    if words[0] not in litgpt_cli.COMMANDS:
        return f"no command {words[0]}"
    from litgpt.pretrain import setup

    known = {*inspect.signature(setup).parameters, "config"}
    missing = [flag for flag in _flags(words) if flag.partition(".")[0] not in known]
    files = [word for word in words if word.startswith("configs/") and not (ROOT / word).is_file()]
    return f"{words[0]} has no {missing or files}" if missing or files else None


def _litgpt(words: list[str]) -> str | None:
    spec = importlib.util.find_spec("litgpt")
    assert spec is not None
    assert spec.origin is not None
    commands_there = (Path(spec.origin).parent / "__main__.py").read_text()
    return None if f'"{words[0]}"' in commands_there else f"litgpt has no {words[0]}"


def _pip(words: list[str]) -> str | None:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    extras = set(re.findall(r"^(\w+) = \[", section.partition("\n[")[0], re.MULTILINE))
    asked = {extra for word in words for found in re.findall(r"\[(.+)\]", word) for extra in found.split(",")}
    missing = [*(asked - extras), *(w for w in words if w.startswith("configs/") and not (ROOT / w).is_file())]
    return f"no {missing}" if missing else None


def _torchrun(words: list[str]) -> str | None:
    from torch.distributed.run import get_args_parser

    known = set(re.findall(r"--[\w-]+", get_args_parser().format_help()))
    end = words.index("-m") if "-m" in words else len(words)
    missing = [flag for flag in _flags(words[:end]) if f"--{flag}" not in known]
    return f"torchrun has no {missing}" if missing else None


def test_options_in_our_help_of_torchrun_are_torchruns() -> None:
    assert _torchrun(re.findall(r"--[\w-]+", commands.TORCHRUN)) is None


def _sbatch(words: list[str]) -> str | None:
    script = next(word for word in words if not word.startswith("--"))
    return None if (ROOT / script).is_file() else f"no script {script}"


CHECKS: dict[str, Callable[[list[str]], str | None]] = {
    "python": _python,
    "python3": _python,
    "lightning-scape": _lightning_scape,
    "litgpt-scape": _litgpt_scape,
    "litgpt": _litgpt,
    "pip": _pip,
    "torchrun": _torchrun,
    "sbatch": _sbatch,
    "source": lambda words: None,
}


@pytest.mark.parametrize("block", BASH, ids=lambda block: block.name)
def test_what_a_command_names_is_there(block: Block) -> None:
    pytest.importorskip("litgpt", reason="commands of LitGPT's are checked against it")
    if any("train.py" in word for words in commands_of(block) for word in words):
        assert block.not_run  # the reader's own script
    found = [problem(words) for words in commands_of(block) if words[:2] != ["python", "train.py"]]
    assert [text for text in found if text] == []


@pytest.mark.parametrize(
    "command",
    [
        "lightning-scape verfy PATH",
        "lightning-scape plan --model x --bandwith 1gbit",
        "litgpt-scape pretrain --scape.sparsty 0.9",
        "litgpt-scape pretrain --config configs/none.yaml",
        "litgpt-scape pretrain --davices 8",
        "litgpt generat",
        "pip install -e '.[none]'",
        "python examples/none.py",
        "python examples/pretrain_python.py --nonsense",
        "torchrun --nodes 2 train.py",
        "sbatch examples/none.sbatch",
        "examples/none.sh",
    ],
)
def test_what_is_not_there_is_found(command: str) -> None:
    pytest.importorskip("litgpt", reason="commands of LitGPT's are checked against it")
    assert problem(shlex.split(command)) is not None
