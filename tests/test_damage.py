"""Damaged and foreign checkpoints: an error before anything is used, or a load as if nothing were; nothing executes.

``lightning-scape verify`` says of each what loading it does.
"""

from __future__ import annotations

import copy
import functools
import http.server
import io
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from trainer_helpers import MARKS, weights

from lightning_scape import CheckpointError, FabricScapeStrategy, FabricSparseLoCoStrategy
from lightning_scape.checkpoint.saver import verify

pytestmark = MARKS
KINDS = ["full", "sharded"]
METHODS = ["scape", "sparseloco"]
FLIPS = 60
"""Of each method and kind: 240 in all."""


class Job:
    """One rank of Fabric that has taken three steps, and can save and load."""

    def __init__(self, method: str, kind: str, steps: int = 3) -> None:
        strategy: Any = FabricScapeStrategy(sparsity=0.8, sparsity_warmup_steps=0, state_dict_type=kind)
        if method == "sparseloco":
            strategy = FabricSparseLoCoStrategy(sync_every=2, density=0.5, state_dict_type=kind)
        self.fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
        self.fabric.launch()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        self.model, self.optimizer = self.fabric.setup(self.net, torch.optim.AdamW(self.net.parameters(), lr=1e-2))
        for step in range(steps):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            self.fabric.backward(self.model(inputs).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps = steps

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "step": self.steps, "note": "as it was"}

    def save(self, path: Path, **more: Any) -> None:
        self.fabric.save(path, {**self.state(), **more})

    def load(self, path: Path | str, **how: Any) -> dict[str, Any]:
        state = self.state()
        self.fabric.load(path, state, **how)
        return {name: state[name] for name in ("step", "note")}

    def held(self) -> list[Any]:
        """All that a load may change."""
        return [weights(self.net), copy.deepcopy(self.optimizer.state_dict())]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]


class Saved:
    """A checkpoint, a job that reads it, and what that holds before and after."""

    def __init__(self, folder: Path, method: str, kind: str) -> None:
        self.path, self.beginning = folder / "c.ckpt", folder / "beginning.ckpt"
        Job(method, kind).save(self.path)
        self.job = Job(method, "full", steps=1)
        self.job.save(self.beginning)
        self.job.load(self.path)
        self.after = self.job.held()
        self.job.load(self.beginning)
        self.before = self.job.held()

    def loads(self, what: str) -> bool:
        """Whether it does, spoiled as it is; if so it is the whole one, else nothing has changed. Verify agrees."""
        said = refusal(self.job, self.path)
        assert self.path.name in (said or self.path.name), what
        assert same(self.job.held(), self.before if said else self.after), what
        if said is None:
            self.job.load(self.beginning)
        try:
            verify(self.path)
        except CheckpointError:
            verified = False
        else:
            verified = True
        assert verified == (said is None), what
        return verified


def refusal(job: Job, path: Path) -> str | None:
    try:
        job.load(path)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.fixture(params=[(method, kind) for method in METHODS for kind in KINDS], ids="-".join)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    return Saved(tmp_path, *request.param)


def test_flipped_bits_are_found_or_change_nothing(saved: Saved) -> None:
    rng, refused = random.Random(0), 0
    files = files_of(saved.path)
    for turn in range(FLIPS):
        file = files[turn % len(files)]
        data = bytearray(file.read_bytes())
        # Every other one near the end, where an archive has its table of contents.
        end = turn // len(files) % 2
        place = len(data) - rng.randrange(1, min(400, len(data))) if end else rng.randrange(len(data))
        whole, bit = data[place], 1 << rng.randrange(8)
        data[place] ^= bit
        file.write_bytes(data)
        refused += not saved.loads(f"{file.name}: {bit} in byte {place} of {len(data)}")
        data[place] = whole
        file.write_bytes(data)
    assert refused > FLIPS // 2
    assert saved.loads("whole again")


def test_cut_files_are_found(saved: Saved) -> None:
    """Of each file a dozen lengths, and some of the last bytes'; and a file of a directory that is gone."""
    refused = cut = 0
    for file in files_of(saved.path):
        data = file.read_bytes()
        lengths = {*range(0, len(data), max(37, len(data) // 12)), *range(max(0, len(data) - 40), len(data), 5)}
        for length in sorted(lengths):
            file.write_bytes(data[:length])
            refused += not saved.loads(f"{file.name}: {length} of {len(data)} bytes")
            cut += 1
        if saved.path.is_dir():
            file.unlink()
            refused += not saved.loads(f"{file.name}: gone")
            cut += 1
        file.write_bytes(data)
    assert refused > 0.7 * cut
    assert saved.loads("whole again")


# ------------------------------------------------------------------------------------------------ strangers' files


class Bait:
    """Makes a directory when it is unpickled."""

    def __init__(self, bait: Path) -> None:
        self.bait = bait

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.bait),))


