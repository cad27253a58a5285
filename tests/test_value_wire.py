"""``wire_dtype="int4"``: SCAPE's values and changes in 4 bits."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_helpers import assert_replicas_equal
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.ops.naive.wire import packed_bytes
from lightning_scape.scape.communicator import scape_bytes
from lightning_scape.scape.shard import TOGETHER
from lightning_scape.scape.state import Step

SHAPES = ((33, 30), (7,), (3, 101))
NUMELS = [990, 7, 303]


@settings(deadline=None, max_examples=60)
@given(
    shards=st.integers(1, 3), rows=st.integers(0, 70), sent=st.sampled_from([1, 2, 25]), seed=st.integers(0, 99)
)  # fmt: skip
def test_what_is_sent_plus_what_is_left_is_what_was_there(shards: int, rows: int, sent: int, seed: int) -> None:
    generator, count = torch.Generator().manual_seed(seed), rows * sent
    magnitude = 10 ** (20 * torch.rand(shards * rows, 1, generator=generator) - 10)
    values = torch.randn(shards * rows, sent, generator=generator) * magnitude
    left = values.clone()
    message = torch.stack([ops.quantize(part) for part in left.view(shards, count)])
    assert message.shape == ops.new_message(shards, count, values.device).shape
    assert message.numel() == shards * packed_bytes(count)
    read = ops.dequantize(message, count).view(values.shape)
    assert torch.equal(read.double() + left.double(), values.double())


def model(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def step(params: list[nn.Parameter], optimizer: ScapeOptimizer, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def _train(rank: int, world_size: int, wire: str, dtype: torch.dtype, sparsity: float) -> dict[str, Any]:
    params = model(dtype)
    warmup = 0 if sparsity else None
    options: dict[str, Any] = {"wire_dtype": wire, "sparsity_warmup_steps": warmup, "update": "adamw"}
    config = ScapeConfig(sparsity=sparsity, **options)
    optimizer = ScapeOptimizer(params, lr=1e-2, config=config)
    for number in range(8):
        step(params, optimizer, rank, number)
        assert_replicas_equal(params)
    state, stats = optimizer.engine.state, optimizer.stats
    assert state is not None
    assert stats is not None
    counted = {"values": stats.bytes_sent["values"], "parameters": stats.bytes_sent["parameters"]}
    planned = scape_bytes(NUMELS, world_size, config)
    assert counted == {kind: planned[kind] for kind in counted}
    error = 0.0 if state.change_error is None else float(state.change_error.abs().max())
    masters = state.master is not None
    return {
        "masters": masters,
        "end": torch.cat([p.detach().flatten().float() for p in params]),
        "error": error,
        **counted,
    }


CASES = [*itertools.product(("int4",), (torch.float32, torch.bfloat16), (0.9,))]
DENSE = [(wire, torch.float32, 0.0) for wire in ("fp32", "int4")]


def _train_all(rank: int, world_size: int) -> list[dict[str, Any]]:
    return [_train(rank, world_size, *case) for case in (*CASES, *DENSE)]


def test_ranks_are_bitwise_equal_bytes_are_as_planned_and_training_is_as_with_fp32(run_ranks: Any) -> None:
    everyone = run_ranks(_train_all, 2, timeout=300.0)
    for case, *found in zip((*CASES, *DENSE), *everyone, strict=True):
        wire, dtype, _ = case
        assert torch.equal(found[0]["end"], found[1]["end"])  # as after every step
        assert bool(found[0]["end"].isfinite().all())
        assert (max(each["error"] for each in found) > 0) == (wire != "fp32")
        assert all(each["masters"] == (dtype == torch.bfloat16 and wire == "fp32") for each in found)
    exact, four = everyone[0][len(CASES) :]
    way = float((exact["end"] - torch.cat([p.detach().flatten() for p in model(torch.float32)])).norm())
    assert 0 < float((four["end"] - exact["end"]).norm()) < 0.5 * way
    assert exact["values"] > 7.0 * four["values"]


def _ends(rank: int, world_size: int, wire: str, dtype: torch.dtype) -> list[Tensor]:
    """What some steps end at, while everything is sent and then less, with rows of blocks that have no gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((250, 101), (7,), (97, 150))
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    options: dict[str, Any] = {"wire_dtype": wire, "sparsity_warmup_steps": 6}
    optimizer = ScapeOptimizer(params, lr=1e-2, config=ScapeConfig(sparsity=0.9, **options))
    for number in range(9):
        step(params[:1] if number in (1, 7) else params, optimizer, rank, number)
        optimizer.zero_grad()
    optimizer.drain()
    assert (state := optimizer.engine.state) is not None
    return [*(p.detach() for p in params), *(each for each in vars(state).values() if isinstance(each, Tensor))]


