"""`litgpt-scape pretrain --sparseloco.sync_every 30`: LitGPT's command line trains, saves and resumes by SparseLoCo."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor

pytest.importorskip("litgpt", reason="tests of LitGPT need litgpt")
pytest.importorskip("jsonargparse")

from litgpt.pretrain import setup as pretrain_setup

from lightning_scape import SparseLoCoConfig
from lightning_scape.tools import litgpt_cli

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "configs" / "sparseloco_tiny_cpu.yaml"


def _train(rank: int, world_size: int, out: str, steps: int, *more: str) -> str:
    """Through the entry point; what was said."""
    options = {
        **{f"model_config.{key}": 32 for key in ("n_embd", "block_size")},
        **{"model_config.n_layer": 1, "model_config.intermediate_size": 64, "out_dir": out},
        **{"tokenizer_dir": ROOT / "configs" / "byte_tokenizer"},
        **{"train.global_batch_size": 8, "train.micro_batch_size": 2, "train.max_tokens": steps * 8 * 32},
        **{"train.lr_warmup_steps": 1, "train.save_interval": 5, "eval.max_iters": 1, "devices": world_size},
    }
    sys.argv = ["litgpt-scape", "pretrain", f"--config={FILE}", *more]
    sys.argv += [f"--{key}={value}" for key, value in options.items()]
    said = io.StringIO()
    with torch.compiler.set_stance("force_eager"), contextlib.redirect_stderr(said):
        litgpt_cli.main()
    return said.getvalue()


def _train_and_resume(rank: int, world_size: int, folder: str) -> str:
    _train(rank, world_size, f"{folder}/stopped", 5, "--sparseloco.sync_every", "3")
    # The file says 15, the checkpoint 3. Its fifth step is inside a window.
    return _train(rank, world_size, f"{folder}/stopped", 7, "--resume=auto")


def inner_states(state: Any) -> list[str]:
    """The keys of what each rank's own optimizer has."""
    return [key for key in state["optimizer"]["sparseloco"]["tensors"] if key.startswith("inner.")]


@pytest.mark.few(0)
def test_litgpt_trains_and_resumes_with_the_options_of_the_checkpoint(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    said = run_ranks(_train_and_resume, 2, str(tmp_path))[0]
    assert "SparseLoCo: options are those of the checkpoint" in said
    assert "sync_every is 3 by the checkpoint, not 15" in said
    for folder, steps in (("stopped/step-00000005", 5), ("stopped/final", 7)):
        saved = yaml.safe_load((tmp_path / folder / "hyperparameters.yaml").read_text())
        assert SparseLoCoConfig(**saved["sparseloco"]) == SparseLoCoConfig(sync_every=3)
        state = torch.load(tmp_path / folder / "lit_model.pth", weights_only=True)
        assert state["step_count"] == steps
        assert state["optimizer"]["sparseloco"]["progress"]["steps"] == steps
        assert len(inner_states(state)) == 2


def _train_on_nodes(rank: int, world_size: int, folder: str) -> None:
    _train(rank, world_size, folder, 4, "--sparseloco.sync_every=2", "--sparseloco.local_group_size=2")


@pytest.mark.slow
def test_litgpt_trains_on_nodes_of_two_and_saves_a_whole_model(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    run_ranks(_train_on_nodes, 4, str(tmp_path))
    state = torch.load(tmp_path / "final" / "lit_model.pth", weights_only=True)
    loco = state["optimizer"]["sparseloco"]
    assert (loco["world_size"], loco["shards"], len(inner_states(state))) == (2, 2, 4)
    assert loco["progress"]["steps"] == 4
    assert state["model"]["transformer.wte.weight"].shape[1] == 32  # n_embd: whole rows, all of them
    assert state["model"]["lm_head.weight"].shape == state["model"]["transformer.wte.weight"].shape


def _finetune(rank: int, world_size: int, file: str, total_steps: int | None) -> tuple[Tensor, Tensor]:
    """As LitGPT does: the epochs end, and the model is saved without its optimizer. Weights before that, and after."""
    strategy = litgpt_cli.LitGPTStrategy(SparseLoCoConfig(sync_every=2), total_steps=total_steps)
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for step in range(3):
        fabric.backward(model(torch.eye(4) * (rank + step)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    before = model.weight.detach().clone()
    fabric.save(file, {"model": model})
    return before, model.weight.detach()


@pytest.mark.parametrize("total_steps", [None, 50])
def test_finetuning_whose_epochs_end_first_saves_the_model_of_all_ranks(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, total_steps: int | None
) -> None:
    (before, after), (other_before, other) = run_ranks(_finetune, 2, str(tmp_path / "final.pth"), total_steps)
    assert not torch.equal(before, other_before)
    assert torch.equal(after, other)
    assert torch.equal(torch.load(tmp_path / "final.pth", weights_only=True)["model"]["weight"], after)


def test_the_file_gives_every_argument_and_explains_every_key() -> None:
    content = yaml.safe_load(FILE.read_text())
    assert set(content) == set(inspect.signature(pretrain_setup).parameters) - {"log"} | {"sparseloco"}
    assert set(content["sparseloco"]) == {field.name for field in dataclasses.fields(SparseLoCoConfig)}
    assert SparseLoCoConfig(**content["sparseloco"]) == SparseLoCoConfig(sync_every=15)
    for line in FILE.read_text().splitlines():
        if re.match(r"\s+\w+:", line) and not re.match(r"\s+(class_path|init_args):", line):
            assert re.search(r"# .*\(.*default: .*\)$", line), line


def asked_for(*arguments: str) -> str:
    given, rest = litgpt_cli.split_arguments(arguments)
    return litgpt_cli.method_asked_for(given, litgpt_cli.take_sections(rest)[0], {})


def test_options_of_both_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Options of one method may be given, got some of SCAPE and some of SparseL"):
        asked_for("pretrain", f"--config={FILE}", "--scape.sparsity=0.9")
    assert asked_for("pretrain", "--config", str(FILE)) == "sparseloco"
    assert asked_for("pretrain", "pythia-14m", "--sparseloco.bits", "null") == "sparseloco"
    assert asked_for("pretrain", "pythia-14m") == "scape"


def test_a_resumed_run_without_options_takes_the_checkpoints_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "step-00000007"
    folder.mkdir()
    (folder / "lit_model.pth").touch()
    (folder / "hyperparameters.yaml").write_text("sparseloco: {sync_every: 5}\n")
    seen: list[str] = []

    def meet() -> None:
        seen.append(os.environ["LT_STRATEGY"])

    monkeypatch.setattr(importlib.import_module("litgpt.__main__"), "main", meet)
    monkeypatch.setattr(
        sys, "argv", ["litgpt-scape", "pretrain", "pythia-14m", f"--out_dir={tmp_path}", "--resume=auto"]
    )
    litgpt_cli.main()
    assert seen == ["sparseloco"]


def test_help_names_every_option() -> None:
    said = litgpt_cli.options_help()
    for field in dataclasses.fields(SparseLoCoConfig):
        assert f"--sparseloco.{field.name} " in said


def test_wrong_options_end_with_a_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for given, complaint in (
        (["--sparseloco.every=3"], "An option of SparseLoCo must be one of sync_every, density"),
        (["--sparseloco.bits=3"], "`bits` must be None, 2, 4 or 8"),
    ):
        monkeypatch.setattr(sys, "argv", ["litgpt-scape", "pretrain", "pythia-14m", *given])
        with pytest.raises(SystemExit) as ended:
            litgpt_cli.main()
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err
