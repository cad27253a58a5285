"""The operations of a step in plain PyTorch: the definition that every faster implementation is tested against.

Symbols: ``B`` block length, ``q`` entries sent per block, ``R`` rows (blocks) of the tensor at hand, ``P`` parameters.
A *mask* is an integer tensor ``[R, q]`` of positions in ``0 .. B-1``, no position twice in a row; ``mask=None`` stands
for all of them (``q = B``), which costs no index. A *scale* is a 0-dim fp32 tensor: the clipping factor of the step,
and 0 for a step that must be skipped; every function here then leaves its state untouched.

Nothing here is tuned, and temporaries are as large as the state. Where no faster implementation serves, :mod:`.chunked`
calls these functions with a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_scape.core.layout import Piece, Region
from lightning_scape.ops.naive.masks import merge, position_dtype, proposal_bytes, propose, select, votes_in
from lightning_scape.ops.naive.params import gather_params, renew_masters, scatter_params
from lightning_scape.ops.naive.rules import (
    LONGEST_MOVE,
    AdamWStep,
    Hyper,
    RowNumbers,
    SecondMoment,
    ShardState,
    TauStep,
    adams_step,
    adamw_step,
    column,
)
from lightning_scape.ops.naive.wire import (
    changes,
    dequantize,
    gather_blocks,
    mean,
    quantize,
    quantize_with_error,
    scatter_blocks,
)

__all__ = [
    "LONGEST_MOVE",
    "AdamWStep",
    "Hyper",
    "RowNumbers",
    "SecondMoment",
    "ShardState",
    "TauStep",
    "accumulate_exp_avg",
    "accumulate_exp_avg_sq",
    "adams_step",
    "adamw_step",
    "changes",
    "checksum",
    "compact",
    "dequantize",
    "fold",
    "gather_blocks",
    "gather_params",
    "mean",
    "merge",
    "position_dtype",
    "proposal_bytes",
    "propose",
    "quantize",
    "quantize_with_error",
    "renew_masters",
    "scatter_blocks",
    "scatter_params",
    "select",
    "sketch",
    "squared_norm",
    "sweep",
    "to_device",
    "update_adams",
    "update_adamw",
    "votes_in",
]

# ------------------------------------------------------------------------------------------------ gradients


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all entries: 0-dim fp32; inf or NaN if any entry is (or if the sum overflows)."""
    norms = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return torch.stack([norm.float() for norm in norms]).square().sum()