def _in_parts(rank: int, world_size: int, wire: str, dtype: torch.dtype) -> None:
    at_once = _ends(rank, world_size, wire, dtype)
    with patch.dict(TOGETHER, {"cpu": 1}), patch.object(ops, "mean", side_effect=ops.mean) as mean:
        in_parts = _ends(rank, world_size, wire, dtype)
    assert mean.call_count > 9  # more than one part
    assert all(map(torch.equal, at_once, in_parts))


@pytest.mark.parametrize("wire", ["int4", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_some_rows_at_a_time_are_as_all_at_once(run_ranks: Any, wire: str, dtype: torch.dtype) -> None:
    run_ranks(_in_parts, 2, wire, dtype)


def _conserved(rank: int, world_size: int, wire: str) -> tuple[Tensor, Tensor]:
    """Of each step, what the values and what the changes have lost on their way."""
    params = model(torch.float32)
    config = ScapeConfig(sparsity=0.9, wire_dtype=wire, update="adamw", sparsity_warmup_steps=0)  # type: ignore[arg-type]
    optimizer = ScapeOptimizer(params, lr=1e-2, config=config)
    engine = optimizer.engine
    shard, got = engine.shard, []
    take, update = shard.take_others, ops.quantize_with_error
    lost = []

    def watched(step: Step) -> Tensor:
        before, mask = step.state.residual.clone(), step.mask
        assert mask is not None
        if not step.folded:
            ops.sweep(ops.Sweep(shard.others, before, step.grads, step.scale.blocks, None, None))
        message = take(step)
        sent = ops.dequantize(message.unflatten(0, (world_size, -1)), mask.numel() // world_size).view(mask.shape)
        rows = shard.others.rows
        after = step.state.residual.double().scatter_add(1, mask.long(), sent.double())
        lost.append(max(float((after[each] - before[each].double()).abs().max()) for each in rows))
        return message

    def watched_changes(error: Tensor, mask: Tensor, theta: Tensor, before: Tensor, *rest: Any) -> Tensor:
        due = (theta - before + error.gather(1, mask.long())).double()
        elsewhere = error.scatter(1, mask.long(), 0.0)
        message = update(error, mask, theta, before, *rest)
        sent = ops.dequantize(message.unsqueeze(0), theta.numel()).view(theta.shape).double()
        assert torch.equal(error.scatter(1, mask.long(), 0.0), elsewhere)
        got.append(float((sent + error.gather(1, mask.long()).double() - due).abs().max()))
        return message

    shard.take_others = watched  # type: ignore[method-assign]
    with patch.object(ops, "quantize_with_error", watched_changes):
        for number in range(4):
            step(params, optimizer, rank, number)
    return torch.tensor(lost), torch.tensor(got)


def test_nothing_is_lost_to_rounding_on_either_way(run_ranks: Any) -> None:
    for lost, got in run_ranks(_conserved, 2, "int4"):
        assert len(lost) == len(got) == 4
        assert float(got.abs().max()) == 0.0
        assert float(lost.abs().max()) == 0.0


MIXED = [torch.bfloat16, torch.float32, torch.float16]


def _kept_of_narrow(rank: int, world_size: int, sparsity: float, choice: str) -> None:
    """Parameter plus error is, before and after a step, what a master of more digits would be."""
    params = [nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(model(torch.float32), MIXED, strict=True)]
    options: dict[str, Any] = {"sparsity_warmup_steps": None if sparsity == 0 else 0}
    config = ScapeConfig(sparsity=sparsity, wire_dtype="int4", update="adamw", **options)
    optimizer = ScapeOptimizer(params, lr=1e-2, config=config)
    engine, shard = optimizer.engine, optimizer.engine.shard
    packed, wanted = ops.quantize_with_error, []

    def held() -> Tensor:
        there = torch.zeros_like(engine.state.exp_avg)
        ops.gather_params(ops.ParamEntries(engine.parameters.flat, shard.region.pieces, None, there.shape[1]), there)
        return there.double()

    def watched(error: Tensor, mask: Tensor | None, theta: Tensor, before: Tensor, *rest: Any) -> Tensor:
        goal = held() + error
        ops.scatter_blocks(goal, mask, ops.gather_blocks(goal, mask) + (theta.double() - before.double()))
        wanted.append(goal)
        return packed(error, mask, theta, before, *rest)

    with ops.using(choice), patch.object(ops, "quantize_with_error", watched):
        for number in range(6):
            step(params, optimizer, rank, number)
            assert_replicas_equal(params)
            assert engine.state is not None
            assert engine.state.master is None
            assert engine.state.change_error is not None
            inside = torch.cat(
                [
                    torch.arange(engine.layout.shard_blocks * engine.layout.block_size)[
                        piece.of_blocks(engine.layout.block_size)
                    ]
                    for piece in shard.region.pieces
                ]
            )
            now = (held() + engine.state.change_error).view(-1)[inside]
            torch.testing.assert_close(now, wanted[-1].view(-1)[inside], rtol=2e-7, atol=2e-7)
    if rank == 0:  # bf16's part has lost more to rounding than fp32's to the wire, and all of it is kept
        assert float(engine.state.change_error.abs().max()) > 2**-9


def _keep_all(rank: int, world_size: int) -> None:
    for sparsity, choice in ((0.9, "cpu"), (0.9, "naive"), (0.0, "cpu")):
        _kept_of_narrow(rank, world_size, sparsity, choice)


def test_what_narrower_parameters_lose_to_rounding_stays_with_their_owner(run_ranks: Any) -> None:
    run_ranks(_keep_all, 2)


def _switch(rank: int, world_size: int) -> None:
    params, gradient = model(torch.bfloat16), iter(range(100))
    last: ScapeOptimizer | None = None
    for wire in ("fp32", "int4", "fp32"):
        config = ScapeConfig(sparsity=0.9, update="adamw", wire_dtype=wire, sparsity_warmup_steps=0)  # type: ignore[arg-type]
        optimizer = ScapeOptimizer(params, lr=1e-3, config=config)
        if last is not None:
            last.consolidate_state_dict()
            states = [last.state_dict() if rank == 0 else None]
            torch.distributed.broadcast_object_list(states)
            with pytest.warns(UserWarning, match=f"wire_dtype='.*' \\(now '{wire}'\\)"):
                optimizer.load_state_dict(states[0])
        for _ in range(3):
            step(params, optimizer, rank, next(gradient))
            assert_replicas_equal(params)
        state, last = optimizer.engine.state, optimizer
        assert (state.master is None) == (wire == "int4")
        assert (state.change_error is None) == (wire == "fp32")


def test_a_run_may_go_on_with_another_wire(run_ranks: Any) -> None:
    run_ranks(_switch, 2)


# ------------------------------------------------------------------------------------------------ the usual wire


def test_four_bits_are_usual_and_dense_training_is_not_packed() -> None:
    assert ScapeConfig().wire == ScapeConfig(sparsity=0.9).wire == "int4"
    assert ScapeConfig().packed
    assert ScapeConfig(sparsity=0).wire == "fp32"
    assert ScapeConfig(sparsity=0, wire_dtype="int4").packed
    assert ScapeConfig().as_dict()["wire_dtype"] == "int4"


def _count_bytes(rank: int, world_size: int, dtype: torch.dtype) -> list[float]:
    """Bytes of each step per parameter, times N/(N-1), without the norm's: of a late one, and of the warm-up's."""
    found = []
    for warmup in (0, 1000):
        parameter = nn.Parameter(torch.zeros(1024, 200, dtype=dtype))
        config = ScapeConfig(update="adamw", sparsity_warmup_steps=warmup)
        optimizer = ScapeOptimizer([parameter], config=config)
        for number in range(3):
            step([parameter], optimizer, rank, number)
        stats = optimizer.stats
        assert stats is not None
        share = parameter.numel() * (world_size - 1) / world_size
        found += [(stats.bytes_total - stats.bytes_sent["norm"]) / share, stats.bytes_sent["mask"] / share]
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_late_step_sends_a_fiftieth_of_a_byte_and_a_mask_at_most_a_bit_for_each_parameter(
    run_ranks: Any, ranks: int
) -> None:
    for late, late_mask, early, early_mask in run_ranks(_count_bytes, ranks, torch.float32):
        assert late <= 0.021
        assert late_mask == pytest.approx(0.01, rel=3e-3)  # the last shard has pads
        assert early_mask == 0  # everything is sent
        assert early == pytest.approx((34 + 34) / 64, rel=3e-3)


@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_where_half_is_sent_every_place_of_a_block_is_sent_as_often(wire: Any) -> None:
    """Of what was just sent nothing is left with its owner: the other half comes next, not the first of a block."""
    config = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0, wire_dtype=wire)
    parameter = nn.Parameter(torch.zeros(256 * 40))
    optimizer, visits = ScapeOptimizer([parameter], config=config), torch.zeros(256)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        parameter.grad = torch.randn(10_240, generator=generator)
        before = parameter.detach().clone()
        optimizer.step()
        visits += (parameter.detach() != before).view(40, 256).sum(0)
    first, last = visits.view(2, 128).mean(dim=1).tolist()
    assert first == pytest.approx(last, rel=0.03)
