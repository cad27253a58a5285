"""The run as a whole: its bytes are those that a run counts, its seconds the sum of its steps', its advice its own."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from example_modules import load_example
from torch import nn

from lightning_scape import ScapeConfig, ScapeOptimizer, SparseLoCoConfig
from lightning_scape.core.words import show_bytes, show_seconds
from lightning_scape.planning import cost_model, two_level
from lightning_scape.planning.cost_model import Job, Link, Machine, Weight
from lightning_scape.planning.run import Run, message_load, predict_run
from lightning_scape.scape.cost import scape_bytes
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.plan import predict
from lightning_scape.sparseloco.cost import exchange_bytes
from lightning_scape.sparseloco.cost import predict as predict_sparseloco
from lightning_scape.tools import commands, plan

WEIGHTS = (Weight(50_000, None, False), *(Weight(30_000, i) for i in range(4)), Weight(50_000))
NUMELS = (1003, 777, 4)
JOB = Job(weights=WEIGHTS, ranks=2, step_compute=0.1)
MACHINE = Machine.of_memory(1e10)
LINK = Link(bandwidth=1.25e7)


def _counted(rank: int, world_size: int, options: dict[str, Any], steps: int) -> int:
    parameters = [nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(size))) for size in NUMELS]
    optimizer, sent = ScapeOptimizer(parameters, config=ScapeConfig(**options)), 0
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert optimizer.stats is not None
        sent += optimizer.stats.bytes_total
    optimizer.drain()
    return sent


@pytest.mark.few(1)
@pytest.mark.parametrize("wire", ["bf16", "int4"])
def test_bytes_of_a_run_are_those_that_it_counts(run_ranks: Any, wire: str) -> None:
    """Dense steps, a warm-up, and what follows."""
    options = {"sparsity": 0.9, "dense_steps": 2, "sparsity_warmup_steps": 6, "wire_dtype": wire}
    job = replace(JOB, weights=tuple(map(Weight, NUMELS)))
    run = predict_run(predict(job, LINK, MACHINE, ScapeConfig(**options)), job, LINK, Run(steps=12))
    (counted, _) = run_ranks(_counted, 2, options, 12)
    next_mask = scape_bytes(NUMELS, 2, ScapeConfig(**options))["mask"]  # of a step that does not come
    assert run.bytes_sent == counted - next_mask
    assert run.beginning == 8


def test_a_run_takes_the_sum_of_its_steps() -> None:
    config = ScapeConfig(sparsity=0.99)
    schedule = SparsitySchedule.of(config, 1000)
    steps = [predict(JOB, LINK, MACHINE, config, schedule.sent(step)) for step in range(1000)]
    run = predict_run(predict(JOB, LINK, MACHINE, config), JOB, LINK, Run(steps=1000))
    assert run.bytes_sent == sum(step.bytes_sent for step in steps)
    assert run.seconds == pytest.approx(sum(step.seconds for step in steps))
    assert run.late.bytes_sent >= steps[-1].bytes_sent  # it ends within its warm-up


def test_a_window_that_the_end_cuts_short_is_sent_too() -> None:
    late = predict_sparseloco(JOB, LINK, MACHINE, SparseLoCoConfig(sync_every=4))
    of_one = exchange_bytes([weight.numel for weight in WEIGHTS], 2, SparseLoCoConfig(sync_every=4))
    sent = [predict_run(late, JOB, LINK, Run(steps=steps)).bytes_sent for steps in (8, 10, 12)]
    assert sent == pytest.approx([2 * of_one, 3 * of_one, 3 * of_one], abs=16)


def test_checkpoints_are_collected_over_the_link_unless_each_rank_writes_its_own() -> None:
    late, plain = predict(JOB, LINK, MACHINE, ScapeConfig(sparsity=0.99, wire_dtype="int4")), Run(steps=10)
    without = predict_run(late, JOB, LINK, plain)
    full = predict_run(late, JOB, LINK, replace(plain, checkpoints=3, saving=0.5))
    each = JOB.parameters * (4 + 16 // 2)  # the residual, and half of both moments, the clock and the changes' errors
    assert full.of_checkpoints == full.bytes_sent - without.bytes_sent == 3 * each
    assert full.seconds - without.seconds == pytest.approx(3 * (0.5 + each / LINK.bandwidth))
    beside = predict_run(late, JOB, LINK, replace(plain, checkpoints=3, saving=0.5, beside=True))
    assert (beside.bytes_sent, beside.seconds) == (full.bytes_sent, without.seconds)
    apart = predict_run(late, JOB, LINK, replace(plain, checkpoints=3, sharded=True))
    assert (apart.bytes_sent, apart.seconds) == (without.bytes_sent, without.seconds)
    dense = predict_run(cost_model.ddp(JOB, LINK, MACHINE), JOB, LINK, replace(plain, checkpoints=3))
    assert dense.of_checkpoints == 0


def test_what_shards_the_optimizer_collects_it_too_and_only_other_nodes_cross_the_link() -> None:
    run, late = Run(steps=10, checkpoints=3), cost_model.predict(JOB, LINK, MACHINE, [])[1:]
    collected = [predict_run(each, JOB, LINK, run).of_checkpoints / JOB.parameters for each in late]
    assert collected == [0, 0, 3 * 4, 3 * 6]  # DDP twice; ZeRO-1 half of both moments; FSDP half of the weights, too
    nodes = replace(JOB, ranks=8, ranks_per_node=4)
    method = predict(nodes, LINK, MACHINE, ScapeConfig())
    waits = [predict_run(method, nodes, LINK, replace(run, checkpoints=n)).seconds for n in (1, 0)]
    assert waits[0] - waits[1] == pytest.approx(4 * method.gathered / LINK.bandwidth)


def test_moments_of_bf16_parameters_take_half() -> None:
    """As torch's AdamW keeps them; SCAPE's own are fp32."""
    narrow = replace(JOB, parameter_bytes=2)
    loco = predict_sparseloco(narrow, LINK, MACHINE, SparseLoCoConfig())
    found = [cost_model.ddp(narrow, LINK, MACHINE).memory, loco.gathered]
    assert found == [10 * JOB.parameters, 12 * JOB.parameters]  # parameters, gradients, buckets, moments; or errors


def test_whole_nodes_have_the_warm_up_of_the_method_between_them() -> None:
    job = replace(JOB, ranks=8, ranks_per_node=4)
    between = two_level.predict_nodes(job, LINK, MACHINE, Link(bandwidth=1e11), [0.99])[1]
    run = predict_run(between, job, LINK, Run(steps=2000))
    assert run.beginning == 2000
    assert run.whole.on_card > 1.2 * 2000 * between.on_card  # of a late step the norm is three quarters here


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("checkpoints", -1), ("validation", float("nan"))])
def test_a_run_that_cannot_be_is_an_error_that_names_the_field(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be >= "):
        Run(**{"steps": 1, name: value})


def test_the_load_is_that_of_a_larger_model_and_half_with_twice_the_batch() -> None:
    load = message_load(8e6, JOB, LINK)
    assert load == pytest.approx(6.4)
    assert message_load(16e6, replace(JOB, step_compute=0.2), LINK) == load
    assert message_load(8e6, replace(JOB, step_compute=0.2), LINK) == load / 2


# ----------------------------------------------------------------------------------------------------- the command

COMMAND = "--model=pythia-14m --nodes=2 --bandwidth=30mbit --step-compute=230ms --memory-bandwidth=14"


def planned(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    pytest.importorskip("litgpt")
    assert commands.main(["plan", *COMMAND.split(), *more]) == 0
    return capsys.readouterr().out


def test_the_advice_is_on_the_run_and_not_on_its_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    """A short run never leaves its warm-up: by its late step SCAPE 99% is as good as free of messages here."""
    assert re.search(r"^Use SCAPE 0.99: a step takes", planned(capsys, "--bandwidth=100mbit"), re.MULTILINE)
    said = planned(capsys, "--bandwidth=10mbit", "--steps=500", "--checkpoints=2")
    assert re.search(r"Take SparseLoCo with sync_every=\d+: this run takes .* min, ", said)
    assert len(re.findall(r"^(Use|Stay with|Take|None of)", said, re.MULTILINE)) == 1


def test_the_table_of_a_run_has_its_sum_and_its_end_with_ddp_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys, "--steps=10000", "--checkpoints=10")
    head, *rows = (
        row.split(" | ") for row in re.findall(r"^\| (.*) \|$", said.partition("A step after all warm-up")[0], re.M)
    )
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    job = Job(weights=plan.model_weights("pythia-14m"), ranks=2, step_compute=0.23)
    link = Link(bandwidth=0.95 * 30e6 / 8)
    late = cost_model.predict(job, link, Machine.of_memory(14e9), [0.99])[-1]
    run = predict_run(late, job, link, Run(steps=10_000, checkpoints=10))
    assert table["SCAPE 0.99"]["the run takes"] == show_seconds(run.seconds)
    assert table["SCAPE 0.99"]["sent by a rank"] == show_bytes(run.bytes_sent)
    assert table["SCAPE 0.99"]["of that checkpoints"] == show_bytes(run.of_checkpoints) != "0 B"
    assert table["SCAPE 0.99"]["at the end"] == show_bytes(late.bytes_sent)
    assert table["DDP"]["sent by a rank"] == show_bytes(10_000 * 4 * job.parameters)
    assert "DDP's messages take 69 times as long as a step's forward and backward" in said


def test_without_a_length_one_line_tells_of_a_long_run(capsys: pytest.CaptureFixture[str]) -> None:
    said = planned(capsys)
    (line,) = re.findall(r"^A run of 10,000 steps takes .*", said, re.MULTILINE)
    assert "with SCAPE 0.99 (the first 3,950 steps send more). `--steps` tells of yours." in line
    assert "with SCAPE 0.95 (the first " in planned(capsys, "--sparsity=0.95")


def test_where_full_checkpoints_take_long_there_is_advice_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The longest window was advised, by which a run of 48 minutes is one minute shorter: all of it are checkpoints."""
    saved = "--bandwidth=10mbit", "--steps=1200", "--checkpoints=12"
    said = planned(capsys, *saved)
    assert re.search(r"^Take SparseLoCo with sync_every=15: this run takes 49 min", said, re.MULTILINE)
    instead = r'^With `state_dict_type="sharded"`, .*: Take SparseLoCo with sync_every=30: this run takes 5.88 min'
    assert re.search(instead, said, re.MULTILINE)
    assert 'With `state_dict_type="sharded"`' not in planned(capsys, *saved, "--async-save")


