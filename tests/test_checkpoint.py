"""A whole state by parameter: exact resume, another number of ranks, foreign and unfit states."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_helpers import SIZES, gradients, parameters, set_gradients, values
from torch import Tensor

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer
from lightning_scape.core.tensors import piece_views

RunRanks = Callable[..., list[Any]]


def build(config: ScapeConfig, dtype: torch.dtype, total_steps: int | None = None) -> tuple[list[Any], ScapeOptimizer]:
    params = parameters(dtype=dtype)
    groups = [{"params": params[:2], "lr": 3e-2}, {"params": params[2:], "weight_decay": 0.0}]
    return params, ScapeOptimizer(groups, lr=1e-2, config=config, total_steps=total_steps)


def train(params: list[Any], optimizer: ScapeOptimizer, rank: int, steps: range, bad: int | None = None) -> None:
    """With AdamW's update, number 3 has no gradient in every third step, and number 1 has its gradients on rank 0."""
    for step in steps:
        set_gradients(params, rank, step)
        if optimizer.config.update == "adamw":
            params[3].grad = None if step % 3 == 1 else params[3].grad
            params[1].grad = None if rank else params[1].grad
        if step == bad:
            params[0].grad.fill_(float("nan"))
        optimizer.clip_grad_norm(20.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()


def saved(optimizer: ScapeOptimizer, params: list[Any]) -> bytes:
    """What rank 0 would write, through torch.save."""
    optimizer.consolidate_state_dict(to=0)
    if optimizer.communicator.rank:
        return b""
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "model": values(params)}, file)
    return file.getvalue()


def from_rank_zero(file: bytes) -> bytes:
    box = [file]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    return box[0]


def restored(
    file: bytes, config: ScapeConfig, dtype: torch.dtype, total_steps: int | None = None
) -> tuple[list[Any], ScapeOptimizer]:
    params, optimizer = build(config, dtype, total_steps)
    content = torch.load(io.BytesIO(file), weights_only=True)
    for parameter, value in zip(params, content["model"], strict=True):
        parameter.data.copy_(value)
    optimizer.load_state_dict(content["optimizer"])
    return params, optimizer


def everything(params: list[Any], optimizer: ScapeOptimizer) -> list[Tensor]:
    optimizer.drain()
    state = optimizer.engine.state
    assert state is not None
    held = [
        state.residual,
        state.step,
        optimizer.engine.masks.active,
        state.local_exp_avg,
        state.local_exp_avg_sum,
        state.local_exp_avg_sq,
    ]
    shard = [
        part
        for t in (state.exp_avg, state.master, state.change_error, state.exp_avg_sq, state.last_step)
        if t is not None
        for part in piece_views(t, optimizer.engine.shard.region.pieces)
    ]
    missed = [0] * len(params) if state.missed is None else state.missed.tolist()
    counts = torch.tensor([state.calls, state.exp_avg_sq_since, optimizer.schedule.warmup_steps, *missed])
    return values(params) + [t for t in held if t is not None] + shard + [counts]


