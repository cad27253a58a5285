"""The planner on nodes of several ranks: HSDP, and SCAPE between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_scape.planning import conclusions, cost_model, two_level
from lightning_scape.planning.cost_model import Job, Link, Machine, Prediction, Weight
from lightning_scape.tools import commands, plan

WEIGHTS = (
    Weight(50_000_000, multiplied=False),
    *(Weight(12_000_000, block) for block in range(24)),
    Weight(50_000_000),
)
JOB = Job(weights=WEIGHTS, ranks=64, ranks_per_node=8, step_compute=0.5)
MACHINE = Machine.of_memory(1.5e12)
BETWEEN, INSIDE = Link(bandwidth=1.25e9), Link(bandwidth=2e11, latency=5e-6)


def nodes(job: Job = JOB, link: Link = BETWEEN, sparsity: float = 0.99) -> tuple[Any, Any]:
    dense, sparse = two_level.predict_nodes(job, link, MACHINE, INSIDE, [sparsity])
    return dense, sparse


def test_a_card_sends_what_one_flat_rank_sends_and_far_less_than_that_of_flat_ranks() -> None:
    flat = cost_model.predict(JOB, BETWEEN, MACHINE, [0.99])[-1]
    _, sparse = nodes()
    assert sparse.on_card <= 1.05 * flat.bytes_sent
    assert sparse.bytes_sent == pytest.approx(sparse.on_card / 8)
    assert flat.on_card > 4 * sparse.on_card  # its all-to-all crosses the card for each of the node's ranks


def test_hsdp_sends_the_whole_gradient_through_the_card_and_scape_a_hundredth() -> None:
    dense, sparse = nodes()
    assert dense.on_card == pytest.approx(2 * 7 / 8 * 4 * JOB.parameters, rel=1e-3)
    assert dense.on_card > 60 * sparse.on_card
    assert dense.seconds > 2 * sparse.seconds


def test_memory_falls_with_the_ranks_of_a_node() -> None:
    flat = cost_model.predict(JOB, BETWEEN, MACHINE, [0.99])[-1]
    _, sparse = nodes()
    gathered = 2 * 4 * 100_000_000  # the root's parameters and their gradients, whole
    assert sparse.memory == pytest.approx(flat.memory / 8 + gathered, rel=0.1)


def test_the_advice_takes_whole_nodes_where_their_ranks_share_a_slow_card() -> None:
    everything = cost_model.predict(JOB, BETWEEN, MACHINE, [0.99]) + [*nodes()]
    assert conclusions.advice(everything).startswith("Use SCAPE 0.99, local_group_size 8: ")


def test_on_a_fast_link_hsdp_or_another_dense_method_stays() -> None:
    fast = Link(bandwidth=5e11, latency=2e-6)
    everything = cost_model.predict(JOB, fast, MACHINE, [0.99]) + [*nodes(link=fast)]
    assert conclusions.advice(everything).startswith("Stay with ")


def test_nodes_of_one_rank_are_refused() -> None:
    with pytest.raises(ValueError, match="`ranks_per_node` must be at least 2"):
        two_level.predict_nodes(replace(JOB, ranks_per_node=1), BETWEEN, MACHINE, INSIDE)


def test_the_command_compares_both_and_advises(capsys: Any) -> None:
    pytest.importorskip("litgpt")
    command = "--model pythia-410m --nodes 4 --gpus-per-node 8 --bandwidth 10gbit --step-compute 0.5s --sparsity 0.99"
    assert commands.main(["plan", *command.split()]) == 0
    out = capsys.readouterr().out
    assert "\nUse SCAPE 0.99, local_group_size 8: " in out
    for word in ("| HSDP |", "| SCAPE 0.99, local_group_size 8 |", "| sent per network card |", "at 200 GB/s"):
        assert word in out
    header = next(line for line in out.splitlines() if line.startswith("| ranks |"))
    rows = [line for line in out.splitlines() if line.startswith("| 64 |")]
    assert rows
    assert rows[0].count("|") == header.count("|")


def test_whole_nodes_have_a_bandwidth_below_which_they_pay() -> None:
    def there(link: Link) -> list[Prediction]:
        return [*cost_model.predict(JOB, link, MACHINE, [0.99]), *nodes(link=link)]

    gain = conclusions.gain_of("SCAPE 0.99, local_group_size 8", there, BETWEEN)
    even = conclusions.break_even_bandwidth(gain, BETWEEN.bandwidth)
    assert even is not None
    for factor, faster in ((0.9, True), (1.1, False)):
        link = Link(bandwidth=factor * even)
        dense = conclusions.best_dense([*cost_model.predict(JOB, link, MACHINE, []), nodes(link=link)[0]])
        assert (nodes(link=link)[1].seconds < dense.seconds) == faster


def test_every_sparse_line_of_the_plan_says_from_where_it_pays() -> None:
    text = plan.Plan(model="m", job=JOB, link=BETWEEN, machine=MACHINE, sparsities=[0.99], inside=INSIDE).report()
    rows = [line for line in text.splitlines() if line.startswith("| SCAPE")]
    assert len(rows) == 2
    assert not any(row.endswith("| - | - |") for row in rows)
