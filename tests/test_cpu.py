"""The operations in numba against their twins: bitwise where only selection, copying or one rounding is involved."""

from __future__ import annotations

import errno
import inspect
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    FAR,
    SWEPT,
    FarAway,
    KernelChecks,
    SweepJob,
    assert_same_bits,
    awkward,
    bits,
    flattened,
    groups_of_all_kinds,
    hyper,
)
from rank_checks import CHANGE_ROUNDING, train_on
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.ops import naive
from lightning_scape.ops.cpu import arrays as cpu_arrays
from lightning_scape.ops.cpu import kernels as cpu_kernels
from lightning_scape.ops.cpu import numbers as cpu_numbers
from lightning_scape.ops.cpu import ranking as cpu_ranking
from lightning_scape.ops.cpu import update as cpu_update
from lightning_scape.ops.cpu import wire as cpu_wire
from lightning_scape.ops.naive import chunked
from lightning_scape.ops.naive.wire import GROUP
from lightning_scape.ops.registry import CHUNKED
from lightning_scape.ops.registry import CPU as cpu
from lightning_scape.scape.clipping import SKETCH_WIDTHS, random_signs

FLOATS = st.sampled_from([torch.float32, torch.bfloat16])
PAIRS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
"""Of parameters and their values on the wire. Each is compiled by itself."""
ONE = torch.ones(())
TESTS = str(Path(__file__).parent)


