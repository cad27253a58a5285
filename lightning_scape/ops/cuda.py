"""Triton kernels: each the twin of the function of the same name and signature in :mod:`lightning_scape.ops.naive`.

What is bitwise equal to the twin and what only rounds:

==================================== ==================================================================================
select, compact, gather, scatter     bitwise
fold, accumulate_first_moment        bitwise equal to the twin on a GPU, where ``scale * grad`` is rounded before it is
                                     added; on the CPU the twin rounds once, after the addition
squared_norm, sketch                 another order of summation, the same at every run: no atomic additions of floats
update, update_adamw                 ``exp`` and ``expm1`` round differently (2 units in the last place)
accumulate_second_moment             the twin rounds the product of weight, N and scale once, this module three times
elect                                bitwise
vote                                 bitwise: the twin's, with this module's select
measure_noise                        the twin, in larger parts: once in several steps
checksum                             the twin, in larger parts: not part of every step
take, put, tau_step, adamw_step      the twin itself: one call of torch each, or not called on a device
==================================== ==================================================================================

Products and sums are never contracted (``enable_fp_fusion=False``): the twin's are not. bf16 is rounded and widened
as integers, which is the same instruction count, and exact in Triton's interpreter too. Lists of parameters are worked
off in one launch per dtype: tables on the device say where each tensor lies and which of its entries a program takes.
No function here makes the host wait for the device, or asks it for a size. How many entries a block sends is a constant
of no kernel: a warm-up of the sparsity goes through hundreds of numbers, and each would be compiled anew.

Offsets are 64-bit wherever a tensor may hold 2**31 entries or more. Run with ``TRITON_INTERPRET=1`` on CPU tensors to
test without a GPU.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_scape.layout import Piece
from lightning_scape.ops import naive
from lightning_scape.ops.naive import (
    AdamWStep,
    Hyper,
    RowNumbers,
    SecondMoment,
    ShardState,
    TauStep,
    adams_step,
    adamw_step,
    gather_blocks,
    position_dtype,
    scatter_blocks,
    sweep,
    to_device,
)

__all__ = [
    "AdamWStep",
    "Hyper",
    "RowNumbers",
    "SecondMoment",
    "ShardState",
    "TauStep",
    "accumulate_exp_avg",
    "accumulate_exp_avg_sq",
    "adamw_step",
    "checksum",
    "compact",
    "merge",
    "fold",
    "gather_params",
    "measure_noise",
    "position_dtype",
    "scatter_blocks",
    "scatter_params",
    "select",
    "sketch",
    "squared_norm",
    "sweep",
    "gather_blocks",
    "adams_step",
    "to_device",
    "update_adams",
    "update_adamw",
    "propose",
]

_DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_STREAM_CHUNK = 4096
"""Entries a program takes where memory is read end to end: 16 for each of 256 threads."""
_LARGE_CHUNK = 1 << 24
"""Entries handled by one torch call where there is no kernel: few calls, and temporaries of 64 MB at most."""
_PICK_CHUNK = 1024
"""Likewise where entries lie scattered."""
_SELECT_TILE = 1024
"""Entries of whole rows that a warp of :func:`select` holds in registers; longer rows are shared by several warps."""
_LONGEST_ROW = 4096
_MAX_PASSES = 32
"""Longer blocks and larger quotas are selected by the twin."""
_SKETCH_ROWS, _SKETCH_COLUMNS = 8, 256
"""Entries of a chunk that a program of :func:`sketch` reads at a time."""
_SKETCH_PROGRAMS = 256
"""Partial sketches, added up in the end."""
_CACHED_TABLES = 64


# ---------------------------------------------------------------------------------------------- numbers in memory


@triton.jit
def _widen(raw, DTYPE: tl.constexpr):
    """What lies in memory as DTYPE (bf16 comes as int16), in at least fp32."""
    if DTYPE == tl.bfloat16:
        value = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float64:
        value = raw
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def _narrow(value, DTYPE: tl.constexpr):
    """The reverse, to the nearest, ties to even; by way of fp32, as torch converts fp64."""
    if DTYPE == tl.float64:
        raw = value.to(tl.float64)
    elif DTYPE == tl.bfloat16:
        single = value.to(tl.float32)
        bits = single.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(single == single, rounded, 0x7FC0)
        raw = rounded.to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        raw = value.to(tl.float32).to(DTYPE)
    return raw


@triton.jit
def _pointer(address, DTYPE: tl.constexpr):
    """An address out of a table, as a pointer."""
    if DTYPE == tl.bfloat16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    return pointer


@triton.jit
def _clamp(value, limit):
    """Keeps NaN, as torch's clamp does."""
    value = tl.where(value > limit, limit, value)
    return tl.where(value < -limit, -limit, value)


@triton.jit
def _divide(a, b):
    if a.dtype == tl.float32:
        quotient = tl.div_rn(a, b)  # a plain division of fp32 is off by 2 units in the last place
    else:
        quotient = a / b
    return quotient


@triton.jit
def _root(a):
    if a.dtype == tl.float32:
        root = tl.sqrt_rn(a)
    else:
        root = tl.sqrt(a)
    return root


# ------------------------------------------------------------------------------------------------------ gradients


