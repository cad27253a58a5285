"""The planner: its bytes are the package's own, its times follow from its rules, its advice from its times."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_modules import load_example
from torch import nn

from lightning_scape import ScapeConfig, ScapeOptimizer, StepStats
from lightning_scape.core.words import show_bandwidth, show_bytes, show_seconds, show_times
from lightning_scape.planning import conclusions, cost_model
from lightning_scape.planning import measure as measuring
from lightning_scape.planning.cost_model import Job, Link, Machine, Prediction, Weight
from lightning_scape.scape import plan as scape_plan
from lightning_scape.scape.advice import dense_would_be_faster
from lightning_scape.scape.cost import scape_bytes, scape_traffic
from lightning_scape.tools import arguments as words
from lightning_scape.tools import commands, plan

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
    optimizer = ScapeOptimizer(parameters, config=ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
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


@pytest.mark.few(1)
@pytest.mark.parametrize("sparsity", [0.0, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("clip", [True, False])
def test_bytes_are_those_that_a_real_step_counts(run_ranks: Any, sparsity: float, clip: bool) -> None:
    dtype = torch.bfloat16 if clip else torch.float32
    steps = run_ranks(_real_bytes, 3, sparsity, dtype, clip)[0]
    expected = scape_bytes((1003, 777, 4), 3, ScapeConfig(sparsity=sparsity), parameter_bytes=dtype.itemsize, clip=clip)
    assert steps[-1] == expected


def test_dense_bytes_are_those_of_rings() -> None:
    sent = {p.method: p.bytes_sent for p in cost_model.predict(JOB, GIGABIT, MACHINE)}
    size = JOB.parameters * 4
    assert sent["compute only"] == 0
    assert sent["DDP"] == sent["ZeRO-1"] == 2 * size * 7 // 8
    assert sent["DDP (bf16 wire)"] == size * 7 // 8
    assert sent["FSDP"] == (size + 4 * 120_000 + size) * 7 // 8  # blocks twice, the rest once, the gradient


def test_one_rank_sends_nothing() -> None:
    for prediction in cost_model.predict(replace(JOB, ranks=1), GIGABIT, MACHINE):
        assert prediction.bytes_sent == 0


# ------------------------------------------------------------------------------------------------------------- times


def test_nothing_is_faster_than_compute_alone_with_equal_optimizers() -> None:
    free = Machine(adamw=0, clip=0, own={"scape": {0.01: (0.0, 0.0), 0.1: (0.0, 0.0)}})
    floor, *others = cost_model.predict(JOB, GIGABIT, free)
    assert all(prediction.seconds >= floor.seconds for prediction in others)


def test_a_faster_link_never_slows_a_step() -> None:
    links = [Link(bandwidth=10**exponent) for exponent in (6, 7, 8, 9, 10, 11)]
    rows = [cost_model.predict(JOB, link, MACHINE, [0.0, 0.9, 0.99]) for link in links]
    for column in zip(*rows, strict=True):
        seconds = [prediction.seconds for prediction in column]
        assert seconds == sorted(seconds, reverse=True)


def test_on_a_slow_link_times_are_in_proportion_to_bytes() -> None:
    slow = Link(bandwidth=1e4, latency=0)
    for prediction in cost_model.predict(JOB, slow, MACHINE)[1:]:
        mask = scape_bytes([w.numel for w in WEIGHTS], 8, ScapeConfig(sparsity=prediction.sparsity or 0.0))
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
    assert cost_model.ddp(job, link, free).seconds == pytest.approx(4.0)


def test_the_processors_work_cannot_be_hidden() -> None:
    job = Job(weights=(Weight(7_000_000, 0), Weight(7_000_000)), ranks=2, step_compute=3.0, clip=False)
    link = Link(bandwidth=1e12, latency=0, reduce_seconds=1e-7)
    assert cost_model.ddp(job, link, Machine(adamw=0, clip=0)).seconds == pytest.approx(3.0 + 56e6 * 1e-7)


def test_an_all_to_all_loads_a_nodes_link_with_all_its_ranks() -> None:
    free = Machine(adamw=0, clip=0, own={"scape": {0.01: (0.0, 0.0)}})
    link = Link(bandwidth=1e4, latency=0)
    config = ScapeConfig(sparsity=0.99)
    one, four = (scape_plan.predict(replace(JOB, ranks_per_node=g), link, free, config).seconds for g in (1, 4))
    values = scape_bytes([w.numel for w in WEIGHTS], 8, config)["values"]
    assert four - one == pytest.approx(values / 1e4 * (4 * 4 / 7 - 1), rel=1e-3)


def gain(
    sparsity: float = 0.99, job: Job = JOB, link: Link = GIGABIT, machine: Machine = MACHINE, **more: float
) -> conclusions.Gain:
    def there(other: Link) -> list[Prediction]:
        return cost_model.predict(job, other, machine, [sparsity])

    return conclusions.gain_of(f"SCAPE {sparsity:g}", there, link, **more)


def break_even(machine: Machine = MACHINE, **more: float) -> float | None:
    return conclusions.break_even_bandwidth(gain(machine=machine, **more), GIGABIT.bandwidth)


def test_break_even_is_where_both_take_the_same_time() -> None:
    even = break_even()
    assert even is not None
    assert math.isfinite(even)
    found = cost_model.predict(JOB, replace(GIGABIT, bandwidth=even), MACHINE, [0.99])
    assert found[-1].seconds == pytest.approx(conclusions.best_dense(found).seconds, rel=1e-2)
    pays = break_even(speedup=2.0)
    assert pays is not None
    found = cost_model.predict(JOB, replace(GIGABIT, bandwidth=pays), MACHINE, [0.99])
    assert conclusions.best_dense(found).seconds == pytest.approx(2 * found[-1].seconds, rel=1e-2)
    slow = Machine(adamw=0, clip=0, own={"scape": {0.01: (1.0, 1.0)}})
    assert break_even(slow) is None


def test_memory_counts_what_each_rank_keeps() -> None:
    memory = {p.method: p.memory / JOB.parameters for p in cost_model.predict(JOB, GIGABIT, MACHINE)}
    assert memory["DDP"] == pytest.approx(4 + 4 + 8 + 4)
    assert memory["ZeRO-1"] == pytest.approx(4 + 4 + 1 + 4)
    for wire, errors in (("bf16", 0.0), ("int4", 0.5)):  # of the changes, which the owner keeps
        kept = scape_plan.predict(JOB, GIGABIT, MACHINE, ScapeConfig(wire_dtype=wire)).memory / JOB.parameters
        assert kept == pytest.approx(4 + 4 + 4 + 1 + 0.5 + errors)
    config = ScapeConfig(update="adams", second_moment="reconstructed", wire_dtype="bf16")
    adams = scape_plan.predict(JOB, GIGABIT, MACHINE, config)
    assert adams.memory / JOB.parameters == pytest.approx(4 + 4 + 4 + 1)


def test_more_ranks_cost_more_and_are_reported_up_to_1024() -> None:
    scaling = cost_model.scaling(JOB, GIGABIT, MACHINE, [0.99])
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


def test_one_node_of_several_ranks_is_refused() -> None:
    """Dense methods were charged for a link between nodes that does not exist, and SCAPE's all-to-all was not."""
    with pytest.raises(ValueError, match="`ranks` must be on at least 2 nodes, got 8 on one"):
        replace(JOB, ranks_per_node=8)


