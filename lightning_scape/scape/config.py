"""What a user may choose, validated once, frozen afterwards.

Symbols: ``rho = 1 - sparsity`` is the density, ``B`` the block length, ``q`` the entries sent per block.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_scape.core.layout import MAX_BLOCK, Quota, density_of, quota_for
from lightning_scape.core.local_shards import check_sharding

Update = Literal["adamw", "adams"]
WireDtype = Literal["int4", "fp32"]
ClipNorm = Literal["sketch", "local"]

STEPS_PER_WAIT = 50
"""Default warm-up: after so many steps an entry waits for one step more. At densities above 1% the wait grows more
slowly, by the root of the density: there the bytes of a warm-up count less."""


@dataclass(kw_only=True, frozen=True)
class ScapeConfig:
    """Every option of SCAPE (arXiv 2607.01678); immutable, checked when made.

    Raises:
        ValueError: an option is outside its rule; the message gives rule, value and remedy.
    """

    sparsity: float = 0.99
    """Share of the entries that is NOT sent in a step, in [0.5, 1). Or 0: dense training, sharded."""

    update: Update | None = None
    """The update of an entry. ``"adamw"`` divides by AdamW's second moment, so that learning rate, betas and eps mean
    what they mean in torch. ``"adams"`` is SCAPE's paper: AdamS, without a second moment. None takes the one that fits
    the optimizer given: ``"adamw"`` for AdamW and Adam, ``"adams"`` for AdamS."""

    sparsity_warmup_steps: int | None = None
    """First steps, in which the density falls from 1 to 1 - sparsity: the steps between two updates of an entry grow
    linearly. 0 sends what `sparsity` says from the first step. None: they grow by one in every 50 steps (158 at 90%),
    for 4,950 steps at 99% and 1,424 at 90% (docs/design.md, 3.3)."""

    wire_dtype: WireDtype | None = None
    """How values travel to their owner: ``"int4"`` (0.53 bytes: 64 values share a scale), or ``"fp32"``. None takes
    ``"int4"``, or ``"fp32"`` at sparsity 0, for dense training. With int4 the rounding error stays in the residual,
    parameters of any dtype come back as changes in as many bits, and the owner keeps their rounding errors. With fp32
    they come back as values in their own dtype."""

    clip_norm: ClipNorm = "sketch"
    """How ``gradient_clip_val`` measures the averaged gradient: ``"sketch"`` (estimate of its true norm, one standard
    deviation 1.1%, one 16 KB message) or ``"local"`` (root mean square of the ranks' own norms, never too small)."""

    local_group_size: int | Literal["node"] = 1
    """Ranks of a node that hold one replica of the model together, sharded by FSDP2 (``fully_shard``), which averages
    their gradients densely; SCAPE runs between the nodes. ``"node"`` takes all ranks of a node. 1: every rank holds
    the whole model. A strategy shards the model; for ``ScapeOptimizer`` itself the parameters say it."""

    reshard_after_forward: bool = True
    """With ``local_group_size`` above 1: True frees a block's gathered parameters after its forward pass and gathers
    them again for the backward pass (ZeRO-3's memory). False keeps them in between (ZeRO-2's)."""

    max_skipped: int = 10
    """A step with a gradient norm that is not finite is skipped on all ranks. This many consecutive skipped steps raise
    an error."""

    check_replicas_every: int = 1000
    """Steps between two comparisons of all ranks' parameters, bit for bit; 0 compares only at the first step. If
    something changes a parameter on one rank alone, it stays different where changes come back (see ``wire_dtype``)."""

    def __post_init__(self) -> None:
        number = isinstance(self.sparsity, (int, float)) and not isinstance(self.sparsity, bool)
        if not number or not (self.sparsity == 0 or 0.5 <= self.sparsity < 1.0):
            raise ValueError(
                f"`sparsity` must be a number in [0.5, 1), or 0, got {self.sparsity!r}. It is the share of entries that"
                " is not sent: 0.99 sends 1% of them; use 0 to send everything."
            )
        if density_of(self.sparsity) * MAX_BLOCK < 1:
            raise ValueError(
                f"`sparsity` must leave at least one entry in {MAX_BLOCK}, got {self.sparsity!r}. Lower it to at"
                f" most {1 - 1 / MAX_BLOCK:.5f}."
            )
        for name, least in (("sparsity_warmup_steps", 0), ("max_skipped", 1), ("check_replicas_every", 0)):
            value = getattr(self, name)
            if value is None and name == "sparsity_warmup_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"`{name}` must be a whole number >= {least}, got {value!r}. Use {least} or more, as an int."
                )
        for name, choices in (("update", Update), ("wire_dtype", WireDtype), ("clip_norm", ClipNorm)):
            value, known = getattr(self, name), get_args(choices)
            if value not in known and not (value is None and name != "clip_norm"):
                raise ValueError(
                    f"`{name}` must be one of {', '.join(map(repr, known))}, got {value!r}. Use {known[0]!r} if unsure."
                )
        check_sharding(self.local_group_size, self.reshard_after_forward)
        if not self.sparsity and self.sparsity_warmup_steps:
            raise ValueError(
                f"`sparsity_warmup_steps` must be 0 when sparsity is 0, got {self.sparsity_warmup_steps}: there is no"
                " sparsity to warm up to. Raise `sparsity` or drop the warm-up."
            )

    @property
    def warmup_steps(self) -> int:
        """`sparsity_warmup_steps`, its default filled in."""
        if self.sparsity_warmup_steps is not None:
            return self.sparsity_warmup_steps
        density = self.quota.density  # 1 at sparsity 0: then there is none
        return math.ceil(STEPS_PER_WAIT * max(1.0, 10 * math.sqrt(density)) * (1 / density - 1))

    @property
    def quota(self) -> Quota:
        """Block length and entries sent per block, once all warm-up is over (docs/design.md, 3.1)."""
        return quota_for(self.sparsity)

    def sent(self, step: int) -> int:
        """q, the entries sent per block at a step (steps count from 0): B means everything, and no mask is needed.

        At the i-th of T steps of the warm-up (i = 1, 2, ...) the density is ``1 / (1 + (1 / rho - 1) i / (T + 1))``.
        Everything is sent while that is above 1/2 (docs/design.md, 3.3).
        """
        quota, warmup = self.quota, self.warmup_steps
        if step >= warmup:
            return quota.sent
        density = 1 / (1 + (1 / quota.density - 1) * ((step + 1) / (warmup + 1)))
        sent = max(quota.sent, round(density * quota.block_size))
        return sent if 2 * sent <= quota.block_size else quota.block_size

    def sent_by_step(self, steps: int) -> Counter[int]:
        """For each q, how many of the first ``steps`` steps send so many entries."""
        begun = range(min(steps, self.warmup_steps))
        counts = Counter(map(self.sent, begun))
        counts[self.quota.sent] += steps - len(begun)
        return counts

    def as_dict(self) -> dict[str, Any]:
        """All options as plain numbers and strings, with the defaults of the warm-up and the wire filled in."""
        return {**vars(self), "sparsity_warmup_steps": self.warmup_steps, "wire_dtype": self.wire}

    @property
    def wire(self) -> WireDtype:
        """`wire_dtype`, its default filled in. Dense training is as with torch's optimizer."""
        return self.wire_dtype or ("int4" if self.sparsity else "fp32")

    @property
    def packed(self) -> bool:
        """Whether values travel in 4 bits."""
        return self.wire == "int4"
