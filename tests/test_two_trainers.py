"""Two Trainers in one script that ask for different numbers of ranks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from trainer_helpers import SCRIPT_MODULE
from warm_python import warm_python

SCRIPT = f"""{SCRIPT_MODULE}
from lightning_scape import ScapeStrategy

for devices in map(int, sys.argv[2:]):
    strategy = ScapeStrategy(sparsity=0.5, timeout=90, start_method=sys.argv[1])
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(accelerator="cpu", devices=devices, max_epochs=1, strategy=strategy, **quiet)
    trainer.fit(Module())
    sys.stdout.write("trained on " + str(devices) + chr(10))  # as one piece: two ranks write
    sys.stdout.flush()
"""


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [warm_python(), "-W", "ignore", str(folder / "script.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(("first", "second"), [("2", "1"), ("1", "2")])
def test_another_number_of_ranks_in_one_script_is_an_error_that_says_why(
    tmp_path: Path, first: str, second: str
) -> None:
    """2, then 1 ended in an IndexError on one rank and a kill of the other; 1, then 2 trained on half of the data."""
    status, said, errors = run(tmp_path, "popen", first, second)
    assert status != 0
    assert f"trained on {first}" in said
    assert f"trained on {second}" not in said
    assert f"got {second} after {first}: the processes that the first one started run the whole script" in errors


def test_forked_processes_end_with_the_fit_and_the_next_may_be_fewer(tmp_path: Path) -> None:
    status, said, errors = run(tmp_path, "fork", "2", "1")
    assert status == 0, errors
    assert said.splitlines() == ["trained on 2", "trained on 1"]