class TestNumba(KernelChecks):
    assert_same_moments = staticmethod(assert_same_bits)
    module = cpu
    choice = "cpu"
    caches = (cpu_arrays.like, cpu_arrays.sketch_plan, cpu_ranking.sorting_network)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(rows: int, length: int, seed: int) -> Tensor:
    """Random numbers of very different sizes among zeros, denormals, ties and numbers that are not finite."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    matrix *= 10 ** torch.randint(-12, 12, (rows, 1), generator=generator).double()
    kind = torch.randint(0, 12, (rows, length), generator=generator)
    for value, number in ((0, 0.0), (1, -0.0), (2, 1e-41), (3, 2.5)):
        matrix[kind == value] = number
    odd = torch.randint(0, 40, (rows, length), generator=generator)
    for value, number in ((0, float("nan")), (1, float("inf")), (2, -float("inf")), (3, 3.4e38), (4, 65519.0)):
        matrix[odd == value] = number
    if rows:
        matrix[-1, length // 2 :] = 0.0
    return matrix


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Bitwise; which NaN it is is left open."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(bits(ours)[~ours.isnan()], bits(theirs)[~theirs.isnan()])


# ----------------------------------------------------------------------------------------------------- one by one


@given(st.data(), FLOATS, st.integers(0, 70), st.integers(1, 300), st.integers(0, 2**20))
def test_select_equals_its_twin_for_all_quotas(
    data: st.DataObject, dtype: torch.dtype, rows: int, length: int, seed: int
) -> None:
    sent, statistic = data.draw(st.integers(1, length)), numbers(rows, length, seed).to(dtype)
    assert torch.equal(cpu.select(statistic, sent), naive.select(statistic, sent))


@pytest.mark.parametrize(("length", "sent"), [(4096, 40), (4097, 40), (40_000, 3)])
def test_select_in_long_blocks_equals_its_twin(length: int, sent: int) -> None:
    statistic = awkward(9, length)
    assert_same_bits(cpu.select(statistic, sent), naive.select(statistic, sent))


@pytest.mark.parametrize(("length", "sent"), [(8, 2), (13, 4), (200, 32), (200, 128), (7, 7), (1, 1)])
def test_a_sorting_network_brings_the_largest_to_the_front_in_order(length: int, sent: int) -> None:
    for _ in range(20):
        found = np.random.default_rng(length).permutation(length)
        for a, b in cpu_ranking.sorting_network(length, sent).astype(int):
            found[[a, b]] = max(found[a], found[b]), min(found[a], found[b])
        assert found[:sent].tolist() == list(range(length - 1, length - 1 - sent, -1))


@given(st.data(), FLOATS, st.integers(0, 40), st.integers(1, 280), st.integers(0, 2**20))
def test_compact_equals_its_twin(data: st.DataObject, wire: torch.dtype, rows: int, length: int, seed: int) -> None:
    sent = data.draw(st.none() | st.integers(1, length))
    residual = numbers(rows, length, seed).float()
    mask = None if sent is None else naive.select(torch.randn(rows, length), sent)
    scale = data.draw(st.sampled_from([ONE, torch.tensor(0.5), torch.zeros(()), torch.arange(rows) % 2.0]))
    ours, theirs = residual.clone(), residual.clone()
    sent_ours = cpu.compact(ours, mask, wire, scale)
    assert_same(sent_ours, naive.compact(theirs, mask, wire, scale))
    assert_same(ours, theirs)


@given(st.sampled_from([4, 8]), st.integers(1, 3), st.integers(0, 700), st.integers(0, 2**20))
def test_quantize_and_dequantize_equal_their_twins(width: int, shards: int, count: int, seed: int) -> None:
    ours = groups_of_all_kinds(shards, count, (1 << (width - 1)) - 1, seed)
    theirs = ours.clone()
    message = cpu.quantize(ours, width)
    assert_same_bits(message, naive.quantize(theirs, width))
    assert_same_bits(ours, theirs)
    message[:, 1::2, ::3] = 255  # codes and scales that nobody sends
    assert_same(cpu.dequantize(message, width, count), naive.dequantize(message, width, count))


@given(st.sampled_from([4, 8]), st.integers(0, 90), st.sampled_from([20, 300]), st.data(), st.integers(0, 2**20))
def test_quantize_with_error_equals_its_twin(
    width: int, rows: int, length: int, data: st.DataObject, seed: int
) -> None:
    sent = data.draw(st.none() | st.integers(1, length))
    mask = None if sent is None else naive.select(torch.randn(rows, length), sent)
    values = numbers(rows, length if sent is None else sent, seed).clamp(-1e30, 1e30).nan_to_num(0.0).float()
    scale = data.draw(st.sampled_from([ONE, torch.tensor(0.5), torch.zeros(()), torch.arange(rows) % 2.0]))
    ours = numbers(rows, length, seed + 1).float()
    ours = torch.where(ours.abs() < 1e30, ours, torch.where(ours > 0, torch.inf, torch.nan))
    theirs = ours.clone()
    before = torch.where(torch.rand(values.shape) < 0.2, values, values.roll(1))  # some stand still
    mine = values.clone()
    message = cpu.quantize_with_error(ours, mask, mine, before, scale, width)
    assert_same_bits(message, naive.quantize_with_error(theirs, mask, values, before, scale, width))
    assert_same_bits(ours, theirs)
    assert_same_bits(mine, values)
    assert_same_bits(mine.flatten(), naive.dequantize(message.unsqueeze(0), width, mine.numel())[0])


@given(FLOATS, st.sampled_from([0.0, 1.0, 0.7]), st.integers(0, 2**20))
def test_fold_and_second_moments_equal_their_twins(dtype: torch.dtype, scale: float, seed: int) -> None:
    sizes = [300, 0, 1, 77]
    grads: list[Tensor | None] = list(numbers(1, sum(sizes), seed).to(dtype)[0].split(sizes))
    grads[3] = None
    residuals = [torch.randn(size) for size in sizes]
    moments, weights = [residual.square() for residual in residuals], [0.1, 0.2, 0.3, 0.4]
    results = []
    for module in (cpu, naive):
        own = [residual.clone() for residual in residuals]
        second = [moment.clone() for moment in moments]
        module.fold(own, grads, torch.tensor(scale))
        module.accumulate_exp_avg_sq(second, grads, weights, 3, torch.tensor(scale))
        module.accumulate_exp_avg_sq(second, grads, weights, 3, torch.tensor([1.0, 0.0, 0.5, 0.25]))
        module.accumulate_exp_avg_sq([second[3]], [None], [0.25], 3, torch.tensor(scale))
        results.append([*own, *second])
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(SWEPT), st.integers(1, 256), st.integers(0, 2**20))
def test_sweep_equals_fold_compact_and_select_one_after_the_other(
    data: st.DataObject, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], length: int, seed: int
) -> None:
    quota = st.none() | st.integers(1, length)
    sizes = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=6))
    job = SweepJob.draw(
        data.draw(st.sampled_from([None, 0, 1, 2])),
        data.draw(quota),
        sizes=sizes,
        length=length,
        seed=seed,
        dtype=dtypes[0],
        state=dtypes[1],
        wire=dtypes[2],
    )
    job.residual.view(-1)[:: data.draw(st.integers(1, 9))] *= data.draw(st.sampled_from([0.0, 1e-41, 1e30]))
    scale = data.draw(st.sampled_from([ONE, torch.tensor(0.7), torch.zeros(()), None]))
    if scale is None:  # by row, alike within a piece
        scale = torch.ones(len(job.residual))
        for place, piece in enumerate(job.region.pieces):
            scale[piece.row : piece.row + piece.blocks] = (0.0, 0.3, 1.0)[(place + seed) % 3]
    assert job.grads is not None
    grads: list[Tensor | None] | None = list(job.grads)
    for place, (piece, grad) in enumerate(zip(job.region.pieces, job.grads, strict=True)):
        if grad is not None and not scale.expand(len(job.residual))[piece.row]:
            grad[::2], grad[1::3] = float("nan"), -float("inf")
        if data.draw(st.integers(0, 9)) == 0:
            job.grads[place] = None
    if data.draw(st.integers(0, 9)) == 0:
        grads = None
    job = job._replace(scale=scale, grads=grads, second=data.draw(st.sampled_from([None, job.second])))
    with threads(data.draw(st.sampled_from([1, 3]))):
        TestNumba().compare_sweep(job)


@pytest.mark.parametrize("length", [300, 5000])
def test_sweep_of_long_blocks_equals_its_parts(length: int) -> None:
    TestNumba().compare_sweep(SweepJob.draw(0, 3, length=length, sizes=[9000, 16_000, 7]))


def test_sweep_of_what_is_not_contiguous_goes_to_the_twin() -> None:
    job = SweepJob.draw(None, 2)
    assert job.grads is not None
    job.grads[0] = torch.randn(2 * job.region.pieces[0].numel)[::2]
    TestNumba().compare_sweep(job)
    own, expected = job._replace(grads=None, second=None), job._replace(grads=None).by_parts()
    wide = torch.zeros(len(own.values), 4, dtype=own.values.dtype)
    cpu.sweep(ops.Sweep(own.region, own.residual, None, own.scale, own.mask, wide[:, ::2]))
    assert_same_bits(wide[:, ::2], expected.values)
    assert_same_bits(own.residual, expected.residual)
    assert not wide[:, 1::2].any()


def test_sweep_in_chunks_equals_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_chunk", lambda tensor: 700)
    for rank in (None, 0, 1, 2):
        job = SweepJob.draw(rank, 2)
        ours, theirs = job.swept(CHUNKED, "cpu"), job.by_parts()
        for mine, twin in zip(flattened(ours), flattened(theirs), strict=True):
            if isinstance(mine, Tensor):
                assert_same_bits(mine, twin)


def test_operations_in_chunks_equal_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve without numba. Chunks of 1,024 entries are 20 rows here."""
    monkeypatch.setattr(chunked, "_chunk", lambda tensor: 1024)
    results = []
    for module in (CHUNKED, naive):
        generator = torch.Generator().manual_seed(6)
        residual, second = torch.rand(2, 61, 50, generator=generator)
        grads: list[Tensor | None] = [torch.randn(2000, generator=generator), torch.randn(1000, generator=generator)]
        parts, moments = residual.view(-1)[:3000].split([2000, 1000]), second.view(-1)[:3000].split([2000, 1000])
        module.fold(parts, grads, torch.tensor(0.5))
        module.accumulate_exp_avg_sq(moments, [grads[0], None], [0.1, 0.2], 2, torch.tensor([1.0, 0.5]))
        mask = module.select(residual, 4)
        sent = module.compact(residual, mask, torch.bfloat16, (torch.arange(61) % 3).float())
        steps = torch.randint(0, 9, (61, 50), generator=generator).int()
        shard = ops.ShardState(torch.rand(61, 4, generator=generator), residual, second, steps)
        by_row = torch.arange(61) % 4
        numbers_of = ops.RowNumbers(by_row.int() + 9, by_row.float(), hyper("cpu", torch.float32), ONE, ONE / 2)
        again = [module.update_adamw(shard, mask, sent.float(), sent.float().neg(), numbers_of, 2)]
        again.append(module.update_adams(shard, mask, sent.float(), numbers_of._replace(step=by_row.int() + 10)))
        pieces, values = Layout([2000, 1000], [0, 0], 50, 1).everything().pieces, torch.zeros(61, 4)
        for piece in pieces:  # no pads
            mask[piece.row + piece.blocks - 1] = torch.arange(4)
        module.gather_params(ops.ParamEntries(grads, pieces, mask, 50), values)
        module.scatter_params(ops.ParamEntries(grads, pieces, mask, 50), values.bfloat16(), True)
        results.append([*shard, *grads, mask, sent, values, *again, module.select(residual, 7)])
        results[-1] += [module.checksum(residual.view(-1)), module.checksum(steps.view(-1))]
        left = torch.randn(2, 1525, generator=generator)
        message = module.quantize(left, 4)
        results[-1] += [left, message, module.dequantize(message, 4, 1525)]
        results[-1] += [module.quantize_with_error(residual, mask, values, sent.float(), ONE, 4), residual, values]
        torch.testing.assert_close(module.squared_norm(grads), naive.squared_norm(grads))
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


