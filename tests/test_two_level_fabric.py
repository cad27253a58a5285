"""FabricScapeStrategy with ``local_group_size`` above 1, and a loss scaler on sharded gradients."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from trainer_helpers import MARKS, GivenRanks
from two_level_helpers import make_mesh, whole

from lightning_scape import FabricScapeStrategy, ScapeConfig, ScapeOptimizer
from lightning_scape.core.method import find_all
from lightning_scape.hosts import setup
from lightning_scape.hosts.common import as_call
from lightning_scape.scape.method import ScapeMethod

pytestmark = MARKS


def make_fabric(size: Any, sparsity: float = 0.9, **options: Any) -> L.Fabric:
    warmup = 0 if sparsity else None
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=warmup, wire_dtype="fp32", local_group_size=size)
    strategy = FabricScapeStrategy(config=config, **options)
    fabric = L.Fabric(accelerator="cpu", devices=4, strategy=strategy, plugins=[GivenRanks()])
    fabric.launch()
    return fabric


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 2)
        self.register_buffer("factor", torch.full((1,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + torch.tanh(block(inputs)) * self.factor
        return self.head(inputs)


def build(fabric: L.Fabric, empty: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(fabric.global_rank)  # ranks start unequal
    with fabric.init_module(empty_init=empty):
        model = Model()
        if empty:
            assert (next(model.parameters()).device.type == "meta") == (fabric.strategy.device_mesh is not None)
    if not empty:
        return fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    model.reset_parameters = lambda: model.factor.fill_(0.5)  # type: ignore[assignment]
    model = fabric.setup(model)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 1e-2))


def train(fabric: L.Fabric, model: Any, optimizer: Any, steps: range) -> float:
    norm = 0.0
    for step in steps:
        for part in range(2):  # two micro-batches
            inputs = torch.randn(
                4, 6, generator=torch.Generator().manual_seed(1000 * step + 10 * part + fabric.global_rank)
            )
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward((model(inputs) - inputs[:, :2] * 2).square().mean() / 2)
        norm = float(fabric.clip_gradients(model, optimizer, max_norm=10.0))
        optimizer.step()
        optimizer.zero_grad()
    return norm


def wholes(model: Any) -> Tensor:
    return torch.cat([whole(parameter).flatten() for parameter in model.parameters()])


def _as_flat(rank: int, world_size: int) -> list[Any]:
    found = []
    for size in (1, 2):
        fabric = make_fabric(size, sparsity=0.0)
        model, optimizer = build(fabric)
        (said,) = ScapeMethod.summary(find_all([optimizer]), 4, as_call("FabricScapeStrategy"))
        assert ("per rank and step between nodes of 2 ranks" in said) == (size == 2)
        found += [train(fabric, model, optimizer, range(4)), wholes(model)]
    return found


@pytest.mark.few(0)
def test_accumulation_trains_as_on_flat_ranks_and_the_norm_is_the_same(run_ranks: Any) -> None:
    everyone = run_ranks(_as_flat, 4)
    flat_norm, flat, nodes_norm, nodes = everyone[0]
    assert nodes_norm == pytest.approx(flat_norm, rel=0.1)  # two estimates, each within 1.1% or so
    torch.testing.assert_close(nodes, flat, rtol=1e-4, atol=1e-5)
    for found in everyone:
        assert torch.equal(found[3], nodes)


class Experts(Model):
    """Every rank uses one of two experts, and leaves the other out of its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Chooser()])


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.experts[dist.get_rank() % 2](inputs)


def _choose(rank: int, world_size: int) -> list[Tensor]:
    found = []
    for size in (1, 2):
        fabric = make_fabric(size, sparsity=0.0)
        torch.manual_seed(0)
        model = Experts()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
        train(fabric, model, optimizer, range(3))
        found.append(wholes(model))
    return found


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="FSDP2 counts zeros for parameters that a rank does not use from torch 2.13 on",
)
def test_ranks_of_a_node_may_use_other_experts(run_ranks: Any) -> None:
    for flat, nodes in run_ranks(_choose, 4):
        torch.testing.assert_close(nodes, flat, rtol=1e-4, atol=1e-5)


def _save_and_load(rank: int, world_size: int, kind: str, folder: str) -> None:
    kinds = {"collected": {"async_save": True}, "full": {}, "sharded": {"state_dict_type": "sharded"}}
    fabric = make_fabric(2, **kinds[kind])
    model, optimizer = build(fabric)
    train(fabric, model, optimizer, range(3))
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save(f"{folder}/saved", state)
    train(fabric, model, optimizer, range(3, 6))
    wanted = wholes(model)
    fabric.strategy.wait_for_checkpoint()
    fabric.barrier()
    again, other = build(make_fabric(2), empty=True)
    state = {"model": again, "optimizer": other, "step": 0}
    fabric.load(f"{folder}/saved", state)
    assert state["step"] == 3
    train(fabric, again, other, range(3, 6))
    assert torch.equal(wholes(again), wanted)
    plain = Model()
    if kind != "sharded":
        plain.load_state_dict(torch.load(f"{folder}/saved", weights_only=True)["model"])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["full", "collected", "sharded"])
def test_a_model_from_the_meta_device_goes_on_exactly_from_a_checkpoint(
    run_ranks: Any, tmp_path: Path, kind: str
) -> None:
    run_ranks(_save_and_load, 4, kind, str(tmp_path))


def _scaled(rank: int, world_size: int) -> tuple[list[float], int]:
    mesh = make_mesh(2)
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    fully_shard(model, mesh=mesh["shard"])
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
    optimizer = ScapeOptimizer(model.parameters(), config=config, process_group=mesh["replicate"].get_group())
    scaler = setup.sharded_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert scaler is not None
    for step in range(4):
        factor = float("inf") if (step, rank) == (2, 1) else 1.0
        scaler.scale((model(torch.ones(2, 6)) * factor).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.drain()
    assert optimizer.engine.state is not None
    return whole(model.weight).flatten().tolist(), optimizer.engine.state.calls


@pytest.mark.few(0)
def test_a_scaler_skips_a_step_on_all_ranks_if_one_meets_an_inf(run_ranks: Any) -> None:
    everyone = run_ranks(_scaled, 4)
    assert all(found == everyone[0] for found in everyone)
    assert everyone[0][1] == 3


def _dies(rank: int, world_size: int, between: str) -> None:
    fabric = make_fabric(2)
    model, optimizer = build(fabric)
    train(fabric, model, optimizer, range(2))
    inputs = torch.ones(4, 6)
    if between == "forward":
        if rank == 3:
            os._exit(1)
        model(inputs)
        return
    loss = model(inputs).square().mean()
    if rank == 3:
        os._exit(1)
    fabric.backward(loss)


@pytest.mark.few(0)
@pytest.mark.parametrize("between", ["forward", "backward"])
def test_a_rank_that_dies_is_said_to_be_lost_in_forward_and_backward(run_ranks: Any, between: str) -> None:
    """FSDP2's own messages ended in gloo's words. The dead rank's node waits for it; others may wait for that node."""
    *_, other, dead = run_ranks(_dies, 4, between, expect_errors=True)
    assert "died without a result" in str(dead)
    assert "All ranks must answer, got no answer" in str(other), repr(other)
    assert "Rank 3 has not reported" in str(other) or "Ranks" in str(other)
