"""The matrix: method x host x kind of checkpoint x levels x six claims, covered in pairs.

Six claims: it trains, replicas are equal, it resumes bit for bit, it goes on on another number of ranks, an error of
one rank reaches all, SIGTERM to one rank ends all after the same batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_runs import STEPS, SYNC_EVERY, Net, Row, Run, loss_at, path_of, run, whole_weights
from trainer_helpers import MARKS

from lightning_scape import newest_checkpoint

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]
ROWS = [
    Row("scape", "trainer", "file", 1, "bf16-true"),
    Row("scape", "trainer", "directory, beside", 2, "32-true"),
    Row("scape", "fabric", "file, beside", 2, "bf16-mixed"),
    Row("scape", "fabric", "directory", 1, "32-true"),
    Row("sparseloco", "trainer", "file, beside", 1, "16-mixed"),
    Row("sparseloco", "trainer", "directory", 2, "bf16-true"),
    Row("sparseloco", "fabric", "file", 2, "32-true"),
    Row("sparseloco", "fabric", "directory, beside", 1, "bf16-mixed"),
]
STOPS = {2: "in the middle of an epoch", 4: "at an epoch's end", 7: "inside a window", 9: "right before the end"}
"""Steps from whose checkpoints a run goes on: each row from two of them."""
ELSEWHERE = [(row, row, ranks) for row in ROWS if row.node == 1 for ranks in (1, 3)]
ELSEWHERE += [(row, replace(row, node=node), 2) for row in ROWS[1:3] for node in (1, 2)]
"""Who saves, who goes on, and on how many ranks: two nodes of SCAPE become two flat ranks, or one node."""
FAILS, STOPPED = [ROWS[place] for place in (0, 2, 5, 7)], [ROWS[place] for place in (1, 3, 4, 6)]
"""Of the last two claims each has a half in which every method meets every host, and every kind and level is."""


@pytest.fixture(params=ROWS, ids=str, scope="module")
def row(request: pytest.FixtureRequest) -> Any:
    return request.param


# ------------------------------------------------------------------------------------- trains, and stays equal


def train(rank: int, world_size: int, row: Row, folder: str) -> Run:
    return run(row, folder=folder)


@pytest.fixture(scope="module")
def done() -> dict[Row, Any]:
    return {}


@pytest.fixture
def straight(
    row: Row, done: dict[Row, Any], tmp_path_factory: pytest.TempPathFactory, run_ranks: Any
) -> tuple[list[Run], str]:
    """Each rank's run from the beginning to the end, and the folder with a checkpoint of each step."""
    if row not in done:
        folder = str(tmp_path_factory.mktemp("straight") / "saved")
        done[row] = run_ranks(train, row.ranks, row, folder), folder
    return done[row]


def test_it_trains(straight: tuple[list[Run], str]) -> None:
    for seen in straight[0]:
        assert seen.step == STEPS
        assert loss_at(seen.end) < 0.6 * loss_at(whole_weights(Net()))


def test_replicas_are_equal_after_every_step_or_exchange(straight: tuple[list[Run], str], row: Row) -> None:
    first, *others = straight[0]
    assert len(first.weights) == STEPS
    together = range(STEPS) if row.method == "scape" else range(SYNC_EVERY - 1, STEPS, SYNC_EVERY)
    for other in others:
        assert torch.equal(first.end, other.end)
        for step in together:
            assert torch.equal(first.weights[step], other.weights[step]), step
    if row.method == "sparseloco":  # and inside a window they are apart, which is the method
        assert not torch.equal(first.weights[0], others[-1].weights[0])


# ------------------------------------------------------------------------------------- checkpoints


def go_on_from_each(rank: int, world_size: int, row: Row, folder: str) -> list[Run]:
    half = ROWS.index(row) in (0, 1, 6, 7)  # with it each stop meets either method, host and kind, one node and two
    return [run(row, load=path_of(folder, step)) for step in list(STOPS)[half::2]]


