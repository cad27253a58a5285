"""The arithmetic of a step in plain PyTorch: the definition that every faster kernel is tested against.

Symbols: ``B`` block length, ``q`` entries sent per block, ``R`` rows (blocks) of the tensor at hand, ``P`` parameters.
A *mask* is an integer tensor ``[R, q]`` of positions in ``0 .. B-1``, no position twice in a row; ``mask=None`` stands
for all of them (``q = B``), which costs no index. A *scale* is a 0-dim fp32 tensor: the clipping factor of the step,
and 0 for a step that must be skipped; every function here then leaves its state untouched.

Nothing here allocates a tensor of the size of its state: work goes in chunks of rows that stay in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_scape.layout import Piece, Region

_CHUNK = 1 << 18
"""Entries handled at a time: small enough for a core's cache, large enough to hide the cost of a call."""
_SMALL_CHUNK = 1 << 15
"""Likewise where many temporaries are alive at once."""
_SMALL_ROWS = 1 << 11
"""At most so many rows then: an entry read from each has its cache line brought in, to be there when it is written."""
_MAX_PASSES = 8
"""Up to so many entries a block are chosen by repeated maximum; beyond it by NumPy's partition, which is vectorized and
several times faster than ``topk``."""
_MAGNITUDE_BITS = 0x7FFFFFFF
"""All bits of an fp32 but its sign; as an integer, these order finite magnitudes (and rank inf, NaN above them)."""


LONGEST_MOVE = 25.0
"""Learning rates that one visit moves an entry by, at most, with the update of AdamW."""


class Hyper(NamedTuple):
    """Hyperparameters of parameter groups: 0-dim for one, else ``[G]``, or ``[R, 1]`` by row; in the state's dtype.

    What fp32 cannot form from rounded betas without losing digits (``1 - 0.999`` is off by 5e-5) stands here ready.
    """

    lr: Tensor
    beta1: Tensor
    log_beta1: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    eps: Tensor
    keep: Tensor
    """``1 - lr * weight_decay``."""
    log_keep: Tensor
    """Of its magnitude."""

    @classmethod
    def of(
        cls, dtype: torch.dtype, lr: Tensor, beta1: Tensor, beta2: Tensor, eps: Tensor, weight_decay: Tensor
    ) -> Hyper:
        """From the five numbers, given in fp64."""
        keep = 1 - lr * weight_decay
        exact = (lr, beta1, beta1.log(), 1 - beta1, beta2, 1 - beta2, eps, keep, keep.abs().log())
        return cls(*(value.to(dtype) for value in exact))

    def rows(self, group: Tensor | None) -> Hyper:
        """Those of the rows whose groups are ``group [r]``, by row; None, and what is 0-dim, is the same for all."""
        return Hyper(*(_by_row(value, group) for value in self))


def _rows(value: Tensor, rows: slice) -> Tensor:
    """Some rows' numbers of ``value [R]``, as a column; a 0-dim one is the same for all rows."""
    return value[rows].unsqueeze(1) if value.dim() else value


def _by_row(value: Tensor, group: Tensor | None) -> Tensor:
    return value if group is None or not value.dim() else value.index_select(0, group).unsqueeze(1)


class ShardState(NamedTuple):
    """What an update changes: the rows of a shard."""

    theta: Tensor
    """``[R, q]``, contiguous: values of the masked parameters."""
    exp_avg: Tensor
    """``[R, B]`` of theta's dtype."""
    exp_avg_sq: Tensor | None
    """Likewise. AdamS only reads it: the gradient's own mean square, or None."""
    last_step: Tensor
    """``[R, B]`` int32, step of each entry's last update."""


class RowNumbers(NamedTuple):
    """What an update needs to know of each row: ``[R]``, or 0-dim where it is the same for all."""

    step: Tensor
    """int32, t of this step."""
    scale: Tensor
    """fp32; 0 changes nothing."""
    hyper: Hyper
    """0-dim, or ``[G]``."""
    first: Tensor | float
    """Divides first moments: ``1 - beta1**t``, or 1 for none."""
    second: Tensor | None = None
    """Divides second moments: ``1 - beta2**t``."""
    group: Tensor | None = None
    """int32 ``[R]``, the parameter group of each row; None where ``hyper`` is 0-dim."""


_Array = Any
"""A tensor; on the CPU a view of it as NumPy's array, whose slices and sums cost less."""


class TauStep(NamedTuple):
    """Result of :func:`adams_step`."""

    theta: Tensor
    momentum: Tensor


class AdamWStep(NamedTuple):
    """Result of :func:`adamw_step`."""

    theta: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


# ------------------------------------------------------------------------------------------------ gradients


def squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all entries: 0-dim fp32; inf or NaN if any entry is (or if the sum overflows)."""
    plain = [grad for grad in grads if grad.dtype == torch.float32]
    # Summing another dtype in fp32 (fp64) converts it first: in chunks, for that is a temporary.
    others = [chunk for grad in grads if grad.dtype != torch.float32 for chunk in grad.reshape(-1).split(_CHUNK)]
    norms = list(torch._foreach_norm(plain)) if plain else []
    norms += [torch.linalg.vector_norm(chunk, dtype=_accumulate_in(chunk)).float() for chunk in others]
    return torch.stack(norms).square().sum()


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
    length, target, all_signs = signs.numel() // 2, _array(buckets), _array(signs)
    with np.errstate(all="ignore"):  # a gradient that is not finite is no error here
        for index, grad in enumerate(grads):
            for number, chunk in enumerate([] if grad is None else _chunks(grad, length)):
                width, rotation, offset, sign = _draw(index, number, length, widths)
                _add_signed(target, chunk, all_signs[offset : offset + len(chunk)], width, rotation, sign)
    return buckets


def fold(residuals: Sequence[Tensor], grads: Sequence[Tensor | None], scale: Tensor, clip_value: float | None) -> None:
    """``residual += scale * grad``, in place; ``clip_value`` first clamps the gradient to ``[-v, v]``.

    Example: residual ``[1, 1]``, gradient ``[3, -8]``, scale 0.5 and ``clip_value=4`` give ``[2.5, -1]``.

    Args:
        residuals: flat, the residual's dtype; one per gradient.
        grads: flat, any float dtype; None is a gradient of zeros. Left as they are.
        scale: 0 folds nothing, even where a gradient is not finite.
        clip_value: v > 0, or None.
    """
    on_host = _host_value(scale)
    if on_host == 0.0:
        return
    for residual, grad in zip(residuals, grads, strict=True):
        if grad is None:
            continue
        for target, part in zip(residual.split(_CHUNK), grad.split(_CHUNK), strict=True):
            value = _clamped(part, clip_value)
            if value.device != target.device or value.dtype != target.dtype:
                value = value.to(device=target.device, dtype=target.dtype)
            if on_host is None:
                factor = scale.to(target.device)
                target.add_(torch.where(factor != 0, value * factor, 0.0))
            else:
                target.add_(value, alpha=on_host)


def _clamped(grad: Tensor, clip_value: float | None) -> Tensor:
    if clip_value is None:
        return grad
    bound = _within(clip_value, grad.dtype)
    return grad.clamp(-bound, bound)


def _within(bound: float, dtype: torch.dtype) -> float:
    """A bound that torch can write in a dtype (it refuses 1e5 in fp16)."""
    return min(bound, torch.finfo(dtype).max)


def accumulate_exp_avg(
    momentum: Tensor, evidence: Tensor, grad: Tensor, beta1: float, scale: Tensor, clip_value: float | None
) -> None:
    """One step of a rank's own first moment, and its sum since each entry's last visit (``"first_moment"``).

    ``momentum = beta1 * momentum + (1 - beta1) * scale * grad``, then ``evidence += momentum``; all flat, in place.
    A scale of 0 changes nothing.
    """
    on_host = _host_value(scale)
    if on_host == 0.0:
        return
    for first, total, part in zip(momentum.split(_CHUNK), evidence.split(_CHUNK), grad.split(_CHUNK), strict=True):
        value = _clamped(part, clip_value)
        value = value.to(device=first.device, dtype=first.dtype)
        if on_host is None:
            factor = scale.to(first.device)
            moved = beta1 * first + (1 - beta1) * factor * value
            first.copy_(torch.where(factor != 0, moved, first))
            total.add_(torch.where(factor != 0, first, 0.0))
        else:
            first.mul_(beta1).add_(value, alpha=(1 - beta1) * on_host)
            total.add_(first)


def measure_noise(
    noise: Tensor, grad: Tensor | None, weight: float, ranks: int, scale: Tensor, clip_value: float | None
) -> None:
    """``noise = (1 - weight) * noise + weight * (scale * grad)**2 / ranks``: a running mean of squares, in place.

    An average over ranks whose gradients are noise has an N-th of one rank's mean square. So this estimates that of the
    averaged gradient where noise prevails, and is below it where ranks agree. It stays finite.

    Args:
        noise: flat, fp32 or fp64.
        grad: flat, any float dtype, as long; None is a gradient of zeros.
        weight: of this gradient, in (0, 1].
        ranks: N.
        scale: 0 changes nothing.
        clip_value: first clamps the gradient to ``[-v, v]``; v > 0, or None.
    """
    _measure_noise_in_chunks(noise, grad, weight, ranks, scale, clip_value, _CHUNK)


def _measure_noise_in_chunks(
    noise: Tensor,
    grad: Tensor | None,
    weight: float,
    ranks: int,
    scale: Tensor,
    clip_value: float | None,
    chunk: int,
) -> None:
    """:func:`measure_noise`, ``chunk`` entries at a time."""
    on_host = _host_value(scale)
    if on_host == 0.0:
        return
    means, largest = noise.split(chunk), torch.finfo(noise.dtype).max
    for mean, part in zip(means, [None] * len(means) if grad is None else grad.split(chunk), strict=True):
        value = _clamped(mean.new_zeros(()) if part is None else part, clip_value)
        value = value.to(device=mean.device, dtype=mean.dtype)
        if on_host is None:
            factor = scale.to(mean.device)
            moved = ((1 - weight) * mean + weight / ranks * (factor * value).square()).clamp_(max=largest)
            mean.copy_(torch.where(factor != 0, moved, mean))
        else:
            mean.mul_(1 - weight).addcmul_(value, value, value=weight / ranks * on_host**2).clamp_(max=largest)


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
        weights: ``1 - beta2`` of each piece.
        ranks: N.
        scale: 0-dim, or one for each piece. 0 changes nothing.
        clip_value: first clamps the gradient to ``[-v, v]``; v > 0, or None.
    """
    scales = [scale] * len(moments) if scale.dim() == 0 else scale.unbind()
    for moment, grad, weight, own in zip(moments, grads, weights, scales, strict=True):
        measure_noise(moment, grad, weight, ranks, own, clip_value)


