"""What ``lightning-scape verify`` says of a checkpoint is what loading it does, for every byte of it."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import build
from test_sharded import assert_equal, save

from lightning_scape import CheckpointError, ScapeConfig
from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.inspection import verify
from lightning_scape.checkpoint.saver import SavedContent
from lightning_scape.hosts.checkpoint_io import ScapeCheckpointIO
from lightning_scape.tools import commands

CONTENT = {"weights": torch.arange(40.0), "step": 3, "of": {"bf16": torch.ones(3, 5, dtype=torch.bfloat16)}}
NEAR_THE_END = 400
"""Bytes of a file's tail, where the zip archive's directory is; flips there went unreported."""


def write_with_seal(path: Path) -> None:
    files.save_file(CONTENT, path)


def write_plain(path: Path) -> None:
    torch.save(CONTENT, path)


def write_directory(path: Path) -> None:
    _, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), torch.float32)
    save(path, optimizer, {"weights": CONTENT["weights"]}, step=3)


def load(path: Path) -> Any:
    if path.is_file():
        return ScapeCheckpointIO().load_checkpoint(path)
    saved = SavedContent(path)
    return {key: saved.directory.tensor(key) for key in sorted(saved.directory.shapes())}


def outcome(act: Callable[[Path], Any], path: Path) -> tuple[bool, Any]:
    try:
        return True, act(path)
    except CheckpointError as error:
        return False, str(error)


def flip_and_compare(path: Path, file: Path, places: list[tuple[int, int]]) -> int:
    """Flips one bit at a time; the number of flips that are refused."""
    data, original, refused = bytearray(file.read_bytes()), load(path), 0
    for place, bit in places:
        data[place] ^= 1 << bit
        file.write_bytes(data)
        (verified, _), (loads, loaded) = outcome(verify, path), outcome(load, path)
        assert verified == loads, f"{file.name}: bit {bit} of byte {place}"
        if loads:
            assert_equal(loaded, original)
        refused += not verified
        data[place] ^= 1 << bit
    file.write_bytes(data)
    verify(path)
    return refused


def some_flips(size: int, count: int) -> list[tuple[int, int]]:
    rng = random.Random(size)
    places = [rng.randrange(size) for _ in range(count)]
    places += [max(0, size - rng.randrange(1, NEAR_THE_END)) for _ in range(count)]
    return [(place, rng.randrange(8)) for place in places]


@pytest.mark.few(1)
@pytest.mark.parametrize("write", [write_with_seal, write_plain])
def test_verify_agrees_with_loading_on_flipped_bits_of_a_file(tmp_path: Path, write: Callable[[Path], None]) -> None:
    """28 of 300 flips near the end of a file were called "complete and undamaged"; torch refused some of them."""
    path = tmp_path / "c.ckpt"
    write(path)
    flips = some_flips(path.stat().st_size, 150)
    refused = flip_and_compare(path, path, flips)
    assert refused == len(flips) if write is write_with_seal else refused > 0


def test_verify_agrees_with_loading_on_flipped_bits_of_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "c.ckpt"
    write_directory(path)
    for file in sorted(path.iterdir()):
        flips = some_flips(file.stat().st_size, 15)
        assert flip_and_compare(path, file, flips) == len(flips), file.name


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("write", [write_with_seal, write_plain, write_directory])
def test_verify_agrees_with_loading_on_every_byte(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "c.ckpt"
    write(path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        flips = [(place, place % 8) for place in range(file.stat().st_size)]
        refused = flip_and_compare(path, file, flips)
        assert refused == len(flips) or write is write_plain, file.name


@pytest.mark.parametrize("write", [write_with_seal, write_plain])
def test_verify_agrees_with_loading_on_every_length_of_the_end(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for missing in range(1, NEAR_THE_END, 3):
        (tmp_path / "torn").write_bytes(data[:-missing])
        assert not outcome(verify, tmp_path / "torn")[0]
        assert not outcome(load, tmp_path / "torn")[0]


class Bait:
    """Makes a directory when it is unpickled."""

    def __init__(self, bait: Path) -> None:
        self.bait = bait

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.bait),))


def test_verify_refuses_what_loading_refuses_a_file_that_executes_code(tmp_path: Path, capsys: Any) -> None:
    """Verify said "complete and undamaged" of a pickle bomb: its checksums were right."""
    bait = tmp_path / "executed"
    torch.save({"state_dict": Bait(bait)}, tmp_path / "plain")
    files.save_file({"state_dict": Bait(bait)}, tmp_path / "sealed")
    for name in ("plain", "sealed"):
        assert commands.main(["verify", str(tmp_path / name)]) == 1
        said = capsys.readouterr()
        assert "only executing its code would load" in said.err
        assert "complete" not in said.out
    assert not bait.exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.pt", ".metadata"])
def test_verify_refuses_a_directory_that_executes_code(tmp_path: Path, capsys: Any, name: str) -> None:
    path, bait = tmp_path / "c.ckpt", tmp_path / "executed"
    write_directory(path)
    size = (path / name).stat().st_size
    if name == ".metadata":
        (path / name).write_bytes(pickle.dumps(Bait(bait)))
    else:
        torch.save(Bait(bait), path / name)
    if name == "__0_0.distcp":  # of the length that the index speaks of
        (path / name).write_bytes((path / name).read_bytes().ljust(size, b"\0"))
    files.write_manifest(path, files.describe_files(path, [".metadata", "__0_0.distcp", "meta.pt"]), 1)
    assert commands.main(["verify", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    assert not bait.exists()


def test_verify_reads_a_large_tensor_without_keeping_it(tmp_path: Path, capsys: Any) -> None:
    files.save_file({"weights": torch.zeros((1 << 24) + 16), "small": torch.ones(3)}, tmp_path / "c.ckpt")
    assert commands.main(["verify", str(tmp_path / "c.ckpt")]) == 0
    assert "c.ckpt: complete and undamaged, and it loads" in capsys.readouterr().out


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_torch_passes_over_the_seal(tmp_path: Path, mmap: bool) -> None:
    files.save_file(CONTENT, tmp_path / "c.ckpt")
    assert_equal(torch.load(tmp_path / "c.ckpt", weights_only=True, mmap=mmap), CONTENT)
