"""SCAPE's step on the user's own optimizer: what the object still is, and what it says of its state."""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from typing import Any

import pytest
import torch
from optimizer_helpers import FP32, RunRanks, parameters, set_gradients
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import StepLR
from trainer_helpers import Regression, gathered, make_trainer, weights

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, ScapeStrategy, SparseLoCoStrategy

SPARSE = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0)


def under_scape(config: ScapeConfig = SPARSE, **options: Any) -> tuple[Any, torch.optim.AdamW, ScapeOptimizer]:
    params = parameters()
    adamw = torch.optim.AdamW(params, 1e-2, **options)
    return params, adamw, ScapeOptimizer.from_optimizer(adamw, config)


# -------------------------------------------------------------------------------------------- the object stays itself


def test_either_object_takes_the_same_steps_and_schedulers_steer_them_from_before_and_after() -> None:
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # of schedulers that find no step
        for kind in ("own", "standing"):
            params, adamw = parameters(), None
            adamw = torch.optim.AdamW(params, 1e-2, fused=True)
            before = StepLR(adamw, 1, 0.5)
            scape = ScapeOptimizer.from_optimizer(adamw, SPARSE)
            stepped = adamw if kind == "own" else scape
            after = StepLR(stepped, 1, 0.5)
            for step in range(3):
                set_gradients(params, 0, step)
                stepped.step()
                before.step()
                after.step()
            assert adamw.param_groups[0]["lr"] == pytest.approx(1e-2 / 64)
            assert scape.steps_taken == 3
            ends.append(torch.cat([each.detach().flatten() for each in params]))
    assert torch.equal(*ends)


def test_hooks_and_a_closure_run_once_a_step_and_see_the_gradients() -> None:
    params, adamw, _ = under_scape()
    seen: list[str] = []
    adamw.register_step_pre_hook(lambda *_: seen.append(f"before {params[0].grad is not None}"))
    adamw.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        set_gradients(params, 0, 0)
        return 7.0

    set_gradients(params, 0, 1)
    assert adamw.step(closure) == 7.0
    assert seen == ["before True", "after"]


def test_a_copy_or_pickle_is_an_adamw_of_its_own_parameters() -> None:
    params, adamw, scape = under_scape()
    set_gradients(params, 0, 0)
    adamw.step()
    for each in (adamw, scape):
        file = io.BytesIO()
        torch.save(each, file)
        file.seek(0)
        for twin in (copy.deepcopy(each), torch.load(file, weights_only=False)):
            assert type(twin) is torch.optim.AdamW
            assert ScapeOptimizer.of(twin) is None
            before = [parameter.detach().clone() for parameter in params]
            for parameter in twin.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            twin.step()
            assert all(map(torch.equal, before, params))
    assert scape.steps_taken == 1


# ---------------------------------------------------------------------------------------------------------- the state


def ask_for_the_state(rank: int, world_size: int) -> list[Any]:
    """Rank 1 asks while rank 0 has gone on: it must not wait."""
    params, adamw, scape = under_scape()
    set_gradients(params, rank, 0)
    adamw.step()
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"got a call of state_dict\(\) on rank 1 without it"):
            adamw.state_dict()
    scape.consolidate_state_dict(to=0)
    if rank == 1:
        with pytest.raises(RuntimeError, match="must be collected"):
            adamw.state_dict()
        return []
    return sorted(map(str, adamw.state_dict()))


def test_the_state_of_one_rank_is_an_error_until_all_have_collected_it(run_ranks: RunRanks) -> None:
    assert run_ranks(ask_for_the_state, 2) == [["param_groups", "scape", "state"], []]


def test_torchs_own_reader_of_states_takes_no_step() -> None:
    model = nn.Linear(3, 2)
    adamw = torch.optim.AdamW(model.parameters())
    scape = ScapeOptimizer.from_optimizer(adamw, SPARSE)
    before = model.weight.detach().clone()
    get_optimizer_state_dict(model, adamw)
    assert scape.steps_taken == 0
    assert torch.equal(model.weight, before)