@triton.jit
def _squares_kernel(
    grads, numels, chunk_tensors, chunk_starts, partials, GRAD: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr
):
    program = tl.program_id(0)
    tensor, start = tl.load(chunk_tensors + program), tl.load(chunk_starts + program)
    left = tl.load(numels + tensor) - start
    source = _pointer(tl.load(grads + tensor), GRAD) + start
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    offsets = tl.arange(0, CHUNK)
    if left >= CHUNK:  # a mask of any length would keep the loads from being 16 bytes wide
        value = _widen(tl.load(source + offsets), GRAD)
    else:
        value = _widen(tl.load(source + offsets, mask=offsets < left, other=0), GRAD)
    tl.store(partials + program, tl.sum(value * value, axis=0).to(tl.float32))


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """See :func:`naive.squared_norm`. One pass, one launch per dtype."""
    partials = []
    for group in _by_kind(grads):
        programs, chunks = _chunks(tuple(grad.numel() for grad in group), _STREAM_CHUNK, group[0].device)
        partials.append(torch.empty(programs, dtype=torch.float32, device=group[0].device))
        _launch(
            _squares_kernel,
            programs,
            _addresses(group),
            *chunks,
            partials[-1],
            GRAD=_DTYPES[group[0].dtype],
            ALIGNED=_aligned(group[0]),
            CHUNK=_STREAM_CHUNK,
            num_warps=8,
        )
    if not partials:
        return torch.zeros((), device=grads[0].device)
    return torch.cat(partials).sum()


