"""Gradients in plain PyTorch: their norm, and what they are added to; and checksums of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_scape.ops.dispatch import operation
from lightning_scape.ops.naive.parts import chunk


@operation
def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all entries: 0-dim fp32; inf or NaN if any entry is (or if the sum overflows)."""
    parts = [part for grad in grads for part in grad.reshape(-1).split(chunk(grad))]
    norms = [torch.linalg.vector_norm(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in parts]
    return torch.stack([norm.float() for norm in norms]).square().sum()


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
            width, rotation, offset, sign = draw(index, number, length, widths)
            signed = part.float() * signs[offset : offset + part.numel()]
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
    parts = moment.split(chunk(moment))
    for here, given in zip(parts, [None] * len(parts) if grad is None else grad.split(chunk(moment)), strict=True):
        factor = scale.to(here)
        value = factor * (here.new_zeros(()) if given is None else given.to(here))
        moved = (1 - weight) * here + (weight / ranks) * value.square()
        here.copy_(torch.where(factor != 0, moved.clamp(max=torch.finfo(here.dtype).max), here))


def checksum(flat: Tensor) -> Tensor:
    """Two 64-bit hashes of a flat tensor, of its sums by column and by row: int64 ``[2]``.

    A changed bit, or two entries that changed places, changes at least one of them, but for a chance of about 2**-64.
    """
    width, first_row = 1024, 0
    columns, rows = torch.zeros(2, width, dtype=torch.int64, device=flat.device)
    for part in flat.split(chunk(flat)):  # whole rows, but for the last
        # 8 bytes are two numbers of 4.
        bits = part.view({1: torch.int8, 2: torch.int16}.get(part.element_size(), torch.int32)).long()
        table = F.pad(bits, (0, -len(bits) % width)).view(-1, width)
        columns += table.sum(0)
        rows[0] += _hashes(table.sum(1), first_row).sum()
        first_row += len(table)
    return torch.stack([_hashes(columns, -width - 1).sum(), rows[0]])


def _hashes(sums: Tensor, first: int) -> Tensor:
    """Each sum mixed with its place, counted from ``first`` (splitmix64's finalizer, on signed integers that wrap)."""
    place = torch.arange(first, first + sums.numel(), dtype=torch.int64, device=sums.device)
    z = sums + (place + 1) * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15
    return z ^ (z >> 31)
