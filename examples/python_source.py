"""`PythonSource`: the Python standard library on this machine as bytes to train on; nothing to download.

Symbols: `T` context length; `b` windows per rank and batch; `N` ranks; `G = N*b` windows per global batch.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from litgpt.data import DataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

VOCABULARY = 256
"""Tokens are bytes. 0 ends a file."""

# Foreign code, and the tests, which a slim distribution leaves out.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload"}
# Written when Python was built or installed: they hold the machine's paths.
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """Two sets of files, each as one tensor uint8 [bytes], in the order of the files' names."""

    train: Tensor
    validation: Tensor
    fingerprint: str
    """Of all names and contents. The corpus is that of the Python that runs: losses compare where this is equal."""


class Shard(NamedTuple):
    """Which part of every global batch is this process's own."""

    rank: int
    world_size: int


class PythonSource(DataModule):
    """Windows over the library's `.py` files, about 12 MB; for Lightning's Trainer and for `litgpt pretrain --data`.

    A batch is an int64 tensor [b, T + 1]: inputs are `[:, :-1]`, targets `[:, 1:]`. `seed` decides the order of the
    training windows. The global batches depend on `G` alone, not on how many ranks share them.
    """

    def __init__(self, batch_size: int = 8, context_length: int = 256, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.context_length, self.seed = batch_size, context_length, seed

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **_: Any) -> None:
        """LitGPT says here what Lightning is told at the start."""
        self.batch_size, self.context_length = batch_size, max_seq_length or self.context_length

    @cached_property
    def corpus(self) -> Corpus:
        return read_corpus()

    def train_dataloader(self) -> WindowLoader:
        windows = TrainingWindows(self.corpus, self.context_length, self.batch_size, self.seed, own_shard())
        return WindowLoader(windows)

    def val_dataloader(self) -> DataLoader[Tensor]:
        windows = ValidationWindows(self.corpus, self.context_length, self.batch_size, own_shard())
        return DataLoader(windows, batch_size=None)


def own_shard() -> Shard:
    """Of the process group, if there is one."""
    return Shard(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Shard(0, 1)


class WindowLoader(DataLoader[Tensor]):
    """The training loader. Lightning and LitGPT keep its position in their checkpoints.

    It walks an endless stream: each iteration hands out the next `len(loader)` batches, wherever the last one ended.
    """

    def __init__(self, windows: TrainingWindows) -> None:
        super().__init__(windows, batch_size=None)  # no workers: they would run ahead of the position
        self.windows = windows

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, and valid for any number of ranks with the same `G`."""
        return {"epoch": self.windows.epoch, "consumed": self.windows.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.windows.epoch, self.windows.consumed = state_dict["epoch"], state_dict["consumed"]


class TrainingWindows(IterableDataset[Tensor]):
    """One rank's part of the stream. Each epoch tiles the corpus from a random offset, in a random order."""

    def __init__(self, corpus: Corpus, context_length: int, batch_size: int, seed: int, shard: Shard) -> None:
        self.data, self.context_length, self.batch_size = corpus.train, context_length, batch_size
        self.seed, self.shard = seed, shard
        self.global_batch = batch_size * shard.world_size
        self.count = (len(self.data) - context_length) // context_length  # for every offset
        self.epoch = self.consumed = 0
        """`consumed`: windows of this epoch that all ranks together have handed out."""
        self.shuffled: tuple[int, Tensor, Tensor] | None = None

    def __len__(self) -> int:
        """Whole global batches per epoch."""
        return self.count // self.global_batch

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(len(self)):
            if self.consumed + self.global_batch > self.count:
                self.epoch, self.consumed = self.epoch + 1, 0
            windows, order = self.shuffle()
            start = self.consumed + self.shard.rank * self.batch_size
            self.consumed += self.global_batch
            yield windows[order[start : start + self.batch_size]].long()

    def shuffle(self) -> tuple[Tensor, Tensor]:
        """This epoch's windows, a view uint8 [windows, T + 1], and their order."""
        if self.shuffled is None or self.shuffled[0] != self.epoch:
            generator = torch.Generator().manual_seed(hash_of(f"{self.seed}/{self.epoch}") >> 1)
            offset = int(torch.randint(self.context_length, (), generator=generator))
            windows = windows_of(self.data[offset:], self.context_length)
            self.shuffled = (self.epoch, windows, torch.randperm(self.count, generator=generator))
        return self.shuffled[1:]


class ValidationWindows(IterableDataset[Tensor]):
    """One rank's validation batches: the same every time, and equally many on every rank."""

    def __init__(self, corpus: Corpus, context_length: int, batch_size: int, shard: Shard) -> None:
        self.windows = windows_of(corpus.validation, context_length)
        # In a random order, so that the first batches are a sample of all files.
        self.order = torch.randperm(len(self.windows), generator=torch.Generator().manual_seed(0))
        self.batch_size, self.shard = batch_size, shard
        self.count = len(self.windows) // shard.world_size

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, self.count, self.batch_size):
            size = min(self.batch_size, self.count - start)
            first = start * self.shard.world_size + self.shard.rank * size
            yield self.windows[self.order[first : first + size]].long()


def read_corpus() -> Corpus:
    """A twentieth of the files is for validation, less those that are mostly copies of training files."""
    root, sources = Path(sysconfig.get_path("stdlib")), {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)]
        for path in (Path(folder, name) for name in files):
            if path.suffix == ".py" and not path.name.startswith(SKIPPED_PREFIXES) and (content := path.read_bytes()):
                sources[path.relative_to(root).as_posix()] = content
    sources = dict(sorted(sources.items()))
    held_out = without_copies(sources, [name for name in sources if hash_of(f"split/{name}") < 0.05 * 2**64])
    parts = [[name for name in sources if name not in held_out], held_out]
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        for name in part:
            digest.update(f"{name}\0{len(sources[name])}\0".encode() + sources[name])
        digest.update(b"\0")
    joined = [bytearray(b"".join(sources[name] + b"\0" for name in part)) for part in parts]
    train, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in joined)
    return Corpus(train, validation, digest.hexdigest())


def without_copies(sources: dict[str, bytes], held_out: list[str]) -> list[str]:
    """`held_out` less the files more than half of whose lines also stand in training files."""
    lines = {name: {line for line in content.split(b"\n") if line.strip()} for name, content in sources.items()}
    seen = set().union(*(lines[name] for name in sources if name not in held_out))
    # What goes is then a training file itself, so look again until nothing goes.
    while copies := [name for name in held_out if 2 * len(lines[name] & seen) > len(lines[name])]:
        held_out = [name for name in held_out if name not in copies]
        seen.update(*(lines[name] for name in copies))
    return held_out


def windows_of(data: Tensor, context_length: int) -> Tensor:
    """All windows of `data`, a view [windows, T + 1]; neighbours share one byte, which is target, then input."""
    return data.unfold(0, context_length + 1, context_length)


def hash_of(text: str) -> int:
    """64 bits, the same in every process and version, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
