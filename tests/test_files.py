"""Checkpoint files: whole or not there, damage is found and named, nothing in them is executed; full disks."""

from __future__ import annotations

import copy
import errno
import io
import os
import random
import resource
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import build, build_state, everything, train
from test_sharded import assert_equal, mutate, save

from lightning_scape import CheckpointError, ScapeConfig, newest_checkpoint
from lightning_scape.checkpoint.atomic_files import load_file, load_stream, save_file
from lightning_scape.checkpoint.inspection import verify
from lightning_scape.checkpoint.temporaries import MANIFEST
from lightning_scape.hosts.checkpoint_io import ScapeCheckpointIO
from lightning_scape.tools import commands

CONFIG = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)


def content() -> dict[str, Any]:
    return {"weights": torch.arange(3000.0), "step": 3, "name": "a", "optimizer": build_state()}


# ------------------------------------------------------------------------------------------------ damage


def test_two_thousand_mutated_files_are_refused_or_read_as_they_were() -> None:
    original = content()
    file = io.BytesIO()
    torch.save(original, file)
    rng, refused, harmless, texts = random.Random(0), 0, 0, []
    for _ in range(2500):
        data = mutate(file.getvalue(), rng)
        try:
            loaded = load_stream(io.BytesIO(data), "c.ckpt")
        except CheckpointError as error:
            refused += 1
            texts.append(str(error))
        else:  # an alignment gap, a time stamp, bytes replaced by the same
            harmless += 1
            assert_equal(loaded, original)
    assert refused + harmless == 2500
    assert refused > 2000
    assert all("'c.ckpt'" in text and len(text) > 60 for text in texts)


def test_a_record_that_claims_to_be_compressed_is_damaged() -> None:
    """Torch's reader would take for its content what the memory held before: the record itself, if read shortly ago."""
    file = io.BytesIO()
    torch.save(content(), file)
    data, entries = file.getvalue(), 0
    place = data.find(b"PK\x01\x02")
    while place >= 0:
        spoiled = bytearray(data)
        spoiled[place + 10] = zipfile.ZIP_DEFLATED
        with pytest.raises(CheckpointError, match="is damaged: its record '.*' is not as it was written"):
            load_stream(io.BytesIO(bytes(spoiled)), "c.ckpt")
        place, entries = data.find(b"PK\x01\x02", place + 1), entries + 1
    assert entries > 10


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))


def replace(tree: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    if value is leaves:  # a mark: remove it
        del tree[path[-1]]
    else:
        tree[path[-1]] = value


JUNK = [leaves, None, -1, 2**40, 1.5, "x", [], {}, torch.zeros(2), torch.zeros(7, 5, dtype=torch.uint8), float("nan")]


def test_states_with_any_part_replaced_are_refused_unchanged_or_taken() -> None:
    """Never an error of another kind, never half loaded: a valid file may still hold an invalid state."""
    state = build_state()
    params, optimizer = build(CONFIG, torch.float32)
    train(params, optimizer, 0, range(3))
    rng, refused, taken, texts = random.Random(1), 0, 0, []
    places = [path for path in leaves(state) if path]
    before = [t.clone() for t in everything(params, optimizer)]
    for _ in range(700):
        spoiled = copy.deepcopy(state)
        path = rng.choice(places)
        replace(spoiled, path, rng.choice(JUNK))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                optimizer.load_state_dict(spoiled)
            except ValueError as error:
                refused += 1
                texts.append((str(error), path))
                assert all(torch.equal(a, b) for a, b in zip(before, everything(params, optimizer), strict=True)), path
            else:  # an option, a name, a counter's other value
                taken += 1
                params, optimizer = build(CONFIG, torch.float32)
                train(params, optimizer, 0, range(3))
    assert refused > 300
    assert taken > 0
    assert all(len(text) > 40 for text, _ in texts)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_bytes(b""), "is torn: it is empty"),
        (
            lambda path: path.write_text("hello"),
            "must be a zip archive of torch.save, got one that starts with b'hell'",
        ),
        (lambda path: zip_of(path, "a.txt"), "got a zip archive without `data.pkl`"),
        (lambda path: torch.save(Path("x"), path), "would load: Unpick.* GLOBAL pathlib.*add_safe_globals"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, make: Callable[[Path], Any], words: str) -> None:
    make(tmp_path / "c.ckpt")
    with pytest.raises(CheckpointError, match=words) as caught:
        load_file(tmp_path / "c.ckpt")
    assert str(tmp_path / "c.ckpt") in str(caught.value)
    assert str(caught.value).isprintable()  # torch's own words have a terminal's colours


