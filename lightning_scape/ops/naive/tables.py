"""Checksums of parameters, and small tables on their way to a device."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lightning_scape.ops.registry import operation


@operation
def checksum(flat: Tensor) -> Tensor:
    """Two 64-bit hashes of a flat tensor, of its sums by column and by row: int64 ``[2]``.

    A changed bit, or two entries that changed places, changes at least one of them, but for a chance of about 2**-64.
    """
    return checksum_of_sums(*column_and_row_sums(flat, 0))


def column_and_row_sums(part: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Sums of bits, as a table of 1,024 columns: int64 ``[1024]``, and one hash over those of all rows.

    Both of a long tensor are the sums of those of its parts, where all parts but the last are whole rows.

    Args:
        part: flat.
        first: entries of the tensor before this part.
    """
    width, bits = 1024, part.view({1: torch.int8, 2: torch.int16}.get(part.element_size(), torch.int32)).long()
    first_row = first // width * (bits.numel() // max(1, part.numel()))  # 8 bytes are two numbers of 4
    rows = -(-bits.numel() // width)
    table = F.pad(bits, (0, rows * width - bits.numel())).view(rows, width)
    return table.sum(0), _hashes(table.sum(1), first_row).sum()


def checksum_of_sums(columns: Tensor, rows: Tensor) -> Tensor:
    """:func:`checksum`, from :func:`column_and_row_sums`."""
    return torch.stack([_hashes(columns, -columns.numel() - 1).sum(), rows])


def _hashes(sums: Tensor, first: int) -> Tensor:
    """Each sum mixed with its place, counted from ``first`` (splitmix64's finalizer, on signed integers that wrap)."""
    place = torch.arange(first, first + sums.numel(), dtype=torch.int64, device=sums.device)
    z = sums + (place + 1) * -0x61C8864680B583EB
    z = (z ^ (z >> 30)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27)) * -0x6B2FB644ECCEEE15
    return z ^ (z >> 31)


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """A table that was made on the CPU, for which the CPU does not wait: the copy is out of pinned memory on CUDA."""
    if device.type != "cuda":
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)
