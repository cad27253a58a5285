"""torch's default dtype and device are the user's: the package names its own, and trains alike whatever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from optimizer_helpers import gradients
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, ops
from lightning_scape.sparseloco import SparseLoCo

# ----------------------------------------------------------------------------------------------- short trainings


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """By ``torch.device``: torch 2.7 does not get over ``set_default_device(None)``, which would take one back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


PLAIN = (torch.float32, "cpu")
ODD = ((torch.float64, "cpu"), (torch.bfloat16, "meta"))
SIZES = ((37, 11), (5,), (300, 7), (641,))


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator("cpu").manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]


def state_on_all_ranks(optimizer: Any, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for to in range(2):
        optimizer.consolidate_state_dict(to)
        found = optimizer.state_dict() if to == rank else found
    return found


def scape(rank: int, dtype: torch.dtype, options: dict[str, Any], choice: tuple[torch.dtype, str]) -> list[Tensor]:
    params, steps = weights(dtype), [gradients(weights(dtype), rank, step) for step in range(5)]
    config = ScapeConfig(**{"sparsity": 0.99, "dense_steps": 1, "sparsity_warmup_steps": 0, **options})
    with defaults(*choice):
        optimizer = ScapeOptimizer([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}], config=config)
        for step, grads in enumerate(steps):
            for place, (parameter, grad) in enumerate(zip(params, grads, strict=True)):
                # Rank 1 has none at all in one step; nobody has one for the second in another.
                parameter.grad = None if (step, rank) == (2, 1) or (step, place) == (3, 1) else grad
            if step % 2:
                optimizer.clip_grad_norm(1.0)
            optimizer.step()
            if step == 3:
                optimizer.load_state_dict(state_on_all_ranks(optimizer, rank))
        assert optimizer.stats is not None
        optimizer.drain()
    return params


def loco(rank: int, dtype: torch.dtype, options: dict[str, Any], choice: tuple[torch.dtype, str]) -> list[Tensor]:
    params, steps = weights(dtype), [gradients(weights(dtype), rank, step) for step in range(6)]
    with defaults(*choice):
        optimizer = AdamS(params, lr=0.01)
        wrapped = SparseLoCo(optimizer, **{"density": 1 / 8, "sync_every": 2, **options})
        for grads in steps:
            for parameter, grad in zip(params, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
        wrapped.sync()
        assert wrapped.stats is not None
        wrapped.load_state_dict(state_on_all_ranks(wrapped, rank))
    return params


Case = tuple[str, torch.dtype, dict[str, Any]]
SCAPE: list[Case] = [
    ("cpu", torch.float32, {"update": "adamw"}),
    ("naive", torch.float32, {"update": "adams", "wire_dtype": "int4"}),
]
LOCO: list[Case] = [
    ("cpu", torch.float32, {"bits": 2, "reduction": "sharded"}),
    ("naive", torch.float32, {"bits": 4, "density": 1.0, "overlap_steps": 1}),
]


def _train(rank: int, world_size: int, train: Any, cases: list[Case]) -> None:
    for choice, dtype, options in cases:
        with ops.using(choice):
            expected = train(rank, dtype, options, PLAIN)
            for odd in ODD:
                for ours, theirs in zip(train(rank, dtype, options, odd), expected, strict=True):
                    assert torch.equal(ours, theirs), (options, dtype, odd)


@pytest.mark.parametrize(("train", "cases"), [(scape, SCAPE), (loco, LOCO)], ids=["SCAPE", "SparseLoCo"])
def test_torchs_defaults_change_no_bit_of_a_training(run_ranks: Any, train: Any, cases: Any) -> None:
    run_ranks(_train, 2, train, cases)
