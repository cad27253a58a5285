"""The GPU benchmark, dry: its whole path on the CPU, so that whoever has a GPU finds it working."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from warm_python import warm_python

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "bench_gpu.py"
TINY = ("--device", "cpu", "--tiny", "--sparsity", "0.99", "--ranks", "8", "--steps", "1")


@pytest.mark.slow
def test_dry_run_writes_its_report(tmp_path: Path) -> None:
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [warm_python(), str(SCRIPT), *TINY, "--out", str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "kernels and reference agree" in done.stdout
    report = json.loads((tmp_path / "bench_gpu.json").read_text())
    assert [row["ranks"] for row in report["rows"]] == [8]
    assert all(row["microseconds"]["sweep"] > 0 for row in report["rows"])
    assert (tmp_path / "bench_gpu.png").stat().st_size > 0
    assert json.loads((tmp_path / report["overlap"]["trace"]).read_text())["traceEvents"]


def test_no_speed_is_reported_when_kernels_are_wrong(bench_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(bench_gpu, "short_training", lambda args, choice, ranks: {"clock": torch.full((), len(choice))})
    args = bench_gpu.argparse.Namespace(device="cpu")
    with pytest.raises(SystemExit, match="disagree on the clock: no speed is reported"):
        bench_gpu.check(args)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_compared_trains_at_its_full_size(bench_gpu: ModuleType, ranks: int) -> None:
    args = bench_gpu.argparse.Namespace(device="cpu", tiny=False)
    left = bench_gpu.short_training(args, "naive", ranks)
    assert all(bench_gpu.torch.isfinite(tensor.double()).all() for tensor in left.values())


def test_hidden_time_is_what_both_streams_have_in_common(bench_gpu: ModuleType) -> None:
    events = [(7, 0, 10, "_merge_kernel"), (7, 20, 30, "copy"), (1, 5, 22, "gemm"), (1, 0, 99, "scape::sweep")]
    busy = bench_gpu.by_stream(events)
    assert bench_gpu.union(busy[7]) == [(0, 10), (20, 30)]
    assert bench_gpu.common(bench_gpu.union(busy[7]), bench_gpu.union(busy[1])) == 5 + 2
    assert bench_gpu.union([(3, 5), (0, 4), (6, 7)]) == [(0, 5), (6, 7)]


def test_models_have_the_size_they_are_named_after(bench_gpu: ModuleType) -> None:
    for size, (millions, _) in bench_gpu.SIZES.items():
        numels = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in bench_gpu.shapes_of(size, tiny=False)]
        assert sum(numels) == millions * 1_000_000


def test_targets_are_judged_by_the_measured_row(bench_gpu: ModuleType) -> None:
    floor = {"sweep": 1.2, "select": 1.6}
    row = {"size": "500M", "sparsity": 0.99, "ranks": 1, "step / adamw": 0.6, "times the floor": floor}
    assert [found["met"] for found in bench_gpu.judge([row]).values()] == [False, True, False]
    assert set(bench_gpu.judge([]).values()) == {None}


def test_a_mask_can_be_made_and_timed_on_its_own(bench_gpu: ModuleType) -> None:
    parameter = bench_gpu.torch.nn.Parameter(bench_gpu.torch.ones(3000))
    optimizer = bench_gpu.scape([parameter], 2, sparsity=0.99)
    parameter.grad = bench_gpu.torch.ones(3000)
    optimizer.step()
    assert bench_gpu.selecting(optimizer, bench_gpu.Clock("cpu")) > 0