def test_nothing_in_a_file_executes_but_by_the_users_word(tmp_path: Path) -> None:
    job, bait, path = Job("scape", "full"), tmp_path / "executed", tmp_path / "c.ckpt"
    job.save(path)
    whole = torch.load(path, weights_only=True)
    torch.save({**whole, "note": Bait(bait)}, path)
    for how in ({}, {"weights_only": True}):
        with pytest.raises(CheckpointError, match="only executing its code would load"):
            job.load(path, **how)
    with pytest.raises(CheckpointError, match="only executing its code would load"):
        verify(path)
    assert not bait.exists()
    job.load(path, weights_only=False)
    assert bait.exists()


def test_nothing_at_an_address_executes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning reads it, and by itself executes what comes by http."""
    job, bait = Job("scape", "full"), tmp_path / "executed"
    job.save(tmp_path / "good.ckpt")
    torch.save({**torch.load(tmp_path / "good.ckpt", weights_only=True), "note": Bait(bait)}, tmp_path / "bad.ckpt")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "downloads"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert job.load(f"{address}/good.ckpt")["step"] == 3
        with pytest.raises(pickle.UnpicklingError, match="weights_only"):
            job.load(f"{address}/bad.ckpt")
        server.shutdown()
    assert not bait.exists()


@pytest.mark.parametrize("method", METHODS)
def test_nothing_in_a_directory_executes(tmp_path: Path, method: str) -> None:
    """A bait in the place of each file, a plain pickle and one of torch's."""
    job, bait = Job(method, "full"), tmp_path / "executed"
    Job(method, "sharded").save(tmp_path / "whole.ckpt")
    for file in files_of(tmp_path / "whole.ckpt"):
        torchs = io.BytesIO()
        torch.save(Bait(bait), torchs)
        for content in (pickle.dumps(Bait(bait)), torchs.getvalue()):
            path = tmp_path / "spoiled.ckpt"
            shutil.copytree(tmp_path / "whole.ckpt", path)
            (path / file.name).write_bytes(content)
            before = job.held()
            assert "spoiled.ckpt" in (refusal(job, path) or "spoiled.ckpt")
            assert same(job.held(), before), file.name
            assert not bait.exists(), file.name
            shutil.rmtree(path)


def save_without_checksums(path: Path) -> None:
    """Torch's; a save of ours has them all the same."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weights": 1}, path)
        Job("scape", "full").save(path.with_suffix(".ours"))
    finally:
        torch.serialization.set_crc32_options(True)
    verify(path.with_suffix(".ours"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b""), r"c.ckpt' \(0 bytes\)"),
        (lambda path: path.write_text("hello"), "no file of torch.save"),
        (lambda path: path.mkdir(), "c.ckpt"),
        (lambda path: torch.save({"weights": 1}, path), "model|optimizer"),
        (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), "torch's old format"),
        (lambda path: save_without_checksums(path), r"set_crc32_options\(False\)"),
        (lambda path: None, "c.ckpt"),
    ],
    ids=["empty", "text", "folder", "other", "old", "unchecked", "none"],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, make: Callable[[Path], Any], words: str) -> None:
    job = Job("scape", "full")
    before = job.held()
    make(tmp_path / "c.ckpt")
    with pytest.raises((ValueError, OSError, KeyError), match=words):
        job.load(tmp_path / "c.ckpt")
    assert same(job.held(), before)


def test_plain_torch_reads_a_directorys_model_from_one_file(tmp_path: Path) -> None:
    job = Job("scape", "sharded")
    job.save(tmp_path / "c.ckpt")
    rest = torch.load(tmp_path / "c.ckpt" / "meta.pt", weights_only=True)["rest"]
    assert same(dict(rest["model"]), dict(job.net.state_dict()))


def test_plain_torch_reads_a_file(tmp_path: Path) -> None:
    job = Job("scape", "full")
    job.save(tmp_path / "c.ckpt")
    for mmap in (False, True):
        content = torch.load(tmp_path / "c.ckpt", weights_only=True, mmap=mmap)
        assert same(dict(content["model"]), dict(job.net.state_dict()))
        assert content["step"] == 3
