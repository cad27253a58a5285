"""The examples' corpus: its split, and the order of its batches for any number of ranks and from any position."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from python_source import Corpus, Shard, TrainingWindows, ValidationWindows, WindowLoader, read_corpus, without_copies
from torch import Tensor

CONTEXT, GLOBAL = 64, 12


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    whole = read_corpus()
    assert len(whole.train) > 2_000_000  # even the slimmest distribution's library
    assert 0.01 < len(whole.validation) / len(whole.train) < 0.1
    return Corpus(whole.train[:100_000], whole.validation[:20_000], whole.fingerprint)


def loader(corpus: Corpus, rank: int = 0, ranks: int = 1, seed: int = 0) -> WindowLoader:
    return WindowLoader(TrainingWindows(corpus, CONTEXT, GLOBAL // ranks, seed, Shard(rank, ranks)))


def take(batches: WindowLoader, count: int) -> list[Tensor]:
    taken: list[Tensor] = []
    while len(taken) < count:
        taken += islice(batches, count - len(taken))
    return taken


def test_a_near_copy_and_the_near_copy_of_that_move_to_training() -> None:
    sources = {"train": b"a\nb\nc\nd", "near": b"a\nb\nc\nx\ny", "near_of_near": b"x\ny\nz", "own": b"a\np\nq"}
    assert without_copies(sources, ["near", "near_of_near", "own"]) == ["own"]


def test_batches_are_windows_of_the_corpus_and_another_seed_or_epoch_gives_others(corpus: Corpus) -> None:
    text = bytes(corpus.train.tolist())
    length = len(loader(corpus))
    batches = take(loader(corpus), length + 1)
    assert batches[0].shape == (GLOBAL, CONTEXT + 1)
    assert all(bytes(row.tolist()) in text for row in batches[0])
    assert not torch.equal(batches[0], batches[length])
    assert not torch.equal(batches[0], take(loader(corpus, seed=1), 1)[0])
    assert length * GLOBAL * CONTEXT > len(text) - (GLOBAL + 2) * CONTEXT  # an epoch misses few bytes


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_global_batches_of_one_rank(corpus: Corpus, ranks: int) -> None:
    count = len(loader(corpus)) + 3  # the second epoch, too
    shared = zip(*(take(loader(corpus, rank, ranks), count) for rank in range(ranks)), strict=True)
    assert all(
        torch.equal(torch.cat(parts), whole) for parts, whole in zip(shared, take(loader(corpus), count), strict=True)
    )


def test_a_loaded_position_goes_on_with_the_next_batch_on_any_number_of_ranks(corpus: Corpus) -> None:
    length = len(loader(corpus))
    whole = take(loader(corpus), 2 * length + 2)
    for steps in (1, length - 1, length, length + 1, 2 * length):
        stopped = loader(corpus)
        take(stopped, steps)
        parts = []
        for rank in range(2):
            resumed = loader(corpus, rank, ranks=2)
            resumed.load_state_dict(stopped.state_dict())
            parts.append(take(resumed, 1)[0])
        assert torch.equal(torch.cat(parts), whole[steps]), f"after {steps} of {length}"


def test_validation_windows_are_shared_out_equally_and_each_is_seen_once(corpus: Corpus) -> None:
    parts = [list(ValidationWindows(corpus, CONTEXT, 5, Shard(rank, 3))) for rank in range(3)]
    assert len({tuple(batch.shape for batch in part) for part in parts}) == 1
    rows = [bytes(row.tolist()) for part in parts for batch in part for row in batch]
    every = [bytes(row.tolist()) for row in corpus.validation.unfold(0, CONTEXT + 1, CONTEXT)]
    for row in rows:
        every.remove(row)
    assert len(every) < 3