def test_memory_of_no_speed_is_refused() -> None:
    for speed in (0.0, -5e9, math.nan):
        with pytest.raises(ValueError, match="`bytes_per_second` must be > 0"):
            Machine.of_memory(speed)


@pytest.mark.parametrize(
    ("per_node", "ranks"), [(3, [6, 12, 24, 48, 96, 192, 384, 768]), (256, [512, 1024]), (2000, [4000])]
)
def test_more_ranks_are_whole_nodes_and_at_least_one_row(per_node: int, ranks: list[int]) -> None:
    job = replace(JOB, ranks=2 * per_node, ranks_per_node=per_node)
    assert [*cost_model.scaling(job, GIGABIT, MACHINE, [])] == ranks


def test_sparse_training_that_pays_on_fast_links_only_says_above() -> None:
    """On 4,000 ranks the all-to-all loads a node's link with the bytes of 2,000, but dense rings take more hops."""
    weights = tuple(Weight(10_000_000, i) for i in range(6))
    job = replace(JOB, weights=weights, ranks=4000, ranks_per_node=2000)
    link = Link(bandwidth=1e11)
    found = cost_model.predict(job, link, MACHINE, [0.9])
    assert conclusions.best_dense(found).seconds > found[-1].seconds
    there = gain(0.9, job, link), link.bandwidth
    assert conclusions.break_even_bandwidth(*there) is None
    least = conclusions.least_bandwidth(*there)
    assert least is not None
    found = cost_model.predict(job, replace(link, bandwidth=least), MACHINE, [0.9])
    assert found[-1].seconds == pytest.approx(conclusions.best_dense(found).seconds, rel=1e-2)
    assert plan.show_turning_point(*there) == f"above {show_bandwidth(least)}"
    assert conclusions.least_bandwidth(gain(), GIGABIT.bandwidth) is None  # it is fast on slow links already


