"""Several writers of one name: what reports success was whole, the last stays, and nothing is left of the killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_scape import newest_checkpoint
from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint import dcp, temporaries
from lightning_scape.checkpoint.inspection import verify
from lightning_scape.checkpoint.temporaries import NewFolder, replacing
from lightning_scape.comm.collectives import Communicator

RunRanks = Callable[..., list[Any]]
TURNS = 5


def write_directory(path: Path, value: float) -> None:
    table = {"format": 1, "models": {"m": {"w": None}}, "optimizers": {}, "rest": {"step": int(value)}}
    chunks = {"m.w": dcp.Chunk.whole(torch.full((200_000,), value))}
    dcp.write_directory(path, chunks, dcp.as_bytes(table), Communicator.alone())


def write_file(path: Path, value: float) -> None:
    files.save_file({"w": torch.full((200_000,), value), "step": int(value)}, path)


def save_at_once(rank: int, world_size: int, folder: str, kinds: list[str]) -> int:
    """Every rank is a writer for itself, and saves to the name to which all others save."""
    path = Path(folder) / "c.ckpt"  # whose folder is not there yet
    for turn in range(TURNS):
        dist.barrier()
        (write_file if kinds[rank] == "file" else write_directory)(path, float(rank))
        dist.barrier()
        assert [entry.name for entry in Path(folder).iterdir()] == ["c.ckpt"], turn
        verify(path)
    return TURNS


@pytest.mark.parametrize("kinds", [["file"] * 3, ["file", "directory"]], ids=str)
def test_who_saves_to_one_name_at_once_leaves_one_whole_checkpoint(
    run_ranks: RunRanks, tmp_path: Path, kinds: list[str]
) -> None:
    """They wrote into one temporary: in 6 of 12 tries a save that reported success left a damaged file."""
    assert run_ranks(save_at_once, len(kinds), str(tmp_path / "out"), kinds) == [TURNS] * len(kinds)


def test_the_last_one_to_be_complete_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with replacing(path) as first:
        first.write(b"first")
        with replacing(path) as second:
            second.write(b"second")
        assert path.read_bytes() == b"second"
        assert len(list(tmp_path.iterdir())) == 2
    assert path.read_bytes() == b"first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_what_killed_writers_left_is_removed_and_what_is_written_stays(tmp_path: Path) -> None:
    killed, living = tmp_path / f".a.{'0' * 16}.partial", tmp_path / f".a.{'1' * 16}.partial"
    strange = [tmp_path / name for name in (".a.b.partial", f".a.b.{'0' * 16}.partial", ".a.partial.txt")]
    for file in (killed, living, *strange):
        file.write_bytes(b"half")
    folders = [
        tmp_path / f".a.{'2' * 16}.partial",
        tmp_path / f".a.{'5' * 16}.previous",
        tmp_path / f".a.{'3' * 16}.partial",
    ]
    for folder in folders:
        folder.mkdir()
        (folder / temporaries.LOCKED).write_bytes(b"")
    (folders[2] / temporaries.LOCKED).unlink()  # killed between two calls
    strange.append(tmp_path / f".a.{'4' * 16}.partial")
    os.mkfifo(strange[-1])
    with open(living, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        files.save_file({}, tmp_path / "a")
        left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"a", living.name, *(file.name for file in strange)}


def test_a_complete_directory_of_a_killed_writer_counts_until_a_newer_one_is_there(tmp_path: Path) -> None:
    write_directory(tmp_path / "c", 3)
    complete = tmp_path / f".c.{'0' * 16}.partial"
    (tmp_path / "c").rename(complete)
    assert newest_checkpoint(tmp_path) == complete
    new = NewFolder(tmp_path / "c")
    assert newest_checkpoint(tmp_path) == complete
    new.close()
    write_directory(tmp_path / "c", 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_name_of_any_length_can_be_saved_to(tmp_path: Path) -> None:
    for name in ("a" * 250, "ü" * 120):
        files.save_file({"step": 1}, tmp_path / name)
        verify(tmp_path / name)
