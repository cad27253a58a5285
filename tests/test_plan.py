"""``lightning-scape plan``: its bytes are those that real steps count, its seconds near those that were measured."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from lightning_scape import ScapeConfig, ScapeOptimizer, SparseLoCo, SparseLoCoConfig
from lightning_scape.scape.communicator import run_bytes, scape_bytes
from lightning_scape.scape.state import state_bytes
from lightning_scape.tools import plan
from lightning_scape.tools.cli import main

RESULTS = Path(__file__).parent.parent / "examples" / "benchmarks" / "results"
SHAPES = ((300, 170), (41,), (1000,))
NUMELS = [51_000, 41, 1000]


def _parameters(rank: int) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    torch.manual_seed(1 + rank)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def _scape(rank: int, world_size: int, sparsity: float) -> list[int]:
    parameters = _parameters(rank)
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=3)
    optimizer = ScapeOptimizer.from_optimizer(torch.optim.AdamW(parameters, lr=1e-3), config)
    counted = []
    for _ in range(6):
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert optimizer.stats is not None
        counted.append(optimizer.stats.bytes_total)
    optimizer.drain()
    state = optimizer.engine.state
    kept = sum(each.nbytes for each in vars(state).values() if isinstance(each, torch.Tensor) and each.dim() == 2)
    assert kept == state_bytes(config, world_size) * state.residual.numel()
    return counted


@pytest.mark.parametrize("sparsity", [0.9, 0.99])
def test_bytes_of_scape_are_those_that_a_run_counts(run_ranks: Any, sparsity: float) -> None:
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=3)
    for counted in run_ranks(_scape, 2, sparsity):
        assert counted[-1] == sum(scape_bytes(NUMELS, 2, config).values())
        assert sum(counted) == run_bytes(NUMELS, 2, config, 6)
        assert counted[0] > counted[-1]


def test_a_run_that_ends_before_its_first_sparse_step_sends_no_mask() -> None:
    config = ScapeConfig()
    dense = config.sent_by_step(100)[200]
    assert dense == 49
    assert run_bytes(NUMELS, 2, config, dense) == dense * sum(scape_bytes(NUMELS, 2, config, sent=200).values())


def _sparseloco(rank: int, world_size: int) -> int:
    parameters = _parameters(rank)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    loco = SparseLoCo(optimizer, sync_every=2)
    for _ in range(2):
        optimizer.step()
    assert loco.stats is not None
    loco.close()
    return loco.stats.bytes_total


def test_bytes_of_an_exchange_are_those_that_sparseloco_counts(run_ranks: Any) -> None:
    assert run_ranks(_sparseloco, 2) == [SparseLoCoConfig().exchange_bytes(NUMELS, 2)] * 2


def _measured() -> dict[tuple[str, ...], dict[str, tuple[float, float]]]:
    """Seconds and sent bytes of a step by method, of each cell of two hosts: what was measured with the same code."""
    cells: dict[tuple[str, ...], dict[str, tuple[float, float]]] = defaultdict(dict)
    for name in ("steps", "runs"):
        for row in json.loads((RESULTS / f"{name}.json").read_text()):
            given = row["settings"]
            steps, apart = (given["steps"], row["validating"] + row["saving"]) if name == "runs" else (1, 0.0)
            cell = cells[given["model"], given["link"], f"{given['hosts']}x{given['ranks_per_host']}", row["commit"]]
            if row["seed"] == 0 and not given["method"].startswith(("powersgd", "fsdp", "zero1", "demo", "diloco")):
                cell[given["method"]] = (row["seconds"] - apart) / steps, row["sent"] / steps
    return {key: cell for key, cell in cells.items() if key[2] == "2x1" and "compute" in cell and len(cell) > 1}


def test_seconds_are_near_those_measured_between_two_hosts() -> None:
    """As the documentation says, with the exception that it names: gloo does not hide DDP's messages."""
    errors, cells = [], _measured()
    for (_, link, *_), cell in cells.items():
        compute, rate, predicted = cell["compute"][0], plan.bytes_per_second(link), {}
        for method in cell.keys() - {"compute"}:
            messages = cell[method][1] / rate
            local = compute + messages
            predicted[method] = plan.ddp_seconds(compute, messages) if method.startswith("ddp") else local
            errors.append(abs(predicted[method] / cell[method][0] - 1))
        measured = {method: cell[method][0] for method in predicted}
        named = min(predicted, key=predicted.__getitem__)
        assert named.startswith("ddp") or measured[named] < 1.1 * min(measured.values())  # as `plan` advises
    assert len(cells) >= 5
    assert median(errors) < 0.07


def test_the_first_row_within_ten_percent_of_the_best_is_advised(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "plan --parameters 160e6 --ranks 8 --compute 0.8 --steps 10000 --bandwidth"
    for bandwidth, advice in (
        ("100gbit", "Use DDP fp32: no"),
        ("10gbit", "Use DDP bf16"),
        ("2gbit", "Use SCAPE 99%"),
    ):
        assert main([*asked.split(), bandwidth]) == 0
        *table, blank, said = capsys.readouterr().out.splitlines()
        assert blank == ""
        assert said.startswith(advice)
        assert [line.split(" | ")[0] for line in table[2:]] == [
            *("| DDP fp32", "| DDP bf16", "| SCAPE 90%", "| SCAPE 99%", "| SparseLoCo, H=30"),
        ]


def test_a_row_is_what_the_formulas_say() -> None:
    dense, _, _, sparse, loco = plan.plan([8_000_000], 2, 1e8, 0.3, 100)
    assert dense.step_bytes == 32e6
    assert dense.step_seconds == pytest.approx(0.1 + 0.32)
    assert dense.run_seconds == pytest.approx(100 * dense.step_seconds)
    assert sparse.step_seconds == pytest.approx(0.3 + sparse.step_bytes / 1e8)
    assert sparse.run_seconds == pytest.approx(30 + sparse.run_bytes / 1e8)
    assert sparse.run_bytes > 100 * sparse.step_bytes  # a warm-up
    assert loco.run_bytes == pytest.approx(4 * 30 * loco.step_bytes)  # the last window is short


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--ranks 8 --bandwidth 10gbit --compute 1", "One of `--parameters` and `--model` must be given, got neither"),
        ("--ranks 1 --bandwidth 10gbit --compute 1 --parameters 9", "`--ranks` must be at least 2, got 1"),
        ("--ranks 2 --bandwidth 10 --compute 1 --parameters 9", "got '10'. Write 10gbit."),
        ("--ranks 2 --bandwidth 1gbit --compute 1 --model none-9b", "got 'none-9b'. Try pythia-160m."),
    ],
)
def test_what_cannot_be_planned_is_an_error(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options.split()]) == 1
    assert said in capsys.readouterr().err


def test_a_model_of_litgpt_is_taken_by_its_name() -> None:
    assert sum(plan.numels_of("pythia-14m")) == 14_067_712
