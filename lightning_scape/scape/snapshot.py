"""The live side of a checkpoint: an optimizer's objects, and its state as parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_scape.checkpoint.parts import Part, of_blocks
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout, Piece
from lightning_scape.core.parameters import Parameters
from lightning_scape.scape import keys
from lightning_scape.scape.clipping import GradientClipping
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.mask import Masks
from lightning_scape.scape.state import SHARD_TENSORS, ScapeState


@dataclass(frozen=True)
class Snapshot:
    """The live objects that make up an optimizer's state."""

    state: ScapeState
    layout: Layout
    config: ScapeConfig
    parameters: Parameters
    masks: Masks
    clipping: GradientClipping
    node: Communicator = field(default_factory=Communicator.alone)
    """The ranks that hold the other rows of the same replica."""

    def shard(self) -> Iterator[tuple[str, Tensor]]:
        """The shard's tensors ``[R, B]``, by name."""
        for name in SHARD_TENSORS:
            tensor: Tensor | None = getattr(self.state, name)
            if tensor is not None:
                yield name, tensor

    def owned(self, name: str, shard: Tensor, pieces: Iterable[Piece]) -> Part:
        """Some pieces of one of the shard's tensors."""
        return keys.owned(name, of_blocks(self.parameters, self.layout, shard, pieces))

    def residual(self) -> Part:
        """All of this rank's residual."""
        pieces = self.layout.everything().pieces
        return keys.residual(of_blocks(self.parameters, self.layout, self.state.residual, pieces))

    def missed(self) -> dict[int, int]:
        """By parameter, the number of steps in which no rank had a gradient for it; zeros are left out."""
        missed = [] if self.state.missed is None else self.state.missed.tolist()  # a checkpoint waits anyhow
        return {index: count for index, count in zip(self.parameters.indices, missed, strict=False) if count}

    def set_steps(self, step: int, missed: Mapping[int, int], rank: int) -> None:
        """Sets step and missed steps, and the last step of the rank's entries to their parameter's own step."""
        self.state.step.fill_(step)
        self.state.last_step.fill_(step)  # right for pads
        for piece in self.layout.local(rank).pieces:
            entries = piece.of_blocks(self.layout.block_size)
            self.state.last_step.view(-1)[entries] -= missed.get(self.parameters.indices[piece.segment.index], 0)
        if any(missed.values()):
            counts = [missed.get(index, 0) for index in self.parameters.indices]
            self.state.missed = torch.tensor(counts, dtype=torch.int32, device="cpu").to(self.state.step.device)
