"""Checkpoints that a stranger has made, with every checksum right: refused with a reason, or read as they say."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import build, train
from test_files import leaves, replace
from test_sharded import mutate, numbered, save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_scape import CheckpointError, ScapeConfig, SparseLoCo, newest_checkpoint, resume_path
from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint import dcp, pickles
from lightning_scape.checkpoint.inspection import step_of, verify
from lightning_scape.checkpoint.rng import set_rng_state
from lightning_scape.checkpoint.saver import Content, SavedContent, Saver, consolidate
from lightning_scape.comm.collectives import Communicator
from lightning_scape.tools import commands

WEIGHTS = torch.arange(12.0).reshape(3, 4)


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    """Opening a pipe waits for a writer."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A directory that is one checkpoint, to be spoiled."""
    return shutil.copytree(written, tmp_path / "c")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix, a number, and a tensor without entries."""
    path = tmp_path_factory.mktemp("written") / "c"
    tensors = {"m.w": WEIGHTS, "m.n": torch.tensor(7), "m.e": torch.zeros(0, 3)}
    table = {"format": 1, "models": {"m": dict.fromkeys(("w", "n", "e"))}, "optimizers": {}, "rest": {"step": 3}}
    chunks = {key: dcp.Chunk.whole(tensor) for key, tensor in tensors.items()}
    dcp.write_directory(path, chunks, dcp.as_bytes(table), Communicator.alone())
    return path


def manifest(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text().rsplit("\n", 2)[0])
    return content


def seal(folder: Path, body: str) -> None:
    digest = hashlib.blake2b(body.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    (folder / "manifest.json").write_bytes(f"{body}\n{digest}\n".encode(errors="surrogatepass"))


def change(folder: Path, act: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest as a stranger would: all its digests and its seal are right."""
    content = manifest(folder)
    content["files"] = {name: described for name, described in files.describe_files(folder, content["files"]).items()}
    act(content)
    seal(folder, json.dumps(content))


# ------------------------------------------------------------------------------------------------ the index


def test_the_index_is_data_of_ours_and_torch_reads_its_own(folder: Path, tmp_path: Path) -> None:
    file, *_ = {part[0] for entry in manifest(folder)["tensors"].values() for part in entry["parts"]}
    entry = manifest(folder)["tensors"]["m.w"]
    assert (file, entry["dtype"], entry["shape"]) == ("__0_0.distcp", "float32", [3, 4])
    assert [part[3:] for part in entry["parts"]] == [[0, 3]]
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    content = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert torch.equal(content["m.w"], WEIGHTS)


def check_content(folder: Path) -> None:
    verify(folder)
    model = SavedContent(folder).model("m")
    assert torch.equal(model["w"], WEIGHTS)
    assert model["n"].shape == ()
    assert int(model["n"]) == 7
    assert model["e"].shape == (0, 3)


def part(content: dict[str, Any], key: str = "m.w") -> list[Any]:
    found: list[Any] = content["tensors"][key]["parts"][0]
    return found