# ---------------------------------------------------------------------------------------------------- masks


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """A table that was made on the host, for which the host does not wait: the copy is out of pinned memory on CUDA."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def position_dtype(block_size: int) -> torch.dtype:
    """``torch.uint8`` for positions in blocks of up to 256 entries, ``torch.uint16`` above (to 65,536)."""
    return torch.uint8 if block_size <= 256 else torch.uint16


def select(statistic: Tensor, sent: int) -> Tensor:
    """Positions of the ``sent`` largest magnitudes of each block, largest first (docs/design.md, 3.1).

    Magnitude and position make one integer key: the bits of ``|x|``, whose lowest bits (as many as a position needs)
    give way to the position. So magnitudes that agree in all but those bits count as equal (for B = 200: to one part
    in 2**15), equal ones go to the lowest position first, and every implementation chooses the same entries. Pads hold
    0 and stand last in their block, hence are chosen only when no entry is left, and after all entries.

    Example: ``[[3, -5, 0, 0], [0, 0, 0, 0]]`` with ``sent=2`` gives ``[[1, 0], [0, 1]]``.

    Args:
        statistic: ``[R, B]`` float; its sign does not count.
        sent: q, 1 .. B.

    Returns:
        ``[R, q]``, dtype :func:`position_dtype`.
    """
    return _select_in_chunks(statistic, sent, _CHUNK)


def _select_in_chunks(statistic: Tensor, sent: int, chunk: int) -> Tensor:
    """:func:`select`, about ``chunk`` entries at a time."""
    blocks, length = statistic.shape
    assert 1 <= sent <= length
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=statistic.device)
    memory: Tensor | None = None
    for rows in _row_chunks(blocks, length, chunk):
        bits = statistic[rows].to(torch.float32).view(torch.int32)
        # Once, for the first chunk is the largest: a megabyte anew for each would be fetched from the kernel each time.
        memory = torch.empty_like(bits) if memory is None else memory
        chosen[rows] = _largest(bits, sent, memory[: bits.shape[0]])
    return chosen


def _largest(bits: Tensor, sent: int, keys: Tensor) -> Tensor:
    """:func:`select` for the bits of a small fp32 matrix; ``keys`` is memory of that size, or ``bits`` itself."""
    rows, length = bits.shape
    low = (1 << (length - 1).bit_length()) - 1
    torch.bitwise_and(bits, _MAGNITUDE_BITS & ~low, out=keys)
    keys.bitwise_or_(low - torch.arange(length, dtype=torch.int32, device=keys.device))
    if sent <= _MAX_PASSES:
        tops = torch.empty(sent, rows, dtype=torch.int32, device=keys.device)
        last = torch.arange(low, rows * length + low, length, device=keys.device)
        for turn, top in enumerate(tops):
            torch.amax(keys, 1, out=top)
            if turn + 1 < sent:
                keys.view(-1).index_fill_(0, last - (top & low), -1)
        best = tops.t()
    elif keys.device.type == "cpu":
        table, rest = keys.numpy(), length - sent
        if rest:
            table.partition(rest, axis=1)
        table[:, rest:].sort(axis=1)
        best = keys[:, rest:].flip(1)
    else:
        best = keys.topk(sent, dim=1).values
    return (low - (best & low)).to(position_dtype(length))


def propose(residual: Tensor, votes: int) -> Tensor:
    """A rank's ballot: the ``votes`` largest magnitudes of each block, as one row of bytes (docs/design.md, 3).

    A row holds the positions (:func:`position_dtype`), then the values as int8 in units of ``s / 127``, then the byte
    ``log2(s) + 127``; ``s`` is the smallest power of two above the row's largest magnitude.

    Example: ``[[3, -5, 0, 0]]`` with ``votes=2`` gives ``[[1, 0, -79, 48, 130]]`` (as int8 where signed): -5 and 3 in
    units of 8/127.

    Args:
        residual: ``[R, B]`` float, finite.
        votes: V, 1 .. B.

    Returns:
        uint8 ``[R, V * (1 or 2) + V + 1]``.
    """
    return _ballots_of(residual, select(residual, votes))


def _ballots_of(residual: Tensor, chosen: Tensor) -> Tensor:
    """:func:`propose`, for the positions ``chosen [R, V]``, largest magnitude first."""
    values = gather_blocks(residual, chosen).float()
    largest = values[:, :1].abs()
    exponent = (largest.view(torch.int32) >> 23).add_(1).clamp_(max=254)
    codes = values.mul_(127 / (exponent << 23).view(torch.float32)).round_()
    return torch.cat(
        [chosen.view(torch.uint8), codes.to(torch.int8).view(torch.uint8), exponent.to(torch.uint8)], dim=1
    )


def merge(residual: Tensor, ballots: Tensor, own: int, votes: int, sent: int) -> Tensor:
    """The next mask of a shard, from its owner's residual and what the other ranks' ballots add to it.

    Args:
        residual: ``[R, B]``, the owner's.
        ballots: ``[N, R, W]``, from :func:`propose`; that of the owner is not read.
        own: the owner's rank.
        votes: V.
        sent: q.

    Returns:
        ``[R, q]``, as :func:`select` gives it for the sum.
    """
    return _elect_in_chunks(residual, ballots, own, votes, sent, _select_in_place, _CHUNK)


def _elect_in_chunks(
    residual: Tensor,
    ballots: Tensor,
    own: int,
    votes: int,
    sent: int,
    choose: Callable[[Tensor, int], Tensor],
    chunk: int,
) -> Tensor:
    """:func:`merge`, about ``chunk`` entries at a time, by the selection ``choose``, which may use up what it gets."""
    blocks, length = residual.shape
    chosen = torch.empty(blocks, sent, dtype=position_dtype(length), device=residual.device)
    memory: Tensor | None = None
    for rows in _row_chunks(blocks, length, chunk):
        memory = torch.empty_like(residual[rows], dtype=torch.float32) if memory is None else memory
        total = memory[: rows.stop - rows.start].copy_(residual[rows])
        for rank in range(ballots.shape[0]):
            if rank != own:
                positions, values = _read_ballot(ballots[rank, rows], votes, length)
                total.scatter_add_(1, positions, values)
        chosen[rows] = choose(total, sent)
    return chosen


def _select_in_place(total: Tensor, sent: int) -> Tensor:
    """:func:`select` for a small fp32 matrix, which is used up."""
    bits = total.view(torch.int32)
    return _largest(bits, sent, bits)


def _read_ballot(ballot: Tensor, votes: int, length: int) -> tuple[Tensor, Tensor]:
    """Positions (int64) and values (fp32) of a :func:`propose`, ``[R, V]`` each."""
    width = ballot.shape[1] - votes - 1
    positions = ballot[:, :width].contiguous().view(position_dtype(length)).long()
    codes = ballot[:, width:-1].contiguous().view(torch.int8).float()
    unit = (ballot[:, -1:].to(torch.int32) << 23).view(torch.float32) / 127
    return positions, codes * unit


# ------------------------------------------------------------------------------ blocks: residual and shard state


def gather_blocks(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """``[R, q]``: the masked entries of ``matrix [R, B]`` (all of it, not copied, for ``mask=None``)."""
    return matrix if mask is None else matrix.gather(1, mask.long())


def scatter_blocks(matrix: Tensor, mask: Tensor | None, values: Tensor) -> None:
    """Overwrites the masked entries of ``matrix [R, B]`` with ``values [R, q]``."""
    if mask is None:
        matrix.copy_(values)
    else:
        matrix.scatter_(1, mask.long(), values.to(matrix.dtype))


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
    blocks, length = residual.shape
    sent = length if mask is None else mask.shape[1]
    values = torch.empty(blocks, sent, dtype=wire_dtype, device=residual.device) if out is None else out
    on_host = None if scale.dim() else _host_value(scale)
    if on_host == 0.0:
        return values.zero_()
    limit = torch.finfo(wire_dtype).max
    for rows in _row_chunks(blocks, sent, _SMALL_CHUNK, _SMALL_ROWS):
        part = _Chosen(mask, rows, length)
        there = part.of(residual)
        rounded = there.clamp(-limit, limit).to(wire_dtype)
        if on_host is None:
            rounded = torch.where(_rows(scale, rows).to(rounded.device) != 0, rounded, 0.0)
        values[rows] = rounded
        part.set(residual, there.sub_(rounded) if mask is not None else there - rounded)
    return values


class SecondMoment(NamedTuple):
    """What :func:`sweep` adds the owner's own gradient to."""

    exp_avg_sq: Tensor
    """``[rows, B]``, changed in place."""
    weights: Sequence[float]
    """Of this gradient, for each piece: ``1 - beta2`` for AdamW."""
    ranks: int
    """N."""


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
        residual: ``[rows, B]``, changed in place.
        grads: flat gradient of each piece, any float dtype; None is a gradient of zeros. None for all: they have been
            folded before.
        scale: 0-dim, or one for each row. 0 folds and sends nothing: values are 0, the rest stays as it is. What is
            left is ranked all the same.
        mask: ``[rows, q]`` positions, or None: everything is sent.
        values: ``[rows, q]`` of the wire's dtype, written.
        clip_value: first clamps the gradient to ``[-v, v]``.
        second_moment: the owner's, or None.
        proposals: uint8 ``[rows, W]``, written: what :func:`propose` returns, as many entries as fit its width.
        next_mask: ``[rows, q']``, written: what :func:`select` returns.
    """
    blocks, length = residual.shape
    if grads is not None:
        flat = residual.view(-1)
        folded = [flat[piece.of_blocks(length)] for piece in region.pieces]
        factor = scale if scale.dim() == 0 else scale.amax()
        fold(folded, grads, factor, clip_value)
        if second_moment is not None:
            moments = second_moment.exp_avg_sq.view(-1)
            parts = [moments[piece.of_blocks(length)] for piece in region.pieces]
            own = scale if scale.dim() == 0 else scale[[piece.row for piece in region.pieces]]
            accumulate_exp_avg_sq(parts, grads, second_moment.weights, second_moment.ranks, own, clip_value)
    for rows in region.rows:
        part = None if mask is None else mask[rows]
        compact(residual[rows], part, values.dtype, scale[rows] if scale.dim() else scale, out=values[rows])
        if proposals is not None:
            proposals[rows] = propose(residual[rows], votes_in(proposals.shape[1], length))
        if next_mask is not None:
            next_mask[rows] = select(residual[rows], next_mask.shape[1])


def proposal_bytes(votes: int, block_size: int) -> int:
    """Bytes of a row of :func:`propose`."""
    return votes * (position_dtype(block_size).itemsize + 1) + 1 if votes else 0


def votes_in(width: int, block_size: int) -> int:
    """The reverse of :func:`proposal_bytes`."""
    return (width - 1) // (position_dtype(block_size).itemsize + 1)


class _Chosen:
    """The masked entries of some rows: where they lie is worked out once, for all matrices of one shape."""

    def __init__(self, mask: Tensor | None, rows: slice, length: int) -> None:
        self.rows = rows
        self.entries: Tensor | None = None
        """In the rows, counted from their first: int64 ``[R * q]``."""
        if mask is not None:
            self.entries, self.shape = _entries(mask[rows], length), mask[rows].shape
            self.places = self.entries.int()  # which are read with less; an index to write to must be of 64 bits

    def of(self, matrix: Tensor) -> Tensor:
        """``[R, q]``: a copy; but for no mask the rows themselves."""
        if self.entries is None:
            return matrix[self.rows]
        return matrix[self.rows].view(-1).index_select(0, self.places).view(self.shape)

    def set(self, matrix: Tensor, values: Tensor) -> None:
        """Overwrites the entries."""
        if self.entries is None:
            matrix[self.rows] = values
        else:
            matrix[self.rows].view(-1).index_copy_(0, self.entries, values.reshape(-1))


def adams_step(
    theta: Tensor,
    momentum: Tensor,
    tau: Tensor,
    total: Tensor,
    hyper: Hyper,
    correction: Tensor | float,
    noise: Tensor | None = None,
    floor: float = 1.0,
    implicit: bool = False,
) -> TauStep:
    """``tau`` steps of AdamS at once, from the sum of their gradients (docs/design.md, 4; AdamS: arXiv 2505.16363).

    With ``g = A / tau``, the mean gradient since the last visit::

        bt    = b1**tau
        m'    = bt*m + (1-bt)*g                       tau EMA steps
        S     = tau*g + (m - g)*b1*(1-bt)/(1-b1)      sum of the tau first moments
        v     = b2*m**2 + (1-b2)*A**2/tau             A**2/tau estimates E[g**2] per step
        theta = (1 - lr*wd)**tau * theta - lr*S/(sqrt(v)+eps)

    ``implicit`` makes the first moment's tau steps one step of backward Euler::

        bt    = b1/(b1 + (1-b1)*tau)
        m'    = bt*m + (1-bt)*g
        S     = tau*m'

    Either way ``S = tau*g + (m - m')*b1/(1-b1)``: all of a gradient reaches the parameter in the end, whatever the
    waits. But A was measured before any of the steps, and the sum of first moments goes on along an m older still. On
    a quadratic whose curvature, in units of the step size, is h, with constant tau and b1 = 0.9, it is stable up to
    h = 2.1, 0.27 and 0.024 (tau = 2, 10, 100); implicitly up to ``2*(2*b1/(1-b1)/tau + 1)/tau``: 10, 0.56 and 0.024.
    AdamS is up to 38. The first formula for m' fades m as tau steps do; this one, more slowly.

    For ``tau = 1`` this is AdamS, term for term. For ``tau > 1``, v rests on a single sample of ``E[g**2]`` and one of
    ``E[m**2]``. Where the gradient's own running mean square ``n`` is known, a share c of it is their least value (for
    AdamS and noise alone ``E[m**2]`` is ``n*(1-b1)/(1+b1)``)::

        v     = b2*max(m**2, c*n*(1-b1)/(1+b1)) + (1-b2)*max(c*n, A**2/tau)

    All tensors have one shape and float dtype; pure.

    Args:
        theta: parameter values.
        momentum: m, first moment after the last visit.
        tau: steps since the last visit, >= 1.
        total: A, mean over ranks of the gradients summed since the last visit.
        hyper: lr, betas, eps, weight decay.
        correction: divides both first moments; ``1 - b1**t``, or 1 for none.
        noise: n, mean square of the averaged gradient per step; None is not known.
        floor: c.
        implicit: see above.
    """
    h = hyper
    first = tau.clone().eq_(1)  # 1 or 0 in the dtype of the state: blending by it is far cheaper than torch.where
    later = 1 - first
    new_momentum, moved = _first_moments(momentum, tau, total, h, first, later, implicit)
    keep = _decay(tau, h, first, later)
    corrected = not (isinstance(correction, float) and correction == 1.0)
    m2, g2 = (momentum / correction if corrected else momentum).square(), total.square().div_(tau)
    if noise is not None:
        known = (noise * later).mul_(floor)
        g2 = torch.maximum(g2, known, out=g2)
        m2 = torch.maximum(m2, known.mul_(h.one_minus_beta1 / (1 + h.beta1)), out=m2)
    v = m2.mul_(h.beta2).add_(g2.mul_(h.one_minus_beta2))
    if corrected:
        moved = moved.div_(correction)
    new_theta = keep.mul_(theta).sub_(moved.mul_(h.lr).div_(v.sqrt_().add_(h.eps)))
    return TauStep(new_theta, new_momentum)


def _first_moments(
    momentum: Tensor, tau: Tensor, total: Tensor, h: Hyper, first: Tensor, later: Tensor, implicit: bool
) -> tuple[Tensor, Tensor]:
    """``m'`` and ``S`` of :func:`adams_step`."""
    if implicit:
        one_minus_bt = (tau * h.one_minus_beta1).div_((tau - 1).mul_(h.one_minus_beta1).add_(1))
    else:
        one_minus_bt = torch.expm1(tau * h.log_beta1).neg_()
    g = total / tau
    new_momentum = (1 - one_minus_bt).mul_(momentum).add_(one_minus_bt * g)
    if implicit:
        moved = tau * new_momentum
    else:
        moved = (tau * g).add_((momentum - g).mul_(one_minus_bt.mul_(h.beta1).div_(h.one_minus_beta1)))
        # One step's sum is m' itself; the general form gets it from the difference of two numbers 1/(1-b1) as large.
        moved.mul_(later).add_(new_momentum * first)
    return new_momentum, moved


def _decay(tau: Tensor, h: Hyper, first: Tensor, later: Tensor) -> Tensor:
    """``(1 - lr*wd)**tau``."""
    # One step's decay is AdamS's to the last digit.
    keep = (tau * h.log_keep).exp_().mul_(later).add_(h.keep.abs() * first)
    negative = h.keep < 0  # a nonsense that AdamW allows, too: lr * weight_decay above 1
    if negative.device.type != "cpu" or negative.any():
        keep = torch.where(negative & (tau % 2 == 1), -keep, keep)
    return keep


def adamw_step(
    theta: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    tau: Tensor,
    total: Tensor,
    hyper: Hyper,
    corrections: tuple[Tensor, Tensor],
    ranks: int,
    whole: bool,
    implicit: bool = True,
) -> AdamWStep:
    """``tau`` steps of AdamW at once, from the sum of their gradients.

    The first moment m', what it moves S, and the decay are those of :func:`adams_step`, with AdamW's bias corrections
    ``c1 = 1 - b1**t`` and ``c2 = 1 - b2**t``::

        theta = (1 - lr*wd)**tau * theta - lr * S/c1 / (sqrt(u) + eps)

    ``u`` estimates AdamW's ``v/c2``, the mean square of the averaged gradient per step. The owner has no message for
    it. It has v, to which its own gradient was added in every step (:func:`accumulate_exp_avg_sq`), and A::

        v = v + (1-b2) * max(0, A**2 - N * tau**2 * v/c2)     # what the owner cannot have seen
        u = max(v/c2, (m'/c1)**2, (S/c1 / L)**2)              # what the ranks have in common; L is LONGEST_MOVE

    Where gradients are noise, ``v/c2`` is right: an N-th of the owner's own mean square. Where they agree from step to
    step and from rank to rank, ``(m'/c1)**2`` is. The first line is for an entry that has a gradient on other ranks
    only: a mean over tau steps cannot exceed the owner's root mean square unless others saw what the owner did not. It
    is then taken for the gradient of one step, and remembered as AdamW remembers one. The last term of u holds a visit
    to a move of L learning rates: AdamW moves an entry by about one in a step, and old gradients are not worth more.

    With ``whole``, everything is sent, so A is the averaged gradient itself, and v is AdamW's own::

        v = b2*v + (1-b2) * A**2/tau ;  u = v/c2              # the other two terms only for tau > 1

    All tensors have one shape and float dtype; pure.

    Args:
        theta: parameter values.
        exp_avg: m, first moment after the last visit, not corrected.
        exp_avg_sq: v, not corrected.
        tau: steps since the last visit, >= 1.
        total: A, mean over ranks of the gradients summed since the last visit.
        hyper: lr, betas, eps, weight decay.
        corrections: c1 and c2.
        ranks: N.
        whole: see above.
        implicit: as in :func:`adams_step`.
    """
    h, (c1, c2) = hyper, corrections
    first = tau.clone().eq_(1)
    later = 1 - first
    new_exp_avg, moved = _first_moments(exp_avg, tau, total, h, first, later, implicit)
    squared, largest = total.square(), torch.finfo(total.dtype).max
    moved.div_(c1)
    common = torch.maximum((new_exp_avg / c1).abs_(), (moved * (1 / LONGEST_MOVE)).abs_())
    # A square may be infinite where nothing else is: never times zero, nor less another.
    if whole:
        new_exp_avg_sq = (exp_avg_sq * h.beta2).add_(squared.div_(tau).mul_(h.one_minus_beta2))
        common.mul_(later)
    else:
        seen = (exp_avg_sq / c2).mul_(ranks).mul_(tau).mul_(tau).clamp_(max=largest)
        new_exp_avg_sq = squared.sub_(seen).clamp_(min=0).mul_(h.one_minus_beta2).add_(exp_avg_sq)
    new_exp_avg_sq.clamp_(max=largest)
    u = torch.maximum(new_exp_avg_sq / c2, common.square_(), out=common)
    change = moved.mul_(h.lr).div_(u.sqrt_().add_(h.eps))
    return AdamWStep(_decay(tau, h, first, later).mul_(theta).sub_(change), new_exp_avg, new_exp_avg_sq)


def update_adams(
    shard: ShardState,
    mask: Tensor | None,
    mean: Tensor,
    numbers: RowNumbers,
    floor: float = 1.0,
    implicit: bool = False,
) -> Tensor:
    """:func:`adams_step` on the masked entries of a shard; theta, momentum and clock change in place.

    Example: lr 1, no decay, both betas 0, eps 1e-30: ``theta = [[3]]`` at step 1 with ``total = [[-2]]``, clock
    ``[[0, 0]]`` and mask ``[[1]]`` gives ``theta = [[4]]``, momentum ``[[0, -2]]``, clock ``[[0, 1]]``, and returns 1.

    Args:
        shard: changed in place, but for its mean square.
        mask: ``[R, q]`` or None.
        mean: ``[R, q]``, A of :func:`adams_step`.
        numbers: of each row.
        floor: as in :func:`adams_step`.
        implicit: likewise.

    Returns:
        0-dim int64: how many of the entries were visited in the step before too.
    """
    theta, momentum, noise, clock = shard
    step, scale, hyper, correction, _, group = numbers

    def step_of(part: _Chosen, old: Tensor, moment: Tensor, tau: Tensor, own: Hyper) -> TauStep:
        known = None if noise is None else part.of(noise).to(theta.dtype)
        divisor = _rows(correction, part.rows) if isinstance(correction, Tensor) else correction
        return adams_step(old, moment, tau, mean[part.rows], own, divisor, known, floor, implicit)

    return _update_in_chunks(theta, momentum, clock, None, mask, step, hyper, scale, group, step_of)


def update_adamw(
    shard: ShardState, mask: Tensor | None, mean: Tensor, numbers: RowNumbers, ranks: int, implicit: bool = True
) -> Tensor:
    """:func:`adamw_step` on the masked entries of a shard; theta, both moments and the clock change in place.

    Example: lr 1, no decay, both betas 0, eps 1e-30, one rank: ``theta = [[3]]`` at step 1 with ``total = [[-2]]``,
    clock ``[[0, 0]]`` and mask ``[[1]]`` gives ``theta = [[4]]``, exp_avg ``[[0, -2]]``, exp_avg_sq ``[[0, 4]]``.

    Args:
        shard: changed in place. Its second moment is that of the step before without a mask, else it has this step's
            own gradient in it.
        mask: ``[R, q]`` or None.
        mean: ``[R, q]``, A of :func:`adamw_step`.
        numbers: of each row.
        ranks: N.
        implicit: as in :func:`adams_step`.

    Returns:
        0-dim int64: how many of the entries were visited in the step before too.
    """
    theta, exp_avg, exp_avg_sq, clock = shard
    step, scale, hyper, c1, c2, group = numbers
    assert exp_avg_sq is not None
    assert isinstance(c1, Tensor)
    assert c2 is not None

    def step_of(part: _Chosen, old: Tensor, moment: Tensor, tau: Tensor, own: Hyper) -> AdamWStep:
        corrections = _rows(c1, part.rows), _rows(c2, part.rows)
        second = part.of(exp_avg_sq)
        return adamw_step(old, moment, second, tau, mean[part.rows], own, corrections, ranks, mask is None, implicit)

    return _update_in_chunks(theta, exp_avg, clock, exp_avg_sq, mask, step, hyper, scale, group, step_of)


def _update_in_chunks(
    theta: Tensor,
    exp_avg: Tensor,
    clock: Tensor,
    exp_avg_sq: Tensor | None,
    mask: Tensor | None,
    step: Tensor,
    hyper: Hyper,
    scale: Tensor,
    group: Tensor | None,
    step_of: Callable[[_Chosen, Tensor, Tensor, Tensor, Hyper], TauStep | AdamWStep],
) -> Tensor:
    """What both updates do: a chunk of rows at a time, entries are read, stepped and written back."""
    again = torch.zeros((), dtype=torch.int64, device=theta.device)
    on_host = None if scale.dim() else _host_value(scale)
    if on_host == 0.0:
        return again
    blocks, sent = theta.shape
    for rows in _row_chunks(blocks, sent, _SMALL_CHUNK, _SMALL_ROWS):
        part = _Chosen(mask, rows, exp_avg.shape[1])
        old, moment, last = theta[rows], part.of(exp_avg), part.of(clock)
        now = _rows(step, rows)
        tau = (now - last).to(theta.dtype)
        visited_before = tau.eq(1)
        new = step_of(part, old, moment, tau.clamp_(min=1), hyper.rows(None if group is None else group[rows]))
        matrices = [exp_avg] if exp_avg_sq is None else [exp_avg, exp_avg_sq]
        values = list(new)
        if on_host is None:
            applied = _rows(scale, rows) != 0
            visited_before &= applied
            olds = [old, *(part.of(matrix) for matrix in matrices)]
            values = [torch.where(applied, value, before) for value, before in zip(values, olds, strict=True)]
            now = torch.where(applied, now, last)
        again += visited_before.sum()
        theta[rows] = values[0]
        for matrix, value in zip(matrices, values[1:], strict=True):
            part.set(matrix, value)
        part.set(clock, now.expand_as(last))
    return again


# ------------------------------------------------------------------------- parameters: each a flat tensor of its own


def gather_params(
    flats: Sequence[Tensor], pieces: Sequence[Piece], mask: Tensor | None, out: Tensor, block_size: int
) -> None:
    """Copies the masked entries of the parameters into ``out [R, q]``; positions that are pads are left alone.

    Example: ``B = 2``, parameters ``[5, 6, 7]`` and ``[8]``, mask ``[[1], [0], [0]]``: ``out = [[6], [7], [8]]``.

    Args:
        flats: every parameter, flat, by index.
        pieces: which parameters fill which rows of ``mask`` and ``out``.
        mask: ``[R, q]`` or None.
        out: ``[R, q]``, contiguous.
        block_size: B.
    """
    for piece in pieces:
        target = _kept(out, piece, block_size)
        flat = flats[piece.segment.index][piece.of_parameter]
        if mask is None:
            target.copy_(flat)
        else:
            target.copy_(flat.index_select(0, _entries_of(piece, mask, block_size, target.numel())))


def scatter_params(
    flats: Sequence[Tensor],
    pieces: Sequence[Piece],
    mask: Tensor | None,
    values: Tensor,
    block_size: int,
    add: bool = False,
) -> None:
    """The reverse of :func:`gather_params`: writes ``values [R, q]`` to the masked entries of the parameters, or adds them."""
    # Less than one entry a cache line: to read the lines first is faster, for a core waits for several at once.
    sparse = mask is not None and block_size >= 16 * mask.shape[1] and mask.device.type == "cpu" and not add
    for piece in pieces:
        source = _kept(values, piece, block_size)
        flat = flats[piece.segment.index][piece.of_parameter]
        if mask is None:
            # In chunks, for torch first widens all of what it adds.
            for there, new in zip(flat.split(_CHUNK), source.split(_CHUNK), strict=True):
                there.add_(new) if add else there.copy_(new)
            continue
        entries = _entries_of(piece, mask, block_size, source.numel())
        few = _SMALL_ROWS if sparse else _SMALL_CHUNK
        for places, new in zip(entries.split(few), source.split(few), strict=True):
            if sparse:
                flat.index_select(0, places)
            if add:
                flat.scatter_add_(0, places, new.to(flat.dtype))
            else:
                flat.index_copy_(0, places, new.to(flat.dtype))


def checksum(flat: Tensor) -> Tensor:
    """Two 64-bit hashes of a flat tensor, of its sums by column and by row: int64 ``[2]``.

    A changed bit, or two entries that changed places, changes at least one of them, but for a chance of about 2**-64.
    """
    return _checksum_in_chunks(flat, _CHUNK)


def _checksum_in_chunks(flat: Tensor, chunk: int) -> Tensor:
    """:func:`checksum`, ``chunk`` entries at a time, which it does not depend on: whole rows of 1,024."""
    bits = flat.view(_BITS[flat.element_size()])
    width = 1024
    assert chunk % width == 0
    columns = torch.zeros(width, dtype=torch.int64, device=flat.device)
    rows = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, part in enumerate(bits.split(chunk)):
        whole = part.numel() // width * width
        table = part[:whole].view(-1, width)
        columns += table.sum(0, dtype=torch.int64)
        columns[: part.numel() - whole] += part[whole:]
        rows += _hashes(table.sum(1, dtype=torch.int64), number * (chunk // width)).sum()
    return torch.stack([_hashes(columns, -width - 1).sum(), rows])


def _hashes(sums: Tensor, first: int) -> Tensor:
    """Each sum mixed with its place, counted from ``first`` (splitmix64's finalizer, on signed integers that wrap)."""
    place = torch.arange(first, first + sums.numel(), device=sums.device)
    z = sums + (place + 1) * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15
    return z ^ (z >> 31)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integers to read bits as; 8 bytes as two of 4, whose sums do not wrap."""


# -------------------------------------------------------------------------------------------------- small helpers


def _accumulate_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _host_value(scale: Tensor) -> float | None:
    """The scale, where reading it waits for nothing; None on a device, where the decision must stay there."""
    return float(scale) if scale.device.type == "cpu" else None


def _row_chunks(rows: int, columns: int, entries: int, most: int | None = None) -> Iterator[slice]:
    """Slices of about ``entries`` entries, whole rows each and at most ``most``, that cover ``rows``."""
    step = max(1, entries // max(1, columns))
    step = step if most is None else min(step, most)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _kept(matrix: Tensor, piece: Piece, block_size: int) -> Tensor:
    rows = matrix[piece.row : piece.row + piece.blocks]
    return rows.view(-1)[: piece.kept(rows.shape[1], block_size)]


def _entries(mask: Tensor, length: int) -> Tensor:
    """Where the chosen positions of ``mask [R, q]`` lie, counted in entries from the first block's start: int64."""
    starts = torch.arange(0, mask.shape[0] * length, length, device=mask.device)
    return mask.long().add_(starts.unsqueeze(1)).view(-1)


def _entries_of(piece: Piece, mask: Tensor, block_size: int, kept: int) -> Tensor:
    """Where the piece's first ``kept`` chosen positions lie in the piece, counted in entries: int64 ``[kept]``."""
    return _entries(mask[piece.row : piece.row + piece.blocks], block_size)[:kept]


def _array(tensor: Tensor) -> _Array:
    return tensor.detach().resolve_neg().numpy() if tensor.device.type == "cpu" else tensor


def _chunks(flat: Tensor, length: int) -> Iterator[_Array]:
    """Parts of a flat tensor in fp32; another dtype is converted part by part, for that is a temporary."""
    if flat.dtype != torch.float32:
        yield from (_array(part.float()) for part in flat.split(length))
        return
    whole = _array(flat)
    yield from (whole[start : start + length] for start in range(0, len(whole), length))


def _draw(index: int, number: int, length: int, widths: Sequence[int]) -> tuple[int, int, int, int]:
    """Width, rotation, offset and sign of a gradient's chunk in :func:`sketch`, pseudo-randomly."""
    mixed = _mix(index, number)
    return widths[(mixed >> 24) % len(widths)], (mixed >> 32) % max(widths), mixed % length, 1 - 2 * (mixed >> 63)


def _add_signed(buckets: _Array, chunk: _Array, signs: _Array, width: int, rotation: int, sign: int) -> None:
    """Adds the signed sums of a chunk's columns: ``buckets[(j + rotation) mod W] += sign * sums[j]``."""
    whole = len(chunk) // width * width
    parts = [chunk[whole:] * signs[whole:]]
    if whole:
        table, of_table = chunk[:whole].reshape(-1, width), signs[:whole].reshape(-1, width)
        on_device = isinstance(table, Tensor)  # where einsum would be a matrix product, at the mercy of its precision
        parts.append((table * of_table).sum(0) if on_device else np.einsum("ij,ij->j", table, of_table))
    for sums in parts:
        head = min(len(sums), len(buckets) - rotation)
        buckets[rotation : rotation + head] += sign * sums[:head]
        buckets[: len(sums) - head] += sign * sums[head:]


def _mix(a: int, b: int) -> int:
    """64 well-mixed bits of two small integers (the finalizer of splitmix64)."""
    z = (a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + 0x8CB92BA72F3D8DD7) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return z ^ (z >> 31)
