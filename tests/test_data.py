"""Claims about the corpus, its split, the order of the batches and their position."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_scape.data import END_OF_FILE, Corpus, PythonSource, WindowLoader, read_corpus
from lightning_scape.data.python_source import drop_copies

SMALL = 300_000
"""Bytes of the corpus of most tests."""
CONTEXT = 64


@pytest.fixture(scope="module")
def small_corpus() -> Corpus:
    return read_corpus(val_fraction=0.1, max_bytes=SMALL)


@pytest.fixture
def make_source(small_corpus: Corpus):
    """A PythonSource on the small corpus without reading it again."""

    def make(
        batch_size: int = 8, seed: int = 0, shard: tuple[int, int] | None = (0, 1), context: int = CONTEXT
    ) -> PythonSource:
        source = PythonSource(batch_size, context, seed=seed, shard=shard)
        source.corpus = small_corpus
        return source

    return make


def take(loader: WindowLoader, count: int) -> list[Tensor]:
    batches: list[Tensor] = []
    while len(batches) < count:
        batches += islice(loader, count - len(batches))
    return batches


# ------------------------------------------------------------------------------------------------- the corpus


def test_whole_library_gives_megabytes_split_by_files():
    corpus = read_corpus()
    assert len(corpus.train) > 2_000_000  # even the slimmest distribution's standard library
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.1
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert list(corpus.train_files) == sorted(corpus.train_files)
    names = corpus.train_files + corpus.validation_files
    assert not [name for name in names if {"site-packages", "test", "tests"} & set(Path(name).parts)]
    assert not [name for name in names if "_sysconfigdata" in name]  # it holds the machine's paths


def test_corpus_is_the_files_bytes_with_a_mark_after_each(small_corpus: Corpus):
    root = Path(sysconfig.get_path("stdlib"))
    for part, names in (
        (small_corpus.train, small_corpus.train_files),
        (small_corpus.validation, small_corpus.validation_files),
    ):
        expected = b"".join((root / name).read_bytes() + bytes([END_OF_FILE]) for name in names)
        assert part.dtype == torch.uint8
        assert bytes(part.tolist()) == expected
    assert len(small_corpus.train) + len(small_corpus.validation) <= SMALL


def test_no_validation_file_is_mostly_made_of_training_lines(small_corpus: Corpus):
    root = Path(sysconfig.get_path("stdlib"))
    seen = {line for name in small_corpus.train_files for line in (root / name).read_bytes().split(b"\n")}
    for name in small_corpus.validation_files:
        lines = {line for line in (root / name).read_bytes().split(b"\n") if line.strip()}
        assert len(lines & seen) <= len(lines) / 2, name


def test_a_near_copy_and_the_near_copy_of_that_move_to_training():
    sources = {
        "train": b"a\nb\nc\nd",
        "near": b"a\nb\nc\nx\ny",
        "near_of_near": b"x\ny\nz",
        "own": b"a\np\nq",
    }
    assert drop_copies(sources, ["near", "near_of_near", "own"]) == ["own"]


def test_an_unreadable_file_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for index in range(40):
        (tmp_path / f"module_{index}.py").write_text(f"x = {index}\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    whole = read_corpus(val_fraction=0.3)
    read_bytes = Path.read_bytes
    victim = whole.train_files[3]

    def refuse(path: Path) -> bytes:
        if path.name == victim:
            raise PermissionError(path)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    rest = read_corpus(val_fraction=0.3)
    assert rest.train_files == tuple(name for name in whole.train_files if name != victim)
    assert rest.fingerprint != whole.fingerprint


# ------------------------------------------------------------------------------------------------- determinism

DIGEST = """
import hashlib
from lightning_scape.data import PythonSource
source = PythonSource(batch_size=4, context_length=32, seed=3, val_fraction=0.1, max_bytes=300_000)
batches = [*source.train_dataloader(), *source.val_dataloader()]
print(source.fingerprint, hashlib.sha256(b"".join(batch.numpy().tobytes() for batch in batches)).hexdigest())
"""


@pytest.mark.few(0)
def test_another_process_gets_the_same_batches():
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    other = subprocess.run(
        [sys.executable, "-c", DIGEST], env=env, check=True, capture_output=True, text=True, timeout=120
    )
    source = PythonSource(batch_size=4, context_length=32, seed=3, val_fraction=0.1, max_bytes=SMALL)
    batches = [*source.train_dataloader(), *source.val_dataloader()]
    digest = hashlib.sha256(b"".join(batch.numpy().tobytes() for batch in batches)).hexdigest()
    assert other.stdout.split() == [source.fingerprint, digest]


def test_seeds_differ_in_the_order_and_not_in_validation(make_source):
    first, second = make_source(seed=0), make_source(seed=1)
    assert not torch.equal(torch.cat([*first.train_dataloader()]), torch.cat([*second.train_dataloader()]))
    assert torch.equal(torch.cat([*first.val_dataloader()]), torch.cat([*second.val_dataloader()]))


def test_epochs_differ_in_windows_and_order_and_are_equally_long(make_source):
    loader = make_source().train_dataloader()
    epochs = [torch.cat([*loader]) for _ in range(3)]
    assert {len(epoch) for epoch in epochs} == {8 * len(loader)}
    starts = [{bytes(row[:32].tolist()) for row in epoch} for epoch in epochs]
    assert len(starts[0] & starts[1]) < len(starts[0]) / 10  # another offset: other windows


# ------------------------------------------------------------------------------------------------- batches


def test_batches_are_int64_windows_of_the_corpus(make_source, small_corpus: Corpus):
    text = bytes(small_corpus.train.tolist())
    for batch in take(make_source(batch_size=3).train_dataloader(), 5):
        assert batch.shape == (3, CONTEXT + 1)
        assert batch.dtype == torch.int64
        assert all(bytes(row.tolist()) in text for row in batch)


def test_an_epoch_predicts_every_byte_at_most_once_and_misses_few(make_source, small_corpus: Corpus):
    loader = make_source(batch_size=1).train_dataloader()
    windows, order = loader.dataset.shuffle()
    assert sorted(order.tolist()) == list(range(len(loader)))
    assert len(small_corpus.train) - len(loader) * CONTEXT < 2 * CONTEXT
    assert torch.equal(windows[0, -1], windows[1, 0])


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_the_single_ranks_global_batches(make_source, world_size: int):
    alone = take(make_source(batch_size=8).train_dataloader(), 700)
    ranks = [make_source(batch_size=8 // world_size, shard=(rank, world_size)) for rank in range(world_size)]
    loaders = [source.train_dataloader() for source in ranks]
    assert len({len(loader) for loader in loaders}) == 1
    shared = zip(*(take(loader, 700) for loader in loaders), strict=True)
    assert len(loaders[0]) < 700  # the second epoch is compared, too
    assert all(torch.equal(torch.cat(parts), whole) for parts, whole in zip(shared, alone, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_windows_are_disjoint_equal_in_number_and_nearly_complete(
    make_source, small_corpus: Corpus, world_size: int
):
    loaders = [make_source(5, shard=(rank, world_size)).val_dataloader() for rank in range(world_size)]
    parts = [torch.cat([*loader]) for loader in loaders]
    assert len({part.shape for part in parts}) == 1
    assert all(len([*loader]) == len(loader) for loader in loaders)
    every = small_corpus.validation.unfold(0, CONTEXT + 1, CONTEXT)
    rows = [bytes(row.tolist()) for part in parts for row in part]
    assert len(rows) == len(every) // world_size * world_size
    left = [bytes(row.tolist()) for row in every]
    for row in rows:
        left.remove(row)
    assert len(left) < world_size


def test_validation_batches_are_shared_like_training_batches(make_source):
    alone = [*make_source(batch_size=4).val_dataloader()]
    loaders = [make_source(batch_size=2, shard=(rank, 2)).val_dataloader() for rank in range(2)]
    shared = [torch.cat(parts) for parts in zip(*loaders, strict=True)]
    assert len(shared) > 10
    assert all(torch.equal(parts, whole) for parts, whole in zip(shared[:-1], alone, strict=False))


def test_a_window_is_sliced_when_asked_for(make_source):
    source = make_source()
    loader = source.train_dataloader()
    next(iter(loader))
    windows, _ = loader.dataset.shuffle()
    storage = source.corpus.train.untyped_storage().data_ptr()
    assert windows.untyped_storage().data_ptr() == storage


# ------------------------------------------------------------------------------------------------- the position


def test_a_loaded_position_goes_on_with_exactly_the_next_batch(make_source):
    length = len(make_source().train_dataloader())
    expected = take(make_source().train_dataloader(), 2 * length + 5)
    for steps in (0, 1, 7, length - 1, length, length + 1, 2 * length):  # in an epoch, at its ends, after it
        stopped = make_source().train_dataloader()
        take(stopped, steps)
        resumed = make_source().train_dataloader()
        resumed.load_state_dict(stopped.state_dict())
        following = zip(take(resumed, 5), expected[steps : steps + 5], strict=True)
        assert all(torch.equal(a, b) for a, b in following), f"after {steps} of {length}"


def test_a_position_moves_to_another_number_of_ranks(make_source):
    expected = take(make_source(batch_size=8).train_dataloader(), 12)[10]
    stopped = make_source(batch_size=8).train_dataloader()
    take(stopped, 10)
    parts = []
    for rank in range(4):
        resumed = make_source(batch_size=2, shard=(rank, 4)).train_dataloader()
        resumed.load_state_dict(stopped.state_dict())
        parts.append(next(iter(resumed)))
    assert torch.equal(torch.cat(parts), expected)


def test_all_ranks_have_the_same_position(make_source):
    states = []
    for rank in range(2):
        loader = make_source(shard=(rank, 2)).train_dataloader()
        take(loader, 3)
        states.append(loader.state_dict())
    assert states[0] == states[1]


@pytest.mark.parametrize(("name", "value"), [("seed", 9), ("context_length", 7), ("fingerprint", "0" * 16)])
def test_a_position_in_another_stream_is_refused(make_source, name: str, value: object):
    loader = make_source().train_dataloader()
    with pytest.raises(ValueError, match=rf"{name} is .*checkpoint's is {value!r}.*start anew"):
        loader.load_state_dict({**loader.state_dict(), name: value})


# ------------------------------------------------------------------------------------------------- Lightning


class Recorder(LightningModule):
    """One weight; keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[Tensor] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.batches.append(batch.clone())
        return self.weight * batch.float().mean() / 256

    def validation_step(self, batch: Tensor) -> None:
        self.validated.append(batch.clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(source: PythonSource, folder: Path, steps: int, resume: Path | None = None, **options: object) -> Recorder:
    recorder = Recorder()
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)] if resume is None else []
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=resume is None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(recorder, source, ckpt_path=resume, weights_only=True)
    return recorder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", [{}, {"limit_train_batches": 3}], ids=["whole epochs", "limited epochs"])
