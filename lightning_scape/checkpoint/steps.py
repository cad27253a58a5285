"""The step at which a checkpoint was saved, from its pickle alone: no tensor is read, and nothing is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.dcp import REST
from lightning_scape.checkpoint.pickles import Pairs, entry
from lightning_scape.core.method import names

_OF_THE_TRAINER = "global_step"
_OF_USERS = ("step", "step_count", "iter_num")
"""Where no optimizer of ours is in a checkpoint; the last two are LitGPT's."""


def step_of(path: Path) -> int | None:
    """Optimizer steps behind a checkpoint, file or directory: the Trainer's count, the optimizers', or its user's.

    Returns:
        None if it has no such number.

    Raises:
        CheckpointError: it cannot be read; that it can is no proof that it is whole.
        OSError: likewise.
    """
    if path.is_dir():
        files.read_manifest(path)
        table = files.read_pickle(path / REST, inside=True)
        content, optimizers = entry(table, "rest"), entry(table, "optimizers")
    else:
        content = files.read_pickle(path)
        optimizers = content
    states = [*_values(optimizers), *_members(entry(content, "optimizer_states"))]
    ours = [step for state in states for step in _steps_of(state)]
    counts = [entry(content, _OF_THE_TRAINER), max(ours, default=None), *(entry(content, name) for name in _OF_USERS)]
    return next((count for count in counts if _is_count(count)), None)


def _steps_of(state: Any) -> Iterator[int]:
    """Of one optimizer: whole, its facts are a part of it; in a directory, they may be all of it."""
    bare = state if entry(state, "format") is not None and entry(state, "config") is not None else None
    for facts in (bare, *(entry(state, name) for name in names())):
        counts = (entry(facts, "step"), entry(entry(facts, "progress"), "steps"))
        yield from (step for step in counts if _is_count(step))


def _values(holder: Any) -> list[Any]:
    return [value for _, value in holder] if isinstance(holder, Pairs) else []


def _members(value: Any) -> list[Any]:
    return value if type(value) is list else []


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0
