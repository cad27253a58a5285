"""Several writers of one name: what reports success was whole, the last stays, and nothing is left of the killed."""

from __future__ import annotations

import errno
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
from lightning_scape.checkpoint.temporaries import NewFolder, put_in_place, replacing
from lightning_scape.comm.collectives import Communicator
from lightning_scape.reporting.history import Writer

RunRanks = Callable[..., list[Any]]
TURNS = 10


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


@pytest.mark.parametrize("kinds", [["file"] * 3, ["directory"] * 2, ["file", "directory"]], ids=str)
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


def test_a_folder_that_takes_no_files_says_why() -> None:
    """It said that 1,000 names were taken."""
    with pytest.raises(FileNotFoundError), replacing(Path("/proc/a")):
        pass


def test_a_temporary_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter(["0" * 16, "0" * 16, "1" * 16])
    monkeypatch.setattr(temporaries.secrets, "token_hex", lambda _: next(taken))
    with replacing(tmp_path / "a"), pytest.raises(FileExistsError), replacing(tmp_path / "a"):
        pass


def test_what_killed_writers_left_is_removed_and_what_is_written_stays(tmp_path: Path) -> None:
    killed, living = tmp_path / f".a.{'0' * 16}.partial", tmp_path / f".a.{'1' * 16}.partial"
    strange = [tmp_path / name for name in (".a.b.partial", f".a.b.{'0' * 16}.partial", ".a.partial.txt")]
    for file in (killed, living, tmp_path / ".a.partial", *strange):
        file.write_bytes(b"half")
    folders = [tmp_path / f".a.{'2' * 16}.partial", tmp_path / ".a.previous", tmp_path / f".a.{'3' * 16}.partial"]
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


def test_what_is_removed_is_held_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a save that has just made its file, and locks it now, would lose it: it ended with FileNotFoundError."""
    (tmp_path / f".a.{'0' * 16}.partial").write_bytes(b"half")
    unlink, removed = Path.unlink, []

    def unlink_what_is_held(path: Path, **options: bool) -> None:
        with open(path, "rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed.append(path.name)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink_what_is_held)
    files.save_file({}, tmp_path / "a")
    assert len(removed) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


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


def test_a_file_system_without_locks_keeps_what_is_not_a_day_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    young, old = (tmp_path / f".a.{digit * 16}.partial" for digit in "01")
    for file in (young, old):
        file.write_bytes(b"half")
    os.utime(old, (0, 0))
    files.save_file({}, tmp_path / "a")
    write_directory(tmp_path / "c", 1)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "c", young.name}


def test_what_cannot_take_its_place_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_directory(tmp_path / "c", 3)
    (tmp_path / "new").write_bytes(b"new")
    real, calls = os.replace, []

    def fail_later(source: Any, target: Any) -> None:
        calls.append(source)
        if len(calls) > 1:
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", fail_later)
    with pytest.raises(OSError, match="Input/output error"):
        put_in_place(tmp_path / "new", tmp_path / "c")
    verify(tmp_path / "c")


def test_a_name_of_any_length_can_be_saved_to(tmp_path: Path) -> None:
    for name in ("a" * 250, "ü" * 120):
        files.save_file({"step": 1}, tmp_path / name)
        verify(tmp_path / name)


def test_a_line_of_figures_is_written_in_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs with one folder: a line of more than 8 kB was cut in pieces, and another's lay between them."""
    writer, other = Writer(tmp_path), Writer(tmp_path)
    written: list[int] = []
    with open(tmp_path / "figures.jsonl", "rb") as file:
        for which in (writer, other, writer):
            which.add("point", 1, {"text": "x" * 50_000})
            written.append(len(file.read().splitlines()))
    assert written == [1, 1, 1]
