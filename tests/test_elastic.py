"""`examples/elastic.py`: a job loses a machine, goes on without it, and takes it in again when it comes back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_example import ROOT, run_script

ELASTIC = ROOT / "examples" / "elastic.py"
EVERY = 10
"""Steps between checkpoints."""


def lose_and_regain(out: Path, *options: str, ranks: tuple[int, ...] = (2, 1, 2)) -> None:
    # A new interpreter: the example kills an agent and all that it has started, which it finds by their parents.
    options = (f"--out={out}", f"--save-every={EVERY}", "--phase=25", *options)
    run_script(ELASTIC, *options, timeout=1100, python=sys.executable)
    result = json.loads((out / "elastic.json").read_text())
    assert result["ranks"] == list(ranks)
    assert result["skipped"] == 0
    steps = [point["step"] for point in result["curve"]]
    assert set(steps) == set(range(1, result["last_step"] + 1))  # every step was taken
    for restart in result["restarts"]:
        assert restart["batches_per_step"] == 4
        assert restart["first_step_after"] % EVERY == 1  # right after a checkpoint
        assert restart["steps_lost"] <= 2 * EVERY
    lost, last = result["restarts"][0], result["restarts"][-1]
    assert lost["first_step_after"] > 1  # not from the beginning
    assert lost["loss_before"] < result["first_loss"]
    assert len(ranks) == 2 or last["loss_after"] < lost["loss_before"]
    assert (out / "elastic.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_whose_agent_is_killed_goes_on_without_it(tmp_path: Path) -> None:
    lose_and_regain(tmp_path / "out", "--alone", ranks=(2, 1))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_whose_agent_is_killed_goes_on_and_takes_it_in_again(tmp_path: Path) -> None:
    lose_and_regain(tmp_path / "out")


@pytest.mark.two_host
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_whose_host_is_cut_off_goes_on_and_takes_it_in_again(tmp_path: Path) -> None:
    lose_and_regain(tmp_path / "out", "--two-hosts", "--timeout=10")


def test_an_output_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "curve.jsonl").write_text("")
    with pytest.raises(AssertionError, match="--out must be a new folder, got"):
        run_script(ELASTIC, f"--out={tmp_path}")