def stop_and_go(rank: int, world_size: int, at: int, config: ScapeConfig, dtype: torch.dtype, bad: int | None) -> int:
    params, optimizer = build(config, dtype)
    train(params, optimizer, rank, range(at), bad)
    file = from_rank_zero(saved(optimizer, params))
    train(params, optimizer, rank, range(at, 12), bad)
    again, other = restored(file, config, dtype, 7)  # the length of the new run does not matter to its warm-up
    train(again, other, rank, range(at, 12), bad)
    for a, b in zip(everything(params, optimizer), everything(again, other), strict=True):
        assert torch.equal(a, b)
    assert optimizer.stats is not None
    assert other.stats is not None
    assert optimizer.stats.bytes_total == other.stats.bytes_total
    assert optimizer.stats.skipped_total == other.stats.skipped_total
    assert [g["lr"] for g in other.param_groups] == [3e-2, 1e-2]
    return len(again)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("at", "options", "dtype"),
    [
        (5, {}, torch.float32),
        (5, {"update": "adamw"}, torch.float32),
        (5, {}, torch.bfloat16),
        (1, {"sparsity": 0.99, "wire_dtype": "fp32", "update": "adamw"}, torch.float32),
        (5, {"sparsity": 0.999, "update": "adamw"}, torch.bfloat16),
        (2, {"dense_steps": 4, "update": "adamw"}, torch.float32),
        (4, {"dense_steps": 1, "sparsity_warmup_steps": 6}, torch.bfloat16),
        (4, {"sparsity_warmup_steps": None, "update": "adamw"}, torch.float32),
        (5, {"mask_statistic": "first_moment", "bias_correction": True}, torch.float32),
        (5, {"mask_statistic": "first_moment", "update": "adamw"}, torch.float32),
        (5, {"update": "adamw"}, torch.float64),
        (5, {"mask_votes": 3}, torch.float32),
        (9, {"second_moment": "reconstructed"}, torch.float32),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_equals_never_having_stopped_bit_for_bit(
    run_ranks: RunRanks, world_size: int, at: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    config = ScapeConfig(**{"sparsity": 0.9, "sparsity_warmup_steps": 0, **options})
    assert run_ranks(stop_and_go, world_size, at, config, dtype, None) == [len(SIZES)] * world_size


@pytest.mark.few(0)
@pytest.mark.parametrize("update", ["adams", "adamw"])
def test_resume_right_after_a_skipped_step_is_exact(run_ranks: RunRanks, update: str) -> None:
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update=update)
    run_ranks(stop_and_go, 2, 5, config, torch.float32, 4)
    run_ranks(stop_and_go, 2, 1, config, torch.float32, 0)


def write_state(rank: int, world_size: int, steps: int, config: ScapeConfig) -> tuple[bytes, Tensor]:
    params, optimizer = build(config, torch.float32)
    train(params, optimizer, rank, range(steps))
    file = saved(optimizer, params)
    state = optimizer.engine.state
    assert state is not None
    mean = torch.cat(piece_views(state.residual, optimizer.engine.layout.everything().pieces)).clone()
    if world_size > 1:
        dist.all_reduce(mean)
    return file, mean / world_size


def read_state(rank: int, world_size: int, file: bytes, config: ScapeConfig) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params, optimizer = restored(file, config, torch.float32)
    state = optimizer.engine.state
    assert state is not None
    mean = torch.cat(piece_views(state.residual, optimizer.engine.layout.everything().pieces)).clone()
    if world_size > 1:
        dist.all_reduce(mean)
    optimizer.consolidate_state_dict(to=0)
    whole = optimizer.state_dict() if rank == 0 else None
    train(params, optimizer, rank, range(8, 12))
    return mean / world_size, whole, [str(w.message) for w in caught]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "after", "update", "warmup"),
    [(2, 3, "adams", 0), (3, 2, "adamw", 0), (3, 1, "adams", 0), (1, 2, "adams", 0), (2, 3, "adamw", None)],
)
def test_another_number_of_ranks_keeps_the_state_and_the_mean_residual(
    run_ranks: RunRanks, before: int, after: int, update: str, warmup: int | None
) -> None:
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=warmup, update=update)
    file, mean = run_ranks(write_state, before, 8, config)[0]
    first = torch.load(io.BytesIO(file), weights_only=True)["optimizer"]
    results = run_ranks(read_state, after, file, config)
    torch.testing.assert_close(results[0][0], mean, rtol=1e-5, atol=1e-6)
    second = results[0][1]
    kept = {"exp_avg", "exp_avg_sq", "last_step", "step"} | (set() if update == "adamw" else {"local_exp_avg_sq"})
    kept |= {"change_error"} if before > 1 else set()
    assert [entry["step"] for entry in first["state"].values()] == [8, 8, 8, 5 if update == "adamw" else 8, 8, 8]
    for name in ("missed", "second_moment_since", "warmup_steps", "step", "calls"):
        assert first["scape"][name] == second["scape"][name]
    for index, entry in first["state"].items():
        assert set(entry) == kept
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second["state"][index][name]))
    assert torch.equal(first["scape"]["mask"], second["scape"]["mask"])
    assert any(f"was written by {before} ranks, this run has {after}" in text for text in results[0][2])


def test_state_must_be_collected_before_it_is_read(run_ranks: RunRanks) -> None:
    errors = run_ranks(read_too_early, 2, expect_errors=True)
    for rank, error in enumerate(errors):
        assert isinstance(error, RuntimeError)
        assert f"got a call of state_dict() on rank {rank}" in str(error)