# ----------------------------------------------------------------------------------------------------------- advice


def test_advice_is_to_stay_dense_on_a_fast_link_and_not_on_a_slow_one() -> None:
    fast = conclusions.advice(cost_model.predict(JOB, Link(bandwidth=1e13, latency=0), MACHINE))
    slow = conclusions.advice(cost_model.predict(JOB, GIGABIT, MACHINE))
    assert fast.startswith("Stay with ")
    assert slow.startswith("Use SCAPE 0.9")


def predictions(dense: float = 1.0, **sparse: float) -> list[Prediction]:
    """Compute alone and FSDP in 30 GB, DDP in 100 GB, SCAPE in 90 GB; ``s90=0.5`` is SCAPE 0.90 in 0.5 seconds."""

    def one(method: str, seconds: float, gigabytes: int, **more: Any) -> Prediction:
        figures: dict[str, Any] = {"bytes_sent": 1000, "memory": gigabytes * 10**9, **more}
        return Prediction(method=method, seconds=seconds, **figures)

    found = [one("compute only", 0.5, 30, bytes_sent=0), one("DDP", dense, 100), one("FSDP", 2 * dense, 30)]
    for name, seconds in sparse.items():
        sparsity = float(f"0.{name[1:]}")
        found.append(one(f"SCAPE {sparsity:g}", seconds, 90, sparsity=sparsity, title="SCAPE"))
    return found


def test_advice_takes_the_lowest_sparsity_that_pays() -> None:
    """0.9 is within 5% of 0.99, but only 0.99 is 1.1 times as fast as DDP: the advice was to stay with DDP."""
    assert conclusions.advice(predictions(s9=0.92, s99=0.89, s999=0.88)).startswith("Use SCAPE 0.99:")
    assert conclusions.advice(predictions(s9=0.90, s99=0.88)).startswith("Use SCAPE 0.9:")
    said = conclusions.advice(predictions(s9=0.96, s99=0.93))
    assert said.startswith("Stay with DDP: SCAPE 0.99 would be 1.08x as fast")


def test_advice_goes_beyond_99_percent_only_where_nothing_else_pays_and_says_what_it_costs() -> None:
    assert conclusions.advice(predictions(s9=0.8, s99=0.7, s999=0.1)).startswith("Use SCAPE 0.99:")
    said = conclusions.advice(predictions(s9=0.99, s99=0.95, s999=0.8))
    assert said.startswith("Use SCAPE 0.999: ")
    assert said.endswith(" But above 99%, once the warm-up is over, the loss ended several percent higher.")


def test_the_other_wire_sends_and_keeps_what_it_takes() -> None:
    """4 bits beside bf16, whichever is the default."""
    link = replace(GIGABIT, bandwidth=1.25e7)
    wide, narrow = (
        scape_plan.predict(JOB, link, MACHINE, ScapeConfig(sparsity=0.9, wire_dtype=wire)) for wire in ("bf16", "int4")
    )
    assert narrow.seconds < wide.seconds
    assert narrow.bytes_sent < 0.6 * wide.bytes_sent
    assert narrow.memory == wide.memory + 4 * JOB.parameters // JOB.ranks  # the owner keeps the changes' errors
    (late,) = scape_plan.ScapeCost().predict(JOB, link, MACHINE, [0.9])
    (other,) = scape_plan.ScapeCost().alternatives(JOB, link, MACHINE, late)
    assert {late.option, other.option} == {'wire_dtype="bf16"', 'wire_dtype="int4"'}
    dense = scape_plan.predict(JOB, link, MACHINE, ScapeConfig(sparsity=0.0))
    assert scape_plan.ScapeCost().alternatives(JOB, link, MACHINE, dense) == []


