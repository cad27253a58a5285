"""``lightning-scape doctor``: nothing is wrong where nothing is; what is wrong is named."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from launcher import run_script

from lightning_scape.tools import doctor
from lightning_scape.tools.cli import main


def test_on_a_machine_that_can_train_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "torch" in said
    assert "Two steps of SCAPE run" in said
    assert said.endswith("Nothing is wrong.\n")


def doctor_of_a_rank(rank: int, world_size: int, port: int) -> str:
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return run_script(rank, world_size, "-m", "lightning_scape", "doctor")


def test_ranks_of_torchrun_meet_and_say_what_their_messages_mean(run_ranks: Any, free_port: int) -> None:
    first, second = run_ranks(doctor_of_a_rank, 2, free_port)
    assert first.endswith("Nothing is wrong.\n")
    assert "All 2 ranks reach each other. An all-reduce of 8 bytes takes " in first
    assert second == ""  # rank 0 speaks


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match=r"All 3 ranks must come within 1 s, got none of \[1, 2\]"):
        doctor.arrive(0, 3, timedelta(seconds=1))


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def test_what_is_wrong_on_any_rank_is_told_by_rank_0_and_fails_on_all(capsys: pytest.CaptureFixture[str]) -> None:
    everyone = [doctor.Found("torch 1", ["Trains on CPU."], []), doctor.Found("torch 2", [], ["no GPU"])]
    assert [doctor.tell(everyone, silent=silent) for silent in (False, True)] == [1, 1]
    *_, told, versions = capsys.readouterr().out.splitlines()
    assert told == "WRONG on rank 1: no GPU"
    assert "the same versions, got rank 0: torch 1; rank 1: torch 2" in versions


def test_a_step_that_fails_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no compiler")

    monkeypatch.setattr(doctor, "_two_steps", fails)
    assert main(["doctor"]) == 1
    assert "WRONG on rank 0: Two steps of SCAPE on cpu must run, got OSError: no compiler" in capsys.readouterr().out