@given(
    st.integers(1, 5),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.integers(1, 1500),
    st.booleans(),
    st.integers(0, 2**20),
)
def test_mean_and_changes_equal_their_twins(ranks: int, wire: torch.dtype, size: int, mixed: bool, seed: int) -> None:
    given_ = [numbers(1, size, seed + rank).to(wire) for rank in range(ranks)]
    if mixed:  # goes to the twin
        given_[-1] = given_[-1].double()
    assert_same(cpu.mean(given_, torch.float32), naive.mean(given_, torch.float32))
    theta, before = (numbers(1, size, seed + place).float() for place in (7, 8))
    before[0, ::3] = theta[0, ::3]
    ours, theirs = (module.changes(theta, before, wire) for module in (cpu, naive))
    assert_same(ours, theirs)
    unmoved = ours[theta == before].float()
    assert (unmoved == 0).all()
    assert unmoved.signbit().all()


@given(st.sampled_from(PAIRS), st.booleans(), st.integers(0, 2**20))
def test_gather_and_scatter_equal_their_twins(dtypes: tuple[torch.dtype, torch.dtype], add: bool, seed: int) -> None:
    dtype, wire = dtypes
    sizes = [70, 3, 40, 20]
    pieces = list(Layout(sizes, [0] * 4, 20, 1).everything().pieces)
    rows = sum(piece.blocks for piece in pieces)
    mask = torch.rand(rows, 20).argsort(1)[:, :3].to(torch.uint8)
    for piece in pieces:  # as select leaves it: pads come last in their block
        tail = piece.numel - (piece.blocks - 1) * 20
        mask[piece.row + piece.blocks - 1] = torch.arange(3) if tail < 3 else torch.randperm(tail)[:3]
    values = numbers(rows, 3, seed).to(wire)
    flats = [torch.randn(size).to(dtype if size > 3 else torch.float32) for size in sizes]
    results = []
    for module in (cpu, naive):
        own, out = [flat.clone() for flat in flats], torch.full((rows, 3), 7.0).to(wire)
        module.gather_params(ops.ParamEntries(own, pieces, mask, 20), out)
        masters = values.to(torch.promote_types(dtype, torch.float32)) * (1 + 2.0**-9)
        module.scatter_params(ops.ParamEntries(own, pieces, mask, 20), values, add)
        module.gather_params(ops.ParamEntries(own, pieces, mask, 20), masters, renew=True)
        results.append([*own, out, masters])
    for ours, theirs in zip(*results, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("waits", [1, 2000])
@pytest.mark.parametrize("decay", [0.1, 1500.0])  # 1 - lr * decay is -0.5
def test_updates_equal_their_twins(masked: bool, by_row: bool, waits: int, decay: float) -> None:
    """Moments bitwise after a wait of one step, where no exp is involved; all else within rounding."""
    rows, length, sent, step = 90, 50, 3 if masked else 50, 5000
    generator = torch.Generator().manual_seed(waits)
    mask = naive.select(torch.randn(rows, length, generator=generator), 3) if masked else None
    theta, total, own = (torch.randn(rows, sent, generator=generator) for _ in range(3))
    total[0], total[1] = 0.0, 1e-30
    own = own if masked else None
    moment = torch.randn(rows, length, generator=generator)
    second = torch.rand(rows, length, generator=generator) + 0.1
    last_step = step - torch.randint(1, waits + 1, (rows, length), generator=generator).int()
    last_step[2] = step  # no wait at all, as after a resumed run
    steps, scale, group = torch.tensor(step, dtype=torch.int32), ONE, None
    corrections = (torch.tensor(0.3), torch.tensor(0.2))
    lr: Any = 1e-3
    if by_row:
        lr, group = torch.tensor([1e-3, 2e-3, 3e-4]), (torch.arange(rows) // 7 % 3).int()
        scale = (torch.arange(rows) % 5 != 0).float()
        steps = step + (torch.arange(rows) // 11 % 2).int() * (waits > 1)
        corrections = (torch.linspace(0.1, 1, rows), torch.linspace(0.2, 0.3, rows))
    numbers_of = hyper("cpu", torch.float32, lr, decay=decay)
    results = []
    for module in (cpu, naive):
        row_numbers = ops.RowNumbers(steps, scale, numbers_of, *corrections, group)
        state = ops.ShardState(*(tensor.clone() for tensor in (theta, moment, second, last_step)))
        again = module.update_adamw(state, mask, total, own, row_numbers, 4)
        results.append([*state, again])
    for place, (ours, theirs) in enumerate(zip(*results, strict=True)):
        if not ours.is_floating_point() or (waits == 1 and place):  # all but parameters
            assert_same_bits(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=4e-6, atol=4e-5)


def test_fp64_goes_to_the_twin() -> None:
    """A loop's powers would differ from torch's in the last place."""
    theta, total, moment, mine = torch.randn(4, 30, 50, dtype=torch.float64)
    last_step, mask = torch.randint(1, 400, (30, 50)).int(), naive.select(torch.randn(30, 50), 50)
    numbers_of = ops.RowNumbers(torch.tensor(500).int(), ONE, hyper("cpu", torch.float64), ONE.double(), ONE.double())
    results = []
    for module in (cpu, naive):
        state = ops.ShardState(theta.clone(), moment.clone(), moment.square(), last_step.clone())
        results.append([module.update_adamw(state, mask, total, mine, numbers_of, 4), *state])
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


def test_a_skipped_step_changes_nothing() -> None:
    state = [torch.randn(4, 10), torch.randn(4, 10), torch.rand(4, 10), torch.zeros(4, 10, dtype=torch.int32)]
    before = [tensor.clone() for tensor in state]
    bad, step, zero = torch.full((4, 10), float("nan")), torch.tensor(3, dtype=torch.int32), torch.zeros(())
    numbers_of = hyper("cpu", torch.float32)
    numbers = ops.RowNumbers(step, zero, numbers_of, ONE, ONE)
    again = cpu.update_adamw(ops.ShardState(*state), None, bad, None, numbers, 2)
    assert int(again) == 0
    for tensor, old in zip(state, before, strict=True):
        assert_same_bits(tensor, old)


def test_a_tensor_that_is_not_contiguous_goes_to_the_twin() -> None:
    wide, grad = torch.randn(6, 40), torch.randn(12)
    mask = naive.select(wide[:, ::2].contiguous(), 3)
    ours, theirs = wide.clone(), wide.clone()
    sent = cpu.compact(ours[:, ::2], mask, torch.bfloat16, ONE)
    assert_same_bits(sent, naive.compact(theirs[:, ::2], mask, torch.bfloat16, ONE))
    cpu.fold([ours[:, 0]], [grad[::2]], ONE)
    naive.fold([theirs[:, 0]], [grad[::2]], ONE)
    assert_same_bits(ours, theirs)


def test_parameters_and_views_of_them_are_read_like_other_tensors() -> None:
    parameter = torch.nn.Parameter(torch.randn(40))
    assert float(cpu.squared_norm([parameter])) == pytest.approx(float(parameter.detach().square().sum()))
    imaginary = torch.randn(40, dtype=torch.complex64).conj().imag  # what lies in memory has the other sign
    residual = torch.zeros(40)
    cpu.fold([residual], [imaginary], ONE)
    assert torch.equal(residual, imaginary.clone())


# ------------------------------------------------------------------------------------------------- far away, in parts


def test_offsets_of_more_than_32_bits() -> None:
    size = FAR + 64
    residuals, grads = FarAway(size), FarAway(size)
    grads.at(FAR, 64)[:] = torch.arange(64.0)
    places = [memory.at(0, 1).data_ptr() for memory in (residuals, grads)]
    like, number = np.empty(0, np.float32), np.float32
    residuals.at(FAR, 64)[:] = 2 * torch.arange(64.0)
    matrix = np.frombuffer(residuals.memory, np.float32, size).reshape(-1, 64)
    row = FAR // 64
    mask, sent = np.full((row + 1, 1), 5, np.uint8), np.zeros((row + 1, 1), np.float32)
    cpu_kernels.compact(matrix, mask, sent, np.ones(1, np.float32), number(1e38), row, row + 1)
    assert sent[row, 0] == 10.0
    assert residuals.at(FAR, 8).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 0.0, 12.0, 14.0]
    table, out = np.array([[places[1], 0, row + 1, 0]]), np.zeros((row + 1, 1), np.float32)
    cpu_update.exchange(table, mask, out, cpu_update.GATHER, 64, like, row, row + 1)
    assert out[row, 0] == 5.0
    cpu_update.exchange(table, mask, out, cpu_update.ADD, 64, like, row, row + 1)
    assert grads.at(FAR, 8).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 10.0, 6.0, 7.0]
    flat, width = np.frombuffer(grads.memory, np.float32, size), GROUP + 2
    message = np.frombuffer(FarAway((row + 1) * width, 1).memory, np.uint8).reshape(-1, width)
    flat[-1] = 63.5  # the largest: the unit is 0.5
    cpu_wire.quantize(flat, message, size, 8, row, row + 1)
    assert message[row, :8].tolist() == [127, 129, 131, 133, 135, 147, 139, 141]
    assert not flat[FAR:].any()
    cpu_wire.dequantize(message, flat, size, 8, row, row + 1)
    assert grads.at(FAR, 8).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 10.0, 6.0, 7.0]


