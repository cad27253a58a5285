"""`examples/soak.py`: a long run with checkpoints keeps its memory flat and its replicas equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_example import ROOT, run_script

SOAK = ROOT / "examples" / "soak.py"


def assert_all_is_well(out: Path, steps: int, bound: float) -> None:
    results = json.loads((out / "soak.json").read_text())
    assert len(results) == 2
    for result in results:
        assert result["steps"] == steps
        assert result["resumed"] == result["checkpoints"] // 2 > 0
        assert result["growth_megabytes"] < bound
        assert result["skipped"] == 0
        assert result["curve"][-1]["loss"] < 0.75 * result["curve"][0]["loss"]
    assert (out / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_hundreds_of_steps_keep_memory_flat_and_replicas_equal(tmp_path: Path) -> None:
    run_script(SOAK, f"--out={tmp_path}", "--steps=240", "--save-every=40", "--bound=16")
    assert_all_is_well(tmp_path, 240, 16.0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_thousand_steps_keep_memory_flat_and_replicas_equal(tmp_path: Path) -> None:
    run_script(SOAK, f"--out={tmp_path}", timeout=1400)
    assert_all_is_well(tmp_path, 5000, 8.0)


@pytest.mark.few(0)
def test_killed_at_random_a_job_takes_every_step_on_two_and_three_ranks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--kill-every=40", "--steps=120", "--save-every=20", "--seed=3", "--bound=16")
    run_script(SOAK, f"--out={out}", *options)
    result = json.loads((out / "kills.json").read_text())
    assert result["steps"] == 120
    assert result["kills"] >= 2
    assert result["ranks"] == [2 + number % 2 for number in range(result["kills"] + 1)]
    assert result["missing"] == []
    assert result["skipped"] == 0
    assert result["lost_at_most"] <= 40  # two intervals: the checkpoint that was being written does not count
    assert abs(result["loss_difference_of_steps_taken_again"]["mean"]) < 0.05
    assert (out / "kills.png").read_bytes().startswith(b"\x89PNG")
