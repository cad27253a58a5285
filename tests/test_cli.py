"""`litgpt-scape`: LitGPT's own command line trains, saves and resumes with SCAPE, and is otherwise left alone."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.strategies import STRATEGY_REGISTRY

pytest.importorskip("litgpt", reason="the command line of LitGPT needs litgpt")
pytest.importorskip("jsonargparse")

from warm_python import warm_python

from lightning_scape import FabricScapeStrategy, ScapeConfig
from lightning_scape.tools import litgpt_cli

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "configs" / "tiny_cpu.yaml"
STEP = 16 * 128
"""Tokens of one optimizer step of the tiny configuration."""


def run_module(module: str, *arguments: str, code: int = 0, timeout: float = 150) -> str:
    """The output of ``python -m module ...`` from the repository's root, as a user would run it."""
    launched = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK", "LT_STRATEGY", litgpt_cli.OPTIONS_VARIABLE)
    environ = {name: value for name, value in os.environ.items() if name not in launched}
    # Compiling takes longer than these runs; test_compile.py compiles.
    environ |= {"PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [warm_python(), "-m", module, *arguments],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stdout[-5000:]
    return done.stdout


def run_tiny(out: Path, steps: int, *options: str) -> str:
    return run_module(
        "lightning_scape.tools.cli",
        "pretrain",
        f"--config={TINY}",
        f"--out_dir={out}",
        "--train.save_interval=4",
        "--train.log_interval=1",
        "--eval.max_iters=2",
        f"--train.max_tokens={steps * STEP}",
        *options,
    )


def recorded(checkpoint: Path) -> dict[str, Any]:
    return yaml.safe_load((checkpoint / "hyperparameters.yaml").read_text())["scape"]


def load(checkpoint: Path) -> dict[str, Any]:
    return torch.load(checkpoint / "lit_model.pth", weights_only=True)


# ------------------------------------------------------------------------------------------------ for real


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Eight steps of the tiny configuration on two processes that LitGPT starts itself, 80% where the file says 90%."""
    out = tmp_path_factory.mktemp("straight")
    return out, run_tiny(out, 8, "--scape.sparsity", "0.8")


def test_the_tiny_configuration_trains_on_two_processes_and_the_loss_falls(straight: tuple[Path, str]) -> None:
    _, output = straight
    losses = [
        float(line.split("loss train: ")[1].split(",")[0]) for line in output.splitlines() if "loss train" in line
    ]
    assert len(losses) == 8
    assert losses[0] > 5.4
    assert losses[-1] < losses[0] - 0.3


def test_the_run_says_once_what_holds_and_by_which_flags_to_change_it(straight: tuple[Path, str]) -> None:
    """LitGPT takes as many steps as the line says: the fixture's losses are eight."""
    said, whole = (line for line in straight[1].splitlines() if line.startswith("SCAPE: "))
    assert whole.startswith("SCAPE: this run of 8 steps will send ")
    assert "sends 20% of the entries per step (sparsity=0.8), " in said
    assert (
        "after a warm-up of 895 steps (this run of 8 ends at 96%). Update: AdamW's, your lr, betas and eps hold."
        in said
    )
    assert said.endswith("--scape.sparsity ... --scape.sparsity_warmup_steps 0 --scape.update adams.")


def test_a_checkpoint_is_scapes_and_holds_the_loaders_position(straight: tuple[Path, str]) -> None:
    state = load(straight[0] / "step-00000004")
    scape = state["optimizer"]["scape"]
    assert (scape["world_size"], scape["step"], scape["config"]["sparsity"]) == (2, 4, 0.8)
    assert len(scape["residuals"]) == 2
    assert (state["train_dataloader"]["epoch"], state["train_dataloader"]["consumed"]) == (0, 4 * 16)


@pytest.mark.parametrize("checkpoint", ["step-00000004", "final"])
def test_the_saved_hyperparameters_record_every_option(straight: tuple[Path, str], checkpoint: str) -> None:
    assert recorded(straight[0] / checkpoint) == ScapeConfig(sparsity=0.8).as_dict()
    litgpts = yaml.safe_load((straight[0] / checkpoint / "hyperparameters.yaml").read_text())
    assert litgpts["train"]["max_tokens"] == 8 * STEP
    assert litgpts["data"]["class_path"] == "examples.python_source.PythonSource"


def test_a_resumed_run_takes_its_options_from_the_checkpoint_and_ends_bitwise_the_same(
    straight: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(straight[0] / "step-00000004", tmp_path / "step-00000004")
    output = run_tiny(tmp_path, 8, "--resume=auto")
    assert "SCAPE: options are those of the checkpoint" in output
    assert "sparsity is 0.8 by the checkpoint, not 0.9 as in the configuration file" in output
    assert "residual_device" not in output.split("model_name")[0]
    assert "options differ" not in output
    before, after = load(straight[0] / "final"), load(tmp_path / "final")
    assert recorded(tmp_path / "final")["sparsity"] == 0.8
    for name, weight in before["model"].items():
        assert torch.equal(weight, after["model"][name])
    for rank in (0, 1):
        for index, residual in before["optimizer"]["scape"]["residuals"][rank].items():
            assert torch.equal(residual, after["optimizer"]["scape"]["residuals"][rank][index])


def test_the_saved_hyperparameters_are_a_configuration_file(
    straight: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    start(monkeypatch, "pretrain", f"--config={straight[0] / 'final' / 'hyperparameters.yaml'}")
    assert seen[-1][0] == ScapeConfig(sparsity=0.8)
    assert "scape" not in yaml.safe_load(seen[-1][1][2].removeprefix("--config="))


def test_plain_litgpt_generates_from_the_checkpoint(straight: tuple[Path, str]) -> None:
    output = run_module("litgpt", "generate", str(straight[0] / "final"), "--prompt=def f", "--max_new_tokens=8")
    assert "def f" in output
    assert "Time for inference" in output


def test_litgpt_converts_the_checkpoint_to_hugging_face_and_the_logits_agree(
    straight: tuple[Path, str], tmp_path: Path
) -> None:
    run_module("litgpt", "convert_from_litgpt", str(straight[0] / "final"), str(tmp_path))
    converted = torch.load(tmp_path / "model.pth", weights_only=True)
    assert converted["model.embed_tokens.weight"].shape == (256, 64)
    transformers = pytest.importorskip("transformers", reason="logits are compared with transformers' Llama")
    from litgpt import GPT, Config

    config = Config.from_file(straight[0] / "final" / "model_config.yaml")
    ours = GPT(config)
    ours.load_state_dict(load(straight[0] / "final")["model"])
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=config.n_embd,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            max_position_embeddings=config.block_size,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
        )
    )
    theirs.load_state_dict(converted)
    tokens = torch.randint(256, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------ command line


def test_options_are_read_by_type_in_both_spellings_and_the_rest_is_left() -> None:
    arguments = "pretrain --scape.sparsity 1e-1 --seed=1 --scape.dense_steps=3 --config c.yaml --scape.block_size null"
    arguments += " --scape.bias_correction true --scape.wire_dtype=fp32 --scape.residual_device cpu"
    options, rest = litgpt_cli.split_arguments(arguments.split())
    assert options["scape"] == {
        "sparsity": 0.1,
        "dense_steps": 3,
        "block_size": None,
        "bias_correction": True,
        "wire_dtype": "fp32",
        "residual_device": "cpu",
    }
    assert rest == ["pretrain", "--seed=1", "--config", "c.yaml"]
    assert ScapeConfig(**options["scape"]).wire_dtype == "fp32"


def test_every_option_of_the_config_can_be_given() -> None:
    for field in fields(ScapeConfig):
        value = ScapeConfig().as_dict()[field.name]
        options, _ = litgpt_cli.split_arguments([f"--scape.{field.name}", "null" if value is None else str(value)])
        assert ScapeConfig(**options["scape"]) == ScapeConfig()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            "pretrain --scape.sparcity 0.9",
            "must be one of sparsity, update, .*; got '--scape.sparcity'.* mean sparsity?",
        ),
        ("pretrain --scape {}", "must be one of sparsity, .*; got '--scape'"),
        ("pretrain --scape.sparsity", "--scape.sparsity must be followed by a value, got none"),
        ("pretrain --scape.sparsity --seed 1", "--scape.sparsity must be followed by a value, got none"),
        ("pretrain --scape.sparsity 1.5", r"`sparsity` must be a number in \[0, 1\), got 1.5"),
        ("pretrain --scape.sparsity much", r"`sparsity` must be a number in \[0, 1\), got 'much'"),
        ("pretrain --scape.dense_steps 1.5", "`dense_steps` must be a whole number >= 0, got 1.5"),
        ("pretrain --scape.bias_correction 2", "`bias_correction` must be True or False, got 2"),
        ("generate x --scape.sparsity 0.9", "pretrain or finetune_full, .* got --scape.sparsity with 'generate'"),
        ("finetune_lora --scape.sparsity 0.9", "got --scape.sparsity with 'finetune_lora'"),
        ("--scape.sparsity 0.9", "got --scape.sparsity with None"),
    ],
)
def test_a_wrong_option_ends_the_process_with_rule_value_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, complaint: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["litgpt-scape", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        litgpt_cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("litgpt-scape: error: ")
    assert re.search(complaint, error)


def test_another_strategy_in_the_environment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LT_STRATEGY", "ddp")
    monkeypatch.setattr(sys, "argv", ["litgpt-scape", "pretrain", "pythia-14m"])
    with pytest.raises(SystemExit):
        litgpt_cli.main()
    assert "LT_STRATEGY must be unset, got 'ddp'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ files


def test_a_section_of_a_file_is_taken_off_and_the_rest_means_the_same(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("model_name: pythia-14m\ntrain: {max_tokens: 3e12, min_lr: 1e-5}\nscape: {sparsity: 0.9}\n")
    second.write_text("scape: {sparsity: 9e-1, dense_steps: 4}\n")
    options, rest = litgpt_cli.take_sections(["pretrain", "--config", str(first), f"--config={second}", "--seed=2"])
    assert options == {"scape": {"sparsity": 0.9, "dense_steps": 4}}
    assert rest[0] == "pretrain"
    assert rest[2:] == ["--seed=2"]  # of the second file nothing is left
    left = rest[1].removeprefix("--config=")
    assert yaml.safe_load(left) == {"model_name": "pythia-14m", "train": {"max_tokens": "3e12", "min_lr": "1e-5"}}


def test_a_file_without_a_section_is_passed_on_as_it_is(tmp_path: Path) -> None:
    plain = tmp_path / "plain.yaml"
    plain.write_text("model_name: pythia-14m\n")
    for source in (str(plain), str(tmp_path / "missing.yaml"), "{model_name: pythia-14m}"):
        assert litgpt_cli.take_sections(["pretrain", f"--config={source}"]) == ({}, ["pretrain", f"--config={source}"])


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        ("{sparcity: 0.9}", "got 'sparcity' under `scape:` in"),
        ("{1: 2}", "got 1 under"),
        ("0.9", "must be a mapping, got 0.9"),
    ],
)
def test_a_wrong_section_is_named_with_its_file(tmp_path: Path, section: str, complaint: str) -> None:
    (tmp_path / "c.yaml").write_text(f"scape: {section}\n")
    with pytest.raises(ValueError, match=complaint) as error:
        litgpt_cli.take_sections(["pretrain", f"--config={tmp_path / 'c.yaml'}"])
    assert "c.yaml" in str(error.value)