def test_what_is_counted_in_a_run_needs_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["plan", *COMMAND.split(), "--checkpoints=3"])
    assert "--checkpoints must come with --steps" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- measured runs


def test_measured_runs_stand_beside_their_predictions() -> None:
    """As examples/bench_end_to_end.py leaves them, of two ranks, the slower of which counts."""
    example = load_example("predicted_steps")
    rank = {
        "step_compute": 0.1,
        "link": {"bandwidth": 1.25e7},
        "adamw": 1e-8,
        "clip": 1e-9,
        "scape": {"1.0": [1e-8, 1e-8], "0.01": [1e-9, 1e-9]},
        "weights": [[w.numel, w.block, w.multiplied] for w in WEIGHTS],
    }

    def measured(rank: dict[str, Any]) -> dict[str, Any]:
        """As the benchmark would find runs of these costs; PowerSGD is not predicted."""
        job, link, machine = example.inputs(rank, rank["weights"], 2)
        lengths = Run(steps=100, validation=3.0, checkpoints=12, saving=0.25)
        seconds = {
            "compute": predict_run(cost_model.compute_only(job, machine), job, link, lengths).seconds,
            "scape-0.99": predict_run(predict(job, link, machine, ScapeConfig()), job, link, lengths).seconds,
        }
        rows = {method: {"seconds": value, "validating": 3.0, "saving": 3.0} for method, value in seconds.items()}
        return {**rows, "powersgd-1": rows["compute"]}

    def compared(rows: dict[str, Any], **options: bool) -> list[tuple[str, float]]:
        cell = {"methods": rows, "plan": [{**rank, "step_compute": 0.08}, rank]}
        results = {"settings": {"steps": 100, "size": "tiny"}, "links": {"1gbit": cell}}
        return [(each.method, round(each.error, 6)) for each in example.compare_runs(results, **options)]

    assert compared(measured(rank)) == [("compute", 0.0), ("scape-0.99", 0.0)]
    slow = measured(example.at_speed(rank, 1.5))  # another has come to use the machine
    assert all(error > 0.2 for _, error in compared(slow))
    assert compared(slow, as_fast_as_alone=True) == [("scape-0.99", 0.0)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("bandwidth", "advice"),
    [("55gbit", "Stay with"), ("45gbit", "Use SCAPE"), ("640mbit", "Use SCAPE"), ("520mbit", "Take SparseLoCo")],
)
def test_the_advice_turns_where_the_page_says(capsys: pytest.CaptureFixture[str], bandwidth: str, advice: str) -> None:
    """In docs/planning.md: at messages of 0.64 and of 55 times the computation."""
    there = "--model=pythia-160m --nodes=8 --step-compute=0.3s --memory-bandwidth=1500 --precision=bf16-mixed"
    said = planned(capsys, *there.split(), "--steps=10000", f"--bandwidth={bandwidth}")
    assert said.split("\n\n")[1].startswith(advice), said
