"""SCAPE's values and changes in 8 or 4 bits: a message of fixed size, and what its rounding leaves behind.

``GROUP`` consecutive values, of whatever blocks, share a scale of 16 bits. What is sent plus what is left is what was
there, bit for bit (:func:`lightning_scape.ops.quantize`). The caller keeps what is left: in the residual, or with the
owner.
"""

from __future__ import annotations

from torch import Tensor

from lightning_scape import ops
from lightning_scape.ops.naive.wire import GROUP, group_bytes


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of a message of so many values."""
    return -(-count // GROUP) * group_bytes(bits)


class ValueWire:
    """Packs values ``[R, q]``, and reads them.

    Args:
        bits: 8 or 4; None: values travel as they are.
    """

    def __init__(self, bits: int | None) -> None:
        self.bits = bits

    def pack(self, values: Tensor, shards: int = 1) -> Tensor:
        """The message; ``values`` become what their rounding leaves, if they are packed.

        Args:
            values: fp32 ``[shards * R, q]``, finite, contiguous, changed in place.
            shards: parts of equal size, none of which shares a group with another: one for each receiver.

        Returns:
            uint8 ``[shards * G, W]``; or the values.
        """
        if self.bits is None:
            return values
        return ops.quantize(values.view(shards, values.numel() // shards), self.bits).flatten(0, 1)

    def pack_with_error(self, error: Tensor, mask: Tensor | None, values: Tensor, scale: Tensor) -> Tensor:
        """The message of values at masked entries, and of what earlier ones' rounding has left of these entries.

        Args:
            error: ``[R, B]``, what is left; changed in place.
            mask: ``[R, q]``, or None for all.
            values: ``[R, q]``, of the same dtype.
            scale: 0-dim or ``[R]``. 0 sends zeros, and the error stays as it is.

        Returns:
            uint8 ``[G, W]``.
        """
        assert self.bits is not None
        return ops.quantize_with_error(error, mask, values, scale, self.bits)

    def read(self, message: Tensor, rows: int, sent: int, shards: int = 1) -> Tensor:
        """The values of a message, fp32 ``[shards * rows, sent]``; or the message itself."""
        if self.bits is None:
            return message
        parts = message.view(shards, len(message) // shards, message.shape[1])
        return ops.dequantize(parts, self.bits, rows * sent).view(shards * rows, sent)
