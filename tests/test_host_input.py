"""What users of DDP bring along: their options and models are taken, or refused with the reason and the remedy."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainer_helpers import MARKS, GivenRanks, Regression, make_trainer

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCoStrategy,
)
from lightning_scape.comm.collectives import broadcast_tensors, timeout_of
from lightning_scape.hosts.common import check_start_method
from lightning_scape.tools.commands import main

RunRanks = Callable[..., list[Any]]
STRATEGIES = (ScapeStrategy, FabricScapeStrategy, SparseLoCoStrategy, FabricSparseLoCoStrategy)
pytestmark = MARKS


# -------------------------------------------------------------------------------------------------------- options


def timeout_in_use(rank: int, world_size: int) -> float:
    strategy = ScapeStrategy(timeout=20)
    trainer = make_trainer(strategy, max_steps=1)
    trainer.fit(Regression())
    group = strategy.lightning_module.trainer.optimizers[0].communicator.mask_group
    timeout = timeout_of(group)
    assert timeout is not None
    return timeout.total_seconds()


def test_a_timeout_that_is_a_number_counts_seconds(run_ranks: RunRanks) -> None:
    """``timeout=20`` passed the constructor and failed inside torch, at the start of the processes."""
    assert run_ranks(timeout_in_use, 2) == [20.0, 20.0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("value", [0, -3, "20", True, float("inf"), float("nan"), datetime.timedelta(0)])
def test_a_timeout_that_is_no_time_is_refused(strategy: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="`timeout` must be a timedelta or a number of seconds, above 0, got"):
        strategy(timeout=value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_remedy_in_a_notebook_keeps_the_method(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SparseLoCo's users were sent to `strategy="scape_notebook"`, which is the other method."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ValueError, match="must be 'fork' in an interactive session") as caught:
        check_start_method(strategy.__name__, strategy.method, "popen")
    assert f"`{strategy.__name__}(start_method='fork')`" in str(caught.value)
    assert f'strategy="{strategy.method}_notebook"' in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("find_unused_parameters", "waits for no parameter's gradient"),
        ("static_graph", "the backward pass sends nothing"),
        ("gradient_as_bucket_view", "there are no buckets"),
        ("ddp_comm_hook", "the strategy's own options say what is sent"),
    ],
)
def test_an_option_of_ddps_is_refused_as_not_needed(strategy: Any, option: str, why: str) -> None:
    """It was an unexpected keyword argument, which says nothing of what to do."""
    with pytest.raises(TypeError, match=f"`{option}` is an option of DDP's and must be left out, got True.*{why}"):
        strategy(**{option: True})
    with pytest.raises(TypeError, match="unexpected keyword argument 'sparseness'"):
        strategy(sparseness=0.9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whether_buffers_are_handed_on_is_yes_or_no(strategy: Any) -> None:
    with pytest.raises(ValueError, match="`broadcast_buffers` must be True or False, got 'no'"):
        strategy(broadcast_buffers="no")


# --------------------------------------------------------------------------------------------------------- models


class Odd(Regression):
    """With a layer that cannot be trained as it is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.odd: nn.Module = nn.LazyLinear(3)
        if kind == "fp8":
            self.odd = nn.Module()
            self.odd.weight = nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn))


def fit_odd(rank: int, world_size: int, kind: str) -> None:
    make_trainer(max_steps=1).fit(Odd(kind))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fp8", r"got odd.weight of shape \(4,\) in torch.float8_e4m3fn"),
        ("lazy", "must have their shape, got odd.weight, which a lazy module has not initialized yet. Run one batch"),
    ],
)
def test_a_parameter_that_cannot_be_trained_is_named(run_ranks: RunRanks, kind: str, words: str) -> None:
    """fp8 failed in a message about ``parameter 4``, or in torch's concatenation; lazy ones in ``stride``."""
    for error in run_ranks(fit_odd, 2, kind, expect_errors=True):
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=words):
            raise error


