"""Checkpoints under the Trainer: one file or a directory, put together, saved and loaded by all ranks together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint.parts import OwnParts
from lightning_scape.checkpoint.paths import directory_path, local_path
from lightning_scape.checkpoint.plain import with_plain_numbers
from lightning_scape.checkpoint.rng import rng_state
from lightning_scape.checkpoint.saver import RNG, SavedContent, host_checkpoint, host_content, is_directory
from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.together import Together
from lightning_scape.core.method import find
from lightning_scape.hosts import generators
from lightning_scape.hosts.guests import callbacks_of
from lightning_scape.hosts.private_names import checkpoints
from lightning_scape.hosts.resume import Resumption
from lightning_scape.hosts.schedulers import as_data, with_live
from lightning_scape.hosts.unwrapped import UnwrappedStrategy


class TrainerCheckpoints(UnwrappedStrategy):
    """Base of the Trainer's strategies.

    Args:
        resumption: from where a fit goes on; the other options are CommonStrategy's.
    """

    _together: Dump

    def __init__(self, *options: Any, resumption: Resumption, **more: Any) -> None:
        super().__init__(*options, **more)
        self._resumption, self._together = resumption, Dump()
        self._alike["resume"] = resumption.resume
        self._saved_rng: Tensor | None = None
        self._generators: generators.Generators | None = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._nodes.several  # before, a module on the meta device has no memory

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._module.trainer
        if self._saving.asked == "auto":
            kept = [each for each in callbacks_of(trainer) if isinstance(each, ModelCheckpoint)]
            folders = self.broadcast([str(each.dirpath or trainer.default_root_dir) for each in kept])
            self._saving.settle([*map(local_path, folders)], self.num_nodes)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        found = self._whole_module(super().lightning_module_state_dict())
        return found if found or self.is_global_zero else Elsewhere()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> Any:  # what `save_checkpoint` takes, by way of hooks
        state = self._state_of(optimizer, super().optimizer_state)
        here = find(optimizer) is None or (state and not isinstance(state, OwnParts))
        return state if here else Shown(optimizer, state or None)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, one file or a directory. Collective; if it fails, it fails on every rank."""
        checkpoint = {**checkpoint}  # a callback may have kept the one that its hook was given
        self._resumption.record(checkpoint)
        if self._saving.sharded:
            if storage_options is not None:
                raise TypeError(
                    '`storage_options` must be None with state_dict_type="sharded", got'
                    f" {storage_options!r}: a directory is written by torch.distributed.checkpoint. Leave it out."
                )
            path = directory_path(self.broadcast(str(filepath)))
            offered = self._offered_parameters(self._module)
            content = host_content(checkpoint, offered, self.global_rank)
            self._saver.save(path, content, self._checkpoint_ranks())
        else:
            states = Communicator().all_gather_object(rng_state())  # on every rank, whatever its hooks have kept
            if "optimizer_states" in checkpoint:
                checkpoint[RNG] = states
            write = functools.partial(super().save_checkpoint, storage_options=storage_options)
            self._write_file(checkpoint, filepath, write)
        if not self._attaching:  # nothing trains meanwhile: the caller expects the file to be there
            self._saver.wait()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._saver.wait()
        ranks = Communicator()
        if is_directory(checkpoint_path, ranks):
            saved = SavedContent(directory_path(checkpoint_path), self._checkpoint_ranks(), weights_only)
            checkpoint, self._saved_rng = ranks.raise_on_all_ranks(
                lambda: (host_checkpoint(saved), saved.rng(ranks.rank, ranks.world_size))
            )
        else:
            read = functools.partial(super().load_checkpoint, checkpoint_path, weights_only=weights_only)
            checkpoint = ranks.raise_on_all_ranks(read)
            states = checkpoint.pop(RNG, [])
            self._saved_rng = states[ranks.rank] if len(states) == ranks.world_size else None
        return self._resumption.adapt(checkpoint)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        Communicator().raise_on_all_ranks(lambda: self._take_up(checkpoint))
        saved, self._saved_rng = self._saved_rng, None
        self._generators = None if saved is None else generators.attach(self._module.trainer, saved)

    def _take_up(self, checkpoint: Mapping[str, Any]) -> None:
        # As Lightning does: without a state (emptied in `on_load_checkpoint`) an optimizer begins anew.
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            (find(optimizer) or optimizer).load_state_dict(saved)
        # Lightning hands these on to the schedulers next.
        states = checkpoint.get("lr_schedulers", [])
        for place, (config, state) in enumerate(zip(self.lr_scheduler_configs, states, strict=False)):
            states[place] = with_live(config.scheduler, state)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._module.trainer.training:
            self._begin_batches()
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_batches()  # of a step that takes `dataloader_iter`, and fetches its batches itself
        return super().training_step(*args, **kwargs)

    def _begin_batches(self) -> None:
        if self._generators is not None:
            self._generators.begin_batches()
            self._generators = None

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._saver.after(functools.partial(super().remove_checkpoint, local_path(filepath) or filepath))


# ------------------------------------------------------------------------------- what hooks find, and what is dumped


class Elsewhere(dict[Any, Any]):
    """What hooks find of a state that only rank 0 has, on other ranks: asking for a part of it is an error."""

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
    """An optimizer's state as hooks find it on ranks without its tensors: its parameter groups.

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
        """Replaces it, for this fit and for saves after it."""
        self._connector = checkpoints(trainer)
        self._connector.dump_checkpoint = self

    def __call__(self, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning would have given, with schedulers' states as data. Collective."""
        self._connector.trainer.strategy.before_save()
        with self.inside():
            checkpoint: dict[str, Any] = type(self._connector).dump_checkpoint(self._connector, weights_only)
            if "lr_schedulers" in checkpoint:
                checkpoint["lr_schedulers"] = [as_data(state) for state in checkpoint["lr_schedulers"]]
            states = checkpoint.get("optimizer_states")
            if isinstance(states, list) and all(isinstance(each, Shown) for each in states):
                checkpoint["optimizer_states"] = [each.parts() for each in states]
        return checkpoint
