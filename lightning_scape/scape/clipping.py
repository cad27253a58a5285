"""What a rank measures of its gradient for the norm (docs/design.md, 3.2); and steps that are skipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.scape.config import ScapeConfig

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