def read_too_early(rank: int, world_size: int) -> None:
    _, optimizer = build(ScapeConfig(sparsity_warmup_steps=0), torch.float32)
    with pytest.raises(ValueError, match="`to` must be a rank, 0 to 1, got 2"):
        optimizer.consolidate_state_dict(to=2)
    optimizer.state_dict()


def test_momentum_stays_fp32_under_bf16_parameters() -> None:
    params, optimizer = build(ScapeConfig(sparsity=0.0), torch.bfloat16)
    train(params, optimizer, 0, range(2))
    entry = optimizer.state_dict()["state"][0]
    assert (entry["exp_avg"].dtype, entry["last_step"].dtype, entry["master"].dtype) == (
        torch.float32,
        torch.int32,
        torch.float32,
    )


def test_a_state_of_adamw_gives_its_first_moments() -> None:
    params, twins = parameters(), parameters()
    dense = torch.optim.AdamW(twins)
    for step in range(3):
        set_gradients(twins, 0, step)
        dense.step()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    with pytest.warns(UserWarning, match=r"first moments and step \(3\) carry over"):
        optimizer.load_state_dict(dense.state_dict())
    whole = optimizer.state_dict()
    for index, twin in enumerate(twins):
        assert torch.equal(whole["state"][index]["exp_avg"], dense.state[twin]["exp_avg"])
        assert (whole["state"][index]["last_step"] == 3).all()
    assert all(not e.any() for e in whole["scape"]["residuals"][0].values())


def test_a_state_of_adams_goes_on_as_dense_adams() -> None:
    twins = parameters()
    dense = AdamS(twins)
    for step in range(3):
        set_gradients(twins, 0, step)
        dense.step()
    params = [torch.nn.Parameter(t.detach().clone()) for t in twins]
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.0, wire_dtype="fp32"))
    with pytest.warns(UserWarning, match="carry over"):
        optimizer.load_state_dict(dense.state_dict())
    for mine, twin, grad in zip(params, twins, gradients(params, 0, 3), strict=True):
        mine.grad, twin.grad = grad, grad.clone()
    optimizer.step()
    dense.step()
    for mine, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-6, atol=1e-7)


def carry_over(rank: int, world_size: int) -> bytes:
    """Three steps of AdamW on every rank, as DDP takes them, then two of the ScapeOptimizer that takes its place."""
    params, twins = parameters(), parameters()
    dense, twin = torch.optim.AdamW(params), torch.optim.AdamW(twins)
    for step in range(5):
        if step == 3:
            dense = ScapeOptimizer.from_optimizer(dense, ScapeConfig(sparsity=0.0, wire_dtype="fp32"))
        for param, mine, first, second in zip(
            params, twins, gradients(params, 0, step), gradients(params, 1, step), strict=True
        ):
            mine.grad = (first + second) / 2
            param.grad = mine.grad.clone() if step < 3 else (first, second)[rank]
        dense.step()
        twin.step()
    for param, mine in zip(params, twins, strict=True):
        torch.testing.assert_close(param, mine, rtol=1e-6, atol=1e-7)
    return b"".join(param.detach().numpy().tobytes() for param in params)


@pytest.mark.filterwarnings("ignore:The checkpoint was not written by SCAPE")
def test_an_adamw_that_has_stepped_goes_on_with_its_moments(run_ranks: Any) -> None:
    first, second = run_ranks(carry_over, 2)
    assert first == second


def guess_and_go(rank: int, world_size: int, file: bytes) -> int:
    """From a state that has no second moment: what is guessed of it is saved, and goes on, like any other."""
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params, optimizer = restored(file, config, torch.float32)
    train(params, optimizer, rank, range(14, 16))
    again, other = restored(from_rank_zero(saved(optimizer, params)), config, torch.float32)
    for steps in (range(0), range(16, 20)):
        train(params, optimizer, rank, steps)
        train(again, other, rank, steps)
        for a, b in zip(everything(params, optimizer), everything(again, other), strict=True):
            assert torch.equal(a, b)
    state = other.engine.state
    assert state is not None
    return state.exp_avg_sq_since