def set_part(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: part(content).__setitem__(place, value)


def set_entry(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["tensors"]["m.w"].__setitem__(name, value)


def cut(content: dict[str, Any], *rows: tuple[int, int]) -> None:
    content["tensors"]["m.w"]["parts"] = [[*part(content)[:3], first, count] for first, count in rows]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda c: c.update(tensors=None), "an index of tensors, got what is none: it must be a dict"),
        (lambda c: c.update(tensors=[]), "it must be a dict, got a list"),
        (lambda c: c["tensors"].update({"m.w": 3}), "must have dtype, shape and parts"),
        (lambda c: c["tensors"].pop("m.w"), "its index must hold 'm.w', got none"),
        (set_entry("dtype", "device"), "must be of a dtype of torch"),
        (set_entry("dtype", []), "must be of a dtype of torch"),
        (set_entry("shape", [-3, 4]), "must have a shape of whole numbers"),
        (set_entry("shape", [True, 4]), "must have a shape of whole numbers"),
        (set_entry("shape", ["3", 4]), "must have a shape of whole numbers"),
        (set_entry("shape", [3.0, 4]), "must have a shape of whole numbers"),
        (set_entry("shape", [10**30]), "must have a shape of whole numbers"),
        (set_entry("shape", [2**40, 2**40]), "less than 2\\*\\*63 bytes"),
        (set_entry("shape", [1] * 100), "must have a shape of whole numbers"),
        (set_entry("shape", [10**12, 4]), "must be all of its .* rows, got 3"),
        (set_entry("shape", [3, 10**12]), "must have .* bytes or more"),
        (set_entry("shape", [2, 4]), "must be all of its .* rows, got 3"),
        (set_entry("shape", []), "must be all of its .* rows, got 3"),
        (set_entry("shape", [3, 5]), "must hold a tensor of torch.float32"),
        (set_entry("dtype", "int32"), "must hold a tensor of torch.int32"),
        (set_entry("parts", []), "must be all of its .* rows, got 0"),
        (set_entry("parts", None), "must have a list of parts"),
        (set_entry("parts", [[]]), "must be a file and 4 whole numbers"),
        (lambda c: cut(c, (0, 1), (2, 1)), "each of its rows once, got row 1 not once"),
        (lambda c: cut(c, (0, 2), (1, 2)), "each of its rows once, got row 2 not once"),
        (lambda c: cut(c, (0, 2), (2, 1)), "must not share bytes"),
        (lambda c: cut(c, (0, 3), (3, 0)), "must lie in"),
        (lambda c: part(c).__setitem__(slice(None), part(c, "m.n")[:3] + [0, 3]), "parts must not share bytes"),
        (set_part(0, "/etc/passwd"), "in a file with a digest"),
        (set_part(0, "../c/__0_0.distcp"), "in a file with a digest"),
        (set_part(0, "manifest.json"), "in a file with a digest"),
        (set_part(0, None), "in a file with a digest"),
        (set_part(1, -1), "4 whole numbers >= 0"),
        (set_part(1, 10**9), "must lie in __0_0.distcp"),
        (set_part(2, 10**15), "must lie in __0_0.distcp"),
        (set_part(2, 0), "must lie in|bytes or more"),
        (set_part(2, 100), "is torn or damaged"),
        (set_part(3, 1), "each of its rows once"),
        (set_part(4, True), "4 whole numbers >= 0"),
        (set_part(4, 10**40), "4 whole numbers >= 0"),
    ],
)
def test_an_index_must_tile_each_tensor_with_bytes_of_its_files(folder: Path, act: Any, words: str) -> None:
    """Rows that no part held were what the memory had held before; a part could lie in any file of the machine."""
    change(folder, act)
    with pytest.raises(CheckpointError, match=words):
        SavedContent(folder).model("m")
    with pytest.raises(CheckpointError):
        verify(folder)


def test_an_expanded_or_foreign_tensor_in_a_part_is_none_of_it(folder: Path) -> None:
    for tensor in (torch.zeros(3, 4, device="meta"), torch.zeros(3, 4).to_sparse(), [1], torch.zeros(4, 3)):
        data, (name, place, length, *_) = dcp.as_bytes(tensor), part(manifest(folder))
        content = (folder / name).read_bytes()
        content = content.ljust(place + length, b"\0") + data
        (folder / name).write_bytes(content)
        at = len(content) - len(data)
        change(folder, lambda c, at=at, data=data: part(c).__setitem__(slice(1, 3), [at, len(data)]))
        with pytest.raises(CheckpointError, match="must hold a tensor of torch.float32"):
            dcp.Directory(folder).tensor("m.w")


# ------------------------------------------------------------------------------------------------ manifests


