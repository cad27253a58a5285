"""The hosts' strategies for each method, with the fields of its configuration by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_scape.hosts.fabric import FabricMethodStrategy
from lightning_scape.hosts.trainer import MethodStrategy
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.sparseloco.config import SparseLoCoConfig

_Strategy = TypeVar("_Strategy", bound=type[Any])


def _by_name(name: str, kind: type[Any], registry: Any) -> Callable[[_Strategy], _Strategy]:
    """Gives a strategy a configuration's fields, the first one also by place, in front of ``config``; registers it."""
    main, *others = inspect.signature(kind, eval_str=True).parameters.values()

    def decorate(strategy: _Strategy) -> _Strategy:
        of_host = strategy.__init__
        this, config, *of_all = inspect.signature(of_host, eval_str=True).parameters.values()
        first = main.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        config = config.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind | None)
        arguments = inspect.Signature([this, first, *others, config, *of_all])

        @functools.wraps(of_host)
        def init(*args: Any, **options: Any) -> None:
            given = arguments.bind(*args, **options).arguments
            if len(given) == len(arguments.parameters):  # by a parser, which fills in defaults
                given = {of: each for of, each in given.items() if each != arguments.parameters[of].default}
            own = {each.name: given.pop(each.name) for each in (main, *others) if each.name in given}
            whole = given.get("config") or kind()
            of_host(**given | {"config": replace(whole, **own) if own else whole})

        # What help(), a documentation and LightningCLI's parser go by.
        init.__signature__ = arguments  # type: ignore[attr-defined]
        init.__annotations__ = {each.name: each.annotation for each in arguments.parameters.values()}
        strategy.__init__ = init
        if name not in registry:  # that of `litgpt-scape` stays
            registry.register(name, strategy)
            registry.register(f"{name}_notebook", strategy, start_method="fork")
        return strategy

    return decorate


@_by_name("scape", ScapeConfig, StrategyRegistry)
class ScapeStrategy(MethodStrategy):
    """Data-parallel training that sends 1% of the entries each step (SCAPE, arXiv 2607.01678).

    ``Trainer(strategy=ScapeStrategy(sparsity=0.99))``, or ``Trainer(strategy="scape")`` for the defaults. Return AdamW,
    Adam or AdamS from ``configure_optimizers``: it stays, and its ``step`` is SCAPE's in the fit. Clipping leaves
    ``p.grad`` as it is: the step applies the factor.

    Its options: the fields of :class:`~lightning_scape.ScapeConfig`, then those of
    :class:`~lightning_scape.MethodStrategy`.
    """

    if TYPE_CHECKING:  # which does not see what `_by_name` does

        def __init__(self, sparsity: float = 0.99, **options: Any) -> None: ...


@_by_name("sparseloco", SparseLoCoConfig, StrategyRegistry)
class SparseLoCoStrategy(MethodStrategy):
    """Data-parallel training whose ranks exchange every ``sync_every`` steps, sparsely (SparseLoCo, arXiv 2508.15706).

    ``Trainer(strategy=SparseLoCoStrategy(sync_every=30))``, or ``Trainer(strategy="sparseloco")`` for the defaults. Any
    torch optimizer serves. Inside a window every rank has parameters of its own: it validates them, and
    ``gradient_clip_val`` bounds the norm of its own gradient. A checkpoint's ``state_dict`` holds rank 0's; a resumed
    run takes up every rank's, bit for bit. The end of a fit ends the window early, so that all ranks hold the same
    model; if callbacks put averages (EMA, SWA) in its place, it is the mean over ranks. With ``precision="16-mixed"``
    all ranks skip a step together, for which they exchange a number in every step.

    Its options: the fields of :class:`~lightning_scape.SparseLoCoConfig`, then those of
    :class:`~lightning_scape.MethodStrategy`.
    """

    if TYPE_CHECKING:  # which does not see what `_by_name` does

        def __init__(self, sync_every: int = 30, **options: Any) -> None: ...


@_by_name("scape", ScapeConfig, STRATEGY_REGISTRY)
class FabricScapeStrategy(FabricMethodStrategy):
    """``L.Fabric(strategy=FabricScapeStrategy(sparsity=0.99))``, or ``L.Fabric(strategy="scape")`` for the defaults.

    For AdamW, Adam or AdamS. ``clip_gradients`` returns the norm of the averaged gradient, and leaves ``p.grad`` as it
    is. Its options: the fields of :class:`~lightning_scape.ScapeConfig`, then those of
    :class:`~lightning_scape.FabricMethodStrategy`.
    """

    if TYPE_CHECKING:  # which does not see what `_by_name` does

        def __init__(self, sparsity: float = 0.99, **options: Any) -> None: ...


@_by_name("sparseloco", SparseLoCoConfig, STRATEGY_REGISTRY)
class FabricSparseLoCoStrategy(FabricMethodStrategy):
    """``L.Fabric(strategy=FabricSparseLoCoStrategy(sync_every=30))``, or ``L.Fabric(strategy="sparseloco")``.

    For any torch optimizer. ``clip_gradients`` clips the rank's own gradient. Inside a window every rank has parameters
    of its own, and ``save`` writes rank 0's for the model. Call ``fabric.strategy.sync()`` at the end of training, or
    give ``total_steps``; call it also before you set up another optimizer over the same parameters. Its options: the
    fields of :class:`~lightning_scape.SparseLoCoConfig`, then those of :class:`~lightning_scape.FabricMethodStrategy`.
    """

    if TYPE_CHECKING:  # which does not see what `_by_name` does

        def __init__(self, sync_every: int = 30, **options: Any) -> None: ...
