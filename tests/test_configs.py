"""The configuration files: LitGPT takes them, they say what they are, and the small one trains as its head says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import capture_parser
from litgpt import GPT, Config
from litgpt.pretrain import setup
from litgpt.utils import CLI

from lightning_scape import ScapeConfig

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs").glob("*.yaml"), key=lambda path: path.name)


def leaves(tree: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        inner = leaves(value) if isinstance(value, dict) else {"": value}
        found |= {f"{key}.{name}".removesuffix("."): leaf for name, leaf in inner.items()}
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_litgpt_takes_a_file_with_every_value_and_its_head_states_the_models_size(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= 60
    content = yaml.safe_load(text)
    assert ScapeConfig(**content.pop("scape", {})).sparsity == 0.99
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(sys, "argv", ["litgpt"])
    # litdata's data modules are named, not imported before a loader is asked for.
    parsed = capture_parser(lambda: CLI(setup)).parse_args([f"--config={plain}"])
    taken = leaves(parsed.as_dict())
    for key, value in leaves(content).items():
        found = taken[key]
        assert found == value or str(found).endswith(str(value)), key  # a path, or a class by its full name
    assert (parsed.train.max_norm, parsed.seed) == (1.0, 42)  # LitGPT's own
    with torch.device("meta"):
        model = GPT(Config(**content["model_config"]))
        if content["train"].get("tie_embeddings"):
            model.transformer.wte.weight = model.lm_head.weight
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,} parameters" in text.splitlines()[0]


def test_the_small_file_trains_by_the_command_in_its_head(tmp_path: Path) -> None:
    short = ("--train.max_tokens=16384", "--train.lr_warmup_steps=2", "--train.log_interval=2", "--eval.max_iters=1")
    command = [Path(sys.executable).parent / "litgpt-scape", "pretrain", "--config=configs/tiny_cpu.yaml"]
    launched = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LT_STRATEGY")
    environ = {name: value for name, value in os.environ.items() if name not in launched}
    done = subprocess.run(
        [*map(str, command), "--scape.sparsity=0.9", *short, f"--out_dir={tmp_path}"],
        cwd=ROOT,
        env={**environ, "TORCHDYNAMO_DISABLE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss train: ([\d.]+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert torch.load(tmp_path / "final" / "lit_model.pth", weights_only=True)["step_count"] == 8
    assert (tmp_path / "final" / "tokenizer.json").is_file()