def test_fabric_names_a_lazy_parameter() -> None:
    strategy = FabricScapeStrategy(cluster_environment=GivenRanks())
    with pytest.raises(ValueError, match="got 0.weight, which a lazy module has not initialized yet"):
        strategy.setup_module(nn.Sequential(nn.LazyLinear(2)))


def test_an_optimizer_without_a_host_names_a_lazy_parameter() -> None:
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="got parameter 0, which a lazy module has not initialized yet"):
        ScapeOptimizer(lazy.parameters(), config=ScapeConfig())
    with pytest.raises(ValueError, match="got weight, which"):
        ScapeOptimizer(lazy.parameters(), config=ScapeConfig(), named_parameters=lazy.named_parameters())


class OddBuffer(Regression):
    """With a buffer whose memory does not read as its entries do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        table: Any = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "csr": lambda: torch.eye(3).to_sparse_csr(),
            "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "expanded": lambda: torch.ones(1).expand(5),
            "conjugate": lambda: torch.complex(torch.ones(3), torch.full((3,), dist.get_rank() + 2.0)).conj(),
            "negative": lambda: torch.complex(torch.ones(3), torch.full((3,), dist.get_rank() + 2.0)).conj().imag,
        }[kind]()
        self.register_buffer("odd", table)


def fit_odd_buffer(rank: int, world_size: int, kind: str) -> list[complex]:
    module = OddBuffer(kind)
    for strategy in (ScapeStrategy(sparsity=0.5), ScapeStrategy(sparsity=0.5, broadcast_buffers=True)):
        make_trainer(strategy, max_steps=1).fit(module)
    return module.odd.tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["quantized", "expanded", "sparse", "csr", "nested"])
def test_a_buffer_that_cannot_be_sent_is_named(run_ranks: RunRanks, kind: str) -> None:
    """A quantized one ended the process without a word."""
    for error in run_ranks(fit_odd_buffer, 2, kind, expect_errors=True):
        assert "must be dense, not quantized, nested or expanded, as with DDP, got 'odd' (torch." in str(error), error


@pytest.mark.parametrize(("kind", "value"), [("conjugate", 1 - 2j), ("negative", -2.0)])
def test_a_buffer_that_reads_as_a_conjugate_is_made_equal(run_ranks: RunRanks, kind: str, value: complex) -> None:
    assert run_ranks(fit_odd_buffer, 2, kind) == [[value] * 3] * 2


def start_with_any_dtype(rank: int, world_size: int) -> bool:
    kinds = (torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.int64, torch.float32)
    tensors = [torch.full((3,), 1.0 if rank == 0 else 0.0).to(kind) for kind in (*kinds, *kinds)]
    broadcast_tensors(tensors)
    return all(bool((tensor.float() == 1).all()) for tensor in tensors)


def test_frozen_weights_of_any_dtype_are_made_equal_at_the_start(run_ranks: RunRanks) -> None:
    assert run_ranks(start_with_any_dtype, 2) == [True, True]


# ------------------------------------------------------------------------------------------------ names of models

COMMAND = "--nodes 2 --bandwidth 1gbit --step-compute 1s --model"


@pytest.mark.parametrize("name", ["Pythia-14M", "EleutherAI/pythia-14m"])
def test_plan_takes_a_models_name_as_users_write_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another case than LitGPT's was an unknown model."""
    assert main(["plan", *COMMAND.split(), name]) == 0
    assert "14.1M parameters" in capsys.readouterr().out


def test_plan_suggests_names_that_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *COMMAND.split(), "pythia-15m"]) == 2
    said = capsys.readouterr().err
    assert "got 'pythia-15m'. Did you mean" in said
    assert "pythia-14m" in said
    assert main(["plan", *COMMAND.split(), "qqqqqqqq"]) == 2
    assert "Such as pythia-160m." in capsys.readouterr().err
