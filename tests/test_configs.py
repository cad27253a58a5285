"""The configuration files: LitGPT takes them, and they say what they are."""

from __future__ import annotations

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