def run_all() -> list[Tensor]:
    """Every operation once, on tensors that are worth several threads."""
    generator = torch.Generator().manual_seed(5)
    rows, length = 2000, 200
    residual = torch.randn(rows, length, generator=generator)
    sizes = [200_000, 150_000, 50_000]
    grads = [torch.randn(size, generator=generator) for size in sizes]
    views = list(residual.view(-1).split(sizes))
    second = torch.rand(rows, length, generator=generator)
    cpu.fold(views, grads, torch.tensor(0.5))
    cpu.accumulate_exp_avg_sq(list(second.view(-1).split(sizes)), grads, [0.1] * 3, 2, ONE)
    mask = cpu.select(residual, 9)
    sent = cpu.compact(residual, mask, torch.bfloat16, ONE)
    theta, last_step = sent.float(), torch.zeros(rows, length, dtype=torch.int32)
    step = torch.tensor(4, dtype=torch.int32)
    numbers_of = hyper("cpu", torch.float32)
    row_numbers = ops.RowNumbers(step, ONE, numbers_of, ONE, ONE)
    shard = ops.ShardState(theta, residual, second, last_step)
    again = cpu.update_adamw(shard, mask, theta * 2, theta * 3, row_numbers, 2)
    pieces = list(Layout(sizes, [0] * 3, length, 1).everything().pieces)
    cpu.scatter_params(ops.ParamEntries(grads, pieces, mask, length), theta)
    norms = [cpu.squared_norm(grads), cpu.sketch(grads, random_signs(1 << 14), SKETCH_WIDTHS)]
    left = residual.view(2, -1).clone()
    message = cpu.quantize(left, 4)
    wire = [left, message, cpu.dequantize(message, 4, left.shape[1])]
    many, error = cpu.select(residual, 80), residual.clone()
    values = torch.randn(rows, 80, generator=generator)
    wire += [cpu.quantize_with_error(error, many, values, values.roll(1), ONE, 4), error, values]
    arrived = [cpu.mean([sent, sent], torch.float32), cpu.changes(theta, sent.float(), torch.bfloat16)]
    state = [residual, second, mask, sent, theta, last_step, again, *arrived]
    return [*state, *grads, *norms, *wire, cpu.select(residual, 2)]


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    alone = run_all()
    for count in (2, 3):
        with threads(count):
            for ours, theirs in zip(run_all(), alone, strict=True):
                assert_same_bits(ours, theirs)


