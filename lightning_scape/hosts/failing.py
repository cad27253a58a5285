"""An error on one rank alone: callbacks that save on an exception save nothing, for all ranks save together.

Lightning has its callbacks save before anybody learns of the error. The rank that failed would wait for ranks that
wait for it, in a message of the step. So this callback, which comes before those, asks in the job's store which ranks
have met an error, and where. If all have, at the same step, all save. Otherwise none does.
"""

from __future__ import annotations

import functools
import time
import uuid
import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from torch.distributed import PrefixStore  # type: ignore[attr-defined] # without a mark for mypy
from typing_extensions import override

from lightning_scape.comm.channel import ANSWER_SECONDS, asked
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import find_all
from lightning_scape.core.private_names import default_store
from lightning_scape.hosts import requeue
from lightning_scape.hosts.preemption import ends_together

GATHER_SECONDS = 3.0
"""How long a rank that has met an error waits for all others to meet one, too."""
_HOOK = "on_exception"


class Failing(requeue.Guest):
    """Lets callbacks save on an exception if all ranks come to it; else keeps them from saving.

    Args:
        token: the same on all ranks, and of no other fit: a store may outlive its ranks.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._kept: list[Callback] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy has kept no callback from saving."""
        return {"_token": self._token, "_kept": []}

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        saving = [callback for callback in requeue.callbacks_of(trainer) if _saves(callback)]
        if not saving or trainer.world_size == 1 or ends_together(exception) or self._all_come(trainer):
            return
        for callback in saving:
            setattr(callback, _HOOK, _save_nothing)
            self._kept.append(callback)
        warnings.warn(
            f"All ranks must save together, got {type(exception).__name__} on rank {trainer.global_rank} and not on all"
            " of them at the same step: no checkpoint is saved on this exception. The last one stands.",
            stacklevel=2,
        )

    def _all_come(self, trainer: Trainer) -> bool:
        """Whether all ranks have met an error at the same step. The first rank that knows decides for all."""
        steps = [each.progress().steps for each in find_all(trainer.optimizers)]
        mine = f"{trainer.global_step} {steps}"
        ask = functools.partial(_ask, self._token, trainer.global_rank, trainer.world_size, mine)
        return bool(asked(ask, GATHER_SECONDS + ANSWER_SECONDS))

    @override
    def leave(self, trainer: Trainer) -> None:
        for callback in self._kept:
            vars(callback).pop(_HOOK, None)
        self._kept.clear()


def _saves(callback: Callback) -> bool:
    if isinstance(callback, ModelCheckpoint):
        return bool(callback.save_on_exception)
    return isinstance(callback, Checkpoint) and type(callback).on_exception is not Callback.on_exception


def _save_nothing(*_: Any) -> None:
    """Takes the place of a callback's hook."""


def _ask(token: str, rank: int, ranks: int, place: str) -> bool:
    store = PrefixStore(f"lightning_scape/failed/{token}", default_store())
    store.set(str(rank), place)
    everyone, deadline = [str(other) for other in range(ranks)], time.monotonic() + GATHER_SECONDS
    while not store.check(everyone) and not store.check(["verdict"]) and time.monotonic() < deadline:
        time.sleep(0.05)
    alike = store.check(everyone) and len({store.get(other) for other in everyone}) == 1
    verdict: bytes = store.compare_set("verdict", "", "together" if alike else "apart")
    return verdict == b"together"


def attach(trainer: Trainer) -> None:
    """Before a fit. Collective."""
    token = Communicator().all_gather_object(uuid.uuid4().hex)[0]
    requeue.insert(trainer, Failing(token))