def described(name: str, size: Any = 1, digest: Any = "0" * 32) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["files"].__setitem__(name, [size, digest])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda c: c.update(kind="other"), "must hold the kind"),
        (lambda c: c.update(format="1"), "as `format`, got 1"),
        (lambda c: c.update(format=True), "as `format`, got True"),
        (lambda c: c.update(format=2), "must be at most 1, got 2"),
        (lambda c: c.update(format=float("nan")), "JSON that can be read"),
        (lambda c: c.update(world_size=0), "as `world_size`, got 0"),
        (lambda c: c.update(world_size=10**30), "as `world_size`, got 1000"),
        (lambda c: c.update(files=[]), "a dict of files"),
        (lambda c: c.update(files={}), "in a file with a digest"),
        (lambda c: c["files"].pop("meta.pt"), "must list meta.pt"),
        (lambda c: c["files"].pop("__0_0.distcp"), "in a file with a digest"),
        (described("../secret"), "plain names"),
        (described("/etc/passwd"), "plain names"),
        (described("a\\b"), "plain names"),
        (described(""), "plain names"),
        (described(".."), "plain names"),
        (described("a" * 300), "plain names"),
        (described("a\0b"), "plain names"),
        (described("\ud800"), "plain names|cannot be read"),
        (described("Manifest.json"), "plain names"),
        (described("META.PT"), "upper and lower case"),
        (described("more", "1"), "a size and a digest"),
        (described("more", True), "a size and a digest"),
        (described("more", -1), "a size >= 0"),
        (described("more", 1, "abc"), "a digest of 32 digits"),
        (described("more"), "torn: more is missing"),
        (lambda c: c["files"].__setitem__("more", []), "a size and a digest"),
    ],
)
def test_odd_manifests_are_refused_in_words(folder: Path, act: Any, words: str) -> None:
    change(folder, act)
    with pytest.raises(CheckpointError, match=words):
        verify(folder)


@pytest.mark.parametrize(
    "body", ["null", "[]", "{", "", "[" * 100_000, '{"files": {}, "files": {}}', '{"format": 1' + "0" * 5000 + "}"]
)
def test_manifests_that_are_no_objects_are_refused_in_words(folder: Path, body: str) -> None:
    seal(folder, body)
    with pytest.raises(CheckpointError, match="The manifest of checkpoint .* must hold"):
        verify(folder)
    (folder / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        verify(folder)


def test_a_file_beside_those_with_a_digest_is_not_read(folder: Path) -> None:
    (folder / "__9_0.distcp").write_bytes(b"of somebody else")
    os.mkfifo(folder / "pipe")
    check_content(folder)


@pytest.mark.parametrize(
    "table",
    [
        [],
        {"models": [], "optimizers": {}, "rest": {}},
        {"models": {"m": 3}, "optimizers": {}, "rest": {}},
        {"models": {"m": {3: None}}, "optimizers": {}, "rest": {}},
        {"models": {}, "optimizers": {"o": []}, "rest": {}},
        {"models": {}, "optimizers": {"o": {}}, "rest": {}},
        {"models": {}, "optimizers": {"o": {"sparseloco": 1}}, "rest": {}},
        {"models": {}, "optimizers": {}, "rest": None},
        {"models": {"m": {"absent": None}}, "optimizers": {}, "rest": {}},
    ],
)
def test_a_table_of_contents_of_odd_shape_is_refused_in_words(folder: Path, table: Any) -> None:
    (folder / "meta.pt").write_bytes(dcp.as_bytes(table))
    change(folder, lambda content: None)
    with pytest.raises(
        CheckpointError, match="must be lightning_scape's table of contents|must be whole, got one that"
    ):
        verify(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 2**31 - 1),
        ("shards", 2**40),
        ("shapes", {0: [3, -1]}),
        ("strides", {}),
        ("tensors", "x"),
        ("mask_shape", [1]),
        ("step", [1]),
        ("config", None),
    ],
)
def test_an_optimizers_facts_of_odd_shape_are_refused_in_words(tmp_path: Path, name: str, value: Any) -> None:
    """A state of 2**31 - 1 ranks, whose residuals are lists in memory, came from a file of 2 kB."""
    _, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), torch.float32)
    path = tmp_path / "c"
    save(path, optimizer, {})
    table = files.load_file(path / "meta.pt")
    table["optimizers"]["optimizer"][name] = value
    (path / "meta.pt").write_bytes(dcp.as_bytes(table))
    change(path, lambda content: None)
    for read in (verify, consolidate):
        with pytest.raises(CheckpointError, match="must be whole, got one that is not"):
            read(path)


# ------------------------------------------------------------------------------------------------ pickles


def nested(depth: int, width: int = 1) -> bytes:
    """A dict with one key: tuples in tuples, each of which has the one before ``width`` times."""
    again = b"q\x00" + b"h\x00" * (width - 1) + (b"\x85" if width == 1 else b"\x86")
    return b"\x80\x02}(" + b"K\x01" + again * depth + b"K\x01u."


