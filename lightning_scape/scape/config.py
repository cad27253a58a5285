"""What a user may choose, validated once, frozen afterwards.

Symbols: ``rho = 1 - sparsity`` is the density, ``B`` the block length, ``q`` the entries sent per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from lightning_scape.core.quota import MAX_BLOCK, Quota, check_local_group_size, density_of, quota_for

WireDtype = Literal["int4", "int8", "bf16", "fp32"]
ClipNorm = Literal["sketch", "local"]
SecondMoment = Literal["measured", "reconstructed"]
Update = Literal["adamw", "adams"]
WarmupShape = Literal["waits", "geometric"]

STEPS_PER_WAIT = 50
"""Default warm-up with the update of AdamW: after so many steps an entry waits for one step more. At densities above 1%
the wait grows more slowly, by the root of the density: there the bytes of a warm-up count less."""
WARMUP_STEPS = 1000
"""Default length of the warm-up with the update of AdamS; a shorter run warms up to its end."""

_WIRE_DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_WIRE_BITS = {"int8": 8, "int4": 4}


@dataclass(kw_only=True, frozen=True)
class ScapeConfig:
    """Every option of SCAPE (arXiv 2607.01678); immutable, checked when made.

    Raises:
        ValueError: an option is outside its rule; the message gives rule, value and remedy.
    """

    sparsity: float = 0.99
    """Share of the entries that is NOT sent in a step, in [0, 1). 0 is dense training, sharded."""

    update: Update | None = None
    """The update of an entry. ``"adamw"`` divides by AdamW's second moment, so that learning rate, betas and eps mean
    what they mean in torch. ``"adams"`` is SCAPE's paper: AdamS, without a second moment. None takes the one that fits
    the optimizer given: ``"adamw"`` for AdamW and Adam, ``"adams"`` for AdamS."""

    dense_steps: int = 0
    """Number of first steps that send everything (>= 0)."""

    sparsity_warmup_steps: int | None = None
    """Steps, after the dense ones, in which the density falls from 1 to 1 - sparsity. 0 sends what `sparsity` says from
    the first step. A number gives a geometric fall in so many steps. None, with the update of AdamW: the steps between
    two updates of an entry grow linearly, by one in every 50 steps (158 at 90%), for 4,950 steps at 99% and 1,424 at
    90% (docs/design.md, 3.3). None, with the update of AdamS, is a geometric fall in 1,000 steps, or in all steps of
    a shorter run."""

    second_moment: SecondMoment = "measured"
    """With ``update="adams"``: what divides an entry that the step before did not update. ``"measured"`` floors the
    denominator with the owner's own running mean square of its gradient, or, at densities above 5%, a share of it (4P/N
    bytes, no message). ``"reconstructed"`` takes it from the synchronized buffer alone, as the paper does.
    ``update="adamw"`` always measures (4P/N bytes)."""

    wire_dtype: WireDtype | None = None
    """How values travel to their owner: ``"int4"`` or ``"int8"`` (0.53 or 1.03 bytes: 64 values share a scale),
    ``"bf16"`` (2 bytes), or ``"fp32"``; the rounding error stays in the residual. None takes ``"int4"``, or ``"bf16"``
    at sparsity 0, for dense training; a run that goes on from a checkpoint keeps one that was chosen there. With
    int4 and int8, parameters of any dtype come back as changes in as many bits (8 while more than half of a block is
    sent), and the owner keeps their rounding errors. With bf16 (which rounds a change by a part in 512) and fp32 they
    come back as changes if all are wider than the wire and need no masters, else as values in their own dtype."""

    bias_correction: bool = False
    """With ``update="adams"``: divide the first moments by ``1 - beta1**t``, as the code of AdamS does, its paper does
    not. An entry that waits has a longer memory than this formula knows, so its first updates move it less far.
    ``update="adamw"`` always corrects both moments, as torch does."""

    clip_norm: ClipNorm = "sketch"
    """How ``gradient_clip_val`` measures the averaged gradient: ``"sketch"`` (estimate of its true norm, one standard
    deviation 1.1%, one 16 KB message) or ``"local"`` (root mean square of the ranks' own norms, never too small)."""

    local_group_size: int | Literal["node"] = 1
    """Ranks of a node that hold one replica of the model together, sharded by FSDP2 (``fully_shard``), which averages
    their gradients densely; SCAPE runs between the nodes. ``"node"`` takes all ranks of a node. 1: every rank holds
    the whole model. A strategy shards the model; under plain torchrun call ``fully_shard`` yourself."""

    reshard_after_forward: bool = True
    """With ``local_group_size`` above 1: True frees a block's gathered parameters after its forward pass and gathers
    them again for the backward pass (ZeRO-3's memory). False keeps them in between (ZeRO-2's)."""

    residual_device: torch.device | str | None = None
    """Where the residual lives; None is the parameters' own device."""

    max_skipped: int = 10
    """A step with a gradient norm that is not finite is skipped on all ranks. This many consecutive skipped steps raise
    an error."""

    check_replicas_every: int = 0
    """Steps between two comparisons of all ranks' parameters, bit for bit; 0 compares only at the first step. If
    something changes a parameter on one rank alone, it stays different where changes come back (see ``wire_dtype``)."""

    block_size: int | None = None
    """Block length B; None takes the largest B <= 256 for which (1 - sparsity) * B is a whole number, the nearest
    where there is none, and 1 / (1 - sparsity) below a density of 1/256."""

    def __post_init__(self) -> None:
        if not _is_number(self.sparsity) or not 0.0 <= self.sparsity < 1.0:
            raise ValueError(
                f"`sparsity` must be a number in [0, 1), got {self.sparsity!r}. It is the share of entries that is not"
                " sent: 0.99 sends 1% of them; use 0 to send everything."
            )
        for name, least in _LEAST_WHOLE.items():
            value = getattr(self, name)
            if value is None and name in _CHOSEN_BY_NONE:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"`{name}` must be a whole number >= {least}, got {value!r}. Use {least} or more, as an int."
                )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (value is None and name in _CHOSEN_BY_NONE):
                raise ValueError(
                    f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}. Use {choices[0]!r} if"
                    " unsure."
                )
        for name, usual in (("bias_correction", False), ("reshard_after_forward", True)):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"`{name}` must be True or False, got {value!r}. Pass a bool; {usual} if unsure.")
        check_local_group_size(self.local_group_size)
        if self.residual_device is not None:
            object.__setattr__(self, "residual_device", _as_device(self.residual_device))
        self._check_block_size()
        if self.update == "adamw" and self.second_moment != "measured":
            raise ValueError(
                f"`second_moment` must be 'measured' with the update of AdamW, got {self.second_moment!r}: it divides"
                " by a mean square that the synchronized buffer does not hold. Leave it out, or set update='adams'."
            )
        if self.dense and self.sparsity_warmup_steps:
            raise ValueError(
                f"`sparsity_warmup_steps` must be 0 when sparsity is 0, got {self.sparsity_warmup_steps}: there is no"
                " sparsity to warm up to. Raise `sparsity` or drop the warm-up."
            )

    def _check_block_size(self) -> None:
        if self.block_size is None:
            if density_of(self.sparsity) * MAX_BLOCK < 1:
                raise ValueError(
                    f"`sparsity` must leave at least one entry in {MAX_BLOCK}, got {self.sparsity!r}. Lower it to at"
                    f" most {1 - 1 / MAX_BLOCK:.5f}."
                )
            return
        if (
            isinstance(self.block_size, bool)
            or not isinstance(self.block_size, int)
            or not 1 <= self.block_size <= MAX_BLOCK
        ):
            raise ValueError(
                f"`block_size` must be None or a whole number from 1 to {MAX_BLOCK}, got {self.block_size!r}. None"
                " chooses it."
            )
        if density_of(self.sparsity) * self.block_size < 1:
            raise ValueError(
                f"`block_size` must hold at least one sent entry, got (1 - {self.sparsity}) * {self.block_size}."
                f" Use block_size >= {math.ceil(1 / density_of(self.sparsity))}, or None."
            )

    @property
    def dense(self) -> bool:
        """Whether everything is sent at every step."""
        return self.sparsity == 0.0

    @property
    def warmup_steps(self) -> int:
        """`sparsity_warmup_steps`, its default for a run of unknown length filled in."""
        return self.warmup_within(None)

    @property
    def warmup_shape(self) -> WarmupShape:
        """How the density falls: ``"waits"`` lets the wait 1 / density grow linearly, ``"geometric"`` its logarithm."""
        return "waits" if self.sparsity_warmup_steps is None and self.update != "adams" else "geometric"

    def warmup_within(self, steps: float | None) -> int:
        """The same for a run of ``steps`` steps; None or infinity: not known."""
        if self.sparsity_warmup_steps is not None:
            return self.sparsity_warmup_steps
        if self.dense:
            return 0
        if self.warmup_shape == "waits":
            density = self.quota.density
            return math.ceil(STEPS_PER_WAIT * max(1.0, 10 * math.sqrt(density)) * (1 / density - 1))
        return WARMUP_STEPS if steps is None else int(max(0, min(WARMUP_STEPS, steps - self.dense_steps)))

    @property
    def measures_noise(self) -> bool:
        """Whether the owner keeps a running mean square of its own gradient, for the update of AdamS."""
        return self.update != "adamw" and self.second_moment == "measured" and not self.dense

    @property
    def quota(self) -> Quota:
        """Block length and entries sent per block, once all warm-up is over (docs/design.md, 3.1)."""
        return quota_for(self.sparsity, self.block_size)

    def as_dict(self) -> dict[str, Any]:
        """All options as plain numbers, strings and None (what a checkpoint may hold)."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: str(value) if isinstance(value, torch.device) else value for name, value in values.items()}

    @property
    def wire(self) -> WireDtype:
        """`wire_dtype`, its default filled in."""
        return self.wire_dtype or usual_wire(self.sparsity)

    @property
    def values_dtype(self) -> torch.dtype:
        """The torch dtype that ``wire_dtype`` names; fp32 for those that are packed into fewer bits."""
        return _WIRE_DTYPES.get(self.wire, torch.float32)

    @property
    def own_dtype(self) -> torch.dtype:
        """The dtype of an owner's values for its own shard, which do not travel: bf16 where other values are packed.

        Where a step sends more than half of a block, their rounding errors rank the entries that were just sent, by
        about their size. If all were exact zeros, the next mask would take the first positions, step after step.
        """
        return self.values_dtype if self.wire_bits is None else torch.bfloat16

    @property
    def wire_bits(self) -> int | None:
        """Bits of a value on the wire where values are packed, else None."""
        return _WIRE_BITS.get(self.wire)

    def change_bits(self, sent: int) -> int | None:
        """Bits of a change on its way back, in a step that sends so many entries of a block; None: it is not packed.

        8 while more than half is sent: with 4 bits, the changes of these first steps cost a small model 0.3% of loss
        (examples/benchmarks/research-log.md).
        """
        return 8 if self.wire_bits is not None and 2 * sent > self.quota.block_size else self.wire_bits


_LEAST_WHOLE = {
    "dense_steps": 0,
    "sparsity_warmup_steps": 0,
    "max_skipped": 1,
    "check_replicas_every": 0,
}
_CHOSEN_BY_NONE = ("sparsity_warmup_steps", "update", "wire_dtype")
_CHOICES: dict[str, tuple[str, ...]] = {
    "update": get_args(Update),
    "second_moment": get_args(SecondMoment),
    "wire_dtype": get_args(WireDtype),
    "clip_norm": get_args(ClipNorm),
}


def usual_wire(sparsity: float) -> WireDtype:
    """The wire where none is chosen. Dense training is as with torch's optimizer, but for the rounding of bf16."""
    return "int4" if sparsity else "bf16"


def _as_device(value: torch.device | str) -> torch.device:
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"`residual_device` must be None or name a device, got {value!r}. Use None, 'cpu' or 'cuda'."
        ) from error


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
