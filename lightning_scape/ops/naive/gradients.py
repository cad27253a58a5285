"""What a rank does with its gradient, in plain PyTorch: its sketch, the whole sweep; and checksums of parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_scape.core.layout import Region
from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.masks import chunk, column, cut, gather_blocks, row_slices, scatter_blocks
from lightning_scape.ops.naive.wire import quantize_with_error


@operation
def sketch(grads: Sequence[Tensor | None], signs: Tensor, widths: Sequence[int]) -> Tensor:
    """Signed bucket sums of a gradient, linear in it (AMS sketch: Alon, Matias, Szegedy 1996; docs/design.md, 3.2).

    Entry ``i`` of a chunk goes to bucket ``(i mod w + r) mod W`` with sign ``s * signs[i + o]``; ``w`` (one of
    ``widths``, of which W is the largest), ``r``, ``o`` and ``s`` change pseudo-randomly from chunk to chunk. Widths
    should be different primes: with one power of two, whole columns of a matrix would fall into one bucket. The
    expected square of the sketch's norm is the square of the gradient's norm, with a relative standard deviation of
    ``sqrt(2 / W)`` (half of it for the norm).

    Args:
        grads: flat gradients, any float dtype; None is a gradient of zeros.
        signs: fp32 ``[2 L]`` of +1 and -1, on CUDA also int8; L is the length of a chunk.
        widths: buckets used, by chunk.

    Returns:
        fp32 ``[W]``. A NaN or inf in the gradient makes the sum over it not finite.
    """
    buckets = torch.zeros(max(widths), dtype=torch.float32, device=signs.device)
    length = signs.numel() // 2
    for index, grad in enumerate(grads):
        for number, part in enumerate([] if grad is None else grad.split(length)):
            width, rotation, offset, sign = draw(index, number, length, tuple(widths))
            signed = part.float() * signs[offset : offset + part.numel()]
            rows = -(-signed.numel() // width)
            columns = F.pad(signed, (0, rows * width - signed.numel())).view(rows, width).sum(0)
            buckets += sign * F.pad(columns, (0, buckets.numel() - width)).roll(rotation)
    return buckets


@functools.lru_cache(maxsize=1 << 16)  # each step asks
def draw(index: int, number: int, length: int, widths: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Width, rotation, offset and sign of a gradient's chunk in :func:`sketch`, pseudo-randomly."""
    mixed = _mix(index, number)
    return widths[(mixed >> 24) % len(widths)], (mixed >> 32) % max(widths), mixed % length, 1 - 2 * (mixed >> 63)


def _mix(a: int, b: int) -> int:
    """64 well-mixed bits of two small integers (the finalizer of splitmix64)."""
    z = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)


def fold(residual: Tensor, grad: Tensor, scale: Tensor) -> None:
    """``residual += scale * grad``, in place.

    Example: residual ``[1, 1]``, gradient ``[3, -8]`` and scale 0.5 give ``[2.5, -3]``.

    Args:
        residual: flat.
        grad: flat, any float dtype.
        scale: 0 folds nothing, even where a gradient is not finite.
    """
    for here, given in zip(residual.split(chunk(residual)), grad.split(chunk(residual)), strict=True):
        factor = scale.to(here)
        here.copy_(torch.where(factor != 0, here + factor * given.to(here), here))


def accumulate_exp_avg_sq(moment: Tensor, grad: Tensor | None, weight: float, ranks: int, scale: Tensor) -> None:
    """AdamW's second moment from the owner's own gradient: ``v = (1 - w) * v + w * (scale * grad)**2 / N``, in place.

    An average over N ranks whose gradients are noise has an N-th of one rank's mean square. What the ranks have in
    common is added where the entry is updated: :func:`adamw_step`. It stays finite.

    Args:
        moment: v, flat, fp32 or fp64.
        grad: flat, any float dtype; None is a gradient of zeros.
        weight: of the gradient, in (0, 1]: ``1 - beta2``.
        ranks: N.
        scale: 0 changes nothing.
    """
    grad = moment.new_zeros(()).expand_as(moment) if grad is None else grad
    for here, given in zip(moment.split(chunk(moment)), grad.split(chunk(moment)), strict=True):
        factor = scale.to(here)
        value = factor * given.to(here)
        moved = (1 - weight) * here + (weight / ranks) * value.square()
        here.copy_(torch.where(factor != 0, moved.clamp(max=torch.finfo(here.dtype).max), here))


def compact(residual: Tensor, mask: Tensor | None, scale: Tensor) -> Tensor:
    """Takes the masked entries out of the residual, fp32 ``[R, B]``, and returns them: ``[R, q]``.

    Example: ``[[1, 5]]`` with mask ``[[0]]`` sends ``[[1]]`` and keeps ``[[0, 5]]``.

    ``scale`` is 0-dim, or one for each row ``[R]``; 0 sends zeros and leaves the residual as it is.
    """
    there = gather_blocks(residual, mask)
    sent = torch.where(column(scale) != 0, there, 0.0)
    scatter_blocks(residual, mask, there - sent)
    return sent


