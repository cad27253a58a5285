"""Lightning's own tests with our strategies put in: `lightning_own.py --source DIR` prints which end differently.

DIR is a source tree of Lightning with its folder `tests/tests_pytorch` (Lightning-AI/pytorch-lightning, at a tag near
the version that is installed). The tests run several times:

- plain: as they are;
- ddp: a Trainer or Fabric for which a test names no strategy gets DDPStrategy, on one CPU. The control: what differs
  here, too, is not ours;
- scape, sparseloco: there it gets ours, dense, so that it trains as DDP does. Where a test names DDP ("ddp",
  "ddp_spawn", a DDPStrategy), on one CPU or several, it gets ours as well.

Lightning's tests train with SGD, which ScapeStrategy refuses. So in every run, the plain one too, `torch.optim.SGD` is
AdamW by that name.

Results lie in files of JSON lines, one for each run, and are written after each test: what was stopped goes on where it
stopped (another folder begins anew). A test that crashes or hangs ends its process, and another goes on with the next.
All tests take an hour on two free cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDERS = (
    *("tests_pytorch/core", "tests_pytorch/trainer/optimization", "tests_pytorch/loops", "tests_pytorch/checkpointing"),
    *("tests_pytorch/callbacks", "tests_pytorch/models/test_hooks.py", "tests_pytorch/models/test_restore.py"),
    *("tests_pytorch/models/test_cpu.py", "tests_pytorch/models/test_amp.py", "tests_pytorch/trainer/flags"),
    *("tests_pytorch/trainer/logging_", "tests_pytorch/trainer/dynamic_args", "tests_pytorch/trainer/properties"),
    "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
    "tests_pytorch/trainer/connectors/test_signal_connector.py",
    *("tests_pytorch/trainer/test_trainer.py", "tests_pytorch/trainer/test_states.py"),
    *("tests_pytorch/trainer/test_dataloaders.py", "tests_pytorch/trainer/test_ddp_sigterm_handling.py"),
    *("tests_pytorch/tuner", "tests_fabric/test_fabric.py", "tests_fabric/test_wrappers.py"),
)
LEFT_OUT = ("tests_pytorch/checkpointing/test_legacy_checkpoints.py",)
"""It reads archives of old checkpoints, which the source tree does not have."""
RUNS = ("plain", "ddp", "scape", "sparseloco")
ENDED = (0, 1, 5)  # pytest's: all passed, some failed, none left

Results = Mapping[str, Mapping[str, Any]]
"""Of one run, by test: outcome, why, ranks, seconds."""


def read(file: Path) -> dict[str, dict[str, Any]]:
    """The results that a run's file holds."""
    return {entry["test"]: entry for entry in entries(file) if "test" in entry}


def entries(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def run_tests(run: str, tests: Path, paths: Sequence[str], file: Path, limit: float) -> None:
    """One run in as many processes as it takes: a test that ends its process is passed over by the next.

    Raises:
        SystemExit: pytest could not begin.
    """
    while True:
        log = file.with_suffix(".log")
        # Away from the source tree and from this project: some tests write into the folder they run in.
        with tempfile.TemporaryDirectory() as scratch, log.open("ab") as output:
            script = Path(__file__).with_name("lightning_own_run.py")
            options = ["--rootdir", tests, "--basetemp", f"{scratch}/tmp", *(f"--ignore={tests / p}" for p in LEFT_OUT)]
            command = [sys.executable, *map(str, [script, run, file, limit, *options, *(tests / p for p in paths)])]
            process = subprocess.Popen(command, cwd=scratch, stdout=output, stderr=output, start_new_session=True)
            try:
                status = _wait(process, run, file)
            finally:  # ranks of a test that hung or crashed end with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        begun = [entry for entry in entries(file) if "began" in entry]
        if begun and begun[-1]["began"] not in read(file):
            how = "hung" if time.time() - begun[-1]["at"] >= limit else "crashed"
            entry = {"test": begun[-1]["began"], "outcome": how, "why": f"exit status {status}", "ranks": 0}
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(entry) + "\n")
        elif status in ENDED:
            return
        else:
            raise SystemExit(f"pytest must run the tests of {tests}, ended with status {status}: see {log}.")


def _wait(process: subprocess.Popen[bytes], run: str, file: Path) -> int:
    """The exit status; says every 15 seconds how far it is."""
    while True:
        try:
            return process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            left = 0
            for entry in entries(file):
                left = entry.get("left", left - ("test" in entry))
            print(f"{run}: {len(read(file))} tests have run, {max(left, 0)} are left", flush=True)


def outcome(results: Results, test: str) -> str:
    return results[test]["outcome"] if test in results else "not run"


def differences(results: Mapping[str, Results], run: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Tests that end otherwise in ``run`` than in the plain run."""
    return [
        (test, entry) for test, entry in results[run].items() if entry["outcome"] != outcome(results["plain"], test)
    ]


def table(results: Mapping[str, Results]) -> str:
    """Markdown: the numbers of each run, and the tests that end otherwise than in the plain one, our own first."""
    lines = []
    for run, found in results.items():
        counts = Counter(entry["outcome"] for entry in found.values()).most_common()
        several = sum(entry["ranks"] > 1 and entry["outcome"] != "skipped" for entry in found.values())
        numbers = ", ".join(f"{number} {name}" for name, number in counts)
        lines.append(f"{run}: {len(found)} tests, {several} of them on several ranks: {numbers}")
    control = results.get("ddp", {})
    for run in results.keys() - {"plain", "ddp"} if "plain" in results else ():
        rows = []
        for test, entry in differences(results, run):
            before, beside = outcome(results["plain"], test), outcome(control, test)
            why = entry["why"].replace("|", "\\|")
            cells = f"| {test} | {entry['ranks']} | {before} | {beside} | {entry['outcome']} | {why} |"
            rows.append((beside == entry["outcome"], entry["why"], cells))
        as_ddp = sum(row[0] for row in rows)
        lines += ["", f"## {run}: {len(rows)} end otherwise than plain, {as_ddp} of them as with DDP", ""]
        lines += [f"| test | ranks | plain | ddp | {run} | why |", "|---|---|---|---|---|---|"]
        lines += [cells for *_, cells in sorted(rows)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="source tree of Lightning")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir(), "lightning_own"), help="a folder")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS[:3], help="which to go on with")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds for one test")
    parser.add_argument("--tests", nargs="+", default=FOLDERS, help="paths within its folder `tests`")
    options = parser.parse_args(arguments)
    tests = options.source.resolve() / "tests"
    if missing := [path for path in options.tests if not (tests / path.split("::")[0]).exists()]:
        parser.error(f"`--source` must be a source tree of Lightning with its tests, got one without {missing[0]}.")
    options.results.mkdir(parents=True, exist_ok=True)
    files = {run: options.results.resolve() / f"{run}.jsonl" for run in RUNS}
    for run in options.runs:
        run_tests(run, tests, options.tests, files[run], options.limit)
    print(table({run: read(file) for run, file in files.items() if file.exists()}))


if __name__ == "__main__":
    main()
