"""The state of a rank between steps, the one object that a step's phases hand on, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.core.layout import Layout
from lightning_scape.core.replicas import Facts
from lightning_scape.core.stats import Stats
from lightning_scape.scape.config import ScapeConfig

Groups = Sequence[dict[str, Any]]
"""An optimizer's parameter groups: schedulers change them from step to step."""


@dataclass
class ScapeState:
    """Buffers of one rank. ``blocks`` counts all blocks, ``R`` those of a shard, ``B`` is the block length."""

    residual: Tensor
    """``[blocks, B]`` fp32: gradients that this rank has computed and not yet sent."""
    exp_avg: Tensor
    """``[R, B]`` fp32 (fp64 for fp64 parameters): m, the first moment."""
    last_step: Tensor
    """``[R, B]`` int32: the parameter's step of each entry's last update, 0 before the first."""
    step: Tensor
    """0-dim int32 on the parameters' device: t, steps taken and not skipped."""
    calls: int = 0
    """Calls of ``step()``, skipped ones included; the sparsity schedule goes by it, and so do the makers of masks."""
    skipped_in_row: int = 0
    skipped_total: int = 0
    """Steps that were skipped because a gradient was not finite: the last ones in a row, and all."""
    sparse: bool = False
    """Whether the last step that was not skipped has left something to rank: it did not send everything."""
    master: Tensor | None = None
    """``[R, B]`` fp32 weights, when a parameter is narrower than that and its values travel. One that does not round to
    its parameter gives way to it when its entry is updated; so it may begin as zero."""
    exp_avg_sq: Tensor | None = None
    """``[R, B]`` fp32 (fp64), ``update="adamw"`` only: v of AdamW, the running mean square of the averaged gradient,
    not corrected for its start at zero. Between an entry's updates it takes in this rank's own gradient instead."""
    change_error: Tensor | None = None
    """``[R, B]`` fp32 (fp64), where changes of parameters are packed: what an entry's parameter lacks, for its changes
    were rounded for the wire, and to a narrower parameter's dtype. It is sent with the next change."""
    missed: Tensor | None = None
    """int32 ``[parameters]``: number of steps in which no rank had a gradient for the parameter. Its own step is
    ``step`` minus this. None stands for zeros."""

    @classmethod
    def allocate(cls, layout: Layout, dtype: torch.dtype, device: torch.device, *others: str) -> ScapeState:
        """All zeros; with these others, which not every state has."""
        shard = (layout.shard_blocks, layout.block_size)
        state = cls(
            residual=torch.zeros(layout.blocks, layout.block_size, dtype=torch.float32, device=device),
            exp_avg=torch.zeros(shard, dtype=dtype, device=device),
            last_step=torch.zeros(shard, dtype=torch.int32, device=device),
            step=torch.zeros((), dtype=torch.int32, device=device),
        )
        for name in others:
            setattr(state, name, torch.zeros_like(state.exp_avg))
        return state


def state_bytes(config: ScapeConfig, ranks: int) -> float:
    """Bytes that a rank keeps for each fp32 parameter of the model: the residual, and its part of what owners keep."""
    mean_square = config.update != "adams"  # AdamW's second moment
    lacking = config.packed  # the errors of changes that come back packed
    return 4 + (8 + 4 * mean_square + 4 * lacking) / ranks


# ------------------------------------------------------------------------------------------------ one step


class Scale(NamedTuple):
    """What a step's gradient is multiplied with. Where all parameters take part it is one number, else one for each.

    A parameter that has no gradient on any rank is skipped, as in torch: its scale is 0.
    """

    whole: Tensor
    """0-dim: the clipping factor, 0 for a step that is skipped."""
    parameters: Tensor
    """``[parameters]``, or 0-dim."""
    blocks: Tensor
    """``[blocks]``, or 0-dim."""


@dataclass
class StepStats(Stats):
    """Figures of one step on one rank. On CUDA reading one that is a property may wait for the device.

    The part of my shard in ``seconds["sweep"]`` comes after ``"exchange"`` has begun, while values travel.
    """

    METHOD = "scape"
    PHASES = ("wait", "norm", "mask", "sweep", "exchange", "update", "write", "launch")
    KINDS = ("norm", "values", "parameters", "mask")
    LOGGED = ("exchange_wait", "grad_norm", "clip_factor", "skipped")

    norm: Tensor | None = None
    scale: Tensor | None = None
    exchange_wait: float = 0.0
    """Seconds the CPU waited for the mask. Without CUDA 0 means that it travelled wholly behind compute. With CUDA
    the GPU waits instead, which a profiler shows and this figure does not."""

    @property
    def grad_norm(self) -> float:
        """Norm of the averaged gradient before clipping: the sketch's estimate.

        With ``clip_norm="local"`` or without clipping, the root mean square of the ranks' own norms: an over-estimate.
        """
        return float("nan") if self.norm is None else float(self.norm)

    @property
    def clip_factor(self) -> float:
        """Factor of the gradient; 0 in a skipped step."""
        return float("nan") if self.scale is None else float(self.scale)

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped because the norm was not finite."""
        return self.clip_factor == 0.0


Verdict = tuple[Tensor, torch.cuda.Event | None, Facts]
"""A step's scale, and whether ranks were together, in host memory once the event has come; this rank's facts."""


@dataclass
class Step:
    """One step: each phase reads what those before it have put here."""

    state: ScapeState
    groups: Groups
    grads: Sequence[Tensor | None]
    """The flat gradient of every parameter, None where it has none."""
    stats: StepStats
    scale: Scale
    sent: int
    """q, entries of a block that are sent; B where everything is."""
    verdict: Verdict
    mask: Tensor | None = None
    """``[blocks, q]``: the masked entries, as positions in their blocks. None: all."""
    folded: bool = False
    """Whether the gradients are in the residual already."""
