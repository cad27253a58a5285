"""The checkpoints that Lightning saves at SLURM's signal, and loads when the job starts again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer


def saved_by_signal(trainer: Trainer) -> list[str]:
    """Checkpoints that Lightning has saved at such signals, in the folder where it looks: only under SLURM."""
    folder = Path(trainer.default_root_dir)
    if not SLURMEnvironment.detect() or not folder.is_dir():
        return []
    return [str(path) for path in folder.glob("hpc_ckpt_*.ckpt")]


def is_found_by_lightning(trainer: Trainer, path: Any) -> bool:
    """Whether it may be the one that Lightning loads if it is told nothing: that with the highest number.

    The file need not be there: Lightning also counts names of files that were cut off.
    """

    def number(saved: str | Path) -> int:
        return int("0" + re.sub(r"\D", "", Path(saved).stem))

    given = Path(path or "")
    there = SLURMEnvironment.detect() and given.parent == Path(trainer.default_root_dir)
    found = [*map(number, saved_by_signal(trainer)), 0]
    return there and given.name.startswith("hpc_ckpt_") and number(given) >= max(found)
