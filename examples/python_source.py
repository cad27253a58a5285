"""`PythonSource`: the installed Python standard library as a byte-level corpus; nothing to download.

Symbols: `T` context length; `b` windows per rank and batch; `N` data-parallel ranks; `G = N*b` windows per global
batch; `n` windows per epoch.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

VOCABULARY = 256
"""Tokens are bytes."""
END_OF_FILE = 0
"""The byte after every file; Python source never contains it."""

# The tests are the first thing a slim distribution leaves out; without them the same Python version gives the same
# corpus in more places. The others hold foreign code.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload"}
# Written at build or install time: they hold the machine's paths.
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two disjoint sets of files, each as one tensor."""

    train: Tensor = field(repr=False)
    """uint8 [bytes]: the training files in order of their names, `END_OF_FILE` after each."""

    validation: Tensor = field(repr=False)
    """uint8 [bytes]: the validation files, likewise."""

    train_files: tuple[str, ...] = field(repr=False)
    """Names relative to the standard library's folder, with `/` on every system."""

    validation_files: tuple[str, ...] = field(repr=False)
    """Likewise."""

    fingerprint: str
    """16 hexadecimal digits over all names and contents and the split; equal fingerprints are equal corpora."""


class Shard(NamedTuple):
    """Which part of every global batch is this process's own."""

    rank: int
    world_size: int