def zip_of(path: Path, name: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, "x")


def test_a_checkpoint_executes_code_only_for_a_user_who_asks(tmp_path: Path) -> None:
    """As torch's `weights_only=False`, also of a file with our checksums, which are compared before."""
    bait = tmp_path / "executed"

    class Bait:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(bait),))

    torch.save({"state_dict": Bait()}, tmp_path / "c.ckpt")
    for weights_only in (None, True):
        with pytest.raises(CheckpointError, match="only executing its code would load"):
            ScapeCheckpointIO().load_checkpoint(tmp_path / "c.ckpt", weights_only=weights_only)
    assert not bait.exists()
    ScapeCheckpointIO().load_checkpoint(tmp_path / "c.ckpt", weights_only=False)
    assert bait.exists()
    ScapeCheckpointIO().save_checkpoint({"path": Path("a")}, tmp_path / "own.ckpt")
    with pytest.raises(CheckpointError, match="load it with `weights_only=False`"):
        ScapeCheckpointIO().load_checkpoint(tmp_path / "own.ckpt")
    assert ScapeCheckpointIO().load_checkpoint(tmp_path / "own.ckpt", weights_only=False) == {"path": Path("a")}
    damaged = bytearray((tmp_path / "own.ckpt").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "own.ckpt").write_bytes(damaged)
    with pytest.raises(CheckpointError, match="is not as it was written"):
        ScapeCheckpointIO().load_checkpoint(tmp_path / "own.ckpt", weights_only=False)


def test_plain_torch_reads_the_file(tmp_path: Path) -> None:
    ScapeCheckpointIO().save_checkpoint(content(), tmp_path / "sub" / "c.ckpt")
    assert_equal(torch.load(tmp_path / "sub" / "c.ckpt", weights_only=True), content())
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["c.ckpt"]


# ------------------------------------------------------------------------------------------------ the newest


