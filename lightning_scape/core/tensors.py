"""Views of parameters and gradients as flat runs of memory, without copies; and a tensor on its way to the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape.core.layout import Piece


def piece_views(matrix: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The entries of each piece in a matrix of blocks ``[rows, B]``, flat; pads left out."""
    flat, length = matrix.view(-1), matrix.shape[1]
    return [flat[piece.of_blocks(length)] for piece in pieces]


def flatten(parameter: Tensor) -> Tensor:
    """A flat view of the memory of a parameter that :func:`is_dense`. Never a copy."""
    return parameter.detach().as_strided((parameter.numel(),), (1,))


def flatten_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The entries of a gradient (or of a saved tensor) in the memory order of its parameter; a view if strides agree.

    Raises:
        ValueError: the gradient is sparse.
    """
    if gradient.layout != torch.strided:
        raise ValueError(
            f"Gradients must be dense, got {gradient.layout} for a parameter of shape {tuple(parameter.shape)}. Build"
            " the embedding with `sparse=False`: SCAPE picks the entries to send itself."
        )
    if gradient.stride() != parameter.stride():
        ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
        gradient = ordered.copy_(gradient)
    elif gradient.is_contiguous() and not gradient.requires_grad:  # as nearly always, and in fewer calls
        return gradient if gradient.dim() == 1 else gradient.view(-1)
    return gradient.detach().as_strided((gradient.numel(),), (1,))


def bytes_of(tensor: Tensor) -> Tensor:
    """uint8, flat: the entries as they read, in their order; a copy where memory has another order, or a conjugate."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's entries fill one run of memory, in whatever order."""
    expected = 1
    if not tensor.numel():
        return True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


class OnItsWay:
    """A small tensor on its way to the CPU, which waits for the device only when it reads it.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """The tensor in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor
