"""What all benchmarks share, and that each runs in its short form and leaves a row, a table and a plot."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from example_modules import BENCHMARKS, load_example
from launcher import run_script

RunRanks = Callable[..., list[Any]]
PNG = b"\x89PNG"
ORIGIN = {"version", "commit", "dirty", "date", "machine", "seed", "settings"}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The shared module, in a checkout of one commit; the memory's speed is not measured."""
    module = load_example("record")
    kept = tmp_path / "examples/benchmarks/results"
    kept.mkdir(parents=True)
    (kept / "step.json").write_text("[]")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "copy_bandwidth", lambda: 1e9)
    return module


def test_a_tree_that_is_no_commit_is_refused_unless_dirty_is_given(record: ModuleType, tmp_path: Path) -> None:
    clean = record.origin(dirty=False)
    assert clean["dirty"] is False
    assert len(clean["commit"]) == 12
    (tmp_path / "examples/benchmarks/results/step.json").write_text("[{}]")  # the row before
    assert record.origin(dirty=False)["dirty"] is False
    (tmp_path / "new.py").touch()
    with pytest.raises(SystemExit, match=r"must come from a commit.*got changes in 1 files \(new.py.*give --dirty"):
        record.origin(dirty=False)
    assert record.origin(dirty=True)["dirty"] is True