def torch_file(path: Path, data: bytes, records: dict[str, bytes] | None = None, seal: bool = True) -> None:
    """What ``torch.save`` would write around a pickle of a stranger's own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {"data.pkl": data, "byteorder": b"little", "version": b"3\n", **(records or {})}.items():
            archive.writestr(f"archive/{name}", content)
    content = file.getvalue()
    if seal:
        end = content[:-2] + b"\0\0"
        sealed = io.BytesIO()
        stream = files.SealedFile(sealed)
        stream.write(end)
        stream.seal()
        content = sealed.getvalue()
    path.write_bytes(content)


@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("data", [nested(200_000), nested(60, 2)], ids=["deep", "wide"])
def test_a_key_whose_hash_does_not_end_is_refused(tmp_path: Path, data: bytes, seal: bool) -> None:
    """Hashing very many tuples in each other ends the process; sixty that hold each other twice take for ever."""
    torch_file(tmp_path / "c.ckpt", data, seal=seal)
    with pytest.raises(CheckpointError, match="a key of more than 1000 parts"):
        verify(tmp_path / "c.ckpt")


def test_what_a_pickle_says_is_told_without_making_it() -> None:
    from collections import OrderedDict

    value = {"a": [1, 2.5, None, True, (1,), ()], "b": OrderedDict(x=b"y"), 3: {4, 5}, "s": "ü" * 300}
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        said = pickles.read(pickle.dumps(value, protocol))
        assert pickles.entry(said, "a") == value["a"]
        assert pickles.entry(said, "s") == value["s"]
        assert pickles.entry(said, "b").maker == ("collections", "OrderedDict")
        assert isinstance(said, pickles.Pairs)
    for data in (b"", b".", b"\x80\x02", b"\x80\x02h\x05.", b"\x80\x02b.", b"\x80\x02(u.", b"\x80\x02]K\x01e."):
        with pytest.raises(ValueError, match="."):
            pickles.read(data)


def with_pickle(data: bytes, spoil: Callable[[bytes], bytes]) -> bytes:
    """A file of ``torch.save`` whose pickle is another, and whose checksums are right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, spoil(content) if name.endswith("data.pkl") else content)
    return file.getvalue()


JUNK = [None, -1, 0, 2**40, 1.5, "x", [], {}, True, float("nan"), "../x", [1], {"a": 1}]


def spoiled_part(tree: Any, rng: random.Random) -> Any:
    """A copy, one part of which is another."""
    tree = copy.deepcopy(tree)
    path = rng.choice([path for path in leaves(tree) if path])
    replace(tree, path, rng.choice(JUNK))
    return tree


def refusals(path: Path) -> int:
    """In how many ways of reading it is refused in words; another error is a fault."""
    refused = 0
    for read in (verify, consolidate, step_of):
        try:
            read(path)
        except CheckpointError:
            refused += 1
    return refused


def test_any_part_may_be_another_and_is_refused_in_words_or_harmless(tmp_path: Path) -> None:
    """A hundred directories whose checksums are right: never an error of another kind."""
    params, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), torch.float32)
    train(params, optimizer, 0, range(2))
    save(tmp_path / "new", optimizer, numbered(params), step=2)
    index, table = manifest(tmp_path / "new"), files.load_file(tmp_path / "new" / "meta.pt")
    rng, refused = random.Random(0), 0
    for turn in range(100):
        path = tmp_path / "c"
        shutil.copytree(tmp_path / "new", path)
        if turn % 3 == 0:
            (path / "meta.pt").write_bytes(dcp.as_bytes(spoiled_part(table, rng)))
        elif turn % 3 == 1:
            (path / "meta.pt").write_bytes(with_pickle(dcp.as_bytes(table), lambda data: mutate(data, rng)))
        if turn % 3 == 2:
            seal(path, json.dumps(spoiled_part(index, rng)))
        else:
            change(path, lambda content: None)
        refused += refusals(path)
        shutil.rmtree(path)
    assert refused > 100


@pytest.mark.few(0)
def test_any_fact_of_a_method_with_an_inner_optimizer_may_be_another(tmp_path: Path) -> None:
    """Sixty tables whose checksums are right: never an error of another kind."""
    net = torch.nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(net.parameters())
    with SparseLoCo(optimizer, sync_every=3) as loco:
        net(torch.ones(6)).sum().backward()
        optimizer.step()
        content = Content(optimizers={"optimizer": loco.sharded_state_dict()})
        Saver(asynchronous=False).save(tmp_path / "new", content, Communicator.alone())
    table = files.load_file(tmp_path / "new" / "meta.pt")
    rng, refused = random.Random(1), 0
    for _ in range(60):
        path = tmp_path / "c"
        shutil.copytree(tmp_path / "new", path)
        (path / "meta.pt").write_bytes(dcp.as_bytes({**table, "optimizers": spoiled_part(table["optimizers"], rng)}))
        change(path, lambda content: None)
        refused += refusals(path)
        shutil.rmtree(path)
    assert refused > 10


