"""A Trainer's checkpoint before it is written: put together by all ranks, of data alone."""

from __future__ import annotations

import itertools
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lightning_scape.checkpoint.parts import OwnParts
from lightning_scape.checkpoint.plain import with_plain_numbers
from lightning_scape.comm.together import Together
from lightning_scape.hosts.private_names import checkpoints
from lightning_scape.hosts.schedulers import as_data


class Elsewhere(dict[Any, Any]):
    """What hooks find of a state on ranks other than 0, which has it: to ask for a part of it is an error."""

    def __missing__(self, key: Any) -> Any:
        raise KeyError(_problem(f"a look at {key!r}"))

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key) if key in self else self.__missing__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """As a dict's."""
        return super().pop(key, *default) if default or key in self else self.__missing__(key)


class Nowhere(Elsewhere):
    """What hooks find of a state that no rank has whole: any look at it is an error."""

    def _refuse(self, *_: Any) -> Any:
        raise ValueError(_problem("a look at its tensors"))

    __iter__ = __len__ = keys = values = items = __reduce_ex__ = _refuse


class Shown(Elsewhere):
    """An optimizer's state as hooks find it where its tensors are not: its parameter groups.

    Args:
        optimizer: as the host steps it.
        parts: what is saved; None: rank 0 has the state.
    """

    def __init__(self, optimizer: Optimizer, parts: OwnParts | None) -> None:
        count = itertools.count()
        groups = [{**group, "params": [next(count) for _ in group["params"]]} for group in optimizer.param_groups]
        tensors = Elsewhere() if parts is None else Nowhere()
        super().__init__(state=tensors, param_groups=with_plain_numbers(groups))
        self._parts, self._before = parts, {"state": tensors, "param_groups": with_plain_numbers(groups)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)

    def parts(self) -> Any:
        """What is saved.

        Raises:
            ValueError: a hook has changed what it was shown.
        """
        if self._parts is not None and self != self._before:
            raise ValueError(_problem("a change of it"))
        return self._parts or self


def _problem(got: str) -> str:
    return (
        f"`on_save_checkpoint` must take a state where its tensors are, got {got} where they are not. With"
        ' state_dict_type="full" and without async_save they are on rank 0 (`if trainer.is_global_zero`). Elsewhere'
        " delete the state as a whole on all ranks, or leave it."
    )


class Dump(Together):
    """Takes the place of ``dump_checkpoint`` of a Trainer's connector.

    Much of it is the user's code (hooks on state dicts, callbacks' states, ``on_save_checkpoint``), between messages
    that collect optimizer states. What fails there on one rank is an error on all, at the next :meth:`agree`.
    """

    _connector: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Takes its place, for this fit and what is saved after it."""
        self._connector = checkpoints(trainer)
        self._connector.dump_checkpoint = self

    def __call__(self, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning would have given, schedulers' states as data. Collective."""
        with self.inside():
            checkpoint: dict[str, Any] = type(self._connector).dump_checkpoint(self._connector, weights_only)
            if "lr_schedulers" in checkpoint:
                checkpoint["lr_schedulers"] = [as_data(state) for state in checkpoint["lr_schedulers"]]
            states = checkpoint.get("optimizer_states")
            if isinstance(states, list) and all(isinstance(each, Shown) for each in states):
                checkpoint["optimizer_states"] = [each.parts() for each in states]
        return checkpoint