class PythonSource(LightningDataModule):
    """Next-token windows over the bytes of the standard library's `.py` files (about 12 MB, without its tests).

    A batch is an int64 tensor [b, T + 1] with values in [0, 256): inputs are `[:, :-1]`, targets `[:, 1:]` (LitGPT's
    convention). The corpus is that of the Python that runs, so losses compare only where `fingerprint` is equal.

    Training windows tile the corpus from a random offset below `T` and come in a random order; both are drawn anew
    for every epoch from `seed`. Rank `r` takes the r-th run of `b` windows of each global batch, so the global batches
    depend on `G` alone, not on how many ranks share them. Validation windows and their order are fixed, and every
    rank gets equally many.

    The split is by file and by a hash of its name, and so is the choice under `max_bytes`. A validation file more than
    half of whose lines also stand in training files is moved to the training side, because the library is full of
    near-copies.

    Rank and world size are `shard`, else the trainer's, else those of `torch.distributed`, else 0 of 1.

    Args:
        batch_size: Windows per rank and batch, `b`.
        context_length: Bytes per window that are predicted, `T`.
        seed: Of the training windows' offsets and order.
        val_fraction: Share of the files that is validation before near-copies are moved, in (0, 1).
        max_bytes: Use only so many bytes of whole files.
        shard: `(rank, world_size)`, where neither trainer nor process group knows better.

    Raises:
        ValueError: An argument is outside its rule, or the corpus is too small for it (from `setup`).
    """

    def __init__(
        self,
        batch_size: int = 8,
        context_length: int = 256,
        seed: int = 0,
        val_fraction: float = 0.05,
        max_bytes: int | None = None,
        shard: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("context_length", context_length)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; pass a positive number.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction must lie between 0 and 1, got {val_fraction}; try 0.05.")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}; pass None for the whole library.")
        if shard is not None and not 0 <= shard[0] < shard[1]:
            raise ValueError(f"shard must be (rank, world_size) with 0 <= rank < world_size, got {shard}; try None.")
        self.batch_size = batch_size
        self.context_length = context_length
        self.seed = seed
        self.val_fraction = val_fraction
        self.max_bytes = max_bytes
        self.shard = shard
        self._corpus: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The corpus, read at the first use and kept."""
        if self._corpus is None:
            self._corpus = read_corpus(self.val_fraction, self.max_bytes)
        return self._corpus

    @corpus.setter
    def corpus(self, corpus: Corpus) -> None:
        """Takes one that was read already."""
        self._corpus = corpus

    @property
    def fingerprint(self) -> str:
        """`Corpus.fingerprint`: name it beside every loss."""
        return self.corpus.fingerprint

    def setup(self, stage: str | None = None) -> None:
        """Read the corpus and check that it is long enough; Lightning calls it on every rank."""
        world_size = self._resolve_shard().world_size
        self._check_length("training", self.corpus.train, self.context_length, self.batch_size * world_size)
        self._check_length("validation", self.corpus.validation, 1, world_size)

    def train_dataloader(self) -> WindowLoader:
        """A new loader at the start of the stream of training batches."""
        shard = self._resolve_shard()
        return WindowLoader(TrainingWindows(self.corpus, self.context_length, self.batch_size, self.seed, shard))

    def val_dataloader(self) -> DataLoader[Tensor]:
        """The same batches, in the same order, at every validation."""
        shard = self._resolve_shard()
        return DataLoader(ValidationWindows(self.corpus, self.context_length, self.batch_size, shard), batch_size=None)

    def _resolve_shard(self) -> Shard:
        if self.shard is not None:
            return Shard(*self.shard)
        if self.trainer is not None:
            return Shard(self.trainer.global_rank, self.trainer.world_size)
        if dist.is_available() and dist.is_initialized():
            return Shard(dist.get_rank(), dist.get_world_size())
        return Shard(0, 1)

    def _check_length(self, part: str, data: Tensor, overlap: int, windows: int) -> None:
        needed = windows * self.context_length + overlap
        if len(data) < needed:
            raise ValueError(
                f"The {part} part must hold one batch: {windows} windows of context_length {self.context_length} need"
                f" {needed} bytes, got {len(data)}; lower context_length or batch_size, or raise max_bytes"
                + (" or val_fraction." if part == "validation" else ".")
            )


class WindowLoader(DataLoader[Tensor]):
    """The training loader: a `DataLoader` whose position Lightning stores in the checkpoint.

    It walks one endless stream. Every iteration hands out the next `len(loader)` batches of it, wherever the last one
    ended; a complete iteration from the start is one epoch. So a loader that has loaded a position goes on with the
    batch after it, in the middle of an epoch or at its end, however often a training loop calls `iter`.
    """

    def __init__(self, windows: TrainingWindows) -> None:
        # Batches come whole. No workers: they would run ahead of the position, and slicing a tensor needs no help.
        super().__init__(windows, batch_size=None, num_workers=0)
        self._windows = windows

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches handed out so far, the same on every rank."""
        return self._windows.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after the position `state_dict`; exact with any number of ranks if `G` is the same.

        Raises:
            ValueError: It is the position in another stream (corpus, context length or seed).
        """
        self._windows.load_state_dict(state_dict)


class TrainingWindows(IterableDataset[Tensor]):
    """The endless stream of this rank's training batches, and the position in it: `epoch` and `consumed`."""

    def __init__(self, corpus: Corpus, context_length: int, batch_size: int, seed: int, shard: Shard) -> None:
        super().__init__()
        self._data = corpus.train
        self._stream = {"fingerprint": corpus.fingerprint, "context_length": context_length, "seed": seed}
        self._context_length = context_length
        self._batch_size = batch_size
        self._seed = seed
        self._shard = shard
        # The same for every offset, so that all epochs are equally long.
        self._count = (len(corpus.train) - context_length) // context_length
        self._shuffled: tuple[int, Tensor, Tensor] | None = None
        self.epoch = 0
        self.consumed = 0
        """Windows of this epoch that all ranks together have handed out."""

    @property
    def _global_batch(self) -> int:
        return self._batch_size * self._shard.world_size

    def __len__(self) -> int:
        """Whole global batches per epoch."""
        return self._count // self._global_batch

    def __iter__(self) -> Iterator[Tensor]:
        """The next `len(self)` batches, int64 [b, T + 1]."""
        for _ in range(len(self)):
            yield self._next_batch()

    def _next_batch(self) -> Tensor:
        if self.consumed + self._global_batch > self._count:
            self.epoch, self.consumed = self.epoch + 1, 0
        windows, order = self.shuffle()
        start = self.consumed + self._shard.rank * self._batch_size
        self.consumed += self._global_batch
        return windows[order[start : start + self._batch_size]].long()

    def shuffle(self) -> tuple[Tensor, Tensor]:
        """This epoch's windows, a view uint8 [n, T + 1], and their order, int64 [n]."""
        if self._shuffled is None or self._shuffled[0] != self.epoch:
            generator = torch.Generator("cpu").manual_seed(_hash(f"{self._seed}/{self.epoch}") >> 1)
            offset = int(torch.randint(self._context_length, (), generator=generator, dtype=torch.int64, device="cpu"))
            order = _permutation(self._count, generator)
            self._shuffled = (self.epoch, _windows(self._data[offset:], self._context_length), order)
        return self._shuffled[1:]

    def state_dict(self) -> dict[str, Any]:
        """Primitives only: `torch.load(weights_only=True)` reads them."""
        return {**self._stream, "epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `WindowLoader.load_state_dict`."""
        for name, expected in self._stream.items():
            if state_dict.get(name) != expected:
                raise ValueError(
                    f"A position holds only in the stream it was taken from: {name} is {expected!r}, the checkpoint's"
                    f" is {state_dict.get(name)!r}; make PythonSource with the checkpoint's settings (and its Python"
                    " version, which decides the fingerprint), or start anew."
                )
        self.epoch, self.consumed = state_dict["epoch"], state_dict["consumed"]


class ValidationWindows(IterableDataset[Tensor]):
    """This rank's validation batches; fewer than `N` of all windows are left out to make the ranks equal."""

    def __init__(self, corpus: Corpus, context_length: int, batch_size: int, shard: Shard) -> None:
        super().__init__()
        self._windows = _windows(corpus.validation, context_length)
        # Shuffled once and for all: `limit_val_batches` then takes a sample of all files, not the first few.
        self._order = _permutation(len(self._windows), torch.Generator("cpu").manual_seed(0))
        self._batch_size = batch_size
        self._shard = shard
        self._count = len(self._windows) // shard.world_size

    def __len__(self) -> int:
        """Batches per rank; the last may be smaller."""
        return -(-self._count // self._batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        """int64 [b, T + 1]."""
        rank, world_size = self._shard
        for start in range(0, self._count, self._batch_size):
            size = min(self._batch_size, self._count - start)
            first = start * world_size + rank * size
            yield self._windows[self._order[first : first + size]].long()


def read_corpus(val_fraction: float = 0.05, max_bytes: int | None = None) -> Corpus:
    """Read and split the standard library; see `PythonSource`.

    Raises:
        ValueError: One side of the split would be empty.
    """
    sources = _choose(_read_sources(Path(sysconfig.get_path("stdlib"))), max_bytes)
    validation = drop_copies(sources, [name for name in sources if _hash(f"split/{name}") < val_fraction * 2**64])
    train = [name for name in sources if name not in validation]
    if not train or not validation:
        raise ValueError(
            f"The corpus must leave files on both sides of the split, got {len(train)} training and {len(validation)}"
            f" validation files (val_fraction={val_fraction}, max_bytes={max_bytes}); raise max_bytes, change"
            " val_fraction, or run a Python whose standard library is installed as .py files."
        )
    return Corpus(
        train=_join(sources, train),
        validation=_join(sources, validation),
        train_files=tuple(train),
        validation_files=tuple(validation),
        fingerprint=_fingerprint(sources, train, validation),
    )


def _read_sources(root: Path) -> dict[str, bytes]:
    """File contents by name, in order of the names; what cannot be read is left out, and so changes the fingerprint."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS and not _is_local(name)]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and not _is_local(name)]
    sources = {}
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if content:
            sources[name] = content
    return sources


def _is_local(name: str) -> bool:
    return name.startswith(_SKIPPED_PREFIXES)


def _choose(sources: dict[str, bytes], max_bytes: int | None) -> dict[str, bytes]:
    """A random-looking choice of files with at most `max_bytes` in all, the end marks counted."""
    if max_bytes is None:
        return sources
    chosen, room = set(), max_bytes
    for name in sorted(sources, key=lambda name: _hash(f"choice/{name}")):
        if len(sources[name]) < room:
            chosen.add(name)
            room -= len(sources[name]) + 1
    return {name: content for name, content in sources.items() if name in chosen}


def drop_copies(sources: dict[str, bytes], validation: list[str]) -> list[str]:
    """`validation` without the files more than half of whose distinct lines also stand in training files."""
    held_out = set(validation)
    seen = set().union(*(sources[name].split(b"\n") for name in sources if name not in held_out))
    lines = {name: {line for line in sources[name].split(b"\n") if line.strip()} for name in validation}
    # What moves is then a training file itself, so look again until nothing moves.
    while copies := [name for name in validation if 2 * len(lines[name] & seen) > len(lines[name])]:
        validation = [name for name in validation if name not in copies]
        seen.update(*(lines[name] for name in copies))
    return validation


def _join(sources: dict[str, bytes], names: list[str]) -> Tensor:
    end = bytes([END_OF_FILE])
    return torch.frombuffer(bytearray(b"".join(sources[name] + end for name in names)), dtype=torch.uint8)


def _fingerprint(sources: dict[str, bytes], *parts: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        for name in part:
            digest.update(f"{name}\0{len(sources[name])}\0".encode())
            digest.update(sources[name])
        digest.update(b"\0")
    return digest.hexdigest()


def _permutation(count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator, dtype=torch.int64, device="cpu")


def _windows(data: Tensor, context_length: int) -> Tensor:
    """All windows of `data`, a view [n, T + 1]; neighbours share one byte, which is target, then input."""
    return data.unfold(0, context_length + 1, context_length)


def _hash(text: str) -> int:
    """64 bits, the same in every process and version, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