@triton.jit
def _sketch_kernel(
    grads,
    numels,
    chunk_tensors,
    chunk_starts,
    plan,
    signs,
    partials,
    chunks,
    LENGTH: tl.constexpr,
    GRAD: tl.constexpr,
    BUCKETS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: the buckets of one range of columns, over every so many chunks. It owns what it writes."""
    bucket = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], dtype=tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        tensor, start = tl.load(chunk_tensors + chunk), tl.load(chunk_starts + chunk)
        left = tl.load(numels + tensor) - start
        source = _pointer(tl.load(grads + tensor), GRAD) + start
        numel = tl.minimum(left, LENGTH).to(tl.int32)
        width, rotation = tl.load(plan + 4 * chunk), tl.load(plan + 4 * chunk + 1)
        offset, sign = tl.load(plan + 4 * chunk + 2), tl.load(plan + 4 * chunk + 3)
        column = bucket - rotation
        column = tl.where(column < 0, column + BUCKETS, column)
        counts = (column < width) & (bucket < BUCKETS)
        of_chunk = tl.zeros([COLUMNS], dtype=tl.float32)
        for first in range(0, numel, ROWS * width):
            entry = first + tl.arange(0, ROWS)[:, None] * width + column[None, :]
            inside = counts[None, :] & (entry < numel)
            value = _widen(tl.load(source + entry, mask=inside, other=0), GRAD).to(tl.float32)
            of_chunk += tl.sum(value * tl.load(signs + offset + entry, mask=inside, other=0), axis=0)
        sums += of_chunk * sign.to(tl.float32)
    tl.store(partials + tl.program_id(0) * BUCKETS + bucket, sums, mask=bucket < BUCKETS)


def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    """See :func:`naive.sketch`. Each bucket is summed by one program in a fixed order: no atomic additions."""
    buckets, length = max(widths), signs.numel() // 2
    sums = torch.zeros(buckets, dtype=torch.float32, device=signs.device)
    numbered = [(i, grad) for i, grad in enumerate(grads) if grad is not None and grad.numel()]
    for dtype in dict.fromkeys(grad.dtype for _, grad in numbered):
        group = [(i, _dense(grad)) for i, grad in numbered if grad.dtype == dtype]
        sizes = tuple(grad.numel() for _, grad in group)
        count, chunks = _chunks(sizes, length, signs.device)
        programs = min(count, _SKETCH_PROGRAMS)
        partials = torch.empty(programs, buckets, dtype=torch.float32, device=signs.device)
        _launch(
            _sketch_kernel,
            (programs, triton.cdiv(buckets, _SKETCH_COLUMNS)),
            _addresses([grad for _, grad in group]),
            *chunks,
            _sketch_plan(tuple(i for i, _ in group), sizes, length, tuple(widths), signs.device, _stream(signs)),
            signs,
            partials,
            count,
            LENGTH=length,
            GRAD=_DTYPES[dtype],
            BUCKETS=buckets,
            ROWS=_SKETCH_ROWS,
            COLUMNS=_SKETCH_COLUMNS,
            num_warps=4,
        )
        sums += partials.sum(0)
    return sums


@lru_cache(maxsize=_CACHED_TABLES)
def _sketch_plan(
    indices: tuple[int, ...],
    sizes: tuple[int, ...],
    length: int,
    widths: tuple[int, ...],
    device: torch.device,
    stream: int,
) -> Tensor:
    """Width, rotation, offset and sign of each chunk, as :func:`naive.sketch` draws them: int32 ``[chunks, 4]``."""
    rows = [
        naive._draw(index, number, length, widths)
        for index, size in zip(indices, sizes, strict=True)
        for number in range(-(-size // length))
    ]
    return to_device(torch.tensor(rows, dtype=torch.int32, device="cpu"), device)


@triton.jit
def _fold_kernel(
    residuals,
    grads,
    numels,
    chunk_tensors,
    chunk_starts,
    scale,
    clip_value,
    RESIDUAL: tl.constexpr,
    GRAD: tl.constexpr,
    CLIP: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    factor = tl.load(scale)
    if factor != 0:
        program = tl.program_id(0)
        tensor, start = tl.load(chunk_tensors + program), tl.load(chunk_starts + program)
        left = tl.load(numels + tensor) - start
        target = _pointer(tl.load(residuals + tensor), RESIDUAL) + start
        source = _pointer(tl.load(grads + tensor), GRAD) + start
        if ALIGNED:
            target, source = tl.multiple_of(target, 16), tl.multiple_of(source, 16)
        offsets = tl.arange(0, CHUNK)
        if left >= CHUNK:  # a mask of any length would keep loads and stores from being 16 bytes wide
            value = _widen(tl.load(source + offsets), GRAD)
            if CLIP:
                value = _clamp(value, tl.load(clip_value))
            there = tl.load(target + offsets)
            tl.store(target + offsets, there + value.to(RESIDUAL) * factor.to(RESIDUAL))
        else:
            inside = offsets < left
            value = _widen(tl.load(source + offsets, mask=inside, other=0), GRAD)
            if CLIP:
                value = _clamp(value, tl.load(clip_value))
            there = tl.load(target + offsets, mask=inside, other=0)
            tl.store(target + offsets, there + value.to(RESIDUAL) * factor.to(RESIDUAL), mask=inside)


def fold(residuals: Sequence[Tensor], grads: Sequence[Tensor | None], scale: Tensor, clip_value: float | None) -> None:
    """See :func:`naive.fold`. One launch for all tensors of a dtype and alignment."""
    pairs = [(r, _dense(g)) for r, g in zip(residuals, grads, strict=True) if g is not None and g.numel()]
    if any(residual.device != grad.device for residual, grad in pairs):
        naive.fold(residuals, grads, scale, clip_value)
        return
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    for residual, grad in pairs:
        kind = residual.dtype, grad.dtype, _aligned(residual) and _aligned(grad)
        groups.setdefault(kind, []).append((residual, grad))
    for (of_residual, of_grad, aligned), group in groups.items():
        device = group[0][0].device
        programs, chunks = _chunks(tuple(grad.numel() for _, grad in group), _STREAM_CHUNK, device)
        _launch(
            _fold_kernel,
            programs,
            _addresses([residual for residual, _ in group]),
            _addresses([grad for _, grad in group]),
            *chunks,
            scale.to(device),
            scale if clip_value is None else _bound(clip_value, of_grad, device),
            RESIDUAL=_DTYPES[of_residual],
            GRAD=_DTYPES[of_grad],
            CLIP=clip_value is not None,
            ALIGNED=aligned,
            CHUNK=_STREAM_CHUNK,
            num_warps=8,
        )


@triton.jit
def _first_moment_kernel(
    momentum,
    evidence,
    grad,
    scale,
    beta1,
    one_minus_beta1,
    clip_value,
    numel,
    GRAD: tl.constexpr,
    CLIP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    factor = tl.load(scale)
    if factor != 0:
        entry = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        inside = entry < numel
        value = _widen(tl.load(grad + entry, mask=inside, other=0), GRAD)
        if CLIP:
            value = _clamp(value, tl.load(clip_value))
        first = tl.load(momentum + entry, mask=inside, other=0)
        first = tl.load(beta1) * first + tl.load(one_minus_beta1) * factor * value.to(tl.float32)
        tl.store(momentum + entry, first, mask=inside)
        tl.store(evidence + entry, tl.load(evidence + entry, mask=inside, other=0) + first, mask=inside)


def accumulate_exp_avg(
    momentum: Tensor, evidence: Tensor, grad: Tensor, beta1: float, scale: Tensor, clip_value: float | None
) -> None:
    """See :func:`naive.accumulate_exp_avg`."""
    if grad.device != momentum.device or momentum.dtype != torch.float32:
        naive.accumulate_exp_avg(momentum, evidence, grad, beta1, scale, clip_value)
        return
    _launch(
        _first_moment_kernel,
        triton.cdiv(momentum.numel(), _STREAM_CHUNK),
        momentum,
        evidence,
        _raw(_dense(grad)),
        scale.to(momentum.device),
        momentum.new_full((), beta1),
        momentum.new_full((), 1 - beta1),
        scale if clip_value is None else _bound(clip_value, grad.dtype, momentum.device),
        momentum.numel(),
        GRAD=_DTYPES[grad.dtype],
        CLIP=clip_value is not None,
        CHUNK=_STREAM_CHUNK,
        num_warps=8,
    )


@triton.jit
def _second_moment_kernel(
    moments,
    grads,
    numels,
    chunk_tensors,
    chunk_starts,
    scale,
    scale_stride,
    weights,
    ranks,
    limit,
    clip_value,
    MOMENT: tl.constexpr,
    GRAD: tl.constexpr,
    CLIP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    tensor, start = tl.load(chunk_tensors + program), tl.load(chunk_starts + program)
    factor = tl.load(scale + tensor * scale_stride)
    if factor != 0:
        offsets = tl.arange(0, CHUNK)
        inside = offsets < tl.load(numels + tensor) - start
        target = _pointer(tl.load(moments + tensor), MOMENT) + start + offsets
        source = _pointer(tl.load(grads + tensor), GRAD) + start + offsets
        value = _widen(tl.load(source, mask=inside, other=0), GRAD)
        if CLIP:
            value = _clamp(value, tl.load(clip_value))
        value = value.to(MOMENT) * factor.to(MOMENT)
        weight = tl.load(weights + tensor).to(MOMENT)
        moment = tl.load(target, mask=inside, other=0)
        moved = (1 - weight) * moment + weight * (value * value) / ranks
        tl.store(target, tl.minimum(moved, tl.load(limit)), mask=inside)


def accumulate_exp_avg_sq(
    moments: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[float],
    ranks: int,
    scale: Tensor,
    clip_value: float | None,
) -> None:
    """See :func:`naive.accumulate_exp_avg_sq`. One launch for each dtype of the gradients."""
    groups: dict[torch.dtype, list[int]] = {}
    rest = []
    for place, (moment, grad) in enumerate(zip(moments, grads, strict=True)):
        if grad is None or grad.device != moment.device:
            rest.append(place)
        elif grad.numel():
            groups.setdefault(grad.dtype, []).append(place)

    def chosen(values: Sequence[Any], places: list[int]) -> list[Any]:
        return [values[place] for place in places]

    def scales(places: list[int]) -> Tensor:
        if not scale.dim() or len(places) == len(moments):
            return scale
        return scale[to_device(torch.tensor(places, device="cpu"), scale.device)]

    if rest:
        own = chosen(moments, rest), chosen(grads, rest), chosen(weights, rest)
        naive.accumulate_exp_avg_sq(*own, ranks, scales(rest), clip_value)
    for dtype, places in groups.items():
        targets, sources = chosen(moments, places), [_dense(grad) for grad in chosen(grads, places)]
        device = targets[0].device
        own_weights = torch.tensor(chosen(weights, places), dtype=torch.float64, device="cpu")
        programs, chunks = _chunks(tuple(target.numel() for target in targets), _STREAM_CHUNK, device)
        _launch(
            _second_moment_kernel,
            programs,
            _addresses(targets),
            _addresses(sources),
            *chunks,
            scales(places).to(device),
            scale.dim(),
            to_device(own_weights, device),
            ranks,
            targets[0].new_full((), torch.finfo(targets[0].dtype).max),
            scale if clip_value is None else _bound(clip_value, dtype, device),
            MOMENT=_DTYPES[targets[0].dtype],
            GRAD=_DTYPES[dtype],
            CLIP=clip_value is not None,
            CHUNK=_STREAM_CHUNK,
            num_warps=8,
        )


# ---------------------------------------------------------------------------------------------------------- masks


@triton.jit
def _select_kernel(
    statistic,
    chosen,
    rows,
    sent,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    LOW: tl.constexpr,
    KEPT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS_GIVEN: tl.constexpr,
    OUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (position < LENGTH)[None, :]
    raw = tl.load(statistic + row[:, None] * STRIDE + position[None, :], mask=inside, other=0)
    if BITS_GIVEN:
        bits = raw
    else:
        bits = raw.to(tl.float32).to(tl.int32, bitcast=True)
    _store_largest(bits, chosen, row, rows, sent, position, LENGTH, LOW, KEPT_BITS, OUT)


@triton.jit
def _store_largest(
    bits,
    chosen,
    row,
    rows,
    sent,
    position,
    LENGTH: tl.constexpr,
    LOW: tl.constexpr,
    KEPT_BITS: tl.constexpr,
    OUT: tl.constexpr,
):
    """The positions of the largest magnitudes of each row, by :func:`naive.select`'s keys."""
    keys = (bits & KEPT_BITS) | (LOW - position)[None, :]
    keys = tl.where((position < LENGTH)[None, :], keys, -1)
    for turn in range(sent):
        top = tl.max(keys, axis=1)
        tl.store(chosen + row * sent + turn, (LOW - (top & LOW)).to(OUT), mask=row < rows)
        keys = tl.where(keys == top[:, None], -1, keys)  # no two keys of a row are equal


def select(statistic: Tensor, sent: int) -> Tensor:
    """See :func:`naive.select`; bitwise. One read of the statistic, one write of the mask."""
    blocks, length = statistic.shape
    assert 1 <= sent <= length
    if not _is_small(statistic, sent):
        return naive._select_in_chunks(statistic, sent, _LARGE_CHUNK)
    given = statistic.view(torch.int32) if statistic.dtype == torch.float32 else statistic
    if statistic.dtype == torch.bfloat16:
        given = statistic.to(torch.float32).view(torch.int32)
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=statistic.device)
    shape = _selection(given, chosen)
    _launch(
        _select_kernel,
        triton.cdiv(blocks, shape["ROWS"]),
        given,
        chosen,
        blocks,
        sent,
        BITS_GIVEN=given.dtype == torch.int32,
        **shape,
    )
    return chosen