def test_advice_never_recommends_what_does_not_fit_while_something_does() -> None:
    slow = predictions(s99=0.5)
    assert conclusions.advice(slow, 120e9) == conclusions.advice(slow)
    assert conclusions.advice(slow, 95e9).startswith("Use SCAPE 0.99: a step takes 500 ms instead of 2.00 s with FSDP")
    said = conclusions.advice(slow, 80e9)
    assert said.startswith("Use FSDP: of what fits into the 80 GB of a rank it is the fastest; a step takes 2.00 s.")
    assert said.endswith("SCAPE 0.99 would take 500 ms, but needs 90 GB per rank; FSDP needs 30 GB.")
    assert conclusions.advice(predictions(), 80e9).startswith("Use FSDP: ")
    assert conclusions.advice(slow, 20e9).startswith(
        "None of these methods fits into the 20 GB of a rank: FSDP needs the"
    )


def test_break_even_is_with_the_best_dense_method_that_fits() -> None:
    found = predictions(s99=0.5)
    assert conclusions.best_dense(found, 80e9).method == "FSDP"
    assert conclusions.best_dense(found, 1e9).method == conclusions.best_dense(found).method == "DDP"
    memory = cost_model.fsdp(JOB, GIGABIT, MACHINE).memory
    fits = break_even(speedup=4.0, memory=memory)
    anyhow = break_even(speedup=4.0)
    assert fits is not None
    assert anyhow is not None
    assert fits > 1.1 * anyhow  # of the dense methods, DDP is the fastest there


def test_advice_names_the_latency_of_many_ranks_where_that_decides() -> None:
    """A hop of 0.2 ms on 1,024 ranks: SCAPE's three rings of hops are not hidden, and the link is not to blame."""
    job = replace(JOB, ranks=1024, step_compute=1.0)
    link = Link(bandwidth=1e12, latency=2e-4)
    said = conclusions.advice(cost_model.predict(job, link, MACHINE))
    assert said.startswith("Stay with ")
    assert said.endswith("616 ms of that are the latency of so many ranks, whatever the bandwidth.")
    slow = replace(Machine.of_memory(1e10), own={"scape": {0.01: (1e-8, 0.0)}})
    quick = cost_model.predict(replace(JOB, step_compute=1.0), Link(bandwidth=1e12, latency=0), slow)
    assert "the link is fast enough for this model" in conclusions.advice(quick)


def test_advice_blames_the_link_only_where_dense_training_hides_its_messages() -> None:
    def said(**figures: float) -> str:
        *rest, last = predictions(s99=1.1)
        return conclusions.advice([*rest, replace(last, **figures)])

    assert said(exposed=0.5).endswith("500 ms of that are spent waiting for its messages.")
    assert said(exposed=0.05).endswith("its own work takes longer here than its smaller messages save.")
    assert said(exposed=0.05, latency=0.05).endswith("its own work takes longer here than its smaller messages save.")
    assert conclusions.advice(predictions(0.54, s99=0.6)).endswith("the link is fast enough for this model.")


def test_advice_for_one_rank_is_an_error_with_a_rule() -> None:
    """It was "min() arg is an empty sequence"."""
    with pytest.raises(ValueError, match="must be of at least 2 ranks"):
        conclusions.advice(cost_model.predict(replace(JOB, ranks=1), GIGABIT, MACHINE))


def stats(**changes: Any) -> StepStats:
    """Of a step that sent 1 MB in 0.1 s, against 100 MB of a dense one; 0.1 s of own work."""
    figures: dict[str, Any] = dict.fromkeys(StepStats.__dataclass_fields__, 0)
    figures |= {"bytes_values": 500_000, "bytes_parameters": 500_000, "bytes_dense": 100_000_000}
    figures |= {"message_seconds": 0.1, "skipped": False, "seconds": {"sweep": 0.03, "exchange": 0.1, "update": 0.07}}
    return StepStats(**{**figures, **changes})


