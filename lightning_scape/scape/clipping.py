"""What a rank measures of its gradient for the norm (docs/design.md, 3.2); and steps that are skipped."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.tensors import OnItsWay
from lightning_scape.scape.config import ScapeConfig

if TYPE_CHECKING:
    from lightning_scape.scape.opening import Answer, Opening

SKETCH_WIDTHS = (4093, 4091, 4079, 4073, 4057, 4051, 4049, 4027)
"""Buckets of the norm sketch: the largest primes below 4096, so that no matrix is as wide as all of them."""
_CHUNK = 1 << 16
"""Entries with the same width of the sketch; the signs take twice as many floats."""


def width(config: ScapeConfig, ranks: int) -> int:
    """Numbers that a rank measures of its gradient, at most."""
    return max(SKETCH_WIDTHS) if config.clip_norm == "sketch" and ranks > 1 else 1


class Sketch:
    """Makes sketches of gradients, on the device where they are."""

    def __init__(self) -> None:
        self._signs: Tensor | None = None

    def __call__(self, grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
        """fp32, for :meth:`Opening.exchange`."""
        if self._signs is None or self._signs.device != device:
            signs = random_signs(2 * _CHUNK)
            # A GPU reads them beside every gradient: as bytes, they are a quarter of what it reads there.
            self._signs = ops.to_device(signs.to(torch.int8) if device.type == "cuda" else signs, device)
        return ops.sketch(grads, self._signs, SKETCH_WIDTHS)


def random_signs(count: int) -> Tensor:
    """The same +1 and -1 on every rank, fp32."""
    generator = torch.Generator("cpu").manual_seed(0x5CA9E)
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.int64, device="cpu").mul_(2).sub_(1).float()


def squared_norm(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """fp32 ``[1]``, of all gradients together."""
    given = [grad for grad in grads if grad is not None and grad.numel()]
    return ops.squared_norm(given).view(1) if given else torch.zeros(1, dtype=torch.float32, device=device)


class Skips:
    """Counts the steps that were skipped because a gradient was not finite.

    On CUDA the CPU learns of one with the next step: reading it at once would make the CPU wait.

    Args:
        most: so many in a row raise an error.
        opening: says what differs where ranks were apart.
    """

    def __init__(self, most: int, opening: Opening) -> None:
        self.in_row = self.total = 0
        self._most, self._opening = most, opening
        self._pending: tuple[OnItsWay, Answer] | None = None
        """On CUDA the last step's scale, and whether ranks were together, on their way to host memory."""

    def note(self, scale: Tensor, answer: Answer) -> None:
        """Notes the scale of a step, from the answer to its first message.

        Raises:
            FloatingPointError: too many steps in a row were skipped (on every rank in the same step).
        """
        if scale.device.type == "cuda":
            self._pending = OnItsWay(torch.stack([scale, answer.together.to(scale.dtype)])), answer
        else:
            self._count(bool(scale))

    def settle(self) -> None:
        """Reads the last step's scale if it is still on the device; that step is long over by now.

        Raises:
            FloatingPointError: as :meth:`note`.
            RuntimeError: ranks were apart in it.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            found, answer = pending
            scale, together = found.read().unbind()
            if not together:
                raise self._opening.apart(answer.standing)
            self._count(bool(scale))

    def forget(self) -> None:
        """Drops what was noted and not read: another state has been loaded."""
        self._pending = None

    def _count(self, taken: bool) -> None:
        if taken:
            self.in_row = 0
            return
        self.total += 1
        self.in_row += 1
        if self.in_row >= self._most:
            raise FloatingPointError(
                f"The gradient norm must be finite, got NaN or inf in {self.in_row} steps in a row"
                f" (max_skipped={self._most}); parameters and residuals are as before the first of them. Lower"
                " the learning rate, clip gradients, or look for a bad batch; raise `max_skipped` to wait longer."
            )
        if self._opening.communicator.rank == 0 and self._opening.node.rank == 0:
            warnings.warn(
                f"The gradient norm was not finite on at least one rank: step skipped on all ranks, nothing lost"
                f" ({self.in_row} in a row, {self.total} in total; an error at {self._most} in a row).",
                stacklevel=4,
            )
