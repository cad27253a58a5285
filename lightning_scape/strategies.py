"""The package's own methods by name: their options, and their strategies for both hosts.

All that they do is the hosts'. A base with the options, by name and as ``config``, stands before the host's strategy;
what it does not name goes on to that.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import Self

from lightning_scape.hosts.fabric import FabricMethodStrategy
from lightning_scape.hosts.trainer import MethodStrategy
from lightning_scape.scape.config import ClipNorm, ScapeConfig, SecondMoment, Update, WireDtype
from lightning_scape.sparseloco.config import Average, Reduction, SparseLoCoConfig


class _Written:
    """Knows what it was called with: an option that was written down counts, also where it holds its default."""

    _written: Collection[str] = ()

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Takes what ``__init__`` takes."""
        made = super().__new__(cls)
        made._written = {*list(inspect.signature(cls).parameters)[: len(args)], *options}
        return made

    def _given(self, kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
        """Options of ``kind`` that were given. Whoever writes down all of them is a parser, which fills in defaults."""
        written = set(self._written) & {field.name for field in fields(kind)}
        named = written if len(written) < len(fields(kind)) else set()
        return {
            field.name: values[field.name]
            for field in fields(kind)
            if field.name in named or values[field.name] != field.default
        }


class ScapeOptions(_Written):
    """Options of SCAPE.

    Args:
        sparsity: share of the entries that is not sent in a step, in [0, 1). 0 is dense training, sharded.
        config: all options at once, a :class:`~lightning_scape.ScapeConfig`. An option that is also given by name must
            be the same.
        update: ``"adamw"`` or ``"adams"``; None fits the optimizer given.
        dense_steps: number of first steps that send everything.
        sparsity_warmup_steps: steps over which the density falls from 1 to ``1 - sparsity``; 0 is none. None is 4,950
            at 99% and 1,424 at 90%; with the update of AdamS 1,000, or all steps of a shorter run.
        second_moment: with the update of AdamS, what divides an entry that the step before did not update.
        wire_dtype: number format of values and of changes of parameters; None is 4 bits, at sparsity 0 bf16.
        bias_correction: divide the first moments by ``1 - beta1**t``.
        clip_norm: how clipping by norm measures the averaged gradient.
        local_group_size: ranks of a node that hold one replica together, sharded by FSDP2; ``"node"`` takes all ranks
            of a node. SCAPE then runs between the nodes.
        reshard_after_forward: with ``local_group_size`` above 1: free gathered parameters between forward and backward.
        residual_device: where the residual lives.
        max_skipped: consecutive skipped steps (a gradient is not finite) that raise an error.
        check_replicas_every: steps between two comparisons of all ranks' parameters; 0: the first step only.
        block_size: block length, None for the best.
        options: those of every strategy (``resume``, ``state_dict_type``, ``timeout``, ...).

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
        second_moment: SecondMoment = "measured",
        wire_dtype: WireDtype | None = None,
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
        named = self._given(ScapeConfig, locals())
        super().__init__(config, **named, **options)  # type: ignore[call-arg] # of the host's strategy, the next base


class SparseLoCoOptions(_Written):
    """Options of SparseLoCo.

    Args:
        sync_every: H, steps from one exchange to the next.
        density: share of the entries that a rank sends in an exchange; 1 sends all.
        bits: bits of a value that is sent: 2, 4, 8, or None for fp32.
        error_decay: factor of the error feedback after each window.
        outer_lr: learning rate of the outer step.
        config: all options at once, a :class:`~lightning_scape.SparseLoCoConfig`. An option that is also given by name
            must be the same.
        average: what the sum over ranks is divided by; None chooses.
        reduction: ``"sharded"`` over the owners of the entries, or ``"gathered"`` on every rank.
        return_density: share of the entries that come back from the owners.
        block_size: block length, None for the best.
        device: where the starting point and the error feedback live.
        overlap_steps: steps of the next window during which the exchange runs.
        max_skipped: dropped windows in a row (parameters are not finite) that raise an error.
        check_replicas_every: exchanges between two comparisons of all ranks.
        local_group_size: ranks of a node that hold one replica together, sharded by FSDP2, with one
            gradient; ``"node"`` takes all ranks of a node. SparseLoCo then runs between the nodes.
        reshard_after_forward: with ``local_group_size`` above 1: free gathered parameters between forward and backward.
        options: those of every strategy (``resume``, ``state_dict_type``, ``timeout``, ...).

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
        named = self._given(SparseLoCoConfig, locals())
        super().__init__(config, **named, **options)  # type: ignore[call-arg] # of the host's strategy, the next base


class ScapeStrategy(ScapeOptions, MethodStrategy):
    """Data-parallel training that sends 1% of the entries each step (SCAPE, arXiv 2607.01678).

    ``Trainer(strategy=ScapeStrategy(sparsity=0.99))``, or ``Trainer(strategy="scape")`` for the defaults, and nothing
    else changes: return AdamW, Adam or AdamS from ``configure_optimizers`` and they are swapped for a
    :class:`~lightning_scape.ScapeOptimizer` with the same parameter groups. Schedulers, gradient accumulation,
    ``gradient_clip_val``, every precision, callbacks and checkpoints work as they do with DDP.

    Clipping leaves ``p.grad`` as it is: the step applies the factor. For buffers and checkpoints see
    :class:`~lightning_scape.MethodStrategy`.

    Its options: those of :class:`ScapeOptions`, then those of :class:`~lightning_scape.MethodStrategy`.
    """


class SparseLoCoStrategy(SparseLoCoOptions, MethodStrategy):
    """Data-parallel training whose ranks exchange every ``sync_every`` steps, sparsely (SparseLoCo, arXiv 2508.15706).

    ``Trainer(strategy=SparseLoCoStrategy(sync_every=30))``, or ``Trainer(strategy="sparseloco")`` for the defaults. Any
    torch optimizer serves; it is not replaced. Schedulers, gradient accumulation, every precision, callbacks and
    checkpoints work as they do with DDP.

    What differs from DDP: inside a window every rank has parameters of its own. ``gradient_clip_val`` bounds the norm
    of each rank's own gradient. Inside a window each rank validates its own parameters, and a checkpoint's
    ``state_dict`` holds rank 0's; a resumed run takes up every rank's, bit for bit. The end of a fit ends the window
    early, so that all ranks hold the same model; if callbacks put averages (EMA, SWA) in its place, it is the mean over
    ranks. With ``precision="16-mixed"`` all ranks skip a step together, for which they exchange a number in every step.
    For buffers and checkpoints see :class:`~lightning_scape.MethodStrategy`.

    Its options: those of :class:`SparseLoCoOptions`, then those of
    :class:`~lightning_scape.MethodStrategy`.
    """


class FabricScapeStrategy(ScapeOptions, FabricMethodStrategy):
    """``L.Fabric(strategy=FabricScapeStrategy(sparsity=0.99))``, or ``L.Fabric(strategy="scape")`` for the defaults.

    ``fabric.setup`` swaps AdamW, Adam or AdamS for a :class:`~lightning_scape.ScapeOptimizer`. Build LR schedulers on
    the optimizer that ``setup`` returns, or on the one that it was given, whose ``step`` now calls the new one's.
    ``clip_gradients`` returns the norm of the averaged gradient, and leaves ``p.grad`` as it is.

    Its options: those of :class:`ScapeOptions`, then those of :class:`~lightning_scape.FabricMethodStrategy`. With the
    update of AdamS the default warm-up is no longer than ``total_steps``.
    """


class FabricSparseLoCoStrategy(SparseLoCoOptions, FabricMethodStrategy):
    """``L.Fabric(strategy=FabricSparseLoCoStrategy(sync_every=30))``, or ``L.Fabric(strategy="sparseloco")``.

    ``fabric.setup`` wraps any torch optimizer in a :class:`~lightning_scape.SparseLoCo`; optimizer and model stay what
    they are. ``clip_gradients`` clips the rank's own gradient. Inside a window every rank has parameters of its own,
    and ``save`` writes rank 0's for the model. Call ``fabric.strategy.sync()`` at the end of training, or give
    ``total_steps``, so that the last step ends its window. Call it also before you set up another optimizer over the
    same parameters.

    Its options: those of :class:`SparseLoCoOptions`, then those of
    :class:`~lightning_scape.FabricMethodStrategy`.
    """


ScapeStrategy.register_strategies(StrategyRegistry)
SparseLoCoStrategy.register_strategies(StrategyRegistry)
FabricScapeStrategy.register_strategies(STRATEGY_REGISTRY)
FabricSparseLoCoStrategy.register_strategies(STRATEGY_REGISTRY)