def test_it_resumes_bit_for_bit(straight: tuple[list[Run], str], row: Row, run_ranks: Any) -> None:
    whole, folder = straight
    assert Path(path_of(folder, STEPS)).is_dir() == row.kind.startswith("directory")
    for before, resumed in zip(whole, run_ranks(go_on_from_each, row.ranks, row, folder), strict=True):
        for after in resumed:
            assert after.step == STEPS
            assert torch.equal(before.end, after.end)
            assert after.batches == before.batches[-len(after.batches) :]
            assert after.losses == before.losses[-len(after.losses) :]
            assert after.drawn == before.drawn


def go_on(rank: int, world_size: int, row: Row, folder: str) -> list[Run]:
    return [run(row, load=path_of(folder, step)) for step in (STEPS, 6)]


@pytest.mark.parametrize(("row", "other", "ranks"), ELSEWHERE, indirect=["row"], ids=str)
def test_another_number_of_ranks_goes_on(
    straight: tuple[list[Run], str], row: Row, other: Row, ranks: int, run_ranks: Any
) -> None:
    whole, folder = straight
    (held, first), *others = run_ranks(go_on, ranks, other, folder)
    assert torch.equal(held.end, whole[0].end)  # at the end nothing is left to train
    assert first.step == STEPS
    assert loss_at(first.end) < 0.9 * loss_at(whole[0].weights[5])
    for _, other_rank in others:
        assert torch.equal(first.end, other_rank.end)


# ------------------------------------------------------------------------------------- errors and signals


def fail(rank: int, world_size: int, row: Row, folder: str, spoiled: str) -> dict[str, str]:
    """What a rank is told of a folder that takes no checkpoint, and of a checkpoint that is cut."""
    said = {}

    def save(to: Callable[[str], None]) -> None:
        said["save"] = told(lambda: to(f"{folder}/a_file/x.ckpt"))
        dist.barrier()  # ranks are still together, and the next save works
        to(f"{folder}/good.ckpt")

    run(row, steps=2, then=save)
    said["load"] = told(lambda: run(row, load=spoiled))
    dist.barrier()
    run(row, load=f"{folder}/good.ckpt", steps=3)
    return said


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("row", FAILS, indirect=True, ids=str)
def test_an_error_of_one_rank_reaches_all(
    straight: tuple[list[Run], str], row: Row, run_ranks: Any, tmp_path: Path
) -> None:
    """Rank 0 alone writes a file, and one part of the checkpoint that is loaded is cut."""
    (tmp_path / "a_file").write_text("no folder")
    spoiled = tmp_path / "spoiled.ckpt"
    whole = Path(path_of(straight[1], 4))
    if whole.is_dir():
        shutil.copytree(whole, spoiled)
    else:
        shutil.copy(whole, spoiled)
    part = max(
        (path for path in [spoiled, *spoiled.rglob("*")] if path.is_file()), key=lambda path: path.stat().st_size
    )
    part.write_bytes(part.read_bytes()[:-100])
    for said in run_ranks(fail, row.ranks, row, str(tmp_path), str(spoiled)):
        assert "a_file" in said["save"]
        assert "Error" in said["save"].partition(":")[0]
        assert "spoiled.ckpt" in said["load"]


def stop(rank: int, world_size: int, row: Row, folder: str) -> tuple[Run, Run, Run]:
    stopped = run(row, folder=folder, steps=1000, signal_at=(1, 5), only_when_stopped=True)
    dist.barrier()
    end = stopped.step + 3
    return stopped, run(row, load=str(newest_checkpoint(folder)), steps=end), run(row, steps=end)


@pytest.mark.parametrize("row", STOPPED, indirect=True, ids=str)
def test_sigterm_to_one_rank_ends_all_after_the_same_batch(row: Row, run_ranks: Any, tmp_path: Path) -> None:
    """And what they save goes on bit for bit. Under SparseLoCo ranks hear of it some steps later."""
    ends = run_ranks(stop, row.ranks, row, str(tmp_path))
    for stopped, resumed, whole in ends:
        assert stopped.stopped
        assert (stopped.step, stopped.batches) == (ends[0][0].step, stopped.batches[: len(ends[0][0].batches)])
        assert stopped.step in (3, 4) if row.method == "scape" else 3 <= stopped.step < 1000
        assert torch.equal(resumed.end, whole.end)