# ------------------------------------------------------------------------------------------------ which options hold


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """LitGPT's entry point, replaced: what it would have met, call by call."""
    calls: list[Any] = []

    def meet() -> None:
        strategy = STRATEGY_REGISTRY.get("scape")
        calls.append((strategy.config, list(sys.argv), dict(os.environ), strategy.total_steps))

    monkeypatch.setattr(importlib.import_module("litgpt.__main__"), "main", meet)
    return calls


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["litgpt-scape", *arguments])
    litgpt_cli.main()


def make_checkpoint(out: Path, text: str) -> Path:
    folder = out / "step-00000007"
    folder.mkdir(parents=True)
    (folder / "lit_model.pth").touch()
    (folder / "hyperparameters.yaml").write_text(text)
    return folder / "lit_model.pth"


def test_the_command_line_goes_before_the_checkpoint_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_checkpoint(tmp_path, "scape: {sparsity: 0.8, dense_steps: 5, max_skipped: 3}\n")
    file = tmp_path / "c.yaml"
    file.write_text("scape: {sparsity: 0.7, dense_steps: 6, wire_dtype: fp32}\nmodel_name: pythia-14m\n")
    given = ("pretrain", f"--config={file}", "--scape.dense_steps=9", f"--out_dir={tmp_path}")
    for resume in ("auto", "true", str(path), str(path.parent)):
        start(monkeypatch, *given, f"--resume={resume}")
        assert seen[-1][0] == ScapeConfig(sparsity=0.8, dense_steps=9, max_skipped=3, wire_dtype="fp32")
    said = capsys.readouterr().err
    assert f"options are those of the checkpoint, from {path.parent / 'hyperparameters.yaml'}" in said
    assert "dense_steps is 9 by the command line (checkpoint: 5)" in said
    assert "sparsity is 0.8 by the checkpoint, not 0.7" in said
    start(monkeypatch, *given)
    assert seen[-1][0] == ScapeConfig(sparsity=0.7, dense_steps=9, wire_dtype="fp32")


