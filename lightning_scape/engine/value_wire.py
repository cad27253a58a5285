"""SCAPE's values and changes in 8 or 4 bits: a message of fixed size, and what its rounding leaves behind.

``GROUP`` consecutive values, of whatever blocks, share a scale of 16 bits. What is sent plus what is left is what was
there, bit for bit (:mod:`lightning_scape.engine.block_wire`, uniform). The caller keeps what is left: in the
residual, or with the owner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape.engine.block_wire import Wire

GROUP = 64
"""Values that share a scale: 66 bytes for 64 values in 8 bits, 34 in 4 bits."""
_CHUNK = 1 << 14
"""Groups worked on at a time: temporaries have 8 bytes for each value."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a message of so many values."""
    return -(-count // GROUP) * Wire(GROUP, GROUP, bits).row_bytes


class ValueWire:
    """Packs values ``[R, q]``, and reads them.

    Args:
        bits: 8 or 4.
    """

    def __init__(self, bits: int) -> None:
        self._wire = Wire(GROUP, GROUP, bits)

    def pack(self, values: Tensor, shards: int = 1) -> Tensor:
        """The message; ``values`` become what their rounding leaves.

        Args:
            values: fp32 ``[shards * R, q]``, finite, changed in place.
            shards: parts of equal size, none of which shares a group with another: one for each receiver.

        Returns:
            uint8 ``[shards * G, W]``.
        """
        if not values.numel():
            return values.new_empty(0, self._wire.row_bytes, dtype=torch.uint8)
        flat = values.view(shards, -1)
        # A part's last group is filled up with zeros.
        groups = torch.nn.functional.pad(flat, (0, -flat.shape[1] % GROUP)).view(-1, GROUP)
        message = torch.cat([self._wire.take(part) for part in groups.split(_CHUNK)])
        flat.copy_(groups.view(shards, -1)[:, : flat.shape[1]])
        return message

    def read(self, message: Tensor, rows: int, sent: int, shards: int = 1) -> Tensor:
        """The values of a message, fp32 ``[shards * rows, sent]``."""
        if not len(message):
            return message.new_empty(shards * rows, sent, dtype=torch.float32)
        values = torch.cat([self._wire.read(part).values for part in message.split(_CHUNK)])
        return values.view(shards, -1)[:, : rows * sent].reshape(shards * rows, sent)
