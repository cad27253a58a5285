"""Data that differ by rank: four kinds of text that a Python installation carries, and their windows for each rank.

Sources of the standard library, prose (licences and pages of the installed packages), C++ (torch's headers) and numbers
(tables of measurements, from a generator). Each is split by file: every tenth one, by a hash of its name, is held out.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_BYTES = 3_000_000
"""Of each domain: whole files, in the order of a hash of their names."""


class Domains(NamedTuple):
    """By domain, uint8 ``[bytes]``."""

    train: list[Tensor]
    held_out: list[Tensor]
    fingerprint: str
    """Of names and contents: losses of other data are not compared."""


@cache
def domains() -> Domains:
    """What this installation carries, read once."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent.parent
    sources = [path for path in library.rglob("*.py") if not {"test", "tests", "site-packages"} & {*path.parts}]
    prose = [path for name in ("LICEN[CS]E*", "METADATA") for path in packages.rglob(name) if path.is_file()]
    headers = packages.joinpath("torch", "include").rglob("*.h")
    tables = {f"table-{number}": table(number) for number in range(300)}
    found = Domains([], [], "")
    digest = hashlib.sha256()
    for texts in (read(sources, library), read(prose, packages), read(headers, packages), tables):
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        seen: set[bytes] = set()
        size = 0
        for name in sorted(texts, key=hashed):
            text = texts[name]
            if text in seen or size + len(text) > MOST_BYTES:
                continue
            seen.add(text)
            size += len(text)
            parts[int(hashed(name), 16) % 10 == 0].append(text + b"\0")
            digest.update(name.encode() + text)
        for split, part in zip((found.train, found.held_out), parts, strict=True):
            split.append(torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8))
    return found._replace(fingerprint=digest.hexdigest()[:16])


def read(paths: Iterable[Path], root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(paths)}


def hashed(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def table(number: int) -> bytes:
    """10,000 bytes of rows of measurements: each column has a mean, a spread and a format of its own."""
    draw = random.Random(number)
    columns = [
        (draw.gauss(0, 3), 10 ** draw.uniform(-2, 2), draw.choice([".1f", ".2f", ".4f", ".3e", ".0f"])) for _ in "1234"
    ]
    rows: list[str] = []
    while sum(map(len, rows)) < 10_000:
        rows.append(",".join(f"{draw.gauss(mean, spread):{form}}" for mean, spread, form in columns) + "\n")
    return "".join(rows).encode()


class DomainWindows:
    """One rank's batches, without end. Every batch of all ranks has equally many windows of each domain.

    Args:
        ranks, batch, context, seed: of the run; ``ranks`` is a multiple of four.
        rank: whose batches.
        apart: the rank reads one domain, number ``rank % 4``; else the same windows are dealt out evenly.
    """

    def __init__(self, ranks: int, batch: int, context: int, seed: int, rank: int, apart: bool) -> None:
        self.ranks, self.batch, self.context, self.seed = ranks, batch, context, seed
        self.rank, self.apart = rank, apart
        self.step = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            mine = self.of_all_ranks()[self.rank]
            self.step += 1
            yield mine

    def of_all_ranks(self) -> Tensor:
        """The coming step's windows, int64 ``[ranks, batch, context + 1]``."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        of_each, reach = self.ranks * self.batch // 4, torch.arange(self.context + 1)
        windows = []
        for data in domains().train:
            starts = torch.randint(len(data) - self.context, (of_each, 1), generator=generator)
            windows.append(data[starts + reach])
        found = torch.stack(windows).long()  # [domains, windows, T + 1]
        if self.apart:
            return found.view(4, self.ranks // 4, self.batch, -1).transpose(0, 1).reshape(self.ranks, self.batch, -1)
        dealt = found.transpose(0, 1).reshape(4 * of_each, -1)
        if self.batch % 4:
            dealt = dealt[torch.randperm(len(dealt), generator=generator)]
        return dealt.view(self.ranks, self.batch, -1)

    def state_dict(self) -> dict[str, Any]:
        """The place reached."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.step = state_dict["step"]


def held_out(context: int, windows: int = 1024) -> list[Tensor]:
    """Batches of int64 ``[windows / 4, context + 1]``, one of each domain."""
    batches = []
    for data in domains().held_out:
        starts = torch.linspace(0, len(data) - context - 1, windows // 4).long()[:, None]
        batches.append(data[starts + torch.arange(context + 1)].long())
    return batches
