"""What a strategy of either host holds: its options, the ranks, their words, checkpoints. Knows neither host."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_scape.__about__ import __version__
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import Method, find, method_of, unwrapped
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.hosts import setup, two_level
from lightning_scape.hosts.checkpoints import Checkpoints, StateDictType
from lightning_scape.hosts.words import Words

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

_HEARD_WITHIN = 8
"""Batches after which a word of all ranks is heard at the latest."""


class Common:
    """Its arguments are those of MethodStrategy and FabricMethodStrategy; ``method`` is the strategy's."""

    def __init__(
        self,
        method: str | None,
        config: Any,
        options: Mapping[str, Any],
        state_dict_type: StateDictType,
        async_save: bool,
        timeout: timedelta | float | None,
    ) -> None:
        self.config = setup.resolve_config(method, config, options)
        self.method = method_of(self.config)
        self.nodes = two_level.Nodes(self.config)
        self.checkpoints = Checkpoints(state_dict_type, async_save, self.nodes)
        self.timeout = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        self.words = Words(None, 1)
        """Of all ranks, once they have met."""
        self._alike: dict[str, Any] = {
            "lightning_scape's version": __version__,
            "method": self.method.name,
            "state_dict_type": state_dict_type,
            "async_save": async_save,
        }
        """By these ranks choose their messages, so they must be the same on all."""

    def meet(self, strategy: Any) -> None:
        """When the process group is up: makes those beside it. Collective."""
        self.checkpoints.check_io(strategy.checkpoint_io)
        check_same_setup(Communicator(), self._alike)
        self.nodes.set_up(strategy.num_processes, strategy.root_device)

    def new_words(self, strategy: Any) -> Words:
        """For a run: those of an earlier one may have been left unheard. Collective."""
        lag = min(self.method.steps_apart(self.config), _HEARD_WITHIN)
        # On CUDA the host is a step ahead of the device.
        self.words = Words.beside(max(lag, 2) if strategy.root_device.type == "cuda" else lag)
        return self.words

    def attach(self, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> Method:
        """Puts one of the user's optimizers under the method, and says so. Collective."""
        if (former := find(optimizer)) is not None and not isinstance(former, self.method):  # of another fit
            former.close()
        method = self.method.attach(optimizer, self.nodes.config, named, self.nodes.process_group)
        rank_zero_info(method.summary())
        return method

    def attach_all(self, optimizers: Sequence[Optimizer], module: Module, former: Iterable[Method]) -> list[Method]:
        """Puts all of a module's optimizers under the method, in place of those it had before. Collective."""
        check_same_setup(Communicator(), {"optimizers": [type(unwrapped(each)).__name__ for each in optimizers]})
        if not self.method.exchanges_every_step:
            setup.check_apart(optimizers)
        before = {id(each.optimizer): each for each in former}
        for gone in [before[place] for place in before if place not in map(id, optimizers)]:
            gone.finish()
            gone.close()
        named = list(module.named_parameters())
        return [before.get(id(each)) or self.attach(each, named) for each in optimizers]

    def make_alike(self, modules: Iterable[Module], methods: Iterable[Method]) -> None:
        """Before a validation, a save and the end: rank 0's buffers for all, and equal replicas. Collective."""
        setup.share_buffers(modules)
        for each in methods:
            each.check_replicas()


def register(strategy: Any, registry: Any) -> None:
    """Registers a strategy of one method under its names, ``"scape"`` and ``"scape_notebook"``.

    What has them already stays, as that of ``litgpt-scape``.
    """
    if (method := strategy.method) not in registry:
        what = f"lightning_scape's method {method!r}"
        registry.register(method, strategy, description=what)
        notebooks = f"{what}; processes are forked, for notebooks"
        registry.register(f"{method}_notebook", strategy, description=notebooks, start_method="fork")


def check_start_method(strategy: str, method: str, start_method: str) -> None:
    """Raises ``ValueError`` where the session is interactive, a notebook or ``python -i``, and ranks are not forked.

    Lightning would refuse it as well, and name ``ddp_notebook`` as the remedy.

    Args:
        strategy: name of the class.
        method: name of its method.
        start_method: its option.
    """
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # there is no script that a process could run
    if interactive and start_method != "fork":
        raise ValueError(
            f"{strategy}'s `start_method` must be 'fork' in an interactive session (a notebook, python -i), got"
            f" {start_method!r}: other ways start processes by running the script again, and there is none. Use"
            f" `strategy=\"{method}_notebook\"` or `{strategy}(start_method='fork')`, or run a script."
        )
