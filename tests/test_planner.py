"""The planner: its bytes are the package's own, its times follow from its rules, its advice from its times."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_scape import ScapeConfig, ScapeOptimizer, StepStats, plan, planner, tool
from lightning_scape.planner import Job, Link, Machine, Weight

WEIGHTS = (Weight(50_000, None, False), *(Weight(30_000, i) for i in range(4)), Weight(50_000))
JOB = Job(weights=WEIGHTS, ranks=8, step_compute=0.01)
MACHINE = Machine.of_memory(1e11)
GIGABIT = Link(bandwidth=1.25e8)
MEASURED = Path(__file__).parents[1] / "examples" / "results" / "two_hosts" / "two_hosts.json"


# ------------------------------------------------------------------------------------------------------------- bytes


def _real_bytes(rank: int, world_size: int, sparsity: float, dtype: torch.dtype, clip: bool) -> list[dict[str, int]]:
    parameters = [nn.Parameter(torch.randn(size).to(dtype)) for size in (1003, 777, 4)]
    for parameter in parameters:
        torch.distributed.broadcast(parameter.data, 0)
    optimizer = ScapeOptimizer(parameters, config=ScapeConfig(sparsity=sparsity))
    found = []
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        if clip:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert optimizer.stats is not None
        found.append({kind: getattr(optimizer.stats, f"bytes_{kind}") for kind in planner_kinds()})
    optimizer.drain()
    return found


def planner_kinds() -> tuple[str, ...]:
    return ("values", "parameters", "mask", "votes", "norm")


@pytest.mark.parametrize("sparsity", [0.0, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("clip", [True, False])
def test_bytes_are_those_that_a_real_step_counts(run_ranks: Any, sparsity: float, clip: bool) -> None:
    dtype = torch.bfloat16 if clip else torch.float32
    steps = run_ranks(_real_bytes, 3, sparsity, dtype, clip)[0]
    expected = planner.scape_bytes(
        (1003, 777, 4), 3, ScapeConfig(sparsity=sparsity), parameter_bytes=dtype.itemsize, clip=clip
    )
    assert steps[-1] == expected


def test_dense_bytes_are_those_of_rings() -> None:
    sent = {p.method: p.bytes_sent for p in planner.predict(JOB, GIGABIT, MACHINE)}
    size = JOB.parameters * 4
    assert sent["compute only"] == 0
    assert sent["DDP"] == sent["ZeRO-1"] == 2 * size * 7 // 8
    assert sent["DDP (bf16 wire)"] == size * 7 // 8
    assert sent["FSDP"] == (size + 4 * 120_000 + size) * 7 // 8  # blocks twice, the rest once, the gradient


def test_one_rank_sends_nothing() -> None:
    for prediction in planner.predict(replace(JOB, ranks=1), GIGABIT, MACHINE):
        assert prediction.bytes_sent == 0


# ------------------------------------------------------------------------------------------------------------- times


def test_nothing_is_faster_than_compute_alone_with_equal_optimizers() -> None:
    free = Machine(adamw=0, clip=0, scape={0.01: (0.0, 0.0), 0.1: (0.0, 0.0)})
    floor, *others = planner.predict(JOB, GIGABIT, free)
    assert all(prediction.seconds >= floor.seconds for prediction in others)


def test_a_faster_link_never_slows_a_step() -> None:
    links = [Link(bandwidth=10**exponent) for exponent in (6, 7, 8, 9, 10, 11)]
    rows = [planner.predict(JOB, link, MACHINE, [0.0, 0.9, 0.99]) for link in links]
    for column in zip(*rows, strict=True):
        seconds = [prediction.seconds for prediction in column]
        assert seconds == sorted(seconds, reverse=True)


def test_on_a_slow_link_times_are_in_proportion_to_bytes() -> None:
    slow = Link(bandwidth=1e4, latency=0)
    for prediction in planner.predict(JOB, slow, MACHINE)[1:]:
        mask = planner.scape_bytes([w.numel for w in WEIGHTS], 8, ScapeConfig(sparsity=prediction.sparsity or 0.0))
        waited = prediction.bytes_sent - (mask["mask"] + mask["votes"] if prediction.sparsity else 0)
        assert prediction.seconds >= waited / 1e4
        assert prediction.seconds <= prediction.bytes_sent / 1e4 + 0.1


def test_ddp_hides_the_buckets_that_are_ready_early() -> None:
    """Two buckets of 28 MB; the head's travels while the rest of the backward pass runs."""
    weights = (Weight(7_000_000, 0), Weight(7_000_000))
    job = Job(weights=weights, ranks=2, step_compute=3.0, clip=False)
    link = Link(bandwidth=28e6, latency=0)
    free = Machine(adamw=0, clip=0)
    # forward 1 s, head's backward 1 s, its bucket until 3 s; the last bucket from 3 s to 4 s
    assert planner.ddp(job, link, free).seconds == pytest.approx(4.0)


