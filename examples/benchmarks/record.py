"""Rows of results, each with what made it: version, commit, date, machine. The benchmarks share it; no script."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import lightning_scape

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
ORIGIN = ("version", "commit", "dirty", "date", "machine")
"""Keys that each row has."""
UNCERTAIN = (
    "**To be made again**: a + means that the code had changes, or is that of the commit which added the result."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where a benchmark writes, and whether it may."""
    parser.add_argument(
        "--out", type=Path, help="folder for rows, tables, plots (default: results/, or out/ if --short)"
    )
    parser.add_argument("--dirty", action="store_true", help="write though the tree is not a commit; rows say so")


def folder(args: argparse.Namespace) -> Path:
    """Where a benchmark writes: a short run never beside the results that are kept."""
    default = ROOT / "out" / "benchmarks" if args.short else RESULTS
    return args.out if args.out is not None else default


def origin(dirty: bool) -> dict[str, Any]:
    """What a row says of the code and the machine that made it.

    Args:
        dirty: whether a tree that is not exactly a commit is allowed.

    Raises:
        SystemExit: it is not allowed, and the tree is not a commit.
    """
    commit = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":(exclude)examples/benchmarks/results")
    if not dirty and (commit is None or changed):
        paths = [line[3:] for line in (changed or "").splitlines()]
        found = "no commit" if commit is None else f"changes in {len(paths)} files ({', '.join(paths[:3])}, ...)"
        raise SystemExit(
            f"error: results must come from a commit, so that they can be made again; got {found}."
            " Commit first, or give --dirty: then the rows say so."
        )
    return {
        "version": lightning_scape.__version__,
        "commit": commit,
        "dirty": bool(changed) or commit is None,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "machine": machine(),
    }


def _git(*arguments: str) -> str | None:
    """What git says of this checkout; None where it is none."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None


def machine() -> dict[str, Any]:
    """Processor, versions, and the speed of the memory, on which an optimizer's step depends."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or "unknown",
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "memory_gb_per_second": round(copy_bandwidth() / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def copy_bandwidth(megabytes: int = 128) -> float:
    """Bytes per second that one core reads and writes when it copies memory; the best of five."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        began = time.process_time()  # other processes' work on the same core does not count
        target.copy_(source)
        times.append(time.process_time() - began)
    torch.set_num_threads(threads)
    return 2 * source.numel() * source.element_size() / min(times)


class Rows:
    """A suite's file: a JSON list with a row a line, each under a name of its own.

    Args:
        path: the file; made by the first row.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else []
        self._by_name: dict[str, dict[str, Any]] = {row["name"]: row for row in found}

    def __iter__(self) -> Any:
        return iter(self._by_name.values())

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Writes rows, in place of those of the same names."""
        self._by_name |= {row["name"]: row for row in rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = ",\n".join(json.dumps(self._by_name[name]) for name in sorted(self._by_name))
        new = self.path.with_suffix(".new")
        new.write_text(f"[\n{text}\n]\n")
        os.replace(new, self.path)


def table(head: Sequence[str], lines: Iterable[Sequence[str]], made_of: Sequence[Iterable[dict[str, Any]]]) -> str:
    """In Markdown. Where not all come from one commit, each line says which: ``made_of`` has its rows."""
    codes = [", ".join(sorted({code_of(row) for row in rows})) for rows in made_of]
    several = len(set(codes)) > 1 or any("," in code for code in codes)
    shown = [[*line, f"{code}"] if several else list(line) for line, code in zip(lines, codes, strict=True)]
    rows = [[*head, "code"] if several else list(head), ["---"] * (len(head) + several), *shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def code_of(row: dict[str, Any]) -> str:
    """The commit that made a row; with a plus, if the tree had changes or is not known."""
    return f"{row['commit'][:8]}{'' if row['dirty'] is False else '+'}"


def made_by(command: str, rows: Iterable[dict[str, Any]]) -> str:
    """The line under a table: the command, and version, commit and date of its rows."""
    found = list(rows)
    codes = sorted({code_of(row) for row in found})
    days = sorted({row["date"][:10] for row in found})
    versions = sorted({row["version"] or "unknown" for row in found})
    commit = f"commit {codes[0]}" if len(codes) == 1 else "commits in the column `code`"
    when = " to ".join(dict.fromkeys([days[0], days[-1]]))
    said = f"Command: `{command}`. Version {', '.join(versions)}, {commit}, {when}."
    return f"{said} {UNCERTAIN}" if any(code.endswith("+") for code in codes) else said


def write_table(path: Path, text: str) -> None:
    """For pages to include as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(f"\n{text}\n\nwritten to {path}")
