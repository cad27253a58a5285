"""What a step of SCAPE costs: bytes of its messages, memory that it keeps, memory that its kernels move."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_scape import ops
from lightning_scape.core.layout import Layout
from lightning_scape.scape.clipping import SKETCH_WIDTHS
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.first_message import DIGITS
from lightning_scape.wire.flags import packed_size
from lightning_scape.wire.values import packed_bytes

PACKING_BYTES = 66
"""Memory that packing into 8 or 4 bits touches for each value and its change, beyond what bf16 does: to round them, to
keep the errors, to read them back. It moves as fast as what AdamW touches."""
_SECTOR_BYTES = 32
"""Memory of a GPU moves in parts of this size."""


def scape_bytes(
    numels: Sequence[int],
    ranks: int,
    config: ScapeConfig,
    *,
    parameter_bytes: int = 4,
    clip: bool = True,
    sent: int | None = None,
) -> dict[str, int]:
    """Bytes that a rank sends in a step, by kind; exactly what the package counts.

    Args:
        numels: entries of each parameter tensor.
        ranks: N.
        config: sparsity, wire dtype and rule of clipping are used.
        parameter_bytes: bytes of one parameter; all have one dtype.
        clip: whether ``clip_grad_norm`` is called.
        sent: entries per block, q; None is the number at the end of the warm-up.
    """
    blocks = Layout(numels, [0] * len(numels), config.quota.block_size, ranks).blocks
    back = parameter_bytes if parameter_bytes < 4 and config.wire_bits is None else None
    return message_bytes(config, blocks, ranks, back, sent) | {
        "norm": norm_bytes(config, len(numels), ranks, clip=clip)
    }


def norm_bytes(config: ScapeConfig, parameters: int, ranks: int, *, clip: bool) -> int:
    """Bytes that a rank sends in the first message of a step; ``parameters`` says how many tensors there are."""
    entries = max(SKETCH_WIDTHS) if clip and config.clip_norm == "sketch" else 1
    return 2 * 4 * (entries + packed_size(parameters + 2, ranks) + DIGITS) * (ranks - 1) // ranks


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
    there, bits = config.wire_bits, config.change_bits(sent)
    sparse = sent < block_size
    buffers = {
        "values": ranks * (mine * width if there is None else packed_bytes(mine, there)),
        "parameters": ranks * (mine * (back or width) if bits is None else packed_bytes(mine, bits)),
        "mask": sparse * blocks * ops.mask_bytes(sent, block_size),
        "votes": sparse * blocks * ops.proposal_bytes(config.proposed, block_size),
    }
    return {kind: size * (ranks - 1) // ranks for kind, size in buffers.items()}


def state_bytes(config: ScapeConfig, ranks: int, parameter_bytes: int) -> float:
    """Bytes that a rank keeps for each parameter of the model: the residual, and its part of what owners keep."""
    mean_square = config.update != "adams" or config.measures_noise  # AdamW's second moment, or AdamS's floor
    lacking = parameter_bytes < 4 or config.wire_bits is not None  # masters, or errors of changes that come back packed
    return 4 + (8 + 4 * mean_square + 4 * lacking) / ranks


def scape_traffic(
    density: float, *, proposed: bool, parameter_bytes: int = 4, wire_bytes: int = 2
) -> tuple[float, float]:
    """Bytes of memory that the kernels of SCAPE's step move: per parameter of the model, and of the shard.

    Memory moves in sectors of 32 bytes. A sector moves as a whole if one of its entries is in the mask.

    - norm: the gradient is read;
    - sweep: the gradient is read, the residual is read and written, and so is the owner's second moment;
    - merge: the owner's residual is read, where ranks propose entries;
    - update: masked entries of the shard's parameters, moments and last steps are read and written;
    - write-back: masked entries of all parameters are written, and read where they travel as changes;
    - wire: what is sent is written once, what arrives is read once. The messages themselves are left out.

    Args:
        density: share of the entries that is sent.
        proposed: whether ranks propose entries to the owners.
        parameter_bytes: of a parameter, and of its gradient.
        wire_bytes: of a value on the wire.
    """

    def lines(width: int) -> float:
        return width * (1 - (1 - density) ** (_SECTOR_BYTES // width))

    mask = density if density < 1 else 0.0
    changes = parameter_bytes > wire_bytes
    proposals = 2.5 * density if proposed else 0.0  # a position and a value for each, and one more byte for each block
    arrives = mask + density * wire_bytes
    norm, sweep = parameter_bytes, 8 + parameter_bytes + mask + density * wire_bytes
    write_back = arrives + lines(parameter_bytes) * (2 if changes else 1)
    whole = norm + sweep + 2 * proposals + write_back
    second_moment, chosen = (8.0, density) if density < 1 else (0.0, 0.0)
    merge = 4.0 if proposed else 0.0
    read = mask + lines(parameter_bytes) + 4 * density
    update = mask + 12 * density + 6 * lines(4)
    return whole, second_moment + merge + chosen + read + update
