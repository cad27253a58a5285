"""A file whose states are collected while training goes on: what is in it, what it moves, what goes wrong."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parts import Tiny, said, state_of

from lightning_scape.checkpoint.atomic_files import load_file, save_file
from lightning_scape.checkpoint.collecting import copied
from lightning_scape.checkpoint.parts import OwnParts
from lightning_scape.checkpoint.saver import Saver
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core import method

RunRanks = Callable[..., list[Any]]


def spoil(own: OwnParts) -> None:
    """What the next step does to the memory that a state is in."""
    for chunk in own.tensors.values():
        chunk.tensor.fill_(7)


def collected_beside(rank: int, world_size: int, folder: str) -> tuple[int, int, int]:
    method.register(Tiny)
    saver, ranks = Saver(asynchronous=True), Communicator(dist.new_group(backend="gloo"))
    path = Path(folder) / "new" / "file.ckpt"
    at_once, own = Tiny.form.collected(state_of(rank, world_size), 0), state_of(rank, world_size)
    content = {"weights": torch.ones(3), "optimizer_states": [own], "tiny": state_of(rank, world_size), "count": [1]}
    saver.save_file(path, content, lambda whole: save_file(whole, path), ranks)
    spoil(own)
    content["weights"].zero_()
    content["count"].append(2)
    saver.wait()
    if rank == 0:
        saved = load_file(path)
        assert [*saved] == [*content]
        assert said(saved["optimizer_states"][0]) == said(saved["tiny"]) == said(at_once)
        assert (saved["weights"].tolist(), saved["count"]) == ([1.0] * 3, [1])
    size = sum(chunk.tensor.nbytes for chunk in state_of(rank, world_size).tensors.values())
    return saver.moved.sent, saver.moved.received, size


def test_a_file_is_as_it_was_when_it_was_saved_and_its_bytes_are_counted(run_ranks: RunRanks, tmp_path: Path) -> None:
    (sent, received, _), (sent_too, received_too, size) = run_ranks(collected_beside, 2, str(tmp_path))
    assert (sent, received_too) == (0, 0)
    assert received == sent_too
    assert 2 * size <= received < 2 * size + 200  # two states; ranks send as much as the one that has most


def fails_beside(rank: int, world_size: int, folder: str) -> list[str]:
    method.register(Tiny)
    saver, ranks = Saver(asynchronous=True), Communicator(dist.new_group(backend="gloo"))
    path, texts = Path(folder) / "file.ckpt", []

    def full(whole: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    saver.save_file(path, {"tiny": state_of(rank, world_size)}, full, ranks)
    with pytest.raises(OSError, match="No space left") as caught:
        saver.wait()
    texts.append(str(caught.value))
    for wrong in (
        {"tiny": state_of(rank, world_size)} if rank == 0 else {},
        {"tiny": state_of(rank, world_size), "model": fails_beside if rank else lambda: None},
    ):
        with pytest.raises(Exception, match="All ranks must save the same optimizers|pickle|local object") as raised:
            saver.save_file(path, wrong, lambda whole: save_file(whole, path), ranks)
        texts.append(str(raised.value))
    # Rank 0 decides what is saved, and the ranks are still together.
    content = {"tiny": state_of(rank, world_size)} if rank else {"a": 1}
    saver.save_file(path, content, lambda whole: save_file(whole, path), ranks)
    saver.finish(raising=True)
    assert rank or load_file(path) == {"a": 1}
    return texts


def test_what_goes_wrong_is_told_on_every_rank_and_none_waits(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(fails_beside, 2, str(tmp_path))
    assert first == second
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith((".ckpt", ".partial"))] == ["file.ckpt"]


def test_tied_tensors_stay_tied_in_the_copy() -> None:
    weight = torch.arange(4.0)
    copy = copied({"a": {"one": weight, "other": weight.view(2, 2)}})["a"]
    assert copy["one"].data_ptr() == copy["other"].data_ptr() != weight.data_ptr()