def test_a_load_that_torch_refuses_changes_nothing() -> None:
    params, adamw, scape = under_scape()
    for step in range(2):
        set_gradients(params, 0, step)
        adamw.step()
    state = copy.deepcopy(adamw.state_dict())
    set_gradients(params, 0, 2)
    adamw.step()
    spoiled = {**state, "param_groups": [{**state["param_groups"][0], "params": [0]}]}
    with pytest.raises(ValueError, match="group"):
        adamw.load_state_dict(spoiled)
    assert scape.steps_taken == 3
    adamw.load_state_dict(state)
    assert scape.steps_taken == 2


def scale_alone(rank: int, world_size: int) -> None:
    params, adamw, _ = under_scape()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        adamw.zero_grad()
        loss = sum(each.sum() for each in params) * (torch.inf if (step, rank) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(adamw)
        scaler.update()


def test_a_plain_scaler_that_steps_the_users_optimizer_is_an_error_on_all_ranks(run_ranks: RunRanks) -> None:
    for error in run_ranks(scale_alone, 2, expect_errors=True):
        assert "ShardedGradScaler" in str(error)


def drop_a_batch(rank: int, world_size: int) -> bool:
    params, adamw, _ = under_scape()
    batch = torch.ones(10)
    there = weakref.ref(batch)
    set_gradients(params, rank, 0)
    adamw.step()
    del batch
    return there() is None


def test_a_step_keeps_nothing_alive_that_its_loop_has_dropped(run_ranks: RunRanks) -> None:
    """It looks for a scaler among its callers, and Python keeps what is read of their variables."""
    assert run_ranks(drop_a_batch, 2) == [True, True]


# ------------------------------------------------------------------------------------------------------- further fits


class Keeps(Regression):
    """Returns the same optimizer in each fit."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = torch.optim.AdamW(self.parameters(), 1e-2)
        return self.kept


def fit_again(rank: int, world_size: int) -> None:
    twice: dict[str, torch.Tensor] = {}
    for name, make in (
        ("ddp", lambda: "ddp"),
        ("scape", lambda: ScapeStrategy(sparsity=0.0, **FP32)),
        ("sparse", lambda: ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0)),
        ("sparseloco", lambda: SparseLoCoStrategy(sync_every=2)),
    ):
        module = Keeps()
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*begins anew")
                make_trainer(make()).fit(module)
        twice[name] = weights(module)
        assert torch.equal(*gathered(twice[name]))
        if name == "sparse":
            scape = ScapeOptimizer.of(module.kept)
            assert scape is not None
            assert scape.steps_taken == 12
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        module.kept.step()  # after its fits it is torch's
        assert ScapeOptimizer.of(module.kept) is None
    torch.testing.assert_close(twice["scape"], twice["ddp"], rtol=1e-5, atol=1e-6)


def test_a_second_fit_of_the_same_optimizer_goes_on_with_its_moments(run_ranks: RunRanks) -> None:
    run_ranks(fit_again, 2)


def test_a_load_into_adams_leaves_no_state_of_torchs_beside_scapes() -> None:
    """A second fit would take it for what AdamS has learnt."""
    params = parameters()
    adams = AdamS(params)
    ScapeOptimizer.from_optimizer(adams, SPARSE)
    set_gradients(params, 0, 0)
    adams.step()
    adams.load_state_dict(adams.state_dict())
    assert not any(param in adams.state for param in params)


def fit_with_other_options(rank: int, world_size: int) -> None:
    module = Keeps()
    make_trainer(ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0)).fit(module)
    with pytest.warns(UserWarning, match="begins anew"):
        make_trainer(ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0)).fit(module)
    make_trainer(SparseLoCoStrategy(sync_every=2)).fit(module)
    assert torch.equal(*gathered(weights(module)))


def test_a_second_fit_with_other_options_begins_anew_and_says_so(run_ranks: RunRanks) -> None:
    run_ranks(fit_with_other_options, 2)
