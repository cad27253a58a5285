"""Ranks stay bitwise equal, whatever is trained and with which options; ranks that differ are told."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from optimizer_helpers import (
    SIZES,
    RunRanks,
    assert_replicas_equal,
    kept_by_a_skipped_step,
    parameters,
    set_gradients,
    values,
)
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer
from lightning_scape.scape.opening import Answer, Opening

# ------------------------------------------------------------------------------------------------ replicas stay equal


class Odd(nn.Module):
    """Tied weights, a frozen parameter, one that few use or none, sizes that nothing divides."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(53, 17)
        self.hidden = nn.Linear(17, 17)
        self.frozen = nn.Linear(17, 17)
        self.sometimes = nn.Linear(17, 17, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(17, 53, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, tokens: Tensor, use_all: bool) -> Tensor:
        x = torch.tanh(self.hidden(self.embed(tokens))) * self.gain + self.frozen(self.embed(tokens))
        return self.head(self.sometimes(x) if use_all else x)


def train_odd(rank: int, world_size: int, sparsity: float, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    model = Odd(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = ScapeOptimizer(
        [{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": rest, "lr": 3e-2, "weight_decay": 0.0}],
        config=ScapeConfig(**{"sparsity": sparsity, "check_replicas_every": 5, "sparsity_warmup_steps": 0, **options}),
    )
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(12):
        tokens = torch.randint(0, 53, (16,))
        logits = model(tokens, use_all=(rank == 0 or step % 3 == 0) and step not in (4, 9))
        loss = nn.functional.cross_entropy(logits.float(), (tokens * 7 + 1) % 53)
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        assert_replicas_equal(list(model.parameters()))
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    stats, state = optimizer.stats, optimizer.engine.state
    assert stats is not None
    assert stats.density == optimizer.config.quota.density
    assert state is not None
    assert state.missed is not None
    trained = {id(p): name for name, p in model.named_parameters()}
    missed = zip((trained[id(p)] for p in optimizer.engine.parameters.tensors), state.missed.tolist(), strict=True)
    assert {name: count for name, count in missed if count} == {"sometimes.weight": 2}
    return dict(zip(names, changed, strict=True)), losses


@pytest.mark.parametrize(("sparsity", "world_size", "update"), [(0.9, 3, "adamw"), (0.99, 2, "adams")])
def test_replicas_are_bitwise_equal_after_every_step(
    run_ranks: RunRanks, world_size: int, update: str, sparsity: float
) -> None:
    for changed, _ in run_ranks(train_odd, world_size, sparsity, torch.float32, {"update": update}):
        assert changed == {name: not name.startswith("frozen") for name in changed}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"wire_dtype": "fp32", "update": "adamw"}),
        (torch.bfloat16, {"update": "adamw"}),
        (torch.float32, {"sparsity_warmup_steps": 4, "clip_norm": "local", "update": "adamw"}),
    ],
)
def test_replicas_are_bitwise_equal_under_every_option(
    run_ranks: RunRanks, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for changed, _ in run_ranks(train_odd, 2, 0.9, dtype, options):
        assert changed == {name: not name.startswith("frozen") for name in changed}


def train_with_flags(rank: int, world_size: int, on_device: bool, options: dict[str, Any]) -> list[Tensor]:
    real = Opening.exchange

    def exchange(self: Opening, measured: Tensor, flags: Any, standing: Any) -> Answer:
        answer = real(self, measured, flags, standing)
        return answer._replace(present=torch.ones(len(flags))) if on_device and answer.present is None else answer

    Opening.exchange = exchange  # type: ignore[method-assign]
    params = parameters()
    groups = [{"params": params[:2], "lr": 3e-2}, {"params": params[2:], "betas": (0.8, 0.99)}]
    config = ScapeConfig(**{"sparsity": 0.9, "sparsity_warmup_steps": 2, **options})
    optimizer = ScapeOptimizer(groups, config=config)
    for step in range(8):
        set_gradients(params, rank, step)
        optimizer.clip_grad_norm(20.0)
        optimizer.step()
    optimizer.drain()
    state = optimizer.engine.state
    assert state is not None
    assert (state.missed is not None) == on_device
    kept = [t for t in kept_by_a_skipped_step(state)[:-1] if t is not None]
    return values(params) + kept


def test_ranks_on_devices_that_do_not_know_whether_all_have_gradients_train_alike(run_ranks: RunRanks) -> None:
    """On CUDA the flags stay on the device, and every step goes by rows."""
    options = {"update": "adamw"}
    known = run_ranks(train_with_flags, 2, False, options)
    for mine, theirs in zip(run_ranks(train_with_flags, 2, True, options, fresh=True), known, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)


# ---------------------------------------------------------------------------------------------- odd shapes and groups


def train_small(rank: int, world_size: int, sizes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    params = parameters(sizes)
    optimizer = ScapeOptimizer(
        [{"params": []}, {"params": params}], config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
    )
    before = values(params)
    for step in range(5):
        set_gradients(params, rank, step)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert_replicas_equal(params)
    optimizer.consolidate_state_dict()
    assert rank or set(optimizer.state_dict()["state"]) == set(range(len(sizes)))
    assert all(p.numel() == 0 or not torch.equal(a, p) for a, p in zip(before, params, strict=True))
    return values(params)


@pytest.mark.parametrize(("world_size", "sizes"), [(1, ((0,), (50,), (3, 0, 2), (9,))), (3, ((1,),))])
def test_empty_parameters_and_more_ranks_than_blocks_are_fine(
    run_ranks: RunRanks, world_size: int, sizes: tuple[tuple[int, ...], ...]
) -> None:
    run_ranks(train_small, world_size, sizes)


# ------------------------------------------------------------------------------------------ ranks that differ


def build_differently(rank: int, world_size: int, kind: str) -> None:
    sizes: tuple[tuple[int, ...], ...] = SIZES
    sparsity = 0.9
    if rank == 1 and kind == "shape":
        sizes = ((37, 12), *SIZES[1:])
    if rank == 1 and kind == "sparsity":
        sparsity = 0.99
    if rank == 1 and kind == "bad lr":
        ScapeOptimizer(parameters(), lr=-1, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    if rank == 1 and kind == "version":
        sys.modules[ScapeOptimizer.__module__].__version__ = "9.9"  # type: ignore[attr-defined]
    params = parameters(sizes)
    if rank == 1 and kind == "values":
        params[3].data[0, 0] += 1
    lr = 0.5 if rank == 1 and kind == "lr" else 1e-3
    names = [(f"layer{i}.weight", p) for i, p in enumerate(params)]
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0)
    optimizer = ScapeOptimizer(params, lr=lr, config=config, named_parameters=names)
    set_gradients(params, 0, 0)
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", r"got a difference: parameters .*\[0\] is .*\(37, 11\).* on rank 0 and .*\(37, 12\).* on rank 1"),
        ("sparsity", r"config\[0\] is 'sparsity=0.9' on rank 0 and 'sparsity=0.99' on rank 1"),
        ("version", r"lightning_scape's version is '.*' on rank 0 and '9.9' on rank 1"),
        ("bad lr", r"`lr` must be >= 0, got -1"),
        ("lr", r"lr of group 0 is 0\.001 on rank 0 and 0\.5 on rank 1"),
        ("values", r"bitwise equal parameters, got 'layer3.weight' of 2100 entries different from rank 0's on rank 1"),
    ],
)
def test_ranks_that_differ_get_the_same_error_everywhere(run_ranks: RunRanks, kind: str, words: str) -> None:
    errors = run_ranks(build_differently, 2, kind, expect_errors=True)
    assert all(isinstance(error, (ValueError, RuntimeError)) for error in errors)
    assert re.search(words, str(errors[0]))
    assert str(errors[0]) == str(errors[1])


def drift(rank: int, world_size: int) -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(check_replicas_every=3, sparsity_warmup_steps=0))
    for step in range(6):
        set_gradients(params, rank, step)
        if step == 3 and rank == 1:
            params[4].data.view(-1)[5] *= 1.0000001
        optimizer.step()


def test_check_replicas_names_the_first_parameter_that_differs(run_ranks: RunRanks) -> None:
    errors = run_ranks(drift, 2, expect_errors=True)
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "got 'parameter 4' of 27 entries different from rank 0's on rank 1" in str(error)