def test_a_runs_own_figures_tell_whether_dense_would_be_faster() -> None:
    assert dense_would_be_faster([stats()] * 3) is None  # dense: 10 s at the 10 MB/s reached
    quick = stats(message_seconds=1e-4, seconds={"sweep": 0.03, "exchange": 1e-4, "update": 0.2})
    said = dense_would_be_faster([quick] * 3)  # dense: 10 ms + 70 ms against 230 ms
    assert said is not None
    assert "80 Gbit/s" in said
    assert dense_would_be_faster([]) is None
    assert dense_would_be_faster([replace(quick, skipped=True)]) is None


def test_the_messages_are_never_said_to_take_longer_than_the_step_that_they_are_part_of() -> None:
    """It said that a part of 5.97 ms takes 6.64 ms for messages: those of clipping counted among these only."""
    seconds = {"norm": 2e-3, "sweep": 0.1e-3, "exchange": 5.87e-3}
    for message_seconds in (6.64e-3, 9e-3):  # or those of a comparison of replicas, which no phase covers
        said = dense_would_be_faster([stats(message_seconds=message_seconds, seconds=seconds, bytes_dense=10_000)] * 3)
        assert said is not None
        whole, messages = re.findall(r"([\d.]+) ms", said)[:2]
        assert float(messages) == 1e3 * message_seconds
        assert float(whole) >= float(messages)


# ------------------------------------------------------------------------------------------------- the command line