# ------------------------------------------------------------------------------------------------------- dispatch


@pytest.mark.parametrize("operation", ops.DISPATCHED, ids=lambda operation: operation.__name__)
def test_twins_have_the_same_signature(operation) -> None:
    ours = inspect.signature(getattr(cpu, operation.__name__))
    assert ours == inspect.signature(getattr(naive, operation.__name__))


def test_without_numba_the_reference_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    ops._cpu.cache_clear()
    monkeypatch.setattr(ops, "find_spec", lambda _: None)
    try:
        assert ops._implementation(on_cuda=False) is CHUNKED
        assert ops._implementation(on_cuda=False) is CHUNKED
        assert [str(warning.message).split(". ")[-1] for warning in recwarn] == ["Install lightning-scape[cpu]."]
        with ops.using("cpu"), pytest.raises(ModuleNotFoundError, match="need numba"):
            ops.select(torch.zeros(1, 4), 1)
    finally:
        ops._cpu.cache_clear()


@pytest.mark.parametrize("words", ["NUMBA_DISABLE_JIT", "needs an older NumPy"])
def test_where_numba_compiles_nothing_the_reference_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    ops._cpu.cache_clear()
    if words == "NUMBA_DISABLE_JIT":
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    else:
        (tmp_path / "numba.py").write_text(f"raise ImportError({words!r})")
        monkeypatch.delitem(sys.modules, "numba")
        monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("lightning_scape.ops.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    try:
        with pytest.warns(UserWarning, match=words):
            assert ops._implementation(on_cuda=False) is CHUNKED
    finally:
        ops._cpu.cache_clear()


def new_loop(folder: Path) -> Any:
    """A loop as another process finds it: compiled code lies on disk, none in memory."""
    (folder / "loop.py").write_text(
        "from lightning_scape.ops.cpu.numbers import jit\n\n\n@jit\ndef double(x):\n    return 2 * x\n"
    )
    return runpy.run_path(str(folder / "loop.py"))["double"]


def test_compiled_code_that_cannot_be_kept_or_read_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    loop = new_loop(tmp_path)
    with monkeypatch.context() as full:
        full.setattr("numba.core.caching.IndexDataCacheFile.save", refuse)
        assert loop(2) == 4
    assert new_loop(tmp_path)(2) == 4  # now it is kept
    (index,) = tmp_path.rglob("*.nbi")
    index.write_bytes(b"")
    loop = new_loop(tmp_path)
    assert not cpu_numbers.is_compiled(loop)
    assert loop(2) == 4
    assert cpu_numbers.is_compiled(new_loop(tmp_path))


# -------------------------------------------------------------------------------------------------------- two ranks


@pytest.mark.parametrize(("sparsity", "wire_dtype", "atol"), [(0.9, "fp32", 1e-5), (0.99, "bf16", CHANGE_ROUNDING)])
def test_two_ranks_train_alike_in_numba_and_by_reference(
    run_ranks, monkeypatch: pytest.MonkeyPatch, wire_dtype: str, atol: float, sparsity: float
) -> None:
    monkeypatch.setenv(ops.VARIABLE, "naive")
    by_reference = run_ranks(train_on, 2, "cpu", wire_dtype, sparsity)
    monkeypatch.setenv(ops.VARIABLE, "cpu")
    by_numba = run_ranks(train_on, 2, "cpu", wire_dtype, sparsity)
    for (ours, residual), (theirs, their_residual) in zip(by_numba, by_reference, strict=True):
        for a, b, first in zip(ours, theirs, by_numba[0][0], strict=True):
            assert torch.equal(a, first)
            torch.testing.assert_close(a, b, rtol=0, atol=atol)
        torch.testing.assert_close(residual, their_residual, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("of_parameter", "of_residual"), [(torch.float32, torch.float64)])
def test_a_sweep_keeps_the_second_moment_in_its_own_precision(
    of_parameter: torch.dtype, of_residual: torch.dtype
) -> None:
    region = Layout([60], [0], 20, 1).local(0)
    grad = torch.full((60,), 1e19 if of_parameter == torch.float32 else 0.1, dtype=of_parameter)
    found = []
    for module in (naive, cpu):
        residual, moment = torch.zeros(3, 20, dtype=of_residual), torch.full((3, 20), 0.3, dtype=of_parameter)
        mask = torch.zeros(3, 1, dtype=torch.uint8)
        values = torch.zeros(3, 1, dtype=torch.bfloat16)
        second = ops.SecondMoment(moment, [1e-3], 2)
        module.sweep(ops.Sweep(region, residual, [grad], torch.ones(()), mask, values, second_moment=second))
        assert moment.isfinite().all()
        found.append(moment)
    assert torch.equal(*found)
