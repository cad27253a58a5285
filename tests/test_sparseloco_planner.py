"""The planner knows both methods: SparseLoCo's bytes are the package's own, and the advice follows the bandwidth."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_scape import SparseLoCo, SparseLoCoConfig
from lightning_scape.core.layout import Layout
from lightning_scape.planning import conclusions, cost_model
from lightning_scape.planning.cost_model import Job, Link, Machine, Prediction, Weight
from lightning_scape.sparseloco.cost import SparseLoCoCost, exchange_bytes, predict, state_bytes
from lightning_scape.sparseloco.method import SparseLoCoMethod
from lightning_scape.sparseloco.state import LocoState
from lightning_scape.tools import commands

WEIGHTS = (Weight(5_000_000, None, False), *(Weight(3_000_000, i) for i in range(4)), Weight(5_000_000))
JOB = Job(weights=WEIGHTS, ranks=4, step_compute=0.3)
MACHINE = Machine.of_memory(1e11)
NUMELS = (1003, 777, 4)


def _counted(rank: int, world_size: int, options: dict[str, Any]) -> int:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size)) for size in NUMELS]
    optimizer = torch.optim.SGD(parameters, 0.1)
    loco = SparseLoCo(optimizer, sync_every=1, **options)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert loco.stats is not None
    return loco.stats.bytes_values + loco.stats.bytes_parameters


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options", [{}, {"bits": None, "density": 1.0}, {"bits": 8, "density": 1 / 256, "return_density": 1 / 32}]
)
def test_bytes_are_those_that_a_real_exchange_counts(run_ranks: Any, options: dict[str, Any]) -> None:
    counted = run_ranks(_counted, 3, options)
    assert counted == [exchange_bytes(NUMELS, 3, SparseLoCoConfig(**options))] * 3


def _expected_and_sent(rank: int, world_size: int) -> tuple[int, int]:
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([parameter], 0.1)
    loco, steps = SparseLoCo(optimizer, sync_every=4), 0

    def train(until: int) -> None:
        nonlocal steps
        while steps < until:
            parameter.grad, steps = torch.randn(1000), steps + 1
            optimizer.step()
        loco.sync()

    train(6)
    (expected, _, _), before = SparseLoCoCost().run_bytes(SparseLoCoMethod(loco), 6, 18, False), loco.progress.exchanges
    train(18)
    assert loco.stats is not None
    return expected, (loco.progress.exchanges - before) * loco.stats.bytes_total


def test_what_is_left_of_a_run_begins_its_window_where_the_last_one_has_ended(run_ranks: Any) -> None:
    """At step 6, so that three exchanges are left of 18 steps; four were expected."""
    for expected, sent in run_ranks(_expected_and_sent, 3):
        assert expected == sent


def both(link: Link) -> tuple[list[Prediction], list[Prediction]]:
    return cost_model.predict(JOB, link, MACHINE, [0.9, 0.99]), cost_model.predict_local(JOB, link, MACHINE)


def test_the_advice_follows_the_bandwidth() -> None:
    said = {}
    for bandwidth in (1.25e6, 2e6, 1.25e7, 1.25e9):
        link = Link(bandwidth=bandwidth)
        predictions, local = (
            cost_model.predict(JOB, link, MACHINE, [0.9, 0.99]),
            cost_model.predict_local(JOB, link, MACHINE),
        )
        said[bandwidth] = conclusions.which_method(predictions, local)
    assert "Take SparseLoCo with sync_every=60" in said[1.25e6]  # four ranks gather: 30 would take 1.16x of compute
    assert "Take SparseLoCo with sync_every=30" in said[2e6]
    assert "SparseLoCo is not needed: with sync_every=5" in said[1.25e7]  # SCAPE 0.99 takes 1.4% longer
    assert "SparseLoCo is not needed" in said[1.25e9]


def test_a_nodes_card_sends_what_its_ranks_send_to_other_nodes() -> None:
    """An all-to-all leaves a node 8 times 8/15; a ring leaves it once. The plan told of one rank's bytes."""
    nodes = replace(JOB, ranks=16, ranks_per_node=8)
    found = predict(nodes, Link(bandwidth=1e9), MACHINE, SparseLoCoConfig(sync_every=4))
    assert found.on_card == pytest.approx(found.bytes_sent * (0.5 * 64 / 15 + 0.5), rel=0.01)
    assert found.begins is not None
    ((_, last),) = found.begins(6)
    assert last.on_card == pytest.approx(2 * found.on_card, rel=1e-3)