def test_a_resumed_trainer_sees_the_uninterrupted_batches(make_source, tmp_path: Path, options: dict[str, object]):
    def source() -> PythonSource:
        return make_source(batch_size=900, shard=None)

    uninterrupted = fit(source(), tmp_path, steps=12, **options)
    length = len(source().train_dataloader())
    assert 3 < length <= 5  # the 12 steps cross several epochs
    assert len(uninterrupted.batches) == 12
    for steps in (1, 3, length, length + 1, 2 * length, 11):
        resumed = fit(source(), tmp_path, steps=12, resume=tmp_path / f"step={steps}.ckpt", **options)
        assert len(resumed.batches) == 12 - steps
        for batch, expected in zip(resumed.batches, uninterrupted.batches[steps:], strict=True):
            assert torch.equal(batch, expected), f"resumed after {steps}"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trainer_validates_on_the_same_windows_every_time(make_source, tmp_path: Path):
    source = make_source(batch_size=900, shard=None)
    recorder = fit(source, tmp_path, steps=2 * len(source.train_dataloader()))
    half = len(recorder.validated) // 2
    assert half >= 1
    assert all(torch.equal(a, b) for a, b in zip(recorder.validated[:half], recorder.validated[half:], strict=True))


def test_the_trainers_ranks_are_used_and_an_explicit_shard_wins(make_source):
    source = make_source(shard=None)
    source.trainer = SimpleNamespace(global_rank=1, world_size=2)
    second = make_source(shard=(1, 2))
    assert torch.equal(next(iter(source.train_dataloader())), next(iter(second.train_dataloader())))
    second.trainer = SimpleNamespace(global_rank=0, world_size=1)
    assert torch.equal(next(iter(source.val_dataloader())), next(iter(second.val_dataloader())))