# ------------------------------------------------------------------------------------------------ files


def expect_refused(path: Path, words: str) -> None:
    for read in (verify, consolidate):
        with pytest.raises(CheckpointError, match=words):
            read(path)
    with pytest.warns(UserWarning, match="Passed over"):
        assert newest_checkpoint(path.parent, path.name) is None


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe made `verify` and a resume wait for ever."""
    os.mkfifo(tmp_path / "pipe.ckpt")
    expect_refused(tmp_path / "pipe.ckpt", "must be a regular file, got a pipe")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(tmp_path / "s.ckpt"))
        expect_refused(tmp_path / "s.ckpt", "got a socket")
    (tmp_path / "zero.ckpt").symlink_to("/dev/zero")
    expect_refused(tmp_path / "zero.ckpt", "got a device")
    (tmp_path / "loop.ckpt").symlink_to(tmp_path / "loop.ckpt")
    with pytest.raises((CheckpointError, OSError)):
        verify(tmp_path / "loop.ckpt")
    (tmp_path / "folder.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="must hold manifest.json"):
        verify(tmp_path / "folder.ckpt")
    with pytest.warns(UserWarning, match="Passed over"), pytest.raises(CheckpointError, match="one of them must load"):
        resume_path(tmp_path)
    for name in ("pipe.ckpt", "s.ckpt"):
        with pytest.raises(OSError, match="must take a free name"):
            files.save_file({}, tmp_path / name)


@pytest.mark.parametrize("name", ["manifest.json", "meta.pt", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_only_regular_files_of_the_folder_are_opened(folder: Path, name: str, kind: str) -> None:
    """The bytes of a link's target have the right digest; it leads out of the folder all the same."""
    (folder / name).rename(folder.parent / name)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(folder.parent / name)
    with pytest.raises(CheckpointError, match="must be a regular file, got a|is missing"):
        verify(folder)
    with pytest.warns(UserWarning, match="Passed over"):
        assert newest_checkpoint(folder.parent, "c") is None


@pytest.mark.parametrize("seal", [False, True])
def test_a_file_is_not_larger_than_its_bytes(tmp_path: Path, seal: bool) -> None:
    good = pickle.dumps({}, 2)
    with zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (1 << 24))
    expect_refused(tmp_path / "bomb.ckpt", "damaged")
    torch_file(tmp_path / "twice.ckpt", good, {"./data.pkl": good}, seal)
    verify(tmp_path / "twice.ckpt")  # another name, which nobody asks for
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", good)
        archive.writestr("b/data.pkl", good)
    (tmp_path / "two.ckpt").write_bytes(file.getvalue())
    expect_refused(tmp_path / "two.ckpt", "a record twice")


@pytest.mark.parametrize("state", [{}, {"scape": 3, "state": {}}, {"scape": {}, "state": {0: 1}, "param_groups": []}])
def test_converting_a_state_of_odd_shape_is_refused_in_words(tmp_path: Path, state: Any) -> None:
    for content in ({"optimizer": state}, {"optimizer_states": [state]}, [state]):
        files.save_file(content, tmp_path / "c.ckpt")
        verify(tmp_path / "c.ckpt")
        arguments = ["consolidate", "--optimizer", "adamw", str(tmp_path / "c.ckpt"), str(tmp_path / "out")]
        assert commands.main(arguments) == 1
        assert not (tmp_path / "out").exists()


def test_generators_of_odd_shape_are_refused_in_words() -> None:
    packed = torch.frombuffer(bytearray(dcp.as_bytes({"python": (3,), "torch": 1})), dtype=torch.uint8)
    for saved in (torch.zeros(3), torch.zeros(3, dtype=torch.uint8), packed, [1]):
        with pytest.raises(CheckpointError):
            set_rng_state(saved)  # type: ignore[arg-type]