def test_the_newest_complete_checkpoint_is_found_and_torn_ones_are_named(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
    params, optimizer = build(CONFIG, torch.float32)
    train(params, optimizer, 0, range(2))
    save_file({"a": 1}, tmp_path / "1.ckpt")
    save(tmp_path / "2.ckpt", optimizer, {})
    save_file({"a": 3}, tmp_path / "3.ckpt")
    save(tmp_path / "4.ckpt", optimizer, {})
    for age, name in enumerate(("4.ckpt", "3.ckpt", "2.ckpt", "1.ckpt")):
        path = tmp_path / name
        os.utime(path / "manifest.json" if path.is_dir() else path, ns=(0, 10**18 - age))
    assert newest_checkpoint(tmp_path) == tmp_path / "4.ckpt"
    (tmp_path / "4.ckpt" / "__0_0.distcp").write_bytes(b"short")
    torn = (tmp_path / "3.ckpt").read_bytes()[:-100]
    (tmp_path / "3.ckpt").write_bytes(torn)
    os.utime(tmp_path / "3.ckpt", ns=(0, 10**18 - 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert newest_checkpoint(tmp_path, "*.ckpt") == tmp_path / "2.ckpt"
    texts = [str(warning.message) for warning in caught]
    assert "4.ckpt' is torn: __0_0.distcp has 5 bytes" in texts[0]
    assert "3.ckpt'" in texts[1]
    # Killed between the two renames that put a directory in another's place: both are complete.
    aside = tmp_path / f".2.ckpt.{'0' * 16}.previous"
    (tmp_path / "2.ckpt").rename(aside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert newest_checkpoint(tmp_path, "*.ckpt") == aside
    verify(aside)


def test_the_newest_is_of_the_latest_step_whatever_the_times_of_files(tmp_path: Path) -> None:
    """A copy, a restored backup or a clock that was set back made a resume begin from an older one."""
    whole = {"step": 4, "optimizer": {"scape": {"step": 9}}}
    contents = {
        "trainer": {"global_step": 7, "step": 100},
        "fabric": whole,
        "litgpt": {"iter_num": 800, "step_count": 8},
        "sparseloco": {"optimizer_states": [{"sparseloco": {"progress": {"steps": 6}}}]},
        "user": OrderedDict(step=5),
        "same": {"global_step": 5},
        "weights": {"a": torch.ones(2)},
        "odd": {"global_step": True, "step": -1},
    }
    for content, name in zip(contents.values(), contents, strict=True):
        save_file(content, tmp_path / f"{name}.ckpt")
    params, optimizer = build(CONFIG, torch.float32)
    train(params, optimizer, 0, range(2))
    save(tmp_path / "directory.ckpt", optimizer, {})
    save(tmp_path / "counted.ckpt", optimizer, {}, global_step=3)
    order = ["fabric", "litgpt", "trainer", "sparseloco", "same", "user", "counted", "directory", "odd", "weights"]
    for age, name in enumerate(reversed(order)):
        path = tmp_path / f"{name}.ckpt"
        os.utime(path / "manifest.json" if path.is_dir() else path, ns=(0, 10**18 - age))
    os.utime(tmp_path / "same.ckpt", ns=(0, 10**18 + 1))
    os.utime(tmp_path / "odd.ckpt", ns=(0, 10**18 + 1))
    for name in order:
        assert newest_checkpoint(tmp_path, "*.ckpt") == tmp_path / f"{name}.ckpt"
        path = tmp_path / f"{name}.ckpt"
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_damaged_one_of_the_latest_step_is_named_and_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_file({"global_step": step, "w": torch.ones(9)}, tmp_path / f"{step}.ckpt")
    content = bytearray((tmp_path / "3.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "3.ckpt").write_bytes(content)
    (tmp_path / "2.ckpt").write_bytes(b"PK")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert newest_checkpoint(tmp_path) == tmp_path / "1.ckpt"
    assert sorted(str(warning.message)[:12] for warning in caught) == ["Passed over:"] * 2
    assert all(any(name in str(each.message) for each in caught) for name in ("2.ckpt", "3.ckpt"))


def test_one_that_does_not_fit_into_memory_is_named_and_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save_file({"global_step": step}, tmp_path / f"{step}.ckpt")

    def check(path: Path) -> None:
        if path.name == "2.ckpt":
            raise MemoryError

    with pytest.warns(UserWarning, match=r"Passed over: .*2\.ckpt': MemoryError"):
        assert newest_checkpoint(tmp_path, check=check) == tmp_path / "1.ckpt"


def test_files_of_another_kind_are_left_to_their_users_check(tmp_path: Path) -> None:
    for age, name in enumerate(("a.bin", "b.bin")):
        (tmp_path / name).write_bytes(b"of another kind")
        os.utime(tmp_path / name, ns=(0, 10**18 - age))
    assert newest_checkpoint(tmp_path, check=lambda path: None) == tmp_path / "a.bin"


def test_the_newest_of_litgpts_folders_is_the_file_in_it(tmp_path: Path) -> None:
    for number, step in enumerate(("step-00000010", "step-00000020", "final")):
        (tmp_path / step).mkdir()
        save_file({"a": number}, tmp_path / step / "lit_model.pth")
        os.utime(tmp_path / step / "lit_model.pth", ns=(0, 10**18 + number))
    (tmp_path / "logs").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert newest_checkpoint(tmp_path) == tmp_path / "final" / "lit_model.pth"
    (tmp_path / "final" / "lit_model.pth").write_bytes(b"")
    with pytest.warns(UserWarning, match="final/lit_model.pth' is torn"):
        assert newest_checkpoint(tmp_path) == tmp_path / "step-00000020" / "lit_model.pth"
    verify(tmp_path / "step-00000010")


def test_a_newest_checkpoint_without_its_end_is_named(tmp_path: Path) -> None:
    """The table of an archive that it holds, a rank's generators, was read in place of its own: it told no step."""
    inner = io.BytesIO()
    torch.save({"a": 1}, inner)
    archive = torch.frombuffer(bytearray(inner.getvalue()), dtype=torch.uint8)
    for step in (1, 2):
        save_file({"global_step": step, "rng": archive}, tmp_path / f"{step}.ckpt")
    whole = (tmp_path / "2.ckpt").read_bytes()
    (tmp_path / "2.ckpt").write_bytes(whole[:-100])
    with pytest.warns(UserWarning, match=r"Passed over: The checkpoint '.*2\.ckpt'"):
        assert newest_checkpoint(tmp_path) == tmp_path / "1.ckpt"


def test_the_tool_checks_all_that_it_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": 1}, tmp_path / "good")
    (tmp_path / "bad").write_bytes(b"PK")
    assert commands.main(["verify", str(tmp_path / "none"), str(tmp_path / "bad"), str(tmp_path / "good")]) == 1
    said = capsys.readouterr()
    assert f"must be at '{tmp_path}/none', got nothing there" in said.err
    assert f"{tmp_path}/bad'" in said.err
    assert f"{tmp_path}/good: complete and undamaged" in said.out


def test_the_tool_takes_the_folder_that_litgpt_saved(tmp_path: Path) -> None:
    """``verify`` and ``resume_path`` took it, and ``consolidate`` asked for a manifest."""
    save_file({"a": 1}, tmp_path / "step-1" / "lit_model.pth")
    assert commands.main(["consolidate", str(tmp_path / "step-1"), str(tmp_path / "one")]) == 0
    assert load_file(tmp_path / "one") == {"a": 1}


def test_the_tool_does_not_write_over_what_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": 1}, tmp_path / "c")
    before = (tmp_path / "c").read_bytes()
    for target in (tmp_path / "c", tmp_path / "." / "c", tmp_path):
        assert commands.main(["consolidate", str(tmp_path / "c"), str(target)]) == 1
        assert "FILE must be a free name or another file, got" in capsys.readouterr().err
    assert (tmp_path / "c").read_bytes() == before
    part = tmp_path / "directory" / "meta.pt"
    part.parent.mkdir()
    (part.parent / MANIFEST).write_text("")
    part.write_text("mine")
    for target in (part, part.with_name("new")):
        assert commands.main(["consolidate", "--force", str(tmp_path / "c"), str(target)]) == 1
        assert "inside a checkpoint, which must stay as it was written" in capsys.readouterr().err
    assert (part.read_text(), part.with_name("new").exists()) == ("mine", False)
    assert commands.main(["consolidate", str(tmp_path / "none"), str(tmp_path / "d")]) == 1
    assert "got nothing there" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ disks


def assert_the_old_one_stays(path: Path, write: Callable[[], None], number: int) -> None:
    """``write`` fails with this errno, says so, and leaves what was there."""
    old = {p.name: p.read_bytes() for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()}
    with pytest.raises(OSError, match="could not be written.*untouched") as caught:
        write()
    assert caught.value.errno == number
    assert str(path) in str(caught.value)
    verify(path)
    assert old == {p.name: p.read_bytes() for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file()}
    assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_write_that_fails_half_way_leaves_the_checkpoint_before(tmp_path: Path, sharded: bool) -> None:
    """A limit on the size of files stands for the disk: the write breaks off in the same place."""
    params, optimizer = build(CONFIG, torch.float32)
    train(params, optimizer, 0, range(2))
    big = {"weights": torch.zeros(1 << 20)}

    def write(model: dict[str, Any]) -> None:
        if sharded:
            save(tmp_path / "c.ckpt", optimizer, model)
        else:
            save_file({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "c.ckpt")

    write({})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # Python ignores SIGXFSZ: write() fails instead
    try:
        assert_the_old_one_stays(tmp_path / "c.ckpt", lambda: write(big), errno.EFBIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    write(big)
    verify(tmp_path / "c.ckpt")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_directory_that_is_no_checkpoint_is_never_replaced(tmp_path: Path, sharded: bool) -> None:
    _, optimizer = build(CONFIG, torch.float32)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(IsADirectoryError, match="holds other things"):
        save(tmp_path / "out", optimizer, {}) if sharded else save_file({}, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    # A checkpoint of the other kind is replaced, either way.
    save(tmp_path / "c", optimizer, {})
    save_file({"a": 1}, tmp_path / "c")
    assert load_file(tmp_path / "c") == {"a": 1}
    save(tmp_path / "c", optimizer, {})
    verify(tmp_path / "c")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system (Linux, root); the test before covers the same code")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_is_named_and_the_checkpoint_before_stays(small_disk: Path, sharded: bool) -> None:
    params, optimizer = build(CONFIG, torch.float32)
    train(params, optimizer, 0, range(2))

    def write(model: dict[str, Any]) -> None:
        if sharded:
            save(small_disk / "c.ckpt", optimizer, model)
        else:
            save_file({"model": model, "optimizer": optimizer.state_dict()}, small_disk / "c.ckpt")

    write({})
    big = {"weights": torch.zeros(1 << 19)}
    assert_the_old_one_stays(small_disk / "c.ckpt", lambda: write(big), errno.ENOSPC)
