"""A dict of a rank's own as the bytes that ``torch.save`` makes of it: a tensor among those of a directory.

What unpacks it for a load unpacks it for ``lightning-scape verify``, too.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.dcp import as_bytes


def pack(content: Mapping[str, Any]) -> Tensor:
    """uint8, flat, in host memory."""
    return torch.frombuffer(bytearray(as_bytes(dict(content))), dtype=torch.uint8)


def unpack(packed: Any, called: str, names: Collection[str] = (), weights_only: bool | None = None) -> dict[str, Any]:
    """The reverse of :func:`pack`.

    Args:
        packed: uint8, flat; a damaged state may hold anything.
        called: for errors.
        names: that it must have.
        weights_only: see :func:`~lightning_scape.checkpoint.atomic_files.only_weights`.

    Raises:
        CheckpointError: the bytes are damaged, lack a name, or hold what only executing code would load.
    """
    content = None
    if isinstance(packed, Tensor) and packed.dtype == torch.uint8 and packed.dim() == 1:
        content = files.load_stream(io.BytesIO(packed.cpu().numpy().tobytes()), called, weights_only=weights_only)
    if not isinstance(content, dict) or not set(names) <= set(content):
        raise files.CheckpointError(
            f"{called!r} must hold a rank's {', '.join(sorted(names)) or 'own part'}, got"
            f" {sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__}. Load another"
            " checkpoint."
        )
    return content