class SecondMoment(NamedTuple):
    """What a sweep adds the owner's own gradient to."""

    exp_avg_sq: Tensor
    """``[rows, B]``, changed in place."""
    weights: Sequence[float]
    """Of this gradient, for each piece: ``1 - beta2`` for AdamW."""
    ranks: int
    """N."""


class Sweep(NamedTuple):
    """What :func:`sweep` works on. Every tensor ``[rows, ...]`` counts the same rows."""

    region: Region
    """Which rows, and which parameters fill them."""
    residual: Tensor
    """fp32 ``[rows, B]``, changed in place."""
    grads: Sequence[Tensor | None] | None
    """Flat gradient of every parameter, by index, any float dtype; None is a gradient of zeros. None for all: they have
    been folded before."""
    scale: Tensor
    """0-dim, or one for each row, the same for all rows of a piece. 0 folds and sends nothing: values are 0, the rest
    stays as it is."""
    mask: Tensor | None
    """``[rows, q]`` positions, or None: everything is sent."""
    values: Tensor | None
    """fp32 ``[rows, q]``, written. None: gradients are folded, and nothing is sent."""
    second_moment: SecondMoment | None = None
    """The owner's, or None."""
    message: Tensor | None = None
    """uint8 ``[S, G, W]``, written: the values travel in 4 bits. The rows are those of S shards, of which the
    region has some as a whole; the message of the others stays as it is."""

    def shards_of(self, rows: slice) -> Iterator[tuple[int, slice]]:
        """The shards of the message that have these rows: number, and rows."""
        assert self.message is not None
        each = len(self.residual) // len(self.message)
        for start in range(rows.start, rows.stop, max(1, each)):
            yield start // each, slice(start, start + each)


@operation
def sweep(work: Sweep) -> None:
    """What a rank does with its gradient in the rows of a region, in one pass over memory (docs/design.md, 3.4).

    In this order, and equal to these operations one after the other:

    1. **fold**      ``residual += scale * grad`` (:func:`fold`), and the owner's second moment
       (:func:`accumulate_exp_avg_sq`);
    2. **compact**   the masked entries leave the residual (:func:`compact`), into ``values``. Where a message in 4
       bits is asked for, that is :func:`quantize_with_error` of each shard, for entries that have not changed: the
       residual is what was not sent yet, and what rounding leaves goes back into it.

    Rows outside the region are left alone.
    """
    residual, scale, values, second = work.residual, work.scale, work.values, work.second_moment
    if work.grads is not None:
        for place, piece in enumerate(work.region.pieces):
            grad, inside = work.grads[piece.index], piece.of_blocks(residual.shape[1])
            factor = cut(scale, piece.row)
            if grad is not None:
                grad = grad[piece.of_parameter]
                fold(residual.view(-1)[inside], grad, factor)
            if second is not None:
                moment, weight = second.exp_avg_sq.view(-1)[inside], second.weights[place]
                accumulate_exp_avg_sq(moment, grad, weight, second.ranks, factor)
    if values is None:
        return
    for rows in work.region.rows:
        if work.message is None:
            for few in row_slices(residual, residual.shape[1], rows):
                values[few] = compact(residual[few], cut(work.mask, few), cut(scale, few))
            continue
        for shard, few in work.shards_of(rows):
            here = values[few].zero_()
            work.message[shard] = quantize_with_error(residual[few], cut(work.mask, few), here, here, cut(scale, few))


def mean(contributions: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The mean over ranks, summed in ``dtype`` (fp32 or fp64) in the order of the list: a new tensor of their shape."""
    total = contributions[0].to(dtype, copy=True)
    for contribution in contributions[1:]:
        total.add_(contribution)
    return total.div_(len(contributions))


def checksum(flat: Tensor) -> Tensor:
    """Two 64-bit sums over the bits of a flat tensor, 4 bytes at a time: int64 ``[2]``.

    In the first each number is multiplied by a pseudo-random odd one that belongs to its place. So a changed number
    changes both sums, and two that changed places change the first, but for a chance of at most 2**-32.
    """
    sums, first = torch.zeros(2, dtype=torch.int64, device=flat.device), 0
    for part in flat.split(chunk(flat)):
        bits = part.view({1: torch.int8, 2: torch.int16}.get(part.element_size(), torch.int32)).long()
        # The finalizer of splitmix64, on signed integers that wrap.
        z = torch.arange(first + 1, first + 1 + len(bits), dtype=torch.int64, device=flat.device) * -0x61C8864680B583EB
        z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
        z = (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15
        sums += torch.stack([(bits * (z | 1)).sum(), bits.sum()])
        first += len(bits)
    return sums