def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    """Signed bucket sums of a gradient, linear in it (AMS sketch: Alon, Matias, Szegedy 1996; docs/design.md, 3.2).

    Entry ``i`` of a chunk goes to bucket ``(i mod w + r) mod W`` with sign ``s * signs[i + o]``; ``w`` (one of
    ``widths``, of which W is the largest), ``r``, ``o`` and ``s`` change pseudo-randomly from chunk to chunk. Widths
    should be different primes: with one power of two, whole columns of a matrix would fall into one bucket. The
    expected square of the sketch's norm is the square of the gradient's norm, with a relative standard deviation of
    ``sqrt(2 / W)`` (half of it for the norm).

    Args:
        grads: flat gradients, any float dtype; None is a gradient of zeros.
        signs: fp32 ``[2 L]`` of +1 and -1; L is the length of a chunk.
        widths: buckets used, by chunk.

    Returns:
        fp32 ``[W]``. A NaN or inf in the gradient makes the sum over it not finite.
    """
    buckets = torch.zeros(max(widths), dtype=torch.float32, device=signs.device)
    length = signs.numel() // 2
    for index, grad in enumerate(grads):
        for number, chunk in enumerate([] if grad is None else grad.split(length)):
            width, rotation, offset, sign = draw(index, number, length, widths)
            signed = chunk.float() * signs[offset : offset + chunk.numel()]
            rows = -(-signed.numel() // width)
            columns = F.pad(signed, (0, rows * width - signed.numel())).view(rows, width).sum(0)
            buckets += sign * F.pad(columns, (0, buckets.numel() - width)).roll(rotation)
    return buckets


def draw(index: int, number: int, length: int, widths: Sequence[int]) -> tuple[int, int, int, int]:
    """Width, rotation, offset and sign of a gradient's chunk in :func:`sketch`, pseudo-randomly."""
    mixed = _mix(index, number)
    return widths[(mixed >> 24) % len(widths)], (mixed >> 32) % max(widths), mixed % length, 1 - 2 * (mixed >> 63)


def _mix(a: int, b: int) -> int:
    """64 well-mixed bits of two small integers (the finalizer of splitmix64)."""
    z = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def fold(residuals: Sequence[Tensor], grads: Sequence[Tensor | None], scale: Tensor, clip_value: float | None) -> None:
    """``residual += scale * grad``, in place; ``clip_value`` first clamps the gradient to ``[-v, v]``.

    Example: residual ``[1, 1]``, gradient ``[3, -8]``, scale 0.5 and ``clip_value=4`` give ``[2.5, -1]``.

    Args:
        residuals: flat, the residual's dtype; one per gradient.
        grads: flat, any float dtype; None is a gradient of zeros. Left as they are.
        scale: 0 folds nothing, even where a gradient is not finite.
        clip_value: v > 0, or None.
    """
    for residual, grad in zip(residuals, grads, strict=True):
        if grad is not None:
            folded = residual + _scaled(grad, scale, clip_value, residual)
            residual.copy_(torch.where(scale.to(residual) != 0, folded, residual))


def _scaled(grad: Tensor, scale: Tensor, clip_value: float | None, like: Tensor) -> Tensor:
    """``scale * clamp(grad)``, with the dtype and on the device of ``like``."""
    if clip_value is not None:
        bound = within(clip_value, grad.dtype)
        grad = grad.clamp(-bound, bound)
    return scale.to(like) * grad.to(like)


def within(bound: float, dtype: torch.dtype) -> float:
    """A bound that torch can write in a dtype (it refuses 1e5 in fp16)."""
    return min(bound, torch.finfo(dtype).max)


def accumulate_exp_avg(
    exp_avg: Tensor, exp_avg_sum: Tensor, grad: Tensor, beta1: float, scale: Tensor, clip_value: float | None
) -> None:
    """One step of a rank's own first moment, and its sum since each entry's last visit (``"first_moment"``).

    ``exp_avg = beta1 * exp_avg + ((1 - beta1) * scale) * grad``, then ``exp_avg_sum += exp_avg``; all flat, in place.
    A scale of 0 changes nothing.
    """
    weight = (1 - beta1) * scale.to(exp_avg)
    moved = beta1 * exp_avg + _scaled(grad, weight, clip_value, exp_avg)
    exp_avg.copy_(torch.where(weight != 0, moved, exp_avg))
    exp_avg_sum.copy_(torch.where(weight != 0, exp_avg_sum + exp_avg, exp_avg_sum))


def accumulate_exp_avg_sq(
    moments: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    weights: Sequence[float],
    ranks: int,
    scale: Tensor,
    clip_value: float | None,
) -> None:
    """AdamW's second moment from the owner's own gradient: ``v = (1 - w) * v + w * (scale * grad)**2 / N``, in place.

    An average over N ranks whose gradients are noise has an N-th of one rank's mean square. What the ranks have in
    common is added where the entry is visited: :func:`adamw_step`. It stays finite.

    Args:
        moments: v of each piece of the shard, flat, fp32 or fp64.
        grads: each piece's gradient, flat, any float dtype; None is a gradient of zeros.
        weights: of each piece's gradient, in (0, 1]: ``1 - beta2``, or 1/n for the mean of n samples.
        ranks: N.
        scale: 0-dim, or one for each piece. 0 changes nothing.
        clip_value: first clamps the gradient to ``[-v, v]``; v > 0, or None.
    """
    scales = [scale] * len(moments) if scale.dim() == 0 else scale.unbind()
    for moment, grad, weight, own in zip(moments, grads, weights, scales, strict=True):
        value = _scaled(moment.new_zeros(()) if grad is None else grad, own, clip_value, moment)
        moved = (1 - weight) * moment + (weight / ranks) * value.square()
        moment.copy_(torch.where(own.to(moment) != 0, moved.clamp(max=torch.finfo(moment.dtype).max), moment))


# ------------------------------------------------------------------------------ blocks: residual and shard state


def compact(
    residual: Tensor, mask: Tensor | None, wire_dtype: torch.dtype, scale: Tensor, out: Tensor | None = None
) -> Tensor:
    """Takes the masked entries out of the residual, rounded for the wire; the rounding error stays behind.

    Example: ``[[1.00390625, 5]]`` with mask ``[[0]]`` sends ``[[1]]`` as bf16 and keeps ``[[0.00390625, 5]]``.

    Sent plus what is left equals what was there, exactly: the difference of a number and its rounding is itself a
    number of the wider format. Magnitudes beyond the wire dtype's largest are sent as that, the rest stays.

    Args:
        residual: ``[R, B]``, changed in place.
        mask: ``[R, q]`` or None.
        wire_dtype: dtype of the values sent.
        scale: 0-dim, or one for each row ``[R]``. 0 sends zeros and leaves the residual as it is.
        out: where to put the result, contiguous; None is new memory.

    Returns:
        ``[R, q]`` of ``wire_dtype``.
    """
    applied = column(scale.to(residual.device)) != 0
    limit = within(torch.finfo(wire_dtype).max, residual.dtype)
    there = gather_blocks(residual, mask)
    rounded = torch.where(applied, there.clamp(-limit, limit).to(wire_dtype), 0.0)
    scatter_blocks(residual, mask, there - rounded)
    return rounded if out is None else out.copy_(rounded)


def sweep(
    region: Region,
    residual: Tensor,
    grads: Sequence[Tensor | None] | None,
    scale: Tensor,
    mask: Tensor | None,
    values: Tensor,
    *,
    clip_value: float | None = None,
    second_moment: SecondMoment | None = None,
    proposals: Tensor | None = None,
    next_mask: Tensor | None = None,
) -> None:
    """All of a rank's work on the rows of a region, in one pass over memory (docs/design.md, 3).

    In this order, and equal to these operations one after the other:

    1. **fold**      ``residual += scale * grad`` (:func:`fold`), and the owner's second moment
       (:func:`accumulate_exp_avg_sq`);
    2. **compact**   the masked entries leave the residual (:func:`compact`), into ``values``;
    3. **propose**   what is left is ranked, for the other ranks (:func:`propose`, into ``proposals``) or for the next
       mask (:func:`select`, into ``next_mask``).

    Every tensor ``[rows, ...]`` counts the same rows; those outside the region are left alone.

    Args:
        region: which rows, and which parameters fill them.
        residual: ``[rows, B]``, contiguous, changed in place.
        grads: flat gradient of each piece, any float dtype; None is a gradient of zeros. None for all: they have been
            folded before.
        scale: 0-dim, or one for each row, the same for all rows of a piece. 0 folds and sends nothing: values are 0,
            the rest stays as it is. What is left is ranked all the same.
        mask: ``[rows, q]`` positions, or None: everything is sent.
        values: ``[rows, q]`` of the wire's dtype, written.
        clip_value: first clamps the gradient to ``[-v, v]``.
        second_moment: the owner's, or None.
        proposals: uint8 ``[rows, W]``, written: what :func:`propose` returns, as many entries as fit its width.
        next_mask: ``[rows, q']``, written: what :func:`select` returns.
    """
    length, pieces = residual.shape[1], region.pieces
    if grads is not None:
        scales = [scale if scale.dim() == 0 else scale[piece.row] for piece in pieces]
        for piece, grad, own in zip(pieces, grads, scales, strict=True):
            fold([_entries(residual, piece)], [grad], own, clip_value)
        if second_moment is not None:
            moments, weights, ranks = second_moment
            for piece, grad, weight, own in zip(pieces, grads, weights, scales, strict=True):
                accumulate_exp_avg_sq([_entries(moments, piece)], [grad], [weight], ranks, own, clip_value)
    for rows in region.rows:
        part = None if mask is None else mask[rows]
        compact(residual[rows], part, values.dtype, scale[rows] if scale.dim() else scale, out=values[rows])
        if proposals is not None:
            proposals[rows] = propose(residual[rows], votes_in(proposals.shape[1], length))
        if next_mask is not None:
            next_mask[rows] = select(residual[rows], next_mask.shape[1])


def _entries(blocks: Tensor, piece: Piece) -> Tensor:
    """The piece's entries in ``blocks [rows, B]``, flat, without pads."""
    return blocks.view(-1)[piece.of_blocks(blocks.shape[1])]


# --------------------------------------------------------------------------------------------------- updates


def update_adams(
    shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, floor: float = 1.0
) -> Tensor:
    """:func:`adams_step` on the masked entries of a shard; theta, exp_avg and last_step change in place.

    Example: lr 1, no decay, both betas 0, eps 1e-30: ``theta = [[3]]`` at step 1 with ``mean = [[-2]]``,
    last steps ``[[0, 0]]`` and mask ``[[1]]`` gives ``theta = [[4]]``, exp_avg ``[[0, -2]]``, last steps ``[[0, 1]]``,
    and returns 1.

    Args:
        shard: changed in place, but for its mean square.
        mask: ``[R, q]`` or None.
        mean: ``[R, q]``, A of :func:`adams_step`.
        numbers: of each row.
        floor: as in :func:`adams_step`.

    Returns:
        0-dim int64: how many of the entries were visited in the step before too.
    """
    local, first = shard.exp_avg_sq, numbers.first
    own = numbers.hyper.rows(numbers.group)
    tau = _waits(shard, mask, numbers.step)
    known = None if local is None else gather_blocks(local, mask).to(mean)
    correction = column(first) if isinstance(first, Tensor) else first
    exp_avg = gather_blocks(shard.exp_avg, mask)
    new = adams_step(shard.theta, exp_avg, tau, mean, own, correction, known, floor)
    return _write(shard._replace(exp_avg_sq=None), mask, numbers, new.theta, new.exp_avg, None)


def update_adamw(shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, ranks: int) -> Tensor:
    """:func:`adamw_step` on the masked entries of a shard; theta, both moments and last_step change in place.

    Example: lr 1, no decay, both betas 0, eps 1e-30, one rank: ``theta = [[3]]`` at step 1 with ``mean = [[-2]]``,
    last steps ``[[0, 0]]`` and mask ``[[1]]`` gives ``theta = [[4]]``, exp_avg ``[[0, -2]]``, exp_avg_sq ``[[0, 4]]``.

    Args:
        shard: changed in place. Its second moment is that of the step before without a mask, else it has this step's
            own gradient in it.
        mask: ``[R, q]`` or None.
        mean: ``[R, q]``, A of :func:`adamw_step`.
        numbers: of each row.
        ranks: N.

    Returns:
        0-dim int64: how many of the entries were visited in the step before too.
    """
    assert shard.exp_avg_sq is not None
    assert isinstance(numbers.first, Tensor)
    assert numbers.second is not None
    own, corrections = numbers.hyper.rows(numbers.group), (column(numbers.first), column(numbers.second))
    tau = _waits(shard, mask, numbers.step)
    moments = gather_blocks(shard.exp_avg, mask), gather_blocks(shard.exp_avg_sq, mask)
    new = adamw_step(shard.theta, *moments, tau, mean, own, corrections, ranks, mask is None)
    return _write(shard, mask, numbers, *new)


def _waits(shard: ShardState, mask: Tensor | None, step: Tensor) -> Tensor:
    """Steps since each masked entry's last visit, at least 1: ``[R, q]`` of theta's dtype."""
    return (column(step) - gather_blocks(shard.last_step, mask)).clamp(min=1).to(shard.theta.dtype)


def _write(
    shard: ShardState,
    mask: Tensor | None,
    numbers: RowNumbers,
    theta: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor | None,
) -> Tensor:
    """Writes an update's result, but for rows of scale 0; counts entries that were visited in the step before."""
    last_step = gather_blocks(shard.last_step, mask)
    step, applied = column(numbers.step).to(last_step), column(numbers.scale) != 0
    again = (applied & (step - last_step == 1)).sum()
    for matrix, value in ((shard.exp_avg, exp_avg), (shard.exp_avg_sq, exp_avg_sq), (shard.last_step, step)):
        if matrix is not None and value is not None:
            scatter_blocks(matrix, mask, torch.where(applied, value, gather_blocks(matrix, mask)))
    shard.theta.copy_(torch.where(applied, theta, shard.theta))
    return again


# ------------------------------------------------------------------------------------- checksums, tables


def checksum(flat: Tensor) -> Tensor:
    """Two 64-bit hashes of a flat tensor, of its sums by column and by row: int64 ``[2]``.

    A changed bit, or two entries that changed places, changes at least one of them, but for a chance of about 2**-64.
    """
    return checksum_of_sums(*column_and_row_sums(flat, 0))


def column_and_row_sums(part: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Sums of bits, as a table of 1,024 columns: int64 ``[1024]``, and one hash over those of all rows.

    Both of a long tensor are the sums of those of its parts, where all parts but the last are whole rows.

    Args:
        part: flat.
        first: entries of the tensor before this part.
    """
    width, bits = 1024, part.view({1: torch.int8, 2: torch.int16}.get(part.element_size(), torch.int32)).long()
    first_row = first // width * (bits.numel() // max(1, part.numel()))  # 8 bytes are two numbers of 4
    rows = -(-bits.numel() // width)
    table = F.pad(bits, (0, rows * width - bits.numel())).view(rows, width)
    return table.sum(0), _hashes(table.sum(1), first_row).sum()


def checksum_of_sums(columns: Tensor, rows: Tensor) -> Tensor:
    """:func:`checksum`, from :func:`column_and_row_sums`."""
    return torch.stack([_hashes(columns, -columns.numel() - 1).sum(), rows])


def _hashes(sums: Tensor, first: int) -> Tensor:
    """Each sum mixed with its place, counted from ``first`` (splitmix64's finalizer, on signed integers that wrap)."""
    place = torch.arange(first, first + sums.numel(), dtype=torch.int64, device=sums.device)
    z = sums + (place + 1) * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15
    return z ^ (z >> 31)


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """A table that was made on the host, for which the host does not wait: the copy is out of pinned memory on CUDA."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
