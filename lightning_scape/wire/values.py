"""SCAPE's values and changes in 8 or 4 bits: a message of fixed size, and what its rounding leaves behind.

``GROUP`` consecutive values, of whatever blocks, share a scale of 16 bits. What is sent plus what is left is what was
there, bit for bit (:func:`lightning_scape.ops.quantize`). What is left of values stays in the residual, because the
sweep packs them (:func:`lightning_scape.ops.sweep`); what is left of changes stays with the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.ops.naive.wire import GROUP, bits_in, group_bytes


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a message of so many values."""
    return -(-count // GROUP) * group_bytes(bits)


class ValueWire:
    """Makes room for messages, and reads values and changes ``[R, q]``.

    Args:
        bits: 8 or 4; None: values travel as they are.
    """

    def __init__(self, bits: int | None) -> None:
        self.bits = bits

    def message(self, rows: int, sent: int, shards: int, device: torch.device) -> Tensor | None:
        """Memory for the message of values ``[shards * rows, sent]``; None: they travel as they are.

        uint8 ``[shards, G, W]``: no two shards, one for each receiver, share a group.
        """
        if self.bits is None:
            return None
        shape = shards, -(-rows * sent // GROUP), group_bytes(self.bits)
        return torch.empty(shape, dtype=torch.uint8, device=device)

    def read(
        self, message: Tensor, rows: int, sent: int, shards: int = 1, some: Sequence[slice] | None = None
    ) -> Tensor:
        """The values of a message, fp32 ``[shards * rows, sent]``; or the message itself.

        ``some``: rows that are read, each slice those of whole shards; the others stay undefined. None: all.
        """
        if self.bits is None:
            return message
        values = torch.empty(shards * rows, sent, dtype=torch.float32, device=message.device)
        parts, count = message.view(shards, len(message) // shards, message.shape[1]), rows * sent
        bits = bits_in(message.shape[1])
        for part in [slice(0, shards * rows)] if some is None else some:
            here = parts[part.start // max(1, rows) : part.stop // max(1, rows)]
            ops.dequantize(here, bits, count, out=values[part].view(len(here), count))
        return values
