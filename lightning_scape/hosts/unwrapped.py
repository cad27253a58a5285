"""DDPStrategy without the wrapper around the module, and with what users of the wrapper rely on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import Method
from lightning_scape.hosts import setup
from lightning_scape.hosts.common import CommonStrategy
from lightning_scape.hosts.private_names import NoOptimizer, OpenedTrainers
from lightning_scape.hosts.schedulers import retarget_schedulers


class UnwrappedStrategy(CommonStrategy, OpenedTrainers):
    """Base of the Trainer's strategies: which optimizers are under the method, and what becomes of buffers.

    Every optimizer comes through :attr:`optimizers`: those of ``configure_optimizers``, those of another
    ``setup_optimizers`` in mid-training, and what a callback puts there. From the beginning of a fit to its teardown
    they are put under the method, and replaced ones are let go; both are collective.
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

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        """Those that the Trainer steps. What is assigned in a fit is put under the method; collective then."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        taken = self._attach_all(optimizers) if self._attaching else list(optimizers)
        OpenedTrainers.optimizers.fset(self, taken)  # type: ignore[attr-defined] # Lightning's wrappers with them

    def _attach_all(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        inner: list[Any] = [setup.stepped(each) for each in optimizers]
        if not self._method.exchanges_every_step:
            setup.check_apart([one for one in inner if not isinstance(one, NoOptimizer)])
        for each in self._attached:
            if not any(each.optimizer is one for one in inner):  # the training goes on without it
                each.finish()
                each.close()
        self._attached = [each for each in self._attached if any(each.optimizer is one for one in inner)]
        attached = {id(each.optimizer) for each in self._attached}
        named = list(self._module.named_parameters())
        for place, one in enumerate(inner):
            # `configure_optimizers` may return None: Lightning then runs without an optimizer.
            if not isinstance(one, NoOptimizer) and id(one) not in attached:
                new = self._put_under_method(one, named)
                self._attached.append(new)
                inner[place] = new.optimizer
        return inner

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        if self._attaching:  # again, in mid-training: the user's schedulers may come with the user's optimizers
            self._steer(back=True)
        else:
            self._attached, self._steps = [], None
        self._attaching = False  # until it is known that all ranks have built the same
        Communicator().raise_on_all_ranks(functools.partial(super().setup_optimizers, trainer))
        setup.check_alike([each for each in self.optimizers if not isinstance(each, NoOptimizer)])
        self._attaching = True
        self.optimizers = self.optimizers
        self._steer()

    def _steer(self, back: bool = False) -> None:
        """Makes the schedulers drive the Trainer's optimizers, or (``back``) those that the user has built."""
        pairs = [(each.given, each.optimizer) for each in self._attached]
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        retarget_schedulers(schedulers, [(b, a) for a, b in pairs] if back else pairs)

    def _end_attachment(self) -> None:
        """The fit is over: the user's optimizers are torch's again. Sends nothing; a checkpoint may still be saved."""
        self._attaching = False
        for each in self._attached:
            each.give_back()
        self._steer(back=True)
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
