"""How a user names the options of the package's own methods, under either host: the often used ones, and ``config``.

A base beside the host's strategy; what it does not name goes on to that.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch

from lightning_scape.scape.config import ClipNorm, MaskStatistic, ScapeConfig, SecondMoment, Update, WireDtype
from lightning_scape.sparseloco.config import Average, Reduction, SparseLoCoConfig


class ScapeOptions:
    """Options of SCAPE.

    Args:
        sparsity: share of the entries that is not sent in a step, in [0, 1). 0 is dense training, sharded.
        config: all options at once, :class:`~lightning_scape.ScapeConfig`: the place for those that are seldom set. An
            option given by name as well must be the same.
        update: ``"adamw"`` or ``"adams"``; None fits the optimizer given.
        dense_steps: number of first steps that send everything.
        sparsity_warmup_steps: steps over which the density falls from 1 to ``1 - sparsity``; 0 is none. None is 4,950
            at 99% and 1,424 at 90%; with the update of AdamS 1,000, or all steps of a shorter run.
        mask_statistic: what ranks the entries.
        mask_votes: entries per block that every rank proposes; None chooses.
        second_moment: what an entry is divided by that was not visited in the step before.
        wire_dtype: how values travel to their owner, and the changes of wider parameters back.
        bias_correction: divide the first moments by ``1 - beta1**t``.
        clip_norm: how clipping by norm measures the averaged gradient.
        local_group_size: ranks of a node that hold one replica together, sharded by FSDP2; ``"node"`` takes all ranks
            of a node. SCAPE then runs between the nodes.
        reshard_after_forward: with ``local_group_size`` above 1: free gathered parameters between forward and backward.
        residual_device: where the residual lives.
        max_skipped: consecutive skipped steps (a gradient is not finite) that raise an error.
        check_replicas_every: steps between two comparisons of all ranks' parameters; 0: the first step only.
        block_size: block length, None for the best.
        options: the host's (``resume``, ``state_dict_type``, ``timeout``, ...): see its strategy.

    Raises:
        ValueError: an option is outside its rule, or is given differently in ``config`` and by name.
        TypeError: an option of DDP's that is not needed here, or one that does not exist.
    """

    method: ClassVar[str | None] = "scape"

    def __init__(
        self,
        sparsity: float = 0.99,
        *,
        config: ScapeConfig | None = None,
        update: Update | None = None,
        dense_steps: int = 0,
        sparsity_warmup_steps: int | None = None,
        mask_statistic: MaskStatistic = "residual",
        mask_votes: int | None = None,
        second_moment: SecondMoment = "measured",
        wire_dtype: WireDtype = "bf16",
        bias_correction: bool = False,
        clip_norm: ClipNorm = "sketch",
        local_group_size: int | Literal["node"] = 1,
        reshard_after_forward: bool = True,
        residual_device: torch.device | str | None = None,
        max_skipped: int = 10,
        check_replicas_every: int = 0,
        block_size: int | None = None,
        **options: Any,
    ) -> None:
        given = locals()
        named = {field.name: given[field.name] for field in fields(ScapeConfig)}
        super().__init__(config, **named, **options)  # type: ignore[call-arg] # of the host's strategy, the next base


class SparseLoCoOptions:
    """Options of SparseLoCo.

    Args:
        sync_every: H, steps from one exchange to the next.
        density: share of the entries that a rank sends in an exchange; 1 sends all.
        bits: of a value on the wire: 2, 4, 8, or None for fp32.
        error_decay: what is left of the error feedback after each window.
        outer_lr: length of the outer step.
        config: all options at once, :class:`~lightning_scape.SparseLoCoConfig`: the place for those that are seldom
            set. An option given by name as well must be the same.
        average: what the sum over ranks is divided by; None chooses.
        reduction: ``"sharded"`` over the owners of the entries, or ``"gathered"`` on every rank.
        return_density: share of the entries that come back from the owners.
        block_size: block length, None for the best.
        device: where the starting point and the error feedback live.
        overlap_steps: inner steps beside which the exchange runs.
        max_skipped: dropped windows in a row (parameters are not finite) that raise an error.
        check_replicas_every: exchanges between two comparisons of all ranks.
        local_group_size: ranks of a node that hold one replica together, sharded by FSDP2, with one
            gradient; ``"node"`` takes all ranks of a node. SparseLoCo then runs between the nodes.
        reshard_after_forward: with ``local_group_size`` above 1: free gathered parameters between forward and backward.
        options: the host's (``resume``, ``state_dict_type``, ``timeout``, ...): see its strategy.

    Raises:
        ValueError: an option is outside its rule, or is given differently in ``config`` and by name.
        TypeError: an option of DDP's that is not needed here, or one that does not exist.
    """

    method: ClassVar[str | None] = "sparseloco"

    def __init__(
        self,
        sync_every: int = 30,
        density: float = 1 / 64,
        bits: int | None = 2,
        error_decay: float = 0.95,
        outer_lr: float = 1.0,
        *,
        config: SparseLoCoConfig | None = None,
        average: Average | None = None,
        reduction: Reduction | None = None,
        return_density: float | None = None,
        block_size: int | None = None,
        device: torch.device | str | None = None,
        overlap_steps: int = 0,
        max_skipped: int = 10,
        check_replicas_every: int = 1,
        local_group_size: int | Literal["node"] = 1,
        reshard_after_forward: bool = True,
        **options: Any,
    ) -> None:
        given = locals()
        named = {field.name: given[field.name] for field in fields(SparseLoCoConfig)}
        super().__init__(config, **named, **options)  # type: ignore[call-arg] # of the host's strategy, the next base
