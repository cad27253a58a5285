"""Writes the checkpoints of older versions that test_older_checkpoints.py loads. See README.md beside it.

    PYTHONPATH=CHECKOUT:tests python tests/data/make_checkpoints.py tests/data/checkpoints_VERSION KIND ...

``KIND:RANKS`` writes nothing, and only takes down how so many ranks go on from what is there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import older_runs
import torch


def run(function: Callable[..., Any], ranks: int, *arguments: Any) -> list[Any]:
    """Runs a function on some ranks."""
    with tempfile.TemporaryDirectory() as folder:
        return older_runs.on_ranks(function, ranks, *arguments, folder=Path(folder))


def main(target: Path, kinds: list[str]) -> None:
    """Adds to what is at ``target``."""
    expected: dict[str, Any] = {}
    for kind in kinds:
        if kind == "trainer":
            target.mkdir(parents=True, exist_ok=True)
            older_runs.fit(older_runs.SAVED_AFTER, saved=target / "trainer.ckpt")
            expected["trainer"] = older_runs.fit(older_runs.LAST, resume=target / "trainer.ckpt")
            continue
        kind, _, only = kind.partition(":")
        saved = str(target / kind)
        if not only:
            run(older_runs.write, older_runs.WRITERS[kind], kind, saved)
        for name, ranks, nodes in older_runs.READERS:
            for form in ("full", "sharded") if name == kind and only in ("", str(ranks)) else ():
                found = run(older_runs.go_on, ranks, kind, nodes, saved, form)
                assert all(torch.equal(a, b) for rank in found for a, b in zip(rank, found[0], strict=True))
                expected[f"{kind} {ranks} {nodes} {form}"] = found[0]
    path = target / "expected.pt"
    torch.save({**(torch.load(path) if path.exists() else {}), **expected}, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
