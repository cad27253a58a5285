"""What an exchange of SparseLoCo costs: bytes of its messages, memory that it keeps, its own work."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_scape.core.layout import Layout
from lightning_scape.sparseloco.config import SparseLoCoConfig

EXCHANGE_WORK = 14.0
"""Own work of an exchange in steps of fused AdamW: measured on one CPU core, 13M parameters."""


def exchange_bytes(numels: Sequence[int], ranks: int, config: SparseLoCoConfig) -> int:
    """Bytes that a rank sends in an exchange; exactly what the package counts, the first message left out.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: densities, bits and block length are used.
    """
    blocks = Layout(numels, [0] * len(numels), config.quota.block_size, ranks).blocks
    return sum(config.message_bytes(blocks, ranks))


def state_bytes(config: SparseLoCoConfig, ranks: int, parameter_bytes: int) -> float:
    """Bytes that a rank's device keeps for each parameter, the inner optimizer's left out."""
    local = 0 if config.device is not None else 8  # starting point and error feedback
    return local + 4 / ranks + (parameter_bytes if config.overlap_steps else 0)