def run_tool(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = commands.main(["plan", *arguments])
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


@pytest.mark.few(0)
def test_plan_looks_at_the_memory_of_a_rank(capsys: Any) -> None:
    """A model of 405B parameters was told to use SCAPE, at 4,870 GB per rank and below what "no method can beat"."""
    pytest.importorskip("litgpt")
    command = "--model Llama-3.1-405B --nodes 1024 --bandwidth 10gbit --step-compute 0.8s --sparsity 0.999"
    status, out, _ = run_tool(capsys, *command.split())
    assert status == 0
    assert "\nUse FSDP: " in out
    assert "needs 4.88 TB per rank; FSDP needs 40 GB." in out
    assert "| 4.88 TB, too much |" in out
    assert "Compute only: no messages, and the whole of AdamW on every rank" in out
    status, out, _ = run_tool(capsys, *command.split(), "--memory", "9000")
    assert "\nUse SCAPE 0.999: " in out
    assert ", too much |" not in out.partition("| SparseLoCo |")[0]


def test_a_sparsity_of_minus_zero_is_zero(capsys: Any) -> None:
    """It was looked for in the table under another name: "not enough values to unpack"."""
    pytest.importorskip("litgpt")
    status, out, _ = run_tool(capsys, *ISSUE_COMMAND.split(), "--sparsity", "-0")
    assert status == 0
    assert "| SCAPE 0 |" in out


def test_the_advice_does_not_contradict_the_table(capsys: Any) -> None:
    pytest.importorskip("litgpt")
    _, out, _ = run_tool(capsys, *ISSUE_COMMAND.replace("10gbit", "16gbit").split())
    assert "\nUse SCAPE 0.99: " in out


@pytest.mark.few(0)
def test_what_is_measured_and_how_is_said(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--precision`` changed the bytes, and neither the model nor how it was computed."""
    pytest.importorskip("litgpt")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured = []

    def measure(parameters: list[torch.Tensor], *_: Any) -> Machine:
        measured.append(parameters[0].dtype)
        return MACHINE

    monkeypatch.setattr(plan, "measure_machine", measure)
    command = "--model pythia-14m --nodes 2 --bandwidth 1gbit --measure --batch-size 1 --context 2 --sparsity 0.9"
    for precision in ("32-true", "bf16-true"):
        _, out, _ = run_tool(capsys, *command.split(), "--precision", precision)
        assert f"compute and optimizers measured on this machine's CPU, in {precision};" in out
    assert measured == [torch.float32, torch.bfloat16]
    _, out, _ = run_tool(capsys, *command.split(), "--step-compute", "1s")
    assert "Assumed: optimizers measured on this machine's CPU" in out


class _Tiny(nn.Module):
    """What :func:`measuring.measure_compute` needs of a LitGPT model; remembers what its products were computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(padded_vocab_size=8)
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.computed: set[torch.dtype] = set()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        self.computed.add(logits.dtype)
        return logits


@pytest.mark.parametrize(
    ("precision", "computed", "kept"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_compute_is_measured_in_the_precision_asked_for(
    precision: str, computed: torch.dtype, kept: torch.dtype
) -> None:
    model = _Tiny().to(kept)
    assert measuring.measure_compute(model, 2, 3, seconds=0, precision=precision) > 0
    assert model.computed == {computed}
    assert model.head.weight.grad is not None
    assert model.head.weight.grad.dtype == kept


def _computed_beside_a_slow_rank(rank: int, world_size: int) -> float:
    model = _Tiny()
    if rank == 1:
        model.head.register_forward_hook(lambda *_: time.sleep(0.05))
    return measuring.measure_compute(model, 2, 3, seconds=0)


def test_a_step_takes_as_long_as_the_slowest_rank_computes(run_ranks: Any) -> None:
    fast, slow = run_ranks(_computed_beside_a_slow_rank, 2)
    assert fast == slow > 0.05


def _computed_where_one_has_no_room(rank: int, world_size: int) -> None:
    model = _Tiny()
    if rank == 1:
        model.head.register_forward_hook(lambda *_: torch.empty(1 << 60))
    measuring.measure_compute(model, 2, 3, seconds=0)


def test_a_step_that_does_not_fit_on_one_rank_is_an_error_on_all(run_ranks: Any) -> None:
    errors = run_ranks(_computed_where_one_has_no_room, 2, expect_errors=True)
    assert ["allocate" in str(error) for error in errors] == [True, True]


def test_a_step_timed_as_a_whole_is_divided_as_its_traffic_is() -> None:
    """What CUDA takes, where phases cannot be timed from the host; the code is the same on a CPU."""
    weight = nn.Parameter(torch.randn(2000, 100))
    weight.grad = torch.randn_like(weight)
    for sparsity in (0.5, 0.99):
        config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0)
        whole, shard = scape_plan.as_a_whole(ScapeOptimizer([weight], config=config), repeats=2)
        traffic = scape_traffic(config.quota.density, proposed=config.proposed > 0)
        assert whole > 0
        assert shard / whole == pytest.approx(traffic[1] / (traffic[0] - 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model no-such-model --nodes 2 --bandwidth 1gbit --step-compute 1s", "must name a LitGPT configuration"),
        (
            "--model pythia-14m --nodes 2 --bandwidth 1gbit --measure --context 5000",
            "`--context` must be at most 512 for pythia-14m, got 5000",
        ),
        (
            "--model pythia-14m --nodes 2 --bandwidth 1gbit --measure --batch-size 1e11",
            "A step must fit into memory, got `--batch-size 100000000000 --context 128`: ",
        ),
    ],
)
def test_what_cannot_be_planned_is_an_error_with_a_remedy(capsys: Any, arguments: str, message: str) -> None:
    pytest.importorskip("litgpt")
    status, _, err = run_tool(capsys, *arguments.split())
    assert status == 2
    assert err.startswith("lightning-scape plan: error: ")
    assert message in err


def test_an_optimizer_moves_half_the_memory_in_bf16(capsys: Any) -> None:
    fp32, bf16 = Machine.of_memory(1e9), Machine.of_memory(1e9, 2)
    assert (bf16.adamw, bf16.clip) == (fp32.adamw / 2, fp32.clip / 2)
    for density, (whole, shard) in bf16.own["scape"].items():  # the residual and what owners keep is fp32
        assert fp32.own["scape"][density][0] / 2 < whole < fp32.own["scape"][density][0]
        assert shard <= fp32.own["scape"][density][1]
    # The whole command: AdamW's 7 tensors and 3 more to clip, of 14.1M parameters at 1 GB/s.
    asked = [
        "plan",
        "--model=pythia-14m",
        "--nodes=2",
        "--bandwidth=1gbit",
        "--step-compute=1s",
        "--memory-bandwidth=1",
    ]
    for precision, width in (("32-true", 4), ("bf16-true", 2)):
        assert commands.main([*asked, f"--precision={precision}"]) == 0
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| compute only"))
        assert f"{1 + 10 * width * 14.067712e-3:.2f} s" in row, row


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_what_a_launcher_sets_must_be_numbers(capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(name, "four")
    with pytest.raises(SystemExit, match="2"):
        commands.main(["plan", "--model", "pythia-14m", "--bandwidth", "1gbit", "--step-compute", "1s"])
    assert f"{name} must be a whole number >= 0, got 'four'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model m --bandwidth 1gbit --step-compute 1s", "--nodes must be given"),
        ("--model m --nodes 2 --bandwidth 1gbit", "--step-compute must be given, or --measure"),
        ("--model m --nodes 2 --step-compute 1s", "--bandwidth must be given"),
        ("--model m --nodes 1 --bandwidth 1gbit --step-compute 1s", "must be at least 2 ranks, got 1"),
        (
            "--model m --nodes 1 --gpus-per-node 8 --bandwidth 1gbit --step-compute 1s",
            "--nodes must be at least 2, got 1",
        ),
        ("--model m --nodes 2 --bandwidth 1gbit --step-compute 1s --plot /", "got '/', a directory"),
        ("--model m --nodes 2 --bandwidth 1gbit --step-compute 1s --plot x.foo", "the suffix '.foo'"),
        ("--model m --nodes 2 --bandwidth 1gbit --step-compute 1s --plot x", "the suffix ''"),
        ("--model m --nodes 2 --bandwidth 1gbit --step-compute 1s --plot /dev/null/x.png", "that can be written"),
        *(
            (f"--model m --nodes 2 --bandwidth 1gbit --step-compute 1s {wrong}", message)
            for wrong, message in (
                ("--bandwidth fast", "a bandwidth must be a number > 0"),
                ("--bandwidth 1.2.3gbit", "a bandwidth must be a number > 0"),
                ("--bandwidth 0gbit", "a bandwidth must be a number > 0"),
                ("--bandwidth=-1gbit", "a bandwidth must be a number > 0"),
                ("--step-compute soon", "a time must be a number >= 0"),
                ("--step-compute .", "a time must be a number >= 0"),
                ("--step-compute=-1s", "a time must be a number >= 0"),
                ("--step-compute 0s", "a time of compute must be > 0"),
                ("--latency=-1us", "a time must be a number >= 0"),
                ("--nodes 0", "--nodes: it must be a whole number >= 1 and <= 10**12, got '0'"),
                ("--nodes 1e300", "--nodes: it must be a whole number >= 1 and <= 10**12, got '1e300'"),
                ("--batch-size 4", "--batch-size must come with --measure"),
                ("--measure --memory-bandwidth 3", "--memory-bandwidth must come without --measure"),
                ("--async-save", "--async-save must come with --checkpoints"),
                ("--steps 9 --state-dict-type sharded", "--state-dict-type must come with --checkpoints"),
                ("--node-bandwidth 9", "--node-bandwidth must come with several --gpus-per-node"),
                ("--gpus-per-node -1", "--gpus-per-node: it must be a whole number >= 1"),
                ("--batch-size 0", "--batch-size: it must be a whole number >= 1"),
                ("--context 0", "--context: it must be a whole number >= 1"),
                ("--memory-bandwidth 0", "--memory-bandwidth: it must be a finite number > 0"),
                ("--memory-bandwidth -5", "--memory-bandwidth: it must be a finite number > 0"),
                ("--memory nan", "--memory: it must be a finite number > 0"),
                ("--sparsity 0.9 1", "a sparsity must be a number in [0, 1), got '1'"),
                ("--sparsity nan", "a sparsity must be a number in [0, 1), got 'nan'"),
            )
        ),
    ],
)
def test_a_missing_or_wrong_option_is_named(capsys: Any, arguments: str, message: str) -> None:
    with pytest.raises(SystemExit):
        commands.main(["plan", *arguments.split()])
    said = capsys.readouterr().err
    assert said.startswith("lightning-scape plan: error: ")  # nothing stands before it
    assert message in said


def test_an_error_of_torchrun_names_the_command_that_was_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tool"])
    with pytest.raises(SystemExit):
        commands.main(["torchrun", "--nnodes"])
    assert "usage: lightning-scape torchrun " in capsys.readouterr().err


def test_the_tool_lists_its_commands_and_rejects_others(capsys: Any) -> None:
    assert commands.main([]) == 0
    assert "plan" in capsys.readouterr().out
    assert commands.main(["dance"]) == 2
    assert "got 'dance'" in capsys.readouterr().err


def test_units_are_read_and_written() -> None:
    assert words.bandwidth("10gbit") == 1.25e9
    assert words.seconds("350ms") == pytest.approx(0.35)
    assert words.seconds("0us") == 0
    assert show_bytes(4.87e12) == "4.87 TB"
    assert [show_bandwidth(x) for x in (1.25e9, 1.25e6, None, math.inf)] == [
        "10 Gbit/s",
        "10 Mbit/s",
        "never",
        "always",
    ]
    assert [show_times(x) for x in (0.0961, 6.678, 138.2, 1382.4)] == ["0.0961", "6.68", "138", "1,380"]  # was 1.38e+03
    assert [show_times(99.7, 2), show_times(7.5, 2)] == ["100", "7.5"]
    assert [show_bytes(999_999), show_bytes(5.63e19)] == ["1,000 KB", "56,300,000 TB"]
    assert [show_seconds(0.9999), show_seconds(4e8)] == ["1,000 ms", "4,630 days"]
    assert show_bandwidth(1.25e8 - 100) == "1,000 Mbit/s"


def _measured(rank: int, world_size: int) -> tuple[Link, Machine]:
    model = nn.Linear(200, 200)
    model.weight.grad, model.bias.grad = torch.randn(200, 200), torch.randn(200)
    return measuring.measure_link(megabytes=0.5, repeats=2), measuring.measure_machine(
        [*model.parameters()], [0.9], repeats=2
    )


@pytest.mark.few(0)
def test_measuring_finds_a_link_and_what_optimizers_cost(run_ranks: Any) -> None:
    for link, machine in run_ranks(_measured, 2):
        assert link.bandwidth > 1e6
        assert 0 < link.latency < 1
        assert link.copy_seconds > 0
        assert machine.adamw > 0
        assert min(machine.own["scape"][0.1]) > 0


def _planned_on_one_machine(rank: int, world_size: int) -> tuple[int, str]:
    plan.measure_machine = lambda *_: MACHINE  # type: ignore[assignment] # a process of its own
    command = "--model pythia-14m --measure --batch-size 1 --context 2 --sparsity 0.9"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = commands.main(["plan", *command.split()])
    return status, out.getvalue()


def test_ranks_of_one_machine_whose_link_was_measured_count_as_nodes(run_ranks: Any) -> None:
    pytest.importorskip("litgpt")
    (status, out), (_, silent) = run_ranks(_planned_on_one_machine, 2)
    assert status == 0
    assert "on 2 ranks (1 per node)" in out
    assert "every rank counts as a node: the link was measured between the ranks of one machine" in out
    assert silent == ""


def test_an_all_to_all_is_measured_as_it_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks per node share a link, which showed in the measurement and was then charged once more."""
    seconds = iter([0.0, 4.0, 2.0])  # of a hop, the all-to-all and the all-reduce
    monkeypatch.setattr(measuring, "median_seconds", lambda *_: next(seconds))
    monkeypatch.setattr(measuring, "message_cost", lambda *_: (next(seconds), 0.0))
    monkeypatch.setattr(measuring, "Communicator", lambda *_: SimpleNamespace(world_size=8))
    link = measuring.measure_link(ranks_per_node=4)
    sent = 1e6 * 4 * 7 / 8
    assert sent * cost_model.nodes_share(8, 4) / (link.bandwidth * link.exchange_share) == pytest.approx(4.0)


# ------------------------------------------------------------------------------------------- against measured steps


def test_predictions_are_within_15_percent_of_two_hosts() -> None:
    """The median over all methods, links and models of the committed measurement."""
    results = json.loads(MEASURED.read_text())
    predicted = load_example("predicted_steps")
    compared = predicted.compare_with_measured(results)
    assert len(compared) >= 7 * len(results["cells"])
    assert predicted.median_error(compared) < 0.15
