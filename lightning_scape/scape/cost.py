"""What SCAPE sends and keeps: bytes of a step's messages, of a run's, and memory for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.ops.naive.flags import packed_size
from lightning_scape.ops.naive.wire import packed_bytes
from lightning_scape.scape.clipping import width
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.first_message import DIGITS
from lightning_scape.scape.mask import SparsitySchedule


def scape_bytes(
    numels: Sequence[int], ranks: int, config: ScapeConfig, *, parameter_bytes: int = 4, sent: int | None = None
) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind; exactly what the package counts.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: sparsity, wire dtype and rule of clipping are used.
        parameter_bytes: bytes of one parameter; all have one dtype.
        sent: entries per block, q; None is the number at the end of the warm-up.
    """
    blocks = Layout(numels, [0] * len(numels), config.quota.block_size, ranks).blocks
    back = parameter_bytes if parameter_bytes < 4 and not config.packed else None
    return message_bytes(config, blocks, ranks, back, sent) | {"norm": norm_bytes(config, len(numels), ranks)}


def run_bytes(numels: Sequence[int], ranks: int, config: ScapeConfig, steps: int) -> int:
    """Bytes that a rank sends in a run of so many steps, warm-up included; fp32 parameters."""
    schedule = SparsitySchedule.of(config)

    def of(sent: int) -> dict[str, int]:
        return scape_bytes(numels, ranks, config, sent=sent)

    whole = sum(count * sum(of(sent).values()) for sent, count in schedule.sent_by_step(steps).items())
    following = of(schedule.sent(steps))  # each step sends the mask of the next one, the first its own, too
    return whole + following["mask"]


def norm_bytes(config: ScapeConfig, parameters: int, ranks: int) -> int:
    """Bytes that a rank sends in the first message of a step; ``parameters`` says how many tensors there are."""
    return 2 * 4 * (width(config, ranks) + packed_size(parameters, ranks) + DIGITS) * (ranks - 1) // ranks


def message_bytes(
    config: ScapeConfig, blocks: int, ranks: int, back: int | None, sent: int | None = None
) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind, but for its first message.

    Args:
        config: sparsity and wire dtype are used.
        blocks: of all parameters and pads: as many on each rank.
        ranks: N.
        back: bytes of a value that comes back; None: a change comes, as wide as what was sent.
        sent: entries per block, q; None is the number at the end of the warm-up.
    """
    block_size, sent = config.quota.block_size, config.quota.sent if sent is None else sent
    mine, width = blocks // ranks * sent, config.values_dtype.itemsize
    packed, sparse = config.packed, sent < block_size
    buffers = {
        "values": ranks * (packed_bytes(mine) if packed else mine * width),
        "parameters": ranks * (packed_bytes(mine) if packed else mine * (back or width)),
        "mask": sparse * blocks * ops.mask_bytes(sent, block_size),
    }
    return {kind: size * (ranks - 1) // ranks for kind, size in buffers.items()}


def state_bytes(config: ScapeConfig, ranks: int) -> float:
    """Bytes that a rank keeps for each fp32 parameter of the model: the residual, and its part of what owners keep."""
    mean_square = config.update != "adams"  # AdamW's second moment
    lacking = config.packed  # the errors of changes that come back packed
    return 4 + (8 + 4 * mean_square + 4 * lacking) / ranks