def test_without_a_trainer_the_process_group_decides(make_source, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    batch = next(iter(make_source(shard=None).train_dataloader()))
    assert torch.equal(batch, next(iter(make_source(shard=(1, 2)).train_dataloader())))


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0; pass"),
        ({"context_length": -1}, "context_length must be at least 1, got -1; pass"),
        ({"val_fraction": 1.0}, r"val_fraction must lie between 0 and 1, got 1.0; try"),
        ({"max_bytes": 0}, "max_bytes must be at least 1, got 0; pass None"),
        ({"shard": (2, 2)}, r"shard must be \(rank, world_size\) .* got \(2, 2\)"),
    ],
)
def test_a_bad_argument_gets_rule_value_and_remedy(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        PythonSource(**arguments)


def test_a_context_longer_than_the_corpus_is_refused(make_source):
    with pytest.raises(ValueError, match=r"training part must hold one batch: 8 windows of context_length 1000000"):
        make_source(context=1_000_000).setup()
    with pytest.raises(ValueError, match=r"validation part .* 1 windows of context_length 100000 .* val_fraction"):
        make_source(batch_size=1, context=100_000).setup()


def test_one_batch_is_exactly_enough(make_source, small_corpus: Corpus):
    source = make_source(batch_size=2, context=10)
    source.corpus = Corpus(torch.arange(30).to(torch.uint8), torch.arange(11).to(torch.uint8), (), (), "")
    source.setup()
    assert len(source.train_dataloader()) == 1
    assert len([*source.val_dataloader()]) == 1
    source.corpus = Corpus(torch.arange(29).to(torch.uint8), torch.arange(11).to(torch.uint8), (), (), "")
    with pytest.raises(ValueError, match="need 30 bytes, got 29"):
        source.setup()


def test_an_empty_side_of_the_split_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(ValueError, match=r"files on both sides of the split.*max_bytes=100.*raise max_bytes"):
        read_corpus(max_bytes=100)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(ValueError, match="got 0 training and 0 validation files"):
        read_corpus()