def test_the_processors_work_cannot_be_hidden() -> None:
    job = Job(weights=(Weight(7_000_000, 0), Weight(7_000_000)), ranks=2, step_compute=3.0, clip=False)
    link = Link(bandwidth=1e12, latency=0, reduce_seconds=1e-7)
    assert planner.ddp(job, link, Machine(adamw=0, clip=0)).seconds == pytest.approx(3.0 + 56e6 * 1e-7)


def test_an_all_to_all_loads_a_nodes_link_with_all_its_ranks() -> None:
    free = Machine(adamw=0, clip=0, scape={0.01: (0.0, 0.0)})
    link = Link(bandwidth=1e4, latency=0)
    config = ScapeConfig(sparsity=0.99)
    one, four = (planner.scape(replace(JOB, ranks_per_node=g), link, free, config).seconds for g in (1, 4))
    values = planner.scape_bytes([w.numel for w in WEIGHTS], 8, config)["values"]
    assert four - one == pytest.approx(values / 1e4 * (4 * 4 / 7 - 1), rel=1e-3)


def test_break_even_is_where_both_take_the_same_time() -> None:
    even = planner.break_even_bandwidth(JOB, GIGABIT, MACHINE, 0.99)
    assert even is not None
    assert math.isfinite(even)
    found = planner.predict(JOB, replace(GIGABIT, bandwidth=even), MACHINE, [0.99])
    assert found[-1].seconds == pytest.approx(planner.best_dense(found).seconds, rel=1e-2)
    pays = planner.break_even_bandwidth(JOB, GIGABIT, MACHINE, 0.99, speedup=2.0)
    assert pays is not None
    found = planner.predict(JOB, replace(GIGABIT, bandwidth=pays), MACHINE, [0.99])
    assert planner.best_dense(found).seconds == pytest.approx(2 * found[-1].seconds, rel=1e-2)
    slow = Machine(adamw=0, clip=0, scape={0.01: (1.0, 1.0)})
    assert planner.break_even_bandwidth(JOB, GIGABIT, slow, 0.99) is None


def test_memory_counts_what_each_rank_keeps() -> None:
    memory = {p.method: p.memory / JOB.parameters for p in planner.predict(JOB, GIGABIT, MACHINE)}
    assert memory["DDP"] == pytest.approx(4 + 4 + 8 + 4)
    assert memory["ZeRO-1"] == pytest.approx(4 + 4 + 1 + 4)
    assert memory["SCAPE 0.99"] == pytest.approx(4 + 4 + 4 + 1 + 0.5)


def test_more_ranks_cost_more_and_are_reported_up_to_1024() -> None:
    scaling = planner.scaling(JOB, GIGABIT, MACHINE, [0.99])
    assert [*scaling] == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    for index in (1, -1):
        seconds = [row[index].seconds for row in scaling.values()]
        assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("field", "value"), [("ranks", 0), ("ranks_per_node", 3), ("step_compute", 0.0), ("parameter_bytes", 0)]
)
def test_a_job_that_cannot_be_is_an_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(JOB, **{field: value})


# ----------------------------------------------------------------------------------------------------------- advice


def test_advice_is_to_stay_dense_on_a_fast_link_and_not_on_a_slow_one() -> None:
    fast = planner.advice(planner.predict(JOB, Link(bandwidth=1e13, latency=0), MACHINE))
    slow = planner.advice(planner.predict(JOB, GIGABIT, MACHINE))
    assert fast.startswith("Stay with ")
    assert slow.startswith("Use SCAPE 0.9")


def stats(**changes: Any) -> StepStats:
    """Of a step that sent 1 MB in 0.1 s, against 100 MB of a dense one; 0.1 s of own work."""
    figures: dict[str, Any] = dict.fromkeys(StepStats.__dataclass_fields__, 0)
    figures |= {"bytes_values": 500_000, "bytes_parameters": 500_000, "bytes_dense": 100_000_000}
    figures |= {"message_seconds": 0.1, "skipped": False, "seconds": {"fold": 0.03, "synchronize": 0.1, "update": 0.07}}
    return StepStats(**{**figures, **changes})


