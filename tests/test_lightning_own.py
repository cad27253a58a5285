"""The script that runs Lightning's own tests with our strategies, on made-up tests in the place of Lightning's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning_own
import pytest
from warm_python import warm_python

TESTS = """
import os

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def trained(tmp_path, **options):
    trainer = Trainer(default_root_dir=tmp_path, max_steps=1, barebones=True, accelerator="cpu", **options)
    trainer.fit(BoringModel())
    return trainer


def test_trains_on_one_device(tmp_path):
    assert type(trained(tmp_path, devices=1).strategy).__name__ == "SingleDeviceStrategy"


def test_ends_its_process():
    os._exit(3)


def test_trains_by_ddp(tmp_path):
    trainer = trained(tmp_path, devices=1, strategy="ddp")
    assert type(trainer.optimizers[0]) is torch.optim.SGD


def test_asks_for_two(tmp_path):
    assert Trainer(accelerator="cpu", devices=2, strategy="ddp_fork").strategy._start_method == "fork"


@pytest.mark.skip
def test_is_skipped():
    pass
"""
FILE = "tests_pytorch/test_tiny.py"


def entry(outcome: str, ranks: int = 1) -> dict[str, object]:
    return {"outcome": outcome, "why": "a | b", "ranks": ranks}


def test_strategies_are_put_in_and_a_run_goes_on_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, results = tmp_path / "source", tmp_path / "results"
    file = source / "tests" / FILE
    file.parent.mkdir(parents=True)
    file.write_text(TESTS)
    results.mkdir()
    names = ("trains_on_one_device", "ends_its_process", "trains_by_ddp", "asks_for_two", "is_skipped")
    tests = [f"{FILE}::test_{name}" for name in names]
    before = [{"test": test, "outcome": "passed", "why": "", "ranks": 1} for test in tests]
    (results / "plain.jsonl").write_text("".join(json.dumps(line) + "\n" for line in before))
    monkeypatch.setattr(sys, "executable", warm_python())
    given = ["--source", str(source), "--results", str(results), "--tests", FILE, "--runs", "scape"]

    lightning_own.main(given)
    found = lightning_own.read(results / "scape.jsonl")
    assert [found[test]["outcome"] for test in tests] == ["failed", "crashed", "failed", "passed", "skipped"]
    assert "'ScapeStrategy' == 'SingleDeviceStrategy'" in found[tests[0]]["why"]
    assert "ScapeOptimizer" in found[tests[2]]["why"]
    assert found[tests[3]]["ranks"] == 2
    assert "4 end otherwise than plain" in capsys.readouterr().out
    lefts = [line["left"] for line in lightning_own.entries(results / "scape.jsonl") if "left" in line]
    assert lefts == [5, 3]  # the second process goes on after the test that ended the first


def test_the_table_tells_our_differences_from_those_of_ddp() -> None:
    results = {
        "plain": {"a": entry("passed"), "b": entry("passed"), "c": entry("failed")},
        "ddp": {"a": entry("failed"), "b": entry("passed"), "c": entry("failed")},
        "scape": {"a": entry("failed"), "b": entry("failed", 2), "c": entry("failed")},
    }
    lines = lightning_own.table(results).splitlines()
    assert lines[2] == "scape: 3 tests, 1 of them on several ranks: 3 failed"
    assert lines[4] == "## scape: 2 end otherwise than plain, 1 of them as with DDP"
    rows = lines[8:]
    assert rows == [
        r"| b | 2 | passed | passed | failed | a \| b |",
        r"| a | 1 | passed | failed | failed | a \| b |",
    ]


def test_a_folder_that_is_not_lightnings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lightning_own.main(["--source", str(tmp_path)])
    assert "got one without tests_pytorch/core" in capsys.readouterr().err
