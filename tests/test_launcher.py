from __future__ import annotations

import os
import time
from pathlib import Path

import launcher
import pytest
import torch
import torch.distributed as dist


class TwoPartError(Exception):
    """Pickles, but does not unpickle: its constructor takes more than the message."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


def sum_of_ranks(rank: int, world_size: int, offset: torch.Tensor) -> torch.Tensor:
    value = offset + rank
    dist.all_reduce(value)
    return value


def rank_and_environment(rank: int, world_size: int) -> tuple[int, dict[str, str], int]:
    return rank, dict(os.environ), torch.get_num_threads()


def fail_on_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        raise KeyError("the missing name")
    dist.all_reduce(torch.ones(1))  # waits for rank 1 in vain
    return "unreachable"


def fail_on_odd_ranks(rank: int, world_size: int) -> str:
    if rank % 2:
        raise ValueError(f"odd {rank}")
    return f"even {rank}"


def never_ends_on_rank_one(rank: int, world_size: int, directory: Path) -> None:
    (directory / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(600)


def die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)


def raise_unpicklable(rank: int, world_size: int) -> None:
    raise TwoPartError("a hole", "the bucket")


def return_unpicklable(rank: int, world_size: int) -> object:
    return lambda: None


def empties(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(3), torch.ones(2, dtype=torch.int32).new_empty(3)


def finish_long_before_rank_one(rank: int, world_size: int) -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    if rank == 1:
        time.sleep(0.5)
        group = dist.group.WORLD
        assert group is not None
    return value.item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_a_group_and_results_come_in_rank_order(run_ranks, world_size):
    results = run_ranks(sum_of_ranks, world_size, torch.tensor([10.0, 20.0]))
    total = sum(range(world_size))
    expected = torch.tensor([10.0 * world_size + total, 20.0 * world_size + total])
    assert len(results) == world_size
    for result in results:
        assert torch.equal(result, expected)


def test_launcher_runs_twice_in_one_test(run_ranks):
    for _ in range(2):
        assert [result.item() for result in run_ranks(sum_of_ranks, 2, torch.zeros(1))] == [1.0, 1.0]


def test_ranks_get_the_callers_environment_and_their_rank(run_ranks, monkeypatch):
    monkeypatch.setenv("SCAPE_TEST_VARIABLE", "here")
    for expected, (rank, environ, threads) in enumerate(run_ranks(rank_and_environment, 2)):
        assert rank == expected
        assert environ["SCAPE_TEST_VARIABLE"] == "here"
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert threads == 1
    assert "RANK" not in os.environ


def test_exception_of_one_rank_is_raised_with_its_type_and_traceback(run_ranks):
    begin = time.monotonic()
    with pytest.raises(KeyError, match="the missing name") as caught:
        run_ranks(fail_on_rank_one, 2)
    cause = str(caught.value.__cause__)
    assert "on rank 1" in cause
    assert "fail_on_rank_one" in cause
    assert time.monotonic() - begin < 60  # rank 0 did not keep us until the timeout


def test_expected_errors_stand_in_the_place_of_results(run_ranks):
    results = run_ranks(fail_on_odd_ranks, 3, expect_errors=True)
    assert results[0] == "even 0"
    assert isinstance(results[1], ValueError)
    assert str(results[1]) == "odd 1"
    assert results[2] == "even 2"


def test_peer_of_a_failed_rank_fails_rather_than_waits(run_ranks):
    waiting, failed = run_ranks(fail_on_rank_one, 2, timeout=60.0, expect_errors=True)
    assert isinstance(failed, KeyError)
    assert isinstance(waiting, RuntimeError)


@pytest.mark.few(1)
@pytest.mark.parametrize("expect_errors", [False, True])
def test_timeout_shows_where_a_rank_is_stuck_and_kills_all(run_ranks, tmp_path, expect_errors):
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 still running after 5\.0 s") as caught:
        run_ranks(never_ends_on_rank_one, 2, tmp_path, timeout=5.0, expect_errors=expect_errors)
    assert "never_ends_on_rank_one" in str(caught.value)
    assert "rank 0 had returned" in str(caught.value)
    for rank in range(2):
        assert not Path(f"/proc/{(tmp_path / str(rank)).read_text()}").exists()


def test_dead_rank_is_an_error_with_its_exit_code(run_ranks):
    with pytest.raises(launcher.RankError, match="rank 0 died without a result, exit code 3"):
        run_ranks(die, 2)


def test_exception_that_cannot_be_unpickled_keeps_name_and_message(run_ranks):
    with pytest.raises(launcher.RankError, match="raised TwoPartError: a hole in the bucket") as caught:
        run_ranks(raise_unpicklable, 1)
    assert "raise_unpicklable" in str(caught.value.__cause__)


def test_result_that_cannot_be_pickled_is_an_error(run_ranks):
    with pytest.raises(launcher.RankError, match="the result of rank 0 cannot be pickled"):
        run_ranks(return_unpicklable, 1)


def test_function_inside_a_test_is_refused_with_advice(run_ranks):
    with pytest.raises(TypeError, match="top level"):
        run_ranks(lambda rank, world_size: None, 2)


def test_early_rank_does_not_cut_off_a_late_one(run_ranks):
    assert run_ranks(finish_long_before_rank_one, 2) == [2.0, 2.0]


def test_uninitialised_memory_is_poisoned_on_ranks(run_ranks):
    ((floats, integers),) = run_ranks(empties, 1)
    assert floats.isnan().all()
    assert (integers == torch.iinfo(torch.int32).max).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_uninitialised_floats_are_nan(dtype):
    like = torch.zeros(4, dtype=dtype)
    fresh = [torch.empty(4, dtype=dtype), torch.empty_like(like), like.new_empty(4)]
    fresh.append(torch.empty_strided((2, 2), (2, 1), dtype=dtype))
    assert all(tensor.isnan().all() for tensor in fresh)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_uninitialised_integers_are_out_of_any_range(dtype):
    assert (torch.empty(4, dtype=dtype).long() == torch.iinfo(dtype).max).all()
    assert torch.empty(2, dtype=torch.bool).all()


def test_poison_leaves_torch_working():
    with torch.device("meta"):
        assert torch.empty(3).is_meta  # the function that obeys the mode is still recognised
    assert torch.empty(0).numel() == 0
    assert torch.empty(2, requires_grad=True).requires_grad
    out = torch.zeros(2)
    assert torch.empty(2, out=out) is out
    assert not torch.nn.Linear(3, 2)(torch.ones(1, 3)).isnan().any()
    loss, counts = torch.nn.BatchNorm1d(2)(torch.randn(4, 2)).sum(), torch.bincount(torch.tensor([0, 1, 1]))
    assert loss.isfinite()
    assert counts.tolist() == [1, 2]


def test_environment_is_restored_after_each_test_part_1():
    assert "SCAPE_LEFT_BEHIND" not in os.environ
    os.environ["SCAPE_LEFT_BEHIND"] = "1"
    assert os.environ["SCAPE_LEFT_BEHIND"] == "1"


def test_environment_is_restored_after_each_test_part_2():
    assert "SCAPE_LEFT_BEHIND" not in os.environ