def test_a_checkpoint_of_plain_litgpt_leaves_the_given_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path, "model_name: pythia-14m\n")
    start(monkeypatch, "pretrain", "pythia-14m", f"--out_dir={tmp_path}", "--resume=auto", "--scape.sparsity=0.9")
    assert seen[-1][0] == ScapeConfig(sparsity=0.9)
    assert "no options of SCAPE can be read from" in capsys.readouterr().err


def test_nothing_to_resume_from_is_left_to_litgpt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: list[Any]
) -> None:
    for resume in ("auto", "true", "false"):
        start(monkeypatch, "pretrain", "pythia-14m", f"--out_dir={tmp_path}", f"--resume={resume}")
        assert seen[-1][0] == ScapeConfig()


def test_started_processes_find_the_options_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, seen: list[Any]
) -> None:
    config = ScapeConfig(sparsity=0.8, residual_device="cpu")
    passed_on = json.dumps({"options": config.as_dict(), "total_steps": 600})
    monkeypatch.setenv(litgpt_cli.OPTIONS_VARIABLE, f"{os.getppid()} {passed_on}")
    start(monkeypatch, "pretrain", "pythia-14m")
    assert (seen[-1][0], seen[-1][3]) == (config, 600)


def test_a_fresh_run_says_which_options_hold_of_which_its_first_line_does_not_speak(
    monkeypatch: pytest.MonkeyPatch, seen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, "pretrain", "pythia-14m", "--scape.max_skipped=3")
    assert "SCAPE: sparsity=0.99, max_skipped=3; all other options are the defaults." in capsys.readouterr().err
    start(monkeypatch, "pretrain", "pythia-14m", "--scape.sparsity=0.9", "--scape.update=adams")
    assert "SCAPE" not in capsys.readouterr().err


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (f"pretrain --config={TINY}", 1000),
        (f"pretrain --config={TINY} --train.max_tokens={7 * STEP + STEP - 1}", 7),
        (f"pretrain --config={TINY} --train.max_seq_length=64", 2000),
        (f"pretrain --config={TINY} --devices=1 --num_nodes=2 --train.global_batch_size=64", 250),
        (f"pretrain --config={TINY} --train.max_steps=3", 1000),  # LitGPT's pretrain warns of it, and goes on
        (f"pretrain --config={TINY} --train.max_tokens=5", None),
        (f"pretrain --config={TINY} --train.max_tokens=-99999", None),
        ("pretrain pythia-14m --devices=4 --train.max_tokens=1000000", 3),
        ("finetune_full checkpoint --train.max_steps=40", 40),
        ("finetune_full checkpoint --train.max_steps=-3", None),
        ("finetune_full checkpoint", None),  # epochs of data that nobody has read yet
        ("pretrain no-such-model", None),
    ],
)
def test_the_strategy_is_told_the_steps_that_litgpt_will_take(
    monkeypatch: pytest.MonkeyPatch, seen: list[Any], arguments: str, steps: int | None
) -> None:
    start(monkeypatch, *arguments.split())
    assert seen[-1][3] == steps