@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_moment_that_was_guessed_goes_on_bit_for_bit(run_ranks: RunRanks, world_size: int) -> None:
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adams", second_moment="reconstructed")
    params, optimizer = build(config, torch.float32)
    train(params, optimizer, 0, range(14))
    for since in run_ranks(guess_and_go, world_size, saved(optimizer, params)):
        assert 0 < since < 14


@pytest.mark.parametrize("kind", ["measured", "reconstructed", "dense"])
def test_a_second_moment_is_made_for_the_betas_that_the_state_brings(kind: str) -> None:
    """They hold from then on: by those given before, it would be divided by another number of gradients' weights."""
    twins = parameters()
    before: torch.optim.Optimizer = AdamS(twins, betas=(0.8, 0.9))
    if kind != "dense":
        config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adams", second_moment=kind)  # type: ignore[arg-type]
        before = ScapeOptimizer(twins, betas=(0.8, 0.9), config=config)
    for step in range(10):
        set_gradients(twins, 0, step)
        before.step()
    found = []
    for betas in ((0.8, 0.9), (0.9, 0.999)):
        params = parameters()
        config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adamw")
        optimizer = ScapeOptimizer(params, betas=betas, config=config)
        with pytest.warns(UserWarning, match="carry over|update='adams'"):
            optimizer.load_state_dict(before.state_dict())
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
        train(params, optimizer, 0, range(10, 11))
        found.append(everything(params, optimizer))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_state_of_adamws_update_goes_on_with_adams_and_measures_anew() -> None:
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adamw")
    params, optimizer = build(config, torch.float32)
    train(params, optimizer, 0, range(5))
    whole = optimizer.state_dict()
    with pytest.warns(UserWarning, match=r"update='adamw' \(now 'adams'\)"):
        params, other = restored(saved(optimizer, params), replace(config, update="adams"), torch.float32)
    state = other.engine.state
    assert state is not None
    assert state.exp_avg_sq is None
    assert state.local_samples == 0
    for index, entry in other.state_dict()["state"].items():
        for name in ("step", "exp_avg", "last_step"):
            assert torch.equal(torch.as_tensor(entry[name]), torch.as_tensor(whole["state"][index][name]))
    train(params, other, 0, range(5, 7))
    assert state.local_samples == 1
    assert all(parameter.isfinite().all() for parameter in params)


def test_another_block_length_drops_the_mask_and_says_so() -> None:
    params, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), torch.float32)
    train(params, optimizer, 0, range(4))
    _, other = build(ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0), torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(optimizer.state_dict())
    texts = [str(warning.message) for warning in caught]
    assert any("masks are for blocks of 250 entries, this run's are 200" in text for text in texts)
    assert any("other options: sparsity=0.9 (now 0.99)" in text for text in texts)
    assert other.engine.masks.active is None
    before, after = optimizer.state_dict(), other.state_dict()
    for index, residual in before["scape"]["residuals"][0].items():
        assert torch.equal(residual, after["scape"]["residuals"][0][index])


def test_the_state_read_is_the_state_of_now() -> None:
    params, optimizer = build(ScapeConfig(sparsity=0.0), torch.bfloat16)
    train(params, optimizer, 0, range(2))
    optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    params[0].data.fill_(7.0)
    optimizer.mark_masters_stale()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.5
    assert (state["state"][0]["master"] == 7.0).all()


def test_a_scheduler_can_go_on_from_a_loaded_state() -> None:
    params, optimizer = build(ScapeConfig(sparsity_warmup_steps=0), torch.float32)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    _, other = build(ScapeConfig(sparsity_warmup_steps=0), torch.float32)
    other.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 0.5, last_epoch=1)
    assert scheduler.base_lrs == [3e-2, 1e-2]


def test_a_state_that_lacks_what_never_had_a_gradient_is_taken() -> None:
    params, twins = parameters(), parameters()
    dense = torch.optim.AdamW(twins)
    twins[0].grad = torch.ones_like(twins[0])
    dense.step()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.warns(UserWarning, match="carry over"):
        optimizer.load_state_dict(dense.state_dict())
    assert not optimizer.state_dict()["state"][1]["exp_avg"].any()


