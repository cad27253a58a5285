"""The main job, end to end: `examples/pretrain_python.py` learns under SCAPE, next to dense training on the same data.

The margins are measured ones with room for other hardware, Python and torch versions; each stands beside its
measurement.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pretrain_python.py"

STEPS, BATCH_SIZE, CONTEXT = 500, 4, 64
CI_RUN = (
    "--size=tiny",
    f"--steps={STEPS}",
    f"--batch-size={BATCH_SIZE}",
    f"--context={CONTEXT}",
    "--lr=1e-3",
    "--val-batches=20",
)
# Losses in nats per byte, seeds 0, 1, 2. A model that knows how frequent each byte is, and no more, has 3.18.
FALL = 2.6  # SCAPE 99%, measured 3.02, 3.08, 2.94, from 5.5 at the start
DISTANCE = 0.35  # SCAPE 99% above dense AdamS, measured 0.22, 0.15, 0.23 after 5 updates of each entry


def run_example(out: Path, *options: str, timeout: float = 170) -> str:
    """The output of the example, which starts its second rank itself, as it does for a user."""
    return run_script(EXAMPLE, f"--out={out}", *options, timeout=timeout)


def run_script(script: Path, *options: str, timeout: float = 170) -> str:
    """The output of a script that starts its other ranks itself."""
    launched = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK")
    environ = {name: value for name, value in os.environ.items() if name not in launched}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    command = [sys.executable, str(script), *options]
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def read_result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def scape_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and output of the CI-sized run at 99%."""
    out = tmp_path_factory.mktemp("scape")
    output = run_example(out, *CI_RUN, "--strategy=scape", "--sparsity=0.99")
    return out / "scape-99", output


@pytest.fixture(scope="module")
def dense_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of dense AdamS on the same data."""
    out = tmp_path_factory.mktemp("dense")
    run_example(out, *CI_RUN, "--strategy=ddp", "--optimizer=adams")
    return out / "dense-adams"


def test_validation_loss_falls_under_scape(scape_run: tuple[Path, str]):
    history = read_result(scape_run[0])["history"]
    assert history[0]["step"] == 0
    assert history[0]["val_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert history[-1]["step"] == STEPS
    assert history[0]["val_loss"] - history[-1]["val_loss"] > FALL


def test_scape_ends_near_dense_adams_on_the_same_data(scape_run: tuple[Path, str], dense_run: Path):
    scape, dense = read_result(scape_run[0]), read_result(dense_run)
    assert scape["history"][0]["val_loss"] == pytest.approx(dense["history"][0]["val_loss"], rel=1e-5)
    assert scape["corpus_fingerprint"] == dense["corpus_fingerprint"]
    assert scape["val_loss"] - dense["val_loss"] < DISTANCE


def test_the_figures_are_the_parts_of_a_whole(scape_run: tuple[Path, str], dense_run: Path):
    scape, dense = read_result(scape_run[0]), read_result(dense_run)
    assert scape["val_perplexity"] == pytest.approx(math.exp(scape["val_loss"]), rel=1e-3)
    assert scape["bits_per_byte"] == pytest.approx(scape["val_loss"] / math.log(2))
    kinds = ("bytes_values", "bytes_parameters", "bytes_mask", "bytes_votes", "bytes_norm")
    assert all(scape[kind] > 0 for kind in kinds)
    assert scape["bytes_total"] == sum(scape[kind] for kind in kinds)
    assert scape["bytes_sent"] == STEPS * scape["bytes_total"]
    assert scape["bytes_dense"] == dense["bytes_total"] == 4 * scape["model_parameters"]
    assert (scape["bytes_are"], dense["bytes_are"]) == ("counted", "computed")
    parts = ("seconds_compute", "seconds_selection", "seconds_exchange")
    assert all(scape[part] > 0 for part in parts)
    assert scape["seconds_step"] == pytest.approx(sum(scape[part] for part in parts))


def test_values_changes_and_mask_take_a_hundred_and_fiftieth_of_dense(scape_run: tuple[Path, str]):
    """8 bytes of dense all-reduce against 0.01 * (2 + 2 + 1) bytes, per parameter, and 0.025 more with votes."""
    scape = read_result(scape_run[0])
    payload = scape["bytes_values"] + scape["bytes_parameters"] + scape["bytes_mask"]
    assert scape["bytes_dense"] / payload > 155
    assert scape["bytes_dense"] / (payload + scape["bytes_votes"]) > 103


def test_the_artifacts_are_complete(scape_run: tuple[Path, str]):
    folder, output = scape_run
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "scape/density" in (folder / "metrics.csv").read_text().splitlines()[0]  # ScapeMonitor's
    assert read_result(folder)["sample"].startswith("def ")
    assert read_result(folder)["sample"] in output
    rows = [line for line in output.splitlines() if line.startswith("| ")]
    assert rows[0] == "|  | SCAPE 99% |"
    titles = "\n".join(rows)
    for title in ("validation loss", "bits per byte", "sent per rank and step", "dense all-reduce", "ratio", "waiting"):
        assert title in titles


def test_the_checkpoint_holds_model_optimizer_and_the_loaders_position(scape_run: tuple[Path, str]):
    checkpoint = torch.load(scape_run[0] / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == STEPS
    assert sum(weight.numel() for weight in checkpoint["state_dict"].values()) == 139_584
    assert len(checkpoint["optimizer_states"]) == 1
    (position,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert (position["epoch"], position["consumed"]) == (0, STEPS * BATCH_SIZE * 2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_distance_to_dense_adams_closes_with_more_updates(tmp_path: Path):
    """Six times the steps: 30 updates of each entry instead of 5."""
    options = [option for option in CI_RUN if "--steps" not in option] + ["--steps=3000"]
    run_example(tmp_path, *options, "--strategy=scape", timeout=500)
    run_example(tmp_path, *options, "--strategy=ddp", "--optimizer=adams", timeout=500)
    scape, dense = read_result(tmp_path / "scape-99"), read_result(tmp_path / "dense-adams")
    assert scape["val_loss"] - dense["val_loss"] < DISTANCE / 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compare_makes_one_table_of_five_runs_and_repeats_none(tmp_path: Path):
    options = ("--compare", "--size=tiny", "--steps=20", "--context=64", "--val-batches=5")
    output = run_example(tmp_path, *options, timeout=400)
    table = (tmp_path / "compare.md").read_text()
    assert table.startswith(
        "|  | dense AdamW | dense AdamS | SCAPE 90% | SCAPE 99% | SCAPE 99% warm-up 1000 |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
    )
    assert table in output
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    again = run_example(tmp_path, *options)
    assert again.count("done before") == 5
    assert table in again


@pytest.mark.slow
def test_one_process_takes_the_same_path_and_sends_nothing(tmp_path: Path):
    run_example(tmp_path, "--devices=1", "--size=tiny", "--steps=20", "--context=64", "--val-batches=5")
    result = read_result(tmp_path / "scape-99")
    assert result["bytes_total"] == 0
    assert "ratio" not in result