def test_longer_windows_send_less_and_wait_less() -> None:
    local = cost_model.predict_local(JOB, Link(bandwidth=1.25e6), MACHINE)
    assert [p.bytes_sent for p in local] == sorted((p.bytes_sent for p in local), reverse=True)
    assert [p.seconds for p in local] == sorted((p.seconds for p in local), reverse=True)
    assert local[0].bytes_sent == pytest.approx(30 * local[3].bytes_sent, rel=1e-3)


def test_a_latency_of_50_ms_is_paid_once_in_a_window() -> None:
    link = Link(bandwidth=1.25e7)
    near, far = (cost_model.predict_local(JOB, each, MACHINE)[3] for each in (link, replace(link, latency=0.05)))
    assert far.seconds - near.seconds == pytest.approx((3 * 3 + 1) * (0.05 - 50e-6) / 30, rel=1e-3)


def test_state_on_the_host_takes_8_bytes_a_parameter_off_the_device() -> None:
    beside, away = (
        predict(JOB, Link(bandwidth=1.25e7), MACHINE, SparseLoCoConfig(device=device)) for device in (None, "cpu")
    )
    assert beside.memory - away.memory == 8 * JOB.parameters


@pytest.mark.parametrize("options", [{}, {"reduction": "sharded"}, {"reduction": "sharded", "device": "cpu"}])
def test_the_memory_of_a_plan_is_that_which_a_rank_allocates(options: dict[str, Any]) -> None:
    config, ranks = SparseLoCoConfig(**options), 4
    layout = Layout([64 * 256], [0], 256, ranks)
    state = LocoState.allocate(layout, None, torch.device("cpu"), owns=not config.gathers(ranks))
    kept = sum(each.nbytes for each in (state.start, state.error, state.owner_error)) / layout.numel
    assert state_bytes(config, ranks, 4) == (0 if config.device else kept)


def test_the_plan_shows_both_methods(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model=pythia-14m", "--nodes=2", "--bandwidth=10mbit", "--step-compute=350ms"]
    assert commands.main(["plan", *given]) == 0
    said = capsys.readouterr().out
    assert "Take SparseLoCo with sync_every=" in said
    assert "| H = 30 |" in said


@pytest.mark.few(3)
@pytest.mark.parametrize("bandwidth", ["10mbit", "100mbit", "1gbit", "10gbit", "100gbit"])
@pytest.mark.parametrize("ranks", ["1", "8"])
def test_a_plan_gives_one_advice(capsys: pytest.CaptureFixture[str], bandwidth: str, ranks: str) -> None:
    """Of nodes it said "Use SCAPE 99.9%" first, and "Take SparseLoCo" below."""
    given = ["--model=pythia-14m", "--nodes=2", f"--bandwidth={bandwidth}", "--step-compute=350ms"]
    assert commands.main(["plan", *given, f"--gpus-per-node={ranks}"]) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"^(Use|Stay with|Take|None of)", said, re.MULTILINE)) == 1
    assert ("Take SparseLoCo" in said) != ("SparseLoCo is not needed" in said)


def test_what_does_not_fit_is_not_advised() -> None:
    link = Link(bandwidth=1.25e6)
    predictions, local = (
        cost_model.predict(JOB, link, MACHINE, [0.9, 0.99]),
        cost_model.predict_local(JOB, link, MACHINE),
    )
    assert conclusions.which_method(predictions, local).startswith("Take SparseLoCo")
    said = conclusions.which_method(predictions, local, memory=min(p.memory for p in local) - 1)
    assert "Take SparseLoCo" not in said
    assert said.endswith("per rank: too much.")
