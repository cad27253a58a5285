"""What SparseLoCo sends in an exchange, and keeps for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_scape.core.layout import Layout
from lightning_scape.sparseloco.config import SparseLoCoConfig

OPENING_BYTES = 40
"""Of an exchange's first message, to each of the other ranks."""


def exchange_bytes(numels: Sequence[int], ranks: int, config: SparseLoCoConfig) -> int:
    """Bytes that a rank sends in an exchange; exactly what the package counts.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: densities, bits and block length are used.
    """
    blocks = Layout(numels, [0] * len(numels), config.quota.block_size, ranks).blocks
    return sum(config.message_bytes(blocks, ranks)) + OPENING_BYTES * (ranks - 1)


def state_bytes(config: SparseLoCoConfig, ranks: int) -> float:
    """Bytes that a rank keeps for each parameter: its starting point, error feedback, and its part of the owners'."""
    return 8 + (0 if config.gathers(ranks) else 4 / ranks)
