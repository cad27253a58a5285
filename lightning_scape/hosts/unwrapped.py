"""DDPStrategy without the wrapper around the module, and with what users of the wrapper rely on."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.nn import Module
from typing_extensions import override

from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import Method
from lightning_scape.hosts import setup
from lightning_scape.hosts.common import CommonStrategy
from lightning_scape.hosts.private_names import NoOptimizer, OpenedTrainers


class UnwrappedStrategy(CommonStrategy, OpenedTrainers):
    """Base of the Trainer's strategies: which optimizers are under the method, and what becomes of buffers.

    Those of ``configure_optimizers``, and of another ``setup_optimizers`` in mid-training, which lets those go that it
    replaces; both are collective.
    """

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self._attached: list[Method] = []
        self._attaching = False
        self._steps: float | None = None
        """Steps of the run, if known; set when the training starts."""

    def __getstate__(self) -> dict[str, Any]:
        """What Lightning copies and pickles of a strategy, without what belongs to this process."""
        return {**super().__getstate__(), "_attached": [], "_attaching": False}

    # ------------------------------------------------------------------------------------------- the module

    @property
    def _module(self) -> LightningModule:
        """The user's module; there is one in a fit."""
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def configure_ddp(self) -> None:
        """Makes all ranks equal to rank 0, as DDP's constructor does, and wraps nothing."""
        model = self.model
        assert model is not None
        setup.start_equal(model)
        if not hasattr(model, "no_sync"):  # DDP's wrapper has it; here nothing is sent in the backward pass
            model.no_sync = functools.partial(_without_sync, self._module)  # type: ignore[assignment]

    # --------------------------------------------------------------------------------------- the optimizers

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Puts the user's optimizers under the method. Collective; also in mid-training, after a change of theirs."""
        self._attaching = False  # until it is known that all ranks have built the same
        Communicator().raise_on_all_ranks(functools.partial(super().setup_optimizers, trainer))
        setup.check_alike(given := [each for each in self.optimizers if not isinstance(each, NoOptimizer)])
        self._attaching = True
        if not self._method.exchanges_every_step:
            setup.check_apart(given)
        before = {id(each.optimizer): each for each in self._attached}
        for gone in [each for each in self._attached if not any(each.optimizer is one for one in given)]:
            gone.finish()
            gone.close()
        named = list(self._module.named_parameters())
        self._attached = [before.get(id(each)) or self._put_under_method(each, named) for each in given]

    def _end_attachment(self) -> None:
        """The fit is over: the user's optimizers are torch's again. Sends nothing; a checkpoint may still be saved."""
        self._attaching = False
        for each in self._attached:
            each.give_back()
        self._attached, self._steps = [], None
        module = self.lightning_module
        if module is not None and getattr(vars(module).get("no_sync"), "func", None) is _without_sync:
            del module.no_sync

    # ------------------------------------------------------------------------------------------- ranks alike

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._attaching:
            self._make_alike()

    @override
    def on_train_end(self) -> None:
        """Ends what has begun: every rank leaves the fit with the same parameters."""
        for each in self._attached:
            each.finish()
        super().on_train_end()
        self._make_alike()

    @override
    def trained(self) -> tuple[list[Module], list[Method]]:
        return ([self._module], self._attached) if self._attaching else ([], [])


def _without_sync(module: LightningModule) -> AbstractContextManager[None]:
    """Stands for ``no_sync`` of DDP's wrapper; a function of the module, which may be copied in a fit."""
    strategy: Any = module.trainer.strategy
    held: AbstractContextManager[None] = strategy.block_backward_sync()
    return held