def test_a_runs_own_figures_tell_whether_dense_would_be_faster() -> None:
    assert planner.dense_would_be_faster([stats()] * 3) is None  # dense: 10 s at the 10 MB/s reached
    quick = stats(message_seconds=1e-4, seconds={"fold": 0.03, "synchronize": 1e-4, "update": 0.2})
    said = planner.dense_would_be_faster([quick] * 3)  # dense: 10 ms + 70 ms against 230 ms
    assert said is not None
    assert "80 Gbit/s" in said
    assert planner.dense_would_be_faster([]) is None
    assert planner.dense_would_be_faster([replace(quick, skipped=True)]) is None


# ------------------------------------------------------------------------------------------------- the command line


def run_tool(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = tool.main(["plan", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


ISSUE_COMMAND = "--model pythia-160m --nodes 8 --gpus-per-node 1 --bandwidth 10gbit --step-compute 0.8s"


def test_plan_answers_in_one_sentence_with_tables_and_a_plot(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("litgpt")
    path = tmp_path / "new" / "plan.png"
    status, out, _ = run_tool(capsys, *ISSUE_COMMAND.split(), "--plot", str(path))
    assert status == 0
    assert "162.3M parameters on 8 ranks" in out
    for word in ("Use SCAPE", "| DDP |", "| FSDP |", "| ZeRO-1 |", "| SCAPE 0.99 |", "| 1024 |", "Assumed: "):
        assert word in out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model no-such-model --nodes 2 --bandwidth 1gbit --step-compute 1s", "must name a LitGPT configuration"),
        ("--model pythia-14m --nodes 0 --bandwidth 1gbit --step-compute 1s", "`ranks` must be >= 1"),
    ],
)
def test_what_cannot_be_planned_is_an_error_with_a_remedy(capsys: Any, arguments: str, message: str) -> None:
    pytest.importorskip("litgpt")
    status, _, err = run_tool(capsys, *arguments.split())
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model m --bandwidth 1gbit --step-compute 1s", "--nodes must be given"),
        ("--model m --nodes 2 --bandwidth 1gbit", "--step-compute must be given, or --measure"),
        ("--model m --nodes 2 --step-compute 1s", "--bandwidth must be given"),
        ("--model m --nodes 2 --bandwidth fast --step-compute 1s", "a bandwidth must be"),
        ("--model m --nodes 2 --bandwidth 1gbit --step-compute soon", "a time must be"),
    ],
)
def test_a_missing_or_wrong_option_is_named(capsys: Any, arguments: str, message: str) -> None:
    with pytest.raises(SystemExit):
        tool.main(["plan", *arguments.split()])
    assert message in capsys.readouterr().err


def test_the_tool_lists_its_commands_and_rejects_others(capsys: Any) -> None:
    assert tool.main([]) == 0
    assert "plan" in capsys.readouterr().out
    assert tool.main(["dance"]) == 2
    assert "got 'dance'" in capsys.readouterr().err


def test_units_are_read_and_written() -> None:
    assert plan.bandwidth("10gbit") == 1.25e9
    assert plan.seconds("350ms") == pytest.approx(0.35)
    assert [plan.show_bandwidth(x) for x in (1.25e9, 1.25e6, None, math.inf)] == [
        "10 Gbit/s",
        "10 Mbit/s",
        "never",
        "always",
    ]


def _measured(rank: int, world_size: int) -> tuple[Link, Machine]:
    model = nn.Linear(200, 200)
    model.weight.grad, model.bias.grad = torch.randn(200, 200), torch.randn(200)
    return plan.measure_link(megabytes=0.5, repeats=2), plan.measure_machine([*model.parameters()], [0.9], repeats=2)


def test_measuring_finds_a_link_and_what_optimizers_cost(run_ranks: Any) -> None:
    for link, machine in run_ranks(_measured, 2):
        assert link.bandwidth > 1e6
        assert 0 < link.latency < 1
        assert link.copy_seconds > 0
        assert machine.adamw > 0
        assert min(machine.scape[0.1]) > 0


# ------------------------------------------------------------------------------------------- against measured steps


def test_predictions_are_within_15_percent_of_two_hosts() -> None:
    """The median over all methods, links and models of the committed measurement."""
    results = json.loads(MEASURED.read_text())
    compared = planner.compare_with_measured(results)
    assert len(compared) >= 7 * len(results["cells"])
    assert planner.median_error(compared) < 0.15