def _is_small(matrix: Tensor, sent: int) -> bool:
    """Whether rows are such that a kernel selects from them; the twin does from others."""
    return sent <= _MAX_PASSES and matrix.shape[1] <= _LONGEST_ROW and matrix.stride(1) == 1


def _selection(matrix: Tensor, chosen: Tensor) -> dict[str, Any]:
    """What kernels that select know of their rows when they are compiled."""
    length = matrix.shape[1]
    low = (1 << (length - 1).bit_length()) - 1
    block = max(16, triton.next_power_of_2(length))
    return {
        "STRIDE": matrix.stride(0),
        "LENGTH": length,
        "LOW": low,
        "KEPT_BITS": naive._MAGNITUDE_BITS & ~low,
        "ROWS": max(1, _SELECT_TILE // block),
        "BLOCK": block,
        "OUT": tl.uint8 if chosen.dtype == torch.uint8 else tl.uint16,
        "num_warps": max(1, block // _SELECT_TILE),
    }


def propose(residual: Tensor, votes: int) -> Tensor:
    """See :func:`naive.propose`; bitwise."""
    return naive._ballots_of(residual, select(residual, votes))


@triton.jit
def _elect_kernel(
    residual,
    ballots,
    chosen,
    rows,
    sent,
    ranks,
    own,
    VOTES: tl.constexpr,
    STRIDE: tl.constexpr,
    LENGTH: tl.constexpr,
    LOW: tl.constexpr,
    KEPT_BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OUT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    position = tl.arange(0, BLOCK)
    there = row < rows
    inside = there[:, None] & (position < LENGTH)[None, :]
    total = tl.load(residual + row[:, None] * STRIDE + position[None, :], mask=inside, other=0).to(tl.float32)
    BYTES: tl.constexpr = 1 if LENGTH <= 256 else 2
    WIDTH: tl.constexpr = VOTES * (BYTES + 1) + 1
    for rank in range(ranks):
        if rank != own:
            ballot = ballots + (row + tl.cast(rank, tl.int64) * rows) * WIDTH
            exponent = tl.load(ballot + (WIDTH - 1), mask=there, other=0).to(tl.int32)
            unit = _divide((exponent << 23).to(tl.float32, bitcast=True), 127.0)
            for turn in range(VOTES):
                place = tl.load(ballot + turn * BYTES, mask=there, other=0).to(tl.int32)
                if BYTES == 2:
                    place += tl.load(ballot + (turn * 2 + 1), mask=there, other=0).to(tl.int32) << 8
                code = tl.load(ballot + (VOTES * BYTES + turn), mask=there, other=0).to(tl.int8, bitcast=True)
                named = position[None, :] == place[:, None]
                total = tl.where(named, total + (code.to(tl.float32) * unit)[:, None], total)
    bits = total.to(tl.int32, bitcast=True)
    _store_largest(bits, chosen, row, rows, sent, position, LENGTH, LOW, KEPT_BITS, OUT)


def merge(residual: Tensor, ballots: Tensor, own: int, votes: int, sent: int) -> Tensor:
    """See :func:`naive.merge`; bitwise. One launch, one read of the residual and of each ballot."""
    if not _is_small(residual, max(votes, sent)):
        return naive._elect_in_chunks(residual, ballots, own, votes, sent, select, _LARGE_CHUNK)
    blocks, length = residual.shape
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=residual.device)
    shape = _selection(residual, chosen)
    _launch(
        _elect_kernel,
        triton.cdiv(blocks, shape["ROWS"]),
        residual,
        ballots.contiguous(),
        chosen,
        blocks,
        sent,
        ballots.shape[0],
        own,
        VOTES=votes,
        **shape,
    )
    return chosen


# ---------------------------------------------------------------------------------- blocks: residual and shard state


@triton.jit
def _compact_kernel(
    residual,
    mask,
    values,
    scale,
    scale_stride,
    count,
    stride,
    sent,
    MASKED: tl.constexpr,
    WIRE: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    entry = first + tl.arange(0, CHUNK)
    inside = entry < count
    row, column = _cells(mask, first, inside, sent, MASKED, CHUNK)
    place = residual + row * stride + column
    taken = tl.load(scale + row * scale_stride, mask=inside, other=0) != 0
    there = tl.load(place, mask=taken, other=0)
    raw = _narrow(_clamp(there, LIMIT), WIRE)
    tl.store(values + entry, raw, mask=inside)
    tl.store(place, there - _widen(raw, WIRE).to(there.dtype), mask=taken)


@triton.jit
def _cells(mask, first, inside, sent, MASKED: tl.constexpr, CHUNK: tl.constexpr):
    """Row and column, int64, of the CHUNK chosen entries from ``first`` on: one division in 64 bits for all of them."""
    within = (first % sent).to(tl.int32) + tl.arange(0, CHUNK)
    row, column = first // sent + within // sent, (within % sent).to(tl.int64)
    if MASKED:
        column = tl.load(mask + first + tl.arange(0, CHUNK), mask=inside, other=0).to(tl.int64)
    return row, column


def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """See :func:`naive.compact`; bitwise. One pass over the mask: gather, round, keep the rounding error."""
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device=residual.device) if out is None else out
    _launch(
        _compact_kernel,
        triton.cdiv(values.numel(), _PICK_CHUNK),
        residual,
        _raw(values) if mask is None else mask.contiguous(),
        _raw(values),
        scale.to(residual.device),
        scale.dim(),
        values.numel(),
        residual.stride(0),
        sent,
        MASKED=mask is not None,
        WIRE=_DTYPES[wire_dtype],
        LIMIT=torch.finfo(wire_dtype).max,
        CHUNK=_PICK_CHUNK,
        num_warps=4,
    )
    return values


@triton.jit
def _minus_expm1(x):
    """``1 - exp(x)`` for x <= 0, to a few units in the last place: a series where the difference would cancel."""
    series = 1.0 + x * (1.0 / 15)
    for fewer in tl.static_range(13):
        series = 1.0 + x * series * (1.0 / (14 - fewer))
    return tl.where(x > -0.4, -x * series, 1.0 - tl.exp(x))


@triton.jit
def _update_kernel(
    theta,
    momentum,
    clock,
    mask,
    total,
    step,
    again,
    scale,
    group,
    lr,
    beta1,
    log_beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    keep,
    log_keep,
    correction,
    correction2,
    second,
    floor,
    limit,
    count,
    momentum_stride,
    clock_stride,
    second_stride,
    step_stride,
    scale_stride,
    correction_stride,
    sent,
    ranks,
    MASKED: tl.constexpr,
    BY_GROUP: tl.constexpr,
    CORRECTED: tl.constexpr,
    ADAMW: tl.constexpr,
    MEASURED: tl.constexpr,
    IMPLICIT: tl.constexpr,
    LONGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * CHUNK
    entry = first + tl.arange(0, CHUNK)
    row, column = _cells(mask, first, entry < count, sent, MASKED, CHUNK)
    inside = (entry < count) & (tl.load(scale + row * scale_stride, mask=entry < count, other=0) != 0)
    if tl.sum(inside.to(tl.int32), axis=0) > 0:
        h = tl.load(group + row, mask=inside, other=0) if BY_GROUP else row.to(tl.int32) * 0
        of_momentum = momentum + row * momentum_stride + column
        of_clock = clock + row * clock_stride + column
        of_second = second + row * second_stride + column

        now = tl.load(step + row * step_stride, mask=inside, other=1)
        tau = now - tl.load(of_clock, mask=inside, other=0)
        tl.atomic_add(again, tl.sum((inside & (tau == 1)).to(tl.int32), axis=0).to(tl.int64), sem="relaxed")
        tau = tl.maximum(tau, 1)  # clocks of pads are loaded as if no parameter had missed a step
        m = tl.load(of_momentum, mask=inside, other=0)
        a = tl.load(total + entry, mask=inside, other=0)
        old = tl.load(theta + entry, mask=inside, other=0)
        b1 = tl.load(beta1 + h, mask=inside, other=0)
        b2 = tl.load(beta2 + h, mask=inside, other=0)
        one_minus_b2 = tl.load(one_minus_beta2 + h, mask=inside, other=0)
        whole = tl.load(keep + h, mask=inside, other=1)
        steps = tau.to(m.dtype)

        one_minus_b1 = tl.load(one_minus_beta1 + h, mask=inside, other=1)
        if IMPLICIT:
            one_minus_bt = _divide(steps * one_minus_b1, (steps - 1) * one_minus_b1 + 1)
        else:
            one_minus_bt = _minus_expm1(steps * tl.load(log_beta1 + h, mask=inside, other=0))
        g = _divide(a, steps)
        new = (1 - one_minus_bt) * m + one_minus_bt * g
        if IMPLICIT:
            moved = steps * new
        else:
            spread = _divide(b1 * one_minus_bt, one_minus_b1)
            moved = tl.where(tau == 1, new, steps * g + (m - g) * spread)
        common = new
        if CORRECTED:
            divisor = tl.load(correction + row * correction_stride, mask=inside, other=1)
            m, moved, common = _divide(m, divisor), _divide(moved, divisor), _divide(new, divisor)
        if ADAMW:
            bounded = moved * (1 / LONGEST)
            common = tl.maximum(common * common, bounded * bounded)
            divisor2 = tl.load(correction2 + row * correction_stride, mask=inside, other=1)
            v2 = tl.load(of_second, mask=inside, other=0)
            if MASKED:
                seen = tl.minimum(_divide(v2, divisor2) * ranks * steps * steps, tl.load(limit))
                v2 += one_minus_b2 * tl.maximum(a * a - seen, 0)
            else:
                v2 = b2 * v2 + one_minus_b2 * _divide(a * a, steps)
                common = tl.where(tau == 1, 0, common)
            v2 = tl.minimum(v2, tl.load(limit))
            tl.store(of_second, v2, mask=inside)
            v = tl.maximum(_divide(v2, divisor2), common)
        else:
            v = b2 * (m * m)
            v += _divide(one_minus_b2 * (a * a), steps)
            if MEASURED:
                n = tl.load(of_second, mask=inside, other=0) * tl.load(floor)
                steady = n * _divide(one_minus_b1, 1 + b1)
                floored = b2 * tl.maximum(m * m, steady) + one_minus_b2 * tl.maximum(n, _divide(a * a, steps))
                v = tl.where(tau == 1, v, floored)
        shrunk = tl.exp(steps * tl.load(log_keep + h, mask=inside, other=0))  # |whole|**tau
        shrunk = tl.where((whole < 0) & (tau % 2 == 1), -shrunk, shrunk)
        shrunk = tl.where(tau == 1, whole, shrunk)
        denominator = _root(v) + tl.load(eps + h, mask=inside, other=1)
        change = _divide(tl.load(lr + h, mask=inside, other=0) * moved, denominator)
        tl.store(theta + entry, old * shrunk - change, mask=inside)
        tl.store(of_momentum, new, mask=inside)
        tl.store(of_clock, now, mask=inside)


def measure_noise(
    noise: Tensor, grad: Tensor | None, weight: float, ranks: int, scale: Tensor, clip_value: float | None
) -> None:
    """See :func:`naive.measure_noise`."""
    naive._measure_noise_in_chunks(noise, grad, weight, ranks, scale, clip_value, _LARGE_CHUNK)


def update_adams(
    shard: ShardState,
    mask: Tensor | None,
    mean: Tensor,
    numbers: RowNumbers,
    floor: float = 1.0,
    implicit: bool = False,
) -> Tensor:
    """See :func:`naive.update_adams`. One launch; what it reads of the moment and the last steps it writes back."""
    theta, momentum, noise, clock = shard
    step, scale, hyper, correction, _, group = numbers
    corrected = isinstance(correction, Tensor) or correction != 1.0
    divisor = correction if isinstance(correction, Tensor) else theta.new_full((), correction if corrected else 1.0)
    return _update(
        (theta, momentum, clock),
        noise,
        mask,
        mean,
        (step, scale, divisor, divisor),
        hyper,
        group,
        theta.new_full((), floor),
        1,
        CORRECTED=corrected,
        ADAMW=False,
        IMPLICIT=implicit,
    )


def update_adamw(
    shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, ranks: int, implicit: bool = True
) -> Tensor:
    """See :func:`naive.update_adamw`. One launch; what it reads of the moments and the last steps it writes back."""
    theta, exp_avg, exp_avg_sq, clock = shard
    step, scale, hyper, c1, c2, group = numbers
    assert exp_avg_sq is not None
    assert isinstance(c1, Tensor)
    assert c2 is not None
    return _update(
        (theta, exp_avg, clock),
        exp_avg_sq,
        mask,
        mean,
        (step, scale, c1, c2),
        hyper,
        group,
        theta,
        ranks,
        CORRECTED=True,
        ADAMW=True,
        IMPLICIT=implicit,
    )


def _update(
    state: tuple[Tensor, Tensor, Tensor],
    second: Tensor | None,
    mask: Tensor | None,
    total: Tensor,
    by_row: tuple[Tensor, Tensor, Tensor, Tensor],
    hyper: Hyper,
    group: Tensor | None,
    floor: Tensor,
    ranks: int,
    **rule: bool,
) -> Tensor:
    """Launches the update; ``by_row`` are step, scale and the two corrections, 0-dim or ``[R]`` each."""
    theta, momentum, clock = state
    step, scale, correction, correction2 = by_row
    assert theta.is_contiguous()
    assert total.is_contiguous()
    assert correction.dim() == correction2.dim()
    again = torch.zeros((), dtype=torch.int64, device=theta.device)
    numbers = [value.contiguous() for value in torch.broadcast_tensors(*hyper)]
    _launch(
        _update_kernel,
        triton.cdiv(theta.numel(), _PICK_CHUNK),
        theta,
        momentum,
        clock,
        again if mask is None else mask.contiguous(),
        total,
        step,
        again,
        scale.to(theta.device),
        again if group is None else group,
        *numbers,
        correction,
        correction2,
        momentum if second is None else second,
        floor,
        theta.new_full((), torch.finfo(theta.dtype).max),
        theta.numel(),
        momentum.stride(0),
        clock.stride(0),
        momentum.stride(0) if second is None else second.stride(0),
        step.dim(),
        scale.dim(),
        correction.dim(),
        theta.shape[1],
        ranks,
        MASKED=mask is not None,
        BY_GROUP=group is not None,
        MEASURED=second is not None,
        LONGEST=naive.LONGEST_MOVE,
        CHUNK=_PICK_CHUNK,
        num_warps=4,
        **rule,
    )
    return again


# --------------------------------------------------------------------------- parameters: each a flat tensor of its own


@triton.jit
def _exchange_kernel(
    addresses,
    first_rows,
    kept,
    chunk_pieces,
    chunk_starts,
    mask,
    values,
    sent,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    PARAMETER: tl.constexpr,
    VALUES: tl.constexpr,
    TO_PARAMETER: tl.constexpr,
    ADD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    piece = tl.load(chunk_pieces + program)
    first = tl.load(chunk_starts + program)
    entry = first + tl.arange(0, CHUNK)
    inside = entry < tl.load(kept + piece)
    before = tl.load(first_rows + piece) * sent
    place = before + entry
    row, column = _cells(mask + before, first, inside, sent, MASKED, CHUNK)
    parameter = _pointer(tl.load(addresses + piece), PARAMETER) + row * BLOCK_SIZE + column
    if TO_PARAMETER:
        value = _widen(tl.load(values + place, mask=inside, other=0), VALUES)
        if ADD:
            value = _widen(tl.load(parameter, mask=inside, other=0), PARAMETER) + value
        tl.store(parameter, _narrow(value, PARAMETER), mask=inside)
    else:
        value = _widen(tl.load(parameter, mask=inside, other=0), PARAMETER)
        tl.store(values + place, _narrow(value, VALUES), mask=inside)


def gather_params(
    flats: Sequence[Tensor], pieces: Sequence[Piece], mask: Tensor | None, out: Tensor, block_size: int
) -> None:
    """See :func:`naive.gather_params`. One launch per dtype of the parameters."""
    _exchange(flats, pieces, mask, out, block_size, to_parameter=False)


def scatter_params(
    flats: Sequence[Tensor],
    pieces: Sequence[Piece],
    mask: Tensor | None,
    values: Tensor,
    block_size: int,
    add: bool = False,
) -> None:
    """See :func:`naive.scatter_params`. One launch per dtype of the parameters."""
    _exchange(flats, pieces, mask, values.contiguous(), block_size, to_parameter=True, add=add)


def _exchange(
    flats: Sequence[Tensor],
    pieces: Sequence[Piece],
    mask: Tensor | None,
    values: Tensor,
    block_size: int,
    *,
    to_parameter: bool,
    add: bool = False,
) -> None:
    assert values.is_contiguous()
    sent = values.shape[1]
    mask = None if mask is None else mask.contiguous()
    for dtype in dict.fromkeys(flats[piece.segment.index].dtype for piece in pieces):
        group = [piece for piece in pieces if flats[piece.segment.index].dtype == dtype]
        programs, chunks = _chunks(tuple(p.kept(sent, block_size) for p in group), _PICK_CHUNK, values.device)
        _launch(
            _exchange_kernel,
            programs,
            _addresses([flats[piece.segment.index][piece.of_parameter] for piece in group]),
            _table(tuple(piece.row for piece in group), values.device),
            *chunks,
            _raw(values) if mask is None else mask,
            _raw(values),
            sent,
            BLOCK_SIZE=block_size,
            MASKED=mask is not None,
            PARAMETER=_DTYPES[dtype],
            VALUES=_DTYPES[values.dtype],
            TO_PARAMETER=to_parameter,
            ADD=add,
            CHUNK=_PICK_CHUNK,
            num_warps=4,
        )


def checksum(flat: Tensor) -> Tensor:
    """See :func:`naive.checksum`; bitwise."""
    return naive._checksum_in_chunks(flat, _LARGE_CHUNK)


# ------------------------------------------------------------------------------------------------ launches and tables


def _launch(kernel: Any, programs: int | tuple[int, int], *args: Any, **meta: Any) -> None:
    """Starts a kernel on the current stream of its tensors' device, and waits for nothing.

    A number with a fraction must come in a tensor: compiled kernels get it as fp32, whatever they compute in, and
    Triton's interpreter as it is.
    """
    assert not any(isinstance(arg, float) for arg in args)
    grid = (programs,) if isinstance(programs, int) else programs
    if not all(grid):
        return
    with torch.cuda.device_of(next(arg for arg in args if isinstance(arg, Tensor))):
        kernel[grid](*args, **meta, enable_fp_fusion=False)


def _raw(tensor: Tensor) -> Tensor:
    """A tensor as kernels take it: bf16 as int16."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def _dense(flat: Tensor) -> Tensor:
    return flat if flat.is_contiguous() else flat.contiguous()


def _aligned(tensor: Tensor) -> bool:
    """Whether 16 bytes can be read at once from its start."""
    return tensor.data_ptr() % 16 == 0


def _bound(clip_value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bound as a number of the gradient's dtype, to which torch's clamp rounds it; 0-dim, fp32 or fp64."""
    bound = torch.full((), naive._within(clip_value, dtype), dtype=dtype, device=device)
    return bound.to(torch.promote_types(dtype, torch.float32))


def _by_kind(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Those that hold anything, by dtype and alignment."""
    groups: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            flat = _dense(tensor).view(-1)
            groups.setdefault((flat.dtype, _aligned(flat)), []).append(flat)
    return list(groups.values())


def _addresses(flats: Sequence[Tensor]) -> Tensor:
    """Where each tensor lies; kept until other addresses are asked for 64 times, since storages may move."""
    return _table(tuple(flat.data_ptr() for flat in flats), flats[0].device)


def _chunks(sizes: tuple[int, ...], chunk: int, device: torch.device) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """Programs needed for tensors of these sizes; the sizes, each program's tensor, and its first entry there."""
    return _cached_chunks(sizes, chunk, device, _stream_of(device))


def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return _cached_table(numbers, device, _stream_of(device))


# The stream is part of the key: a table is read on the stream that filled it, and its memory returns to that stream.


@lru_cache(maxsize=_CACHED_TABLES)
def _cached_chunks(
    sizes: tuple[int, ...], chunk: int, device: torch.device, stream: int
) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    numels = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    counts = (numels + (chunk - 1)) // chunk
    tensors = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device="cpu"), counts)
    before = counts.cumsum(0) - counts
    starts = (torch.arange(tensors.numel(), device="cpu") - before[tensors.long()]) * chunk
    return tensors.numel(), (to_device(numels, device), to_device(tensors, device), to_device(starts, device))


@lru_cache(maxsize=_CACHED_TABLES)
def _cached_table(numbers: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)


def _stream(tensor: Tensor) -> int:
    return _stream_of(tensor.device)


def _stream_of(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0
