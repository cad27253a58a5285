"""Optimizers, parameters and options that are refused, and what is kept of those that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optimizer_helpers import parameters
from torch import nn
from torch.optim import AdamW

from lightning_scape import ScapeConfig, ScapeOptimizer, SparseLoCo
from lightning_scape.sparseloco.config import SparseLoCoConfig

# ---------------------------------------------------------------------------------------------------------- bad input


class OwnAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def with_own_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), TypeError, r"must be torch.optim.AdamW.*got torch.optim.sgd.SGD"),
        (lambda p: OwnAdamW(p), TypeError, r"OwnAdamW with a `step` of its own"),
        (lambda p: with_own_step(torch.optim.AdamW(p)), TypeError, "AdamW with a `step` of its own"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ValueError, "`amsgrad` must be False, got True"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), ValueError, "`weight_decay` of Adam must be 0, got 0.1"),
    ],
)
def test_an_optimizer_that_cannot_be_kept_is_refused(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ScapeOptimizer.from_optimizer(build(parameters()), ScapeConfig(sparsity_warmup_steps=0))


def test_from_optimizer_keeps_settings_by_reference() -> None:
    params = parameters()
    own = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.7}
    groups = [{"params": params[:2], **own}, {"params": params[2:]}]
    dense = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.125, fused=True)
    scape = ScapeOptimizer.from_optimizer(dense, ScapeConfig(sparsity_warmup_steps=0))
    assert scape.param_groups is dense.param_groups
    assert scape.defaults["lr"] == 0.25
    first, second = scape.param_groups
    assert (first["lr"], first["betas"], first["eps"], first["weight_decay"]) == (0.5, (0.8, 0.9), 1e-5, 0.7)
    assert (second["lr"], second["betas"], second["eps"], second["weight_decay"]) == (0.25, (0.9, 0.999), 1e-8, 0.125)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "`lr` must be >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"`betas` must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": 0.0}, "`eps` must be at least 1.17549e-38, got 0.0"),
        ({"weight_decay": -0.1}, "`weight_decay` must be >= 0, got -0.1"),
    ],
)
def test_bad_hyperparameters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0), **options)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_sparseloco_names_the_parameter_that_it_cannot_carry(dtype: torch.dtype) -> None:
    module = nn.ParameterDict({"fine": torch.zeros(3), "bad": torch.zeros(3, dtype=dtype)})
    with pytest.raises(ValueError, match=f"got bad .*in (torch.)?{str(dtype).removeprefix('torch.')}"):
        SparseLoCo.from_optimizer(
            AdamW(module.parameters()), SparseLoCoConfig(), named_parameters=module.named_parameters()
        )


def test_parameters_that_cannot_be_carried_are_refused() -> None:
    complex_ = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"Parameters must be one of .* in torch.complex64, which the wire cannot"):
        ScapeOptimizer([complex_], config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(ValueError, match="without overlap or gap"):
        ScapeOptimizer([nn.Parameter(torch.zeros(4, 8)[:, ::2])], config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(ValueError, match="At least one parameter must require grad"):
        ScapeOptimizer([nn.Parameter(torch.zeros(3), requires_grad=False)], config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(TypeError, match="`config` must be a ScapeConfig, got dict"):
        ScapeOptimizer(parameters(), config={"sparsity": 0.9})  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = ScapeOptimizer(embedding.parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="Gradients must be dense, got torch.sparse_coo.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda optimizer, _: optimizer.add_param_group({"params": parameters()}), "got 6 .* and 0 .*Build a new"),
        (lambda _, params: params[0].requires_grad_(True), "be frozen or unfrozen before .* got 1 .* and 0 "),
        (lambda _, params: params[1].requires_grad_(False), "be frozen or unfrozen before .* got 0 .* and 1 "),
        (
            lambda _, params: params[1].set_(torch.zeros(9)),
            r"'parameter 1' of shape \(9,\) with strides \(1,\) instead",
        ),
    ],
)
def test_other_parameters_after_the_optimizer_was_built_are_refused(change: Any, words: str) -> None:
    params = parameters()
    params[0].requires_grad_(False)
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity_warmup_steps=0))
    with torch.no_grad():
        change(optimizer, params)
    with pytest.raises(ValueError, match=words):
        optimizer.step()


def test_ranks_that_nobody_joined_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError, match=r"got WORLD_SIZE=2 and no process group: each would train on its own\. Call"
    ):
        ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
