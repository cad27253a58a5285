"""torch's default dtype and device are the user's: the package names its own, and trains alike whatever they are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_helpers import gradients
from torch import Tensor, nn
from torch.utils._device import _device_constructors

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, ops
from lightning_scape.planning.measure import measure_machine
from lightning_scape.sparseloco import SparseLoCo

PACKAGE = Path(ops.__file__).parents[1]
FACTORIES = {function.__name__ for function in _device_constructors()} | {"normal", "frombuffer", "Tensor"}
"""What makes a tensor of torch's default dtype or on its default device, where none is named."""
NAMED = {"frombuffer": {"dtype"}}
"""A buffer lies where it lies."""


def unnamed(tree: ast.AST) -> Iterator[str]:
    """Calls of factories of torch that leave the dtype or the device to the defaults."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        module, _, name = ast.unparse(node.func).rpartition(".")
        if module == "torch" and name in FACTORIES:
            missing = NAMED.get(name, {"dtype", "device"}) - {keyword.arg or "" for keyword in node.keywords}
            if missing:
                yield f"line {node.lineno}: {ast.unparse(node)} names no {' and no '.join(sorted(missing))}"


def test_every_factory_call_names_dtype_and_device() -> None:
    modules = list(PACKAGE.rglob("*.py"))
    assert modules
    assert [(path, found) for path in modules if (found := list(unnamed(ast.parse(path.read_text()))))] == []


def test_the_search_finds_what_is_not_named() -> None:
    text = "torch.zeros(3, device=d); torch.ones_like(x); x.new_zeros(2); torch.full((), 1.0, dtype=a, device=b)"
    assert list(unnamed(ast.parse(text))) == ["line 1: torch.zeros(3, device=d) names no dtype"]


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
LOCAL = {"mask_statistic": "first_moment", "clip_norm": "local"}
SCAPE: list[Case] = [
    ("cpu", torch.float32, {"update": "adamw"}),
    ("cpu", torch.bfloat16, {"update": "adams", "sparsity": 0.9, "wire_dtype": "fp32", **LOCAL}),
    ("naive", torch.float32, {"update": "adams", "wire_dtype": "int4"}),
]
LOCO: list[Case] = [
    ("cpu", torch.float32, {"bits": 2, "reduction": "sharded"}),
    ("cpu", torch.bfloat16, {"bits": None, "reduction": "gathered"}),
    ("naive", torch.float32, {"bits": 4, "density": 1.0, "overlap_steps": 1}),
]


def _train(rank: int, world_size: int, train: Any, cases: list[Case]) -> None:
    for choice, dtype, options in cases:
        with ops.using(choice):
            expected = train(rank, dtype, options, PLAIN)
            for odd in ODD:
                for ours, theirs in zip(train(rank, dtype, options, odd), expected, strict=True):
                    assert torch.equal(ours, theirs), (options, dtype, odd)


@pytest.mark.few(1)
@pytest.mark.parametrize(("train", "cases"), [(scape, SCAPE), (loco, LOCO)], ids=["SCAPE", "SparseLoCo"])
def test_torchs_defaults_change_no_bit_of_a_training(run_ranks: Any, train: Any, cases: Any) -> None:
    run_ranks(_train, 2, train, cases)


def test_nor_do_they_disturb_the_planners_measurement() -> None:
    params = weights(torch.float32)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    with defaults(torch.float64, "meta"):
        assert measure_machine(params, [0.99], repeats=1).adamw > 0