def test_a_look_at_an_optimizers_state_leaves_an_entry_that_says_nothing() -> None:
    """``optimizer.state`` of torch's optimizers is a defaultdict: who reads an entry makes it."""
    params, config = parameters(), ScapeConfig(sparsity_warmup_steps=0)
    dense = torch.optim.AdamW(params)
    assert "exp_avg" not in dense.state[params[0]]
    with warnings.catch_warnings(action="error"):
        ScapeOptimizer.from_optimizer(dense, config)
    params[1].grad = torch.ones_like(params[1])
    dense.step()
    with pytest.warns(UserWarning, match=r"first and second moments and step \(1\) carry over"):
        state = ScapeOptimizer.from_optimizer(dense, config).state_dict()["state"]
    assert not state[0]["exp_avg"].any()
    assert state[1]["exp_avg"].any()


def spoil(state: dict[str, Any], kind: str) -> Any:
    if kind == "newer":
        state["scape"]["format"] = 2
    if kind == "shape":
        state["state"][1]["exp_avg"] = torch.zeros(6)
    if kind == "count":
        del state["state"][3]
    if kind == "foreign":
        return {"weights": 1}
    if kind == "sgd":
        state["state"][0] = {"momentum_buffer": None}
    if kind == "groups":
        state["param_groups"].pop()
    if kind == "second moment":
        state["state"][1]["exp_avg_sq"] = torch.zeros(6)
    if kind == "half a second moment":
        del state["state"][2]["exp_avg_sq"]
    if kind == "missed steps":
        state["scape"]["missed"] = {3: -1}
    if kind == "no missed steps":
        state["scape"]["missed"] = [0]
    if kind == "since":
        state["scape"]["second_moment_since"] = None
    if kind == "amsgrad":  # as a state of AdamW may have it
        state["param_groups"][1]["amsgrad"] = True
    return state


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("newer", "format must be at most 1, got 2.*Upgrade"),
        ("shape", r"exp_avg of 'parameter 1' \(number 1\) must have shape \(5,\), got \(6,\)"),
        ("count", "must hold the 6 parameters that it speaks of, got 5; the first that only one .* is number 3"),
        ("foreign", r"must have `state` and `param_groups`, got \['weights'\]"),
        ("sgd", r"state of 'parameter 0' .* must hold a first moment `exp_avg`, got \['momentum_buffer'\]"),
        ("groups", "must have 2 parameter groups, got 1"),
        ("amsgrad", "group 1 of the state cannot be taken: `amsgrad` must be False, got True"),
        ("missed steps", r"`missed\[3\]` of a SCAPE state must be a whole number from 0 to .*, got -1"),
        ("no missed steps", "`missed` of an optimizer state must be a dict, got list"),
        ("since", "`second_moment_since` of a SCAPE state must be a whole number from 0 to .*, got None"),
        ("second moment", r"exp_avg_sq of 'parameter 1' \(number 1\) must have shape \(5,\), got \(6,\)"),
        ("half a second moment", r"exp_avg_sq of 'parameter 2' \(number 2\) must be a floating-point tensor, got None"),
    ],
)
def test_an_unfit_state_is_refused_and_changes_nothing(kind: str, words: str) -> None:
    params, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adamw"), torch.float32)
    train(params, optimizer, 0, range(4))
    before = [t.clone() for t in everything(params, optimizer)]
    spoiled = spoil(build_state(), kind)
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(spoiled)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(params, optimizer), strict=True))


def build_state() -> dict[str, Any]:
    params, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adamw"), torch.float32)
    train(params, optimizer, 0, range(2))
    return optimizer.state_dict()


def test_a_run_that_turns_sparse_measures_its_noise_from_the_start() -> None:
    params, optimizer = build(ScapeConfig(sparsity=0.0), torch.float32)
    train(params, optimizer, 0, range(5))
    state = optimizer.state_dict()
    params, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(state)
    train(params, optimizer, 0, range(5, 6))  # no step at which a sample would be due
    noise = optimizer.engine.state_at_rest().local_exp_avg_sq
    assert noise is not None
    grad = torch.cat([p.grad.reshape(-1) for p in params]) * optimizer.stats.clip_factor  # type: ignore[union-attr]
    assert float(noise.sum()) == pytest.approx(float(grad.square().sum()), rel=1e-5)
