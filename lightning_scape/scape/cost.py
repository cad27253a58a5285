"""What SCAPE sends and keeps: bytes of a step's messages, of a run's, and memory for each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.ops.naive.wire import packed_bytes
from lightning_scape.scape.clipping import width
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.opening import DIGITS


def scape_bytes(
    numels: Sequence[int], ranks: int, config: ScapeConfig, sent: int | None = None, back: int = 4
) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind; exactly what the package counts.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: sparsity, wire dtype and rule of clipping are used.
        sent: entries per block, q; None is the number at the end of the warm-up.
        back: bytes of a value that comes back, where nothing is packed.
    """
    block_size, sent = config.quota.block_size, config.quota.sent if sent is None else sent
    blocks = Layout(numels, [0] * len(numels), block_size, ranks).blocks
    mine = blocks // ranks * sent
    buffers = {
        "norm": 2 * 4 * (width(config, ranks) + len(numels) + DIGITS),
        "values": ranks * (packed_bytes(mine) if config.packed else 4 * mine),
        "parameters": ranks * (packed_bytes(mine) if config.packed else back * mine),
        "mask": blocks * ops.mask_bytes(sent, block_size) if sent < block_size else 0,
    }
    return {kind: size * (ranks - 1) // ranks for kind, size in buffers.items()}


def run_bytes(schedule: SparsitySchedule, step_bytes: Callable[[int], dict[str, int]], steps: int) -> int:
    """Bytes that a rank sends in the first ``steps`` steps, warm-up included.

    ``step_bytes`` says what a step sends that sends q entries of a block.
    """
    whole = sum(count * sum(step_bytes(sent).values()) for sent, count in schedule.sent_by_step(steps).items())
    following = step_bytes(schedule.sent(steps))  # each step sends the mask of the next one, the first its own, too
    return whole + following["mask"]


def state_bytes(config: ScapeConfig, ranks: int) -> float:
    """Bytes that a rank keeps for each fp32 parameter of the model: the residual, and its part of what owners keep."""
    mean_square = config.update != "adams"  # AdamW's second moment
    lacking = config.packed  # the errors of changes that come back packed
    return 4 + (8 + 4 * mean_square + 4 * lacking) / ranks