def test_no_checkout_is_no_commit(record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ROOT", tmp_path / "missing")
    with pytest.raises(SystemExit, match="got no commit"):
        record.origin(dirty=False)


def test_a_row_replaces_that_of_its_name_and_takes_a_line(record: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    record.Rows(path).add([{"name": "b", "loss": 1.0}, {"name": "a", "loss": 2.0}])
    record.Rows(path).add([{"name": "b", "loss": 3.0}])
    assert json.loads(path.read_text()) == [{"name": "a", "loss": 2.0}, {"name": "b", "loss": 3.0}]
    assert path.read_text().count("\n") == 4


TO_BE_MADE_AGAIN = {
    "gpu.md", "runs-3M-2x1.md", "steps-pythia-14m-2x1.md",
    *(f"quality-{suite}.md" for suite in ("10M", "largest")),
}  # fmt: skip
"""Tables with a row whose code had changes or is not known. A table leaves this set when it is made from one commit."""
MADE_BY = re.compile(
    r"Command: `(?:sudo )?python (examples/benchmarks/\w+\.py)[^`]*`\. Version ((?:0\.\d+\.\d+, )?unknown|0\.\d+\.\d+),"
    r" (commit [0-9a-f]{8}\+?|commits in the column `code`), \d{4}-\d\d-\d\d(?: to \d{4}-\d\d-\d\d)?\.(.*)"
)


def test_kept_results_are_few_and_say_what_made_them() -> None:
    files = [path for path in (BENCHMARKS / "results").rglob("*") if path.is_file()]
    assert len(files) <= 60
    assert sum(path.stat().st_size for path in files) < 2e6
    for path in BENCHMARKS.glob("results/*.json"):
        for row in json.loads(path.read_text()):
            assert set(row) >= ORIGIN, f"{path.name}: {row['name']}"


def test_every_table_is_that_of_its_rows(tmp_path: Path, record: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(name: str) -> list[dict[str, Any]]:
        return list(record.Rows(BENCHMARKS / f"results/{name}.json"))

    report, two_hosts = load_example("quality_report"), load_example("two_hosts")
    for module, plots in ((report, ["curves", "ranks"]), (two_hosts, ["runs", "steps"])):
        for plot in plots:
            monkeypatch.setattr(module, f"plot_{plot}", lambda *_: None)
    report.report(rows("quality"), load_example("quality_runs").SUITES, tmp_path)
    for what in ("steps", "runs"):
        two_hosts.report(what, rows(what), tmp_path)
    for name in ("gpu", "step"):
        module = load_example(name)
        monkeypatch.setattr(module, "plot", lambda *_: None)
        module.report(rows(name), tmp_path)
    made = {path.name: path.read_text() for path in tmp_path.glob("*.md")}
    assert made == {path.name: path.read_text() for path in BENCHMARKS.glob("results/*.md")}


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("results/*.md")), ids=lambda path: path.name)
def test_a_table_names_version_commit_date_and_command(path: Path) -> None:
    text = path.read_text()
    last = MADE_BY.fullmatch(text.splitlines()[-1])
    assert last, text.splitlines()[-1]
    script, version, commit, more = last.groups()
    assert (BENCHMARKS.parents[1] / script).is_file()
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    if commit.startswith("commits"):
        assert all(re.search(r"\| [0-9a-f]{8}\+?(, [0-9a-f]{8}\+?)* \|$", row) for row in rows)
    unclean = "+" in commit or any(re.search(r"[0-9a-f]{8}\+", row) for row in rows)
    assert ("To be made again" in more) == unclean
    assert ("To be made again" in text) == (path.name in TO_BE_MADE_AGAIN)


def run_alone(rank: int, world_size: int, *words: str, times: int) -> str:
    torch.distributed.destroy_process_group()
    return "".join(run_script(rank, world_size, *words) for _ in range(times))


def short(run_ranks: RunRanks, tmp_path: Path, script: str, *options: str, times: int = 1) -> tuple[str, list[Any]]:
    """What a benchmark says, run in a process that has imported torch, and the rows that it leaves."""
    words = [str(BENCHMARKS / f"{script}.py"), "--short", "--dirty", f"--out={tmp_path}", *options]
    (said,) = run_ranks(functools.partial(run_alone, times=times), 1, *words, timeout=170)
    rows = json.loads((tmp_path / f"{script}.json").read_text())
    assert all(set(row) >= ORIGIN for row in rows)
    return said, rows


def test_quality_trains_every_method_and_runs_none_again(run_ranks: RunRanks, tmp_path: Path) -> None:
    said, rows = short(run_ranks, tmp_path, "quality", "--jobs=0", times=2)
    assert {row["settings"]["method"] for row in rows} == {"adamw", "adams", "muon", "scape", "sparseloco"}
    table = (tmp_path / "quality-short.md").read_text()
    assert "| SCAPE 90% |" in table
    assert "Version " in table
    assert said.count(" 4/4 loss ") == len(rows)


def test_gpu_runs_dry_on_a_cpu(run_ranks: RunRanks, tmp_path: Path) -> None:
    """So that whoever has a GPU finds it working."""
    _, (row,) = short(run_ranks, tmp_path, "gpu", "--device=cpu", "--sparsity=0.99", "--ranks=2")
    assert row["microseconds"]["sweep"] > 0
    assert "| short | fp32 | 0.99 | 2 |" in (tmp_path / "gpu.md").read_text()
    assert (tmp_path / "gpu.png").read_bytes().startswith(PNG)


def test_step_times_two_wires_in_turns(run_ranks: RunRanks, tmp_path: Path) -> None:
    _, (row,) = short(run_ranks, tmp_path, "step", "--against=fp32")
    assert {"own", "against", "more", "adamw", "fused", "phase/sweep"} <= set(row["milliseconds"])
    assert row["peak_bytes"] > 4 * row["parameters"]  # the residual alone
    assert "(fp32)" in (tmp_path / "step.md").read_text()
    assert (tmp_path / "step.png").read_bytes().startswith(PNG)


def test_no_speed_is_reported_when_kernels_are_wrong(bench_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "short_training", lambda args, choice, ranks: {"clock": torch.full((), len(choice))})
    with pytest.raises(SystemExit, match="disagree on the clock: no speed is reported"):
        bench_gpu.check(bench_gpu.argparse.Namespace(device="cpu"))


def test_hidden_time_is_what_both_streams_have_in_common(bench_gpu: ModuleType) -> None:
    events = [(7, 0, 10, "_merge_kernel"), (7, 20, 30, "copy"), (1, 5, 22, "gemm"), (1, 0, 99, "scape::sweep")]
    busy = bench_gpu.by_stream(events)
    assert bench_gpu.common(bench_gpu.union(busy[7]), bench_gpu.union(busy[1])) == 5 + 2
    assert bench_gpu.union([(3, 5), (0, 4), (6, 7)]) == [(0, 5), (6, 7)]


# ------------------------------------------------------------------------------------------------- the quality report


def row_of(run: Any, loss: float) -> dict[str, Any]:
    settings = load_example("quality").dataclasses.asdict(run)
    rest = {"accuracy": 0.5, "bytes": 1, "parameters": 1, "curve": None, "commit": "0123456789ab", "dirty": False}
    return {"name": run.name, "seed": settings.pop("seed"), "settings": settings, "loss": loss, **rest}


def test_a_row_gives_its_run_back() -> None:
    runs = load_example("quality_runs")
    for run in (run for suite in (runs.SHORT, *runs.SUITES.values()) for run in suite):
        assert runs.run_of(json.loads(json.dumps(row_of(run, 1.0)))) == run


def test_methods_are_compared_at_adamws_best_rate_on_the_seeds_that_both_have() -> None:
    runs, report = load_example("quality_runs"), load_example("quality_report")
    dense = {(1e-3, 0): 2.2, (2e-3, 0): 2.0, (2e-3, 1): 4.0}
    found = [row_of(runs.Run(method="adamw", lr=lr, seed=seed), loss) for (lr, seed), loss in dense.items()]
    for lr, seed, loss in ((2e-3, 0, 2.1), (2e-3, 1, 4.4), (2e-3, 2, 9.0), (1e-3, 0, 1.0)):
        found.append(row_of(runs.Run(**runs.scape(0.9), lr=lr, seed=seed), loss))
    text = report.suite_table(report.lines_of(found))
    assert "| AdamW | 2 | 3.0000 ± 1.4142 |  |" in text
    assert "| SCAPE 90% | 3 | 5.1667 ± 3.5133 | +7.5% ± 2.5 |" in text
    assert "AdamW's loss by learning rate (0.2M): 0.001: 2.2000, 0.002: 2.0000." in text
    assert "1.0000" not in text


def test_one_batch_that_many_ranks_share_is_compared_with_one_adamw() -> None:
    runs, report = load_example("quality_runs"), load_example("quality_report")
    found = [row_of(runs.Run(method="adamw", ranks=4, batch=8), 2.0)]
    found.append(row_of(runs.Run(**runs.scape(0.9), ranks=32, batch=1), 2.1))
    text = report.suite_table(report.lines_of(found))
    assert "| 32 | 1 x 64 bytes | SCAPE 90% | 1 | 2.1000 | +5.0% |" in text


def test_what_many_ranks_should_choose_is_what_sends_least_within_one_percent(tmp_path: Path) -> None:
    runs, report = load_example("quality_runs"), load_example("quality_report")
    found = [row_of(runs.Run(method="adamw", ranks=4, batch=8), 2.0)]
    losses = {(4, 0.9): 2.002, (4, 0.99): 2.016, (32, 0.9): 2.03, (32, 0.99): 2.06}
    for (ranks, sparsity), loss in losses.items():
        run = runs.Run(**runs.one_page(sparsity), ranks=ranks, batch=32 // ranks)
        found.append(row_of(run, loss) | {"bytes": run.steps * (1 - sparsity) * 2})
    by_ranks = report.lines_by_ranks(report.lines_of(found))
    assert "| 4 | 8 | +0.1%, 0.2 | +0.8%, 0.02 | 99% |" in (text := report.ranks_table(by_ranks))
    assert "| 32 | 1 | +1.5%, 0.2 | +3.0%, 0.02 | none |" in text
    report.plot_ranks(by_ranks, tmp_path)
    assert (tmp_path / "quality-many_ranks.png").exists()
