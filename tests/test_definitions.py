"""What the operations promise, each against a plain loop or float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.scape.opening import SKETCH_WIDTHS, random_signs, squared_norm

ONE = torch.ones(())


# ------------------------------------------------------------------------------------------------- select


@pytest.mark.parametrize("sent", [9, 100, 200])
def test_select_ranks_by_the_integer_keys(sent: int) -> None:
    statistic = torch.randn(50, 200)
    statistic[:, 150:] = 0  # pads among them, and ties
    statistic[:7] = statistic[:7].round()
    bits = statistic.abs().view(torch.int32).long()
    keys = bits // 256 * 256 + 255 - torch.arange(200)
    by_sort = keys.sort(1, descending=True).indices[:, :sent]
    for choice in ("auto", "naive"):
        with ops.using(choice):
            chosen = ops.select(statistic, sent)
        assert chosen.dtype is torch.uint8
        assert torch.equal(chosen.long(), by_sort)


def test_select_in_long_blocks_uses_two_bytes() -> None:
    statistic = torch.zeros(2, 40000)
    statistic[0, 39999], statistic[1, 257] = -1.0, 1e-30
    chosen = ops.select(statistic, 1)
    assert chosen.dtype is torch.uint16
    assert chosen.long().tolist() == [[39999], [257]]


def test_select_ranks_nan_infinity_all_else_and_pads_last_and_ties_by_their_position() -> None:
    assert ops.select(torch.full((1, 256), -2.0), 5).tolist() == [[0, 1, 2, 3, 4]]
    assert ops.select(torch.tensor([[1.0, float("inf"), 2.0, float("nan")]]), 2).tolist() == [[3, 1]]
    statistic = torch.zeros(1, 8)
    statistic[0, 3] = 1e-40  # a denormal is still more than a pad
    assert ops.select(statistic, 5).tolist() == [[3, 0, 1, 2, 4]]


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**31))
def test_select_positions_are_distinct_and_no_other_entry_is_larger(length: int, sent: int, seed: int) -> None:
    sent = min(sent, length)
    statistic = torch.randn(3, length, generator=torch.Generator().manual_seed(seed))
    chosen = ops.select(statistic, sent).long()
    for row in range(3):
        inside = set(chosen[row].tolist())
        assert len(inside) == sent
        rest = [abs(float(statistic[row, i])) for i in range(length) if i not in inside]
        smallest = min(abs(float(statistic[row, i])) for i in inside)
        bits = (length - 1).bit_length()
        assert all(value <= smallest * (1 + 2.0 ** (bits - 23)) for value in rest)


@pytest.mark.parametrize(("rows", "length", "sent"), [(23, 200, 30), (9, 250, 249), (0, 8, 1), (2, 5000, 9)])
def test_a_mask_that_travels_as_bits_arrives_in_ascending_order(rows: int, length: int, sent: int) -> None:
    mask = ops.select(torch.randn(rows, length), sent)
    bits = ops.pack_mask(mask, length)
    arrived = ops.unpack_mask(bits, sent, length)
    assert bits.shape == (rows, -(-length // 8))
    assert arrived.dtype is mask.dtype
    assert torch.equal(arrived.long(), mask.long().sort(1).values)


# -------------------------------------------------------------------------------------- fold and compact


@pytest.mark.parametrize("whole", [True, False])
def test_sent_plus_left_equals_what_was_there_exactly(whole: bool) -> None:
    residual = torch.randn(40, 200) * torch.logspace(-30, 30, 40).unsqueeze(1)
    before = residual.double().clone()
    mask = None if whole else ops.select(residual, 2)
    sent = ops.compact(residual, mask, ONE)
    there = torch.zeros(40, 200, dtype=torch.float64)
    ops.scatter_blocks(there, mask, sent.double())
    assert torch.equal(there + residual.double(), before)
    assert (ops.gather_blocks(residual, mask) == 0).all()


def test_quantize_sends_the_nearest_multiples_of_a_unit_that_just_fits() -> None:
    values = (torch.randn(3, 6400) * torch.logspace(-20, 20, 3).unsqueeze(1)).view(-1)
    left = values.clone()
    message = ops.quantize(left)
    assert message.shape == (300, 34)
    sent = ops.dequantize(message.unsqueeze(0), 3 * 6400)[0]
    assert torch.equal(sent.double() + left.double(), values.double())
    groups = values.view(300, 64)
    unit = (message[:, -2:].contiguous().view(torch.int16).int() << 16).view(torch.float32).view(300)
    exact = groups.abs().amax(1) / 7
    assert ((exact <= unit) & (unit <= exact * (1 + 2**-7))).all()
    assert (left.view(300, 64).abs() <= unit.unsqueeze(1) / 2).all()
    assert sent[sent == 0].signbit().all()  # -0.0: adding it leaves 0.0 and -0.0 as they are


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sent", [3, None])
def test_errors_of_rounding_are_sent_later_and_rows_that_stand_still_keep_theirs(
    dtype: torch.dtype, sent: int | None
) -> None:
    error, values = torch.randn(70, 50, dtype=dtype) / 8, torch.randn(70, sent or 50, dtype=dtype)
    values = values.t().contiguous().t()  # rows that do not lie one behind the other
    mask = None if sent is None else ops.select(error.float(), sent)
    scale, before = torch.arange(70) % 3.0, error.clone()
    theta, before_all = values.clone(), torch.zeros_like(values)
    message = ops.quantize_with_error(error, mask, theta, before_all, scale)
    read = ops.dequantize(message.unsqueeze(0), values.numel()).view(values.shape)
    assert torch.equal(theta, read.to(dtype))
    due = values + ops.gather_blocks(before, mask)
    moved = scale > 0
    assert torch.equal((read + ops.gather_blocks(error, mask))[moved], due[moved])
    assert torch.equal(error[~moved], before[~moved])
    bad = torch.full_like(error, float("nan")).fill_diagonal_(float("inf"))  # of parameters that were not finite
    again = ops.quantize_with_error(bad, mask, values.clone(), before_all, torch.ones(()))
    fresh = torch.zeros_like(error)
    assert torch.equal(again, ops.quantize_with_error(fresh, mask, values.clone(), before_all, torch.ones(())))
    assert torch.equal(ops.gather_blocks(bad, mask), ops.gather_blocks(fresh, mask))
    assert not read[~moved].any()
    if mask is not None:
        ops.scatter_blocks(before, mask, ops.gather_blocks(error, mask))
        assert torch.equal(error, before)  # all else is as it was


# --------------------------------------------------------------------------------------------- tau steps


def hyper(lr: float, beta1: float, beta2: float, eps: float, decay: float) -> ops.Hyper:
    return ops.Hyper.of(torch.float64, *(torch.tensor(v, dtype=torch.float64) for v in (lr, beta1, beta2, eps, decay)))


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


values = st.floats(-100, 100, allow_nan=False)


@given(st.integers(1, 400), values, values, values, st.floats(0.0, 0.999), st.floats(0.0, 0.9999))
def test_tau_steps_at_once_are_one_step_of_backward_euler(
    tau: int, theta: float, m: float, g: float, beta1: float, beta2: float
) -> None:
    lr, eps, decay = 1e-2, 1e-8, 0.1
    given = scalar(theta), scalar(m), scalar(tau), scalar(tau * g)
    moved, new = ops.adams_step(*given, hyper(lr, beta1, beta2, eps, decay))
    momentum = (beta1 * m + (1 - beta1) * tau * g) / (beta1 + (1 - beta1) * tau)
    sum_of_moments, total = tau * momentum, tau * g
    v = beta2 * m**2 + (1 - beta2) * total**2 / tau
    expected = theta * (1 - lr * decay) ** tau - lr * sum_of_moments / (math.sqrt(v) + eps)
    assert float(new) == pytest.approx(momentum, rel=1e-9, abs=1e-9)
    assert float(moved) == pytest.approx(expected, rel=1e-7, abs=1e-7)


def catch_up(waits: Iterable[int], curvature: float) -> list[float]:
    """theta, visit by visit: a gradient of 1 for one step, then that of a parabola; v is next to nothing beside eps."""
    theta, m, path = scalar(0.0), scalar(0.0), []
    steady = hyper(1e9, 0.9, 0.95, 1e9, 0.0)
    for visit, tau in enumerate(waits):
        total = tau * curvature * theta - float(visit == 0)
        theta, m = ops.adams_step(theta, m, scalar(tau), total, steady)
        path.append(float(theta))
    return path


@pytest.mark.parametrize("waits", [[1] * 400, [2] * 400, [10] * 400, [100] * 400, [1, 100] * 200, [1, *[7] * 400]])
def test_all_of_a_gradient_reaches_the_parameter_whatever_the_waits(waits: list[int]) -> None:
    assert catch_up(waits, 0.0)[-1] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("tau", "limit"), [(2, 10.0), (10, 0.56), (100, 0.0236)])
def test_how_sharp_a_parabola_may_be(tau: int, limit: float) -> None:
    for curvature, stays in ((0.97 * limit, True), (1.03 * limit, False)):
        path = [abs(value) for value in catch_up([tau] * 1500, curvature)]
        assert (max(path[-20:]) < max(path[:20])) == stays, curvature


def test_a_decay_beyond_one_changes_the_sign_at_every_step() -> None:
    for steps in (1, 2, 3):
        theta, _ = ops.adams_step(scalar(2.0), scalar(0.0), scalar(steps), scalar(0.0), hyper(3, 0.9, 0.95, 1e-8, 0.5))
        assert float(theta) == pytest.approx(2.0 * (-0.5) ** steps)


def test_update_leaves_unmasked_entries_bitwise_alone() -> None:
    momentum, last_step = torch.randn(3000, 10), torch.randint(0, 4, (3000, 10), dtype=torch.int32)
    mask = ops.select(torch.randn(3000, 10), 2)
    old_momentum, old_clock = momentum.clone(), last_step.clone()
    theta, total = torch.randn(3000, 2), torch.randn(3000, 2)
    single = ops.Hyper(*(v.float() for v in hyper(1e-3, 0.9, 0.95, 1e-8, 0.1)))
    numbers = ops.RowNumbers(torch.tensor(5, dtype=torch.int32), ONE, single, ONE, ONE)
    ops.update_shard(ops.ShardState(theta, momentum, None, last_step), mask, total, None, numbers, 2)
    outside = torch.ones(3000, 10, dtype=torch.bool).scatter_(1, mask.long(), False)
    assert torch.equal(momentum[outside], old_momentum[outside])
    assert torch.equal(last_step[outside], old_clock[outside])
    assert (last_step[~outside] == 5).all()


# ---------------------------------------------------------------------------------------- AdamW's update


sizes = st.floats(-1e6, 1e6, allow_nan=False, allow_subnormal=False)


@given(st.integers(1, 5000), sizes, sizes, st.floats(0, 1e12), st.integers(1, 64), st.none() | sizes)
def test_a_visit_moves_an_entry_by_so_many_learning_rates_at_most(
    tau: int, m: float, total: float, v: float, ranks: int, own: float | None
) -> None:
    lr, corrections, given = 1e-2, (scalar(0.5), scalar(0.1)), (scalar(value) for value in (0.0, m, v, tau, total))
    part = None if own is None else scalar(own)
    theta, first, second = ops.adamw_step(*given, part, hyper(lr, 0.9, 0.999, 1e-8, 0.0), corrections, ranks)
    assert second >= 0
    assert all(value.isfinite() for value in (theta, first, second))
    if tau > 1:  # a step of AdamW itself has no bound
        assert abs(float(theta)) <= lr * ops.LONGEST_MOVE * (1 + 1e-9)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95), (0.0, 0.0)])
@pytest.mark.parametrize("ranks", [None, 1, 2, 8])
def test_an_update_in_every_step_is_torchs_adamw(ranks: int | None, betas: tuple[float, float]) -> None:
    """The owner has added an N-th of its own square; the averaged gradient's takes its place. None: all is sent."""
    mine, twin = torch.randn(100, dtype=torch.float64), torch.nn.Parameter(torch.zeros(100, dtype=torch.float64))
    twin.data.copy_(mine)
    dense = torch.optim.AdamW([twin], lr=1e-2, betas=betas, eps=1e-6, weight_decay=0.3)
    first, second, one = torch.zeros_like(mine), torch.zeros_like(mine), torch.ones_like(mine)
    common = torch.randn(100, dtype=torch.float64)
    for step in range(1, 8):
        grads = common * torch.linspace(-1, 1, 100) + torch.randn(ranks or 4, 100, dtype=torch.float64)
        twin.grad = grads.mean(0)
        corrections = scalar(1 - betas[0] ** step), scalar(1 - betas[1] ** step)
        if ranks is not None:
            ops.accumulate_exp_avg_sq(second, grads[0], 1 - betas[1], ranks, ONE)
        own, rest = None if ranks is None else grads[0], (hyper(1e-2, *betas, 1e-6, 0.3), corrections, ranks or 4)
        mine, first, second = ops.adamw_step(mine, first, second, one, twin.grad, own, *rest)
        dense.step()
        torch.testing.assert_close(mine, twin.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(first, dense.state[twin]["exp_avg"], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(second, dense.state[twin]["exp_avg_sq"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("common", [0.0, 1.0])
def test_the_second_moment_is_that_of_the_average(common: float) -> None:
    """Noise of four ranks, and what they share, new in each step; visits after 1 to 4 steps."""
    ranks, count, beta2 = 4, 20_000, 0.95
    second, waits = torch.zeros(count, dtype=torch.float64), torch.arange(count) % 4 + 1
    sums, clock = torch.zeros(ranks, count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    found = []
    for step in range(1, 121):
        grads = torch.randn(ranks, count, dtype=torch.float64) + common * torch.randn(count, dtype=torch.float64)
        ops.accumulate_exp_avg_sq(second, grads[0], 1 - beta2, ranks, ONE)
        sums += grads
        there = step % waits == 0
        tau, zeros = (step - clock)[there].double(), torch.zeros(int(there.sum()), dtype=torch.float64)
        given = sums.mean(0)[there], sums[0][there], hyper(1e-3, 0.9, beta2, 1e-8, 0.0), (ONE, ONE)
        second[there] = ops.adamw_step(zeros, zeros, second[there], tau, *given, ranks)[2]
        sums[:, there], clock[there] = 0.0, step
        found.append([float(second[waits == wait].mean()) for wait in range(1, 5)])
    means, own = torch.tensor(found)[60:].mean(0), (1 + common**2) / ranks
    torch.testing.assert_close(means[0], torch.tensor(1 / ranks + common**2), rtol=0.05, atol=0)
    if common:  # the longer the wait, the less is said of the average, and never less than the owner's square says
        assert (means.diff() < 0).all()
        assert (means > 1.2 * own).all()
    else:
        torch.testing.assert_close(means, torch.full((4,), own), rtol=0.1, atol=0)


def test_entries_that_are_chosen_by_their_noise_keep_their_second_moment() -> None:
    """The owner visits what has gathered most: of noise alone, a visit leaves v as it is in the mean."""
    ranks, count, beta2 = 4, 2000, 0.95
    second, clock = torch.full((count,), 1 / ranks, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    sums, before, after = torch.zeros(ranks, count, dtype=torch.float64), 0.0, 0.0
    for step in range(1, 1001):
        grads = torch.randn(ranks, count, dtype=torch.float64)
        ops.accumulate_exp_avg_sq(second, grads[0], 1 - beta2, ranks, ONE)
        sums += grads
        there = sums[0].abs().topk(count // 50).indices
        tau, zeros = (step - clock)[there].double(), torch.zeros(len(there), dtype=torch.float64)
        given = sums.mean(0)[there], sums[0][there], hyper(1e-3, 0.9, beta2, 1e-8, 0.0), (ONE, ONE)
        before += float(second[there].sum())
        second[there] = ops.adamw_step(zeros, zeros, second[there], tau, *given, ranks)[2]
        after += float(second[there].sum())
        sums[:, there], clock[there] = 0.0, step
    assert 0.97 < after / before < 1.03


def test_what_waited_with_another_owner_moves_an_entry_no_further_than_adamw() -> None:
    """After a load on other ranks a rest may come to an owner that has seen nothing: v must not be 0 beside m."""
    zero, one, rest = (torch.tensor(v, dtype=torch.float64) for v in ([0.0] * 4, [1.0] * 4, [1e-5, 1e-3, 1.0, 1e3]))
    given = one, rest / 8, rest, hyper(1e-2, 0.9, 0.95, 1e-8, 0.0), (ONE, ONE), 8
    moved, _, second = ops.adamw_step(zero, zero, zero, *given)
    torch.testing.assert_close(second, 0.05 * (rest / 8).square())
    assert (moved.abs() < 1e-2).all()


def test_what_the_owner_cannot_have_seen_is_remembered() -> None:
    grad, tau = torch.randn(50, dtype=torch.float64), 7
    state, given = [torch.zeros_like(grad)] * 3, (hyper(1e-3, 0.9, 0.999, 1e-8, 0.0), (ONE, scalar(0.5)))
    foreign = ops.adamw_step(*state, torch.full_like(grad, tau), grad, grad * 0, *given, 4)[2]
    assert (foreign >= (1 - 0.999) * grad.square()).all()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("update", ["adams", "adamw"])
def test_rows_by_themselves_equal_a_run_each(update: str, masked: bool) -> None:
    """Step, scale, corrections and group may differ by row; where the scale is 0, a row is left bitwise alone."""
    rows, length = 600, 6
    first, second = torch.randn(rows, length), torch.rand(rows, length)
    mask = ops.select(torch.randn(rows, length), 2) if masked else None
    theta, total = torch.randn(2, rows, 2 if masked else length)
    step = torch.tensor([7, 9, 30], dtype=torch.int32).repeat(200)
    last_step = step.unsqueeze(1) - torch.randint(1, 6, (rows, length), dtype=torch.int32)
    scale, corrections = torch.tensor([1.0, 0.0, 0.3]).repeat(200), torch.tensor([0.2, 0.5, 0.9]).repeat(200)
    total[1::3] = float("nan")
    group = torch.tensor([1, 0, 0], dtype=torch.int32).repeat(200)
    table = ops.Hyper.of(torch.float32, *torch.tensor([[0.1, 0.2], [0.8, 0.9], [0.9, 0.95], [1e-8, 1e-6], [0.1, 0.0]]))

    def run(which: slice | None) -> list[Tensor]:
        own = [t.clone() if which is None else t[which].clone() for t in (theta, first, second, last_step)]
        part = slice(None) if which is None else which
        kind = 0 if which is None else int(which.start)
        single = table if which is None else ops.Hyper(*(column[group[kind]] for column in table))
        numbers = [values if which is None else values[kind] for values in (step, corrections, scale)]
        now, correction, applied = numbers
        rest = None if mask is None else mask[part], total[part]
        row_numbers = ops.RowNumbers(
            now, applied, single, correction, correction * 0.5, group if which is None else None
        )
        shard = ops.ShardState(*own)
        if update == "adams":
            shard = shard._replace(exp_avg_sq=None)
        ops.update_shard(shard, *rest, None if mask is None else rest[1] * 2, row_numbers, 4)
        return own

    together = run(None)
    for kind in range(3):
        for a, b in zip(together, run(slice(kind, None, 3)), strict=True):
            torch.testing.assert_close(a[kind::3], b, rtol=1e-6, atol=1e-6)
    for now, before in zip(together, (theta, first, second, last_step), strict=True):
        assert torch.equal(now[1::3], before[1::3])
    assert not torch.equal(together[0], theta)


# ----------------------------------------------------------------------------------- gather and scatter


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(2, 12), st.integers(1, 3), st.integers(0, 999))
def test_gather_and_scatter_touch_exactly_the_masked_entries(
    numels: list[int], block_size: int, world_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(numels, [0] * len(numels), block_size, world_size)
    flats = [torch.randn(n, generator=generator) for n in numels]
    sent = 1 + seed % block_size
    statistic = torch.zeros(layout.blocks, block_size)
    for piece in layout.pieces:
        statistic.view(-1)[piece.row * block_size :][: piece.numel] = torch.randn(piece.numel, generator=generator)
    mask = ops.select(statistic, sent)
    masked = torch.zeros_like(statistic, dtype=torch.bool).scatter_(1, mask.long(), True)
    out = torch.full((layout.blocks, sent), 7.0)
    pieces = list(layout.pieces)
    ops.gather_params(ops.ParamEntries(flats, pieces, mask, block_size), out)
    assert int((out != 7.0).sum()) == sum(piece.kept(sent, block_size) for piece in pieces)
    new = [flat.clone() for flat in flats]
    ops.scatter_params(ops.ParamEntries(new, pieces, mask, block_size), out + 1, False, ONE)
    for piece, flat, changed in zip(pieces, flats, new, strict=True):
        inside = masked.view(-1)[piece.row * block_size :][: piece.numel]
        assert torch.equal(changed[inside], flat[inside] + 1)
        assert torch.equal(changed[~inside], flat[~inside])


# ---------------------------------------------------------------------------------------- norm and checks


def signs() -> Tensor:
    return random_signs(1 << 17)


def in_one_column(width: int) -> list[Tensor]:
    """A bucket must not collect a column."""
    matrix = torch.zeros(800, width)
    matrix[:, 17] = torch.randn(800)
    return [matrix.view(-1)]


GRADIENTS: dict[str, Callable[[], list[Tensor]]] = {
    "random": lambda: [torch.randn(600_000)],
    "heavy-tailed": lambda: [torch.randn(600_000) / torch.rand(600_000).clamp(min=1e-6)],
    "all one": lambda: [torch.ones(600_000)],
    "all one, long": lambda: [torch.ones(1).expand(60_000_000)],  # chunks must not add up in step
    "one column": lambda: in_one_column(4096),
    "columns at the sketch's own width": lambda: in_one_column(SKETCH_WIDTHS[0]),
    "embedding rows": lambda: [(torch.randn(5000, 128) * (torch.rand(5000, 1) < 0.01)).view(-1)],
    "many": lambda: [torch.randn(n) for n in torch.randint(1, 9000, (150,)).tolist()],
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_sketch_norm_is_within_five_percent(kind: str) -> None:
    grads = GRADIENTS[kind]()
    true = torch.cat(grads).double().norm()
    sketched = ops.sketch(grads, signs(), SKETCH_WIDTHS).double().norm()
    assert float(sketched / true) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_that_is_not_finite_is_no_error_of_the_sketch(dtype: torch.dtype) -> None:
    """It is the norm, on all ranks, that says so; an error on one would leave the others waiting."""
    grad = torch.ones(200_000, dtype=dtype)
    grad[:3] = torch.tensor([float("inf"), float("-inf"), 3e38])
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ops.sketch([grad], signs(), SKETCH_WIDTHS).isfinite().all()


def test_sketch_deviation_is_as_stated() -> None:
    table = signs()
    ratios = torch.tensor(
        [float(ops.sketch([g], table, SKETCH_WIDTHS).norm() / g.norm()) for g in torch.randn(60, 100_000)]
    )
    deviation = math.sqrt(1 / (2 * SKETCH_WIDTHS[0]))
    assert deviation == pytest.approx(0.011, abs=0.0002)
    assert float(ratios.std()) == pytest.approx(deviation, rel=0.4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_squared_norm_is_summed_in_fp32_at_least_and_tells_what_is_not_finite(dtype: torch.dtype) -> None:
    grads = [torch.ones(10_001, dtype=dtype), None, torch.ones(0), torch.ones(1_000_000, dtype=torch.float32)]
    assert float(squared_norm(grads, torch.device("cpu"))) == pytest.approx(1_010_001, rel=1e-6)
    for value in (float("nan"), float("inf")):
        grads[0][-1] = value
        assert not squared_norm(grads, torch.device("cpu")).isfinite()
    assert squared_norm([None], torch.device("cpu")).tolist() == [0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksum_sees_a_flipped_bit_and_two_entries_swapped(dtype: torch.dtype) -> None:
    flat = torch.randn(5000).to(dtype)
    original = ops.checksum(flat)
    assert torch.equal(original, ops.checksum(flat.clone()))
    for a, b in ((3, 4), (3, 1027), (4990, 4999), (0, 4500)):
        swapped = flat.clone()
        swapped[[a, b]] = flat[[b, a]]
        assert not torch.equal(original, ops.checksum(swapped))
    for place in (0, 2047, 4999):
        for bit in range(8):
            flipped = flat.clone()
            flipped.view(torch.uint8)[place] ^= 1 << bit
            assert not torch.equal(original, ops.checksum(flipped))
    for other in (-flat, 2 * flat):
        assert not torch.equal(original, ops.checksum(other))