@pytest.mark.parametrize("left_over", ['1 {"sparsity": 0.5}', '{"sparsity": 0.5}', "garbage", ""])
def test_options_of_another_run_in_the_environment_do_not_hold(
    monkeypatch: pytest.MonkeyPatch, seen: list[Any], left_over: str
) -> None:
    monkeypatch.setenv(litgpt_cli.OPTIONS_VARIABLE, left_over.replace("1 ", f"{os.getpid()} "))
    start(monkeypatch, "pretrain", "pythia-14m", "--scape.sparsity=0.9")
    assert seen[-1][0] == ScapeConfig(sparsity=0.9)


def test_the_process_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    before = dict(os.environ)
    start(monkeypatch, "pretrain", "pythia-14m", "--scape.sparsity=0.9")
    _, arguments, environ, _ = seen[-1]
    assert arguments == ["litgpt-scape", "pretrain", "pythia-14m"]
    assert environ["LT_STRATEGY"] == "scape"
    assert dict(os.environ) == before
    assert sys.argv[-1] == "--scape.sparsity=0.9"
    assert isinstance(STRATEGY_REGISTRY.get("scape"), FabricScapeStrategy)
    assert STRATEGY_REGISTRY.get("scape").config == ScapeConfig()


def test_other_commands_are_litgpts_own(monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    start(monkeypatch, "generate", "checkpoint", "--config", "x.yaml")
    _, arguments, environ, _ = seen[-1]
    assert arguments == ["litgpt-scape", "generate", "checkpoint", "--config", "x.yaml"]
    assert "LT_STRATEGY" not in environ


def test_no_function_of_litgpt_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [importlib.import_module(f"litgpt.{name}") for name in ("__main__", "pretrain", "finetune.full", "utils")]
    before = [dict(vars(module)) for module in modules]
    with litgpt_cli.scape_strategy(ScapeConfig()):
        assert all(
            vars(module)[name] is value
            for module, names in zip(modules, before, strict=True)
            for name, value in names.items()
        )


@pytest.mark.parametrize("command", ["pretrain", "finetune_full"])
def test_help_shows_litgpts_options_and_every_one_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, command, "--help")
    assert ended.value.code in (0, None)
    output = capsys.readouterr().out
    assert "--train.global_batch_size" in output
    for field in fields(ScapeConfig):
        assert f"--scape.{field.name} " in output
    assert "Share of the entries that is NOT sent" in output
    assert "(type: int4 or int8 or bf16 or fp32 or null, default: null)" in " ".join(output.split())
    assert "(type: adamw or adams or null, default: null)" in " ".join(output.split())
    assert "(type: int or null, default: null)" in " ".join(output.split())


def test_the_printed_configuration_has_the_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        start(monkeypatch, "pretrain", "pythia-14m", "--scape.sparsity=0.75", "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["scape"]["sparsity"] == 0.75
    assert printed["train"]["max_norm"] == 1.0


def test_the_console_script_is_this_one() -> None:
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["litgpt-scape"].partition(":")
    assert isinstance(getattr(importlib.import_module(module), function), Callable)
