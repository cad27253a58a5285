"""The package's own methods by name: their strategies for both hosts.

All that they do is the hosts'. What they add: the fields of a method's configuration, by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, TypeVar, get_type_hints

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_scape.hosts.common import register
from lightning_scape.hosts.fabric import FabricMethodStrategy
from lightning_scape.hosts.trainer import MethodStrategy
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.sparseloco.config import SparseLoCoConfig

_Strategy = TypeVar("_Strategy", bound=type[Any])


def _by_name(kind: type[Any], registry: Any) -> Callable[[_Strategy], _Strategy]:
    """Gives a strategy the fields of a configuration as arguments, the first one also by place, and registers it."""
    defaults, hints = {field.name: field.default for field in fields(kind)}, get_type_hints(kind)
    main = next(iter(defaults))

    def decorate(strategy: _Strategy) -> _Strategy:
        of_host = strategy.__init__

        @functools.wraps(of_host)
        def init(self: Any, *args: Any, config: Any = None, **options: Any) -> None:
            if args:
                (options[main],) = args
            if defaults.keys() <= options.keys():  # written by a parser, which fills in defaults
                options = {
                    name: each for name, each in options.items() if name not in defaults or each != defaults[name]
                }
            of_host(self, config, **options)

        of_all = list(inspect.signature(of_host).parameters.values())[2:-1]
        own = [
            inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=hints[n])
            for n, d in defaults.items()
        ]
        own[0] = own[0].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind | None))
        this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # What help(), a documentation and LightningCLI's parser go by.
        init.__annotations__ = of_host.__annotations__ | {each.name: each.annotation for each in own}
        init.__signature__ = inspect.Signature([this, *own, *of_all])  # type: ignore[attr-defined]
        strategy.__init__ = init
        register(strategy, registry)
        return strategy

    return decorate


@_by_name(ScapeConfig, StrategyRegistry)
class ScapeStrategy(MethodStrategy):
    """Data-parallel training that sends 1% of the entries each step (SCAPE, arXiv 2607.01678).

    ``Trainer(strategy=ScapeStrategy(sparsity=0.99))``, or ``Trainer(strategy="scape")`` for the defaults. Return AdamW,
    Adam or AdamS from ``configure_optimizers``: it stays, and its ``step`` is SCAPE's in the fit. Clipping leaves
    ``p.grad`` as it is: the step applies the factor.

    Its options: the fields of :class:`~lightning_scape.ScapeConfig`, then those of
    :class:`~lightning_scape.MethodStrategy`.
    """

    method: ClassVar[str | None] = "scape"


@_by_name(SparseLoCoConfig, StrategyRegistry)
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

    method: ClassVar[str | None] = "sparseloco"


@_by_name(ScapeConfig, STRATEGY_REGISTRY)
class FabricScapeStrategy(FabricMethodStrategy):
    """``L.Fabric(strategy=FabricScapeStrategy(sparsity=0.99))``, or ``L.Fabric(strategy="scape")`` for the defaults.

    For AdamW, Adam or AdamS. ``clip_gradients`` returns the norm of the averaged gradient, and leaves ``p.grad`` as it
    is. Its options: the fields of :class:`~lightning_scape.ScapeConfig`, then those of
    :class:`~lightning_scape.FabricMethodStrategy`.
    """

    method: ClassVar[str | None] = "scape"


@_by_name(SparseLoCoConfig, STRATEGY_REGISTRY)
class FabricSparseLoCoStrategy(FabricMethodStrategy):
    """``L.Fabric(strategy=FabricSparseLoCoStrategy(sync_every=30))``, or ``L.Fabric(strategy="sparseloco")``.

    For any torch optimizer. ``clip_gradients`` clips the rank's own gradient. Inside a window every rank has parameters
    of its own, and ``save`` writes rank 0's for the model. Call ``fabric.strategy.sync()`` at the end of training, or
    give ``total_steps``; call it also before you set up another optimizer over the same parameters. Its options: the
    fields of :class:`~lightning_scape.SparseLoCoConfig`, then those of :class:`~lightning_scape.FabricMethodStrategy`.
    """

    method: ClassVar[str | None] = "sparseloco"
