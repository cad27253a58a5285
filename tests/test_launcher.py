"""What tests with several ranks rely on: a failure says where, a hang ends, and one claim does not see another's."""

from __future__ import annotations

import os
import time
from typing import Any

import launcher
import pytest
import torch
import torch.distributed as dist


def sum_of_ranks(rank: int, world_size: int, offset: torch.Tensor) -> torch.Tensor:
    value = offset + rank
    dist.all_reduce(value)
    return value


def process_and_environment(rank: int, world_size: int) -> tuple[int, str | None, str, float]:
    torch.set_default_dtype(torch.float64)
    return os.getpid(), os.environ.get("SCAPE_TEST"), os.environ["RANK"], torch.rand(1).item()


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("the missing name")
    dist.all_reduce(torch.ones(1))  # waits for rank 1 in vain


def hang_on_rank_1(rank: int, world_size: int) -> int:
    time.sleep(600 * rank)
    return os.getpid()


def die(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def give_what_cannot_be_pickled(rank: int, world_size: int) -> Any:
    return lambda: None


def late(rank: int, world_size: int) -> Any:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.3 * rank)
    return torch.empty(2), torch.empty(1, dtype=torch.int32)


def test_ranks_share_a_group_in_each_call_and_results_come_in_their_order(run_ranks):
    for offset in (0.0, 10.0):
        assert [each.item() for each in run_ranks(sum_of_ranks, 3, torch.tensor(offset))] == [3 * offset + 3.0] * 3


def test_a_call_finds_the_same_processes_and_nothing_of_the_calls_before(run_ranks, monkeypatch):
    first = run_ranks(process_and_environment, 2)
    monkeypatch.setenv("SCAPE_TEST", "here")
    second = run_ranks(process_and_environment, 2)
    fresh = run_ranks(process_and_environment, 2, fresh=True)
    for rank in range(2):
        assert first[rank] == (first[rank][0], None, str(rank), first[rank][3])
        assert second[rank] == (first[rank][0], "here", str(rank), pytest.approx(first[rank][3]))
        assert fresh[rank][0] != first[rank][0]


def test_what_a_rank_raises_is_raised_with_its_traceback(run_ranks):
    began = time.monotonic()
    with pytest.raises(KeyError, match="the missing name") as caught:
        run_ranks(fail_on_rank_1, 2)
    assert "on rank 1" in str(caught.value.__cause__)
    assert "in fail_on_rank_1" in str(caught.value.__cause__)
    assert time.monotonic() - began < 60  # rank 0 did not keep us until the timeout
    assert run_ranks(sum_of_ranks, 2, torch.tensor(0.0))[0] == 1.0


def test_errors_stand_in_the_place_of_results_where_they_are_expected(run_ranks):
    waiting, failed = run_ranks(fail_on_rank_1, 2, timeout=60.0, expect_errors=True)
    assert isinstance(failed, KeyError)
    assert isinstance(waiting, RuntimeError)


def test_a_hang_ends_with_the_place_where_it_happened(run_ranks):
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 still running after 2 s") as caught:
        run_ranks(hang_on_rank_1, 2, timeout=2)
    assert "in hang_on_rank_1" in str(caught.value)


def test_a_dead_rank_and_what_cannot_be_pickled_are_errors(run_ranks):
    with pytest.raises(launcher.RankError, match="rank 1 died without a result, exit code 3"):
        run_ranks(die, 2)
    with pytest.raises(launcher.RankError, match="rank 0 gave what cannot be pickled"):
        run_ranks(give_what_cannot_be_pickled, 1)


def test_an_early_rank_cuts_off_no_late_one_and_fresh_memory_is_poisoned(run_ranks):
    for floats, integers in run_ranks(late, 2):
        assert floats.isnan().all()
        assert integers.item() == torch.iinfo(torch.int32).max


def test_a_script_runs_as_if_by_python(run_ranks, tmp_path):
    (tmp_path / "neighbour.py").write_text("name = 'friend'")
    script = tmp_path / "script.py"
    script.write_text("import os, sys, neighbour\nprint(neighbour.name, __name__, sys.argv[1], os.environ['RANK'])")
    assert run_ranks(launcher.run_script, 2, str(script), "x") == [f"friend __main__ x {rank}\n" for rank in range(2)]
    script.write_text("import sys\nprint('why')\nsys.exit(2)")
    with pytest.raises(RuntimeError, match="ended with 2, and said: why"):
        run_ranks(launcher.run_script, 1, str(script))
