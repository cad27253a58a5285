"""LitGPT's folders of a model over bytes; no script of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_scape.checkpoint.atomic_files import load_file


def save_checkpoint(model: Any, folder: Path) -> None:
    """Writes a GPT of LitGPT's over bytes as a folder of LitGPT's, which this script takes."""
    from litgpt.utils import copy_config_files, save_config

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "lit_model.pth")
    save_config(model.config, folder)
    copy_config_files(Path(__file__).resolve().parents[1] / "configs" / "byte_tokenizer", folder)


def load_model(config: Any, checkpoint: Path) -> torch.nn.Module:
    from litgpt import GPT

    state = load_file(checkpoint / "lit_model.pth")
    model = GPT(config)
    model.load_state_dict(state.get("model", state))
    return model.float().eval()
