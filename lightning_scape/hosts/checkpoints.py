"""How Lightning's hosts save and load: all ranks together, one file or a directory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from lightning_scape.checkpoint import files
from lightning_scape.checkpoint.rng import rng_state, set_rng_state
from lightning_scape.checkpoint.saver import RNG, opened
from lightning_scape.checkpoint.shards import Directory, collect, whole_state
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import find
from lightning_scape.hosts import generators, two_level
from lightning_scape.hosts.common import CommonStrategy
from lightning_scape.hosts.private_names import OpenedFabrics, check_strictly, checkpoints
from lightning_scape.hosts.schedulers import Restored, as_data, with_live
from lightning_scape.hosts.unwrapped import UnwrappedStrategy


class TogetherSaved(CommonStrategy):
    """What both hosts do alike."""

    def _save(
        self, content: dict[str, Any], path: str | Path, special: bool, write: Callable[[dict[Any, Any], Any], None]
    ) -> None:
        """Collective.

        Args:
            content: the host's checkpoint, with each optimizer's ``OwnState``.
            path: rank 0's counts.
            special: whether options of one file were given.
            write: writes one file to a path, on rank 0.
        """
        path = self.broadcast(str(path))  # type: ignore[attr-defined]
        local = files.local_path(path)
        if self._sharded and (special or local is None):
            raise ValueError(
                'With state_dict_type="sharded" a checkpoint must be at a path that all machines share, without'
                f' `storage_options` and `filter`, got {path!r}. Save it with state_dict_type="full".'
            )
        if self._nodes.several:
            content = two_level.whole(content, self.is_global_zero)  # type: ignore[attr-defined]
        ranks, one_file = self._checkpoint_ranks(), None if self._sharded else lambda whole: write(whole, local or path)
        self._saver.save(local, content, rng_state(), ranks, one_file)

    def _load(
        self, path: str | Path, read: Callable[[], dict[str, Any]], weights_only: bool | None, optimizers: bool = True
    ) -> tuple[dict[str, Any], Any]:
        """The host's checkpoint, and this rank's generators: None if the number of ranks has changed.

        Args:
            path: of the checkpoint.
            read: reads one file.
            weights_only: as in ``torch.load``.
            optimizers: whether those of ours take it. Else a rank may load alone, as with DDP.
        """
        self._saver.wait()
        ranks = self._checkpoint_ranks() if optimizers else Communicator.alone()
        local = files.local_path(path)
        seen = ranks.all_gather_object((str(local or path), local is not None and local.is_dir()))
        for rank, other in enumerate(seen):
            if other != seen[0]:
                a, b = (f"{'a directory' if folder else 'a file'}, {name!r}" for name, folder in (seen[0], other))
                raise files.CheckpointError(
                    f"All ranks must load the same checkpoint, got {a} on rank 0, and {b} on rank {rank}. Save to a"
                    " file system that all machines share, and give all ranks the same path."
                )
        if local is not None and local.is_dir():
            saved = Directory(local, ranks, weights_only, parts=optimizers)
            same = optimizers and saved.ranks == ranks.world_size
            rng = ranks.raise_on_all_ranks(lambda: saved.rng(ranks.rank) if same else None)
            return opened(saved), rng or None
        content = ranks.raise_on_all_ranks(read)
        states = content.pop(RNG, []) if isinstance(content, dict) else []
        return content, states[ranks.rank] if len(states) == ranks.world_size else None


# ------------------------------------------------------------------------------------------------ Trainer


class TrainerCheckpoints(TogetherSaved, UnwrappedStrategy):
    """Base of the Trainer's strategies."""

    def __init__(self, *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self._connector = ConnectorOfAll()
        self._saved_rng: Any = None
        self._generators: generators.Generators | None = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._nodes.several  # before, a module on the meta device has no memory

    @override
    def optimizer_state(self, optimizer: Optimizer) -> Any:  # what `save_checkpoint` takes, by way of hooks
        method = find(optimizer)
        return super().optimizer_state(optimizer) if method is None else method.own_state()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, one file or a directory. Collective; if it fails, it fails on every rank."""

        def write(content: dict[str, Any], path: Any) -> None:
            self.checkpoint_io.save_checkpoint(content, path, storage_options=storage_options)

        self._save(checkpoint, filepath, storage_options is not None, write)
        if not self._attaching:  # nothing trains meanwhile: the caller expects the file to be there
            self._saver.wait()

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        read = functools.partial(super().load_checkpoint, checkpoint_path, weights_only=weights_only)
        checkpoint, self._saved_rng = self._load(checkpoint_path, read, weights_only)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._take_up(checkpoint)
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
        self._saver.after(functools.partial(super().remove_checkpoint, files.local_path(filepath) or filepath))


class ConnectorOfAll:
    """Takes the place of two methods of a Trainer's connector, for what all ranks must do alike.

    Much of a save is the user's code (hooks on state dicts, callbacks' states, ``on_save_checkpoint``), between
    messages. What fails there on one rank is an error on all.
    """

    _own: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Replaces them, for this fit and for saves after it."""
        self._own = checkpoints(trainer)
        self._own.dump_checkpoint, self._own.resume_start = self.dump_checkpoint, self.resume_start

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning would have given, with schedulers' states as data. Collective."""
        self._own.trainer.strategy.before_save()

        def dump() -> dict[str, Any]:
            checkpoint: dict[str, Any] = type(self._own).dump_checkpoint(self._own, weights_only)
            if "lr_schedulers" in checkpoint:
                checkpoint["lr_schedulers"] = [as_data(state) for state in checkpoint["lr_schedulers"]]
            return checkpoint

        return Communicator().raise_on_all_ranks(dump)

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Loads the checkpoint that Lightning has chosen before ranks met, each by what it sees. Collective."""
        told = Communicator().all_gather_object(None if checkpoint_path is None else str(checkpoint_path))
        if None in told and any(told):
            there = next(rank for rank, path in enumerate(told) if path is not None)
            raise FileNotFoundError(
                f"All ranks must load the checkpoint, or none, got {told[there]!r} on rank {there} and none on rank"
                f" {told.index(None)}. Save to a file system that all machines share."
            )
        type(self._own).resume_start(self._own, checkpoint_path, weights_only)


# ------------------------------------------------------------------------------------------------ Fabric


class FabricCheckpoints(TogetherSaved, OpenedFabrics):
    """Base of Fabric's strategies."""

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> Any:
        """For the user, and so whole: on rank 0, and empty on the others."""
        if (method := find(optimizer)) is None:
            return super().get_optimizer_state(optimizer)
        whole = collect(method.own_state(), self._checkpoint_ranks(), torch.device("cpu"))
        return {} if whole is None else whole_state(whole)

    @override
    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Module | Optimizer | Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes a checkpoint, one file or a directory. Collective; if it fails, it fails on every rank."""
        self.before_save()
        methods, late = {name: find(value) for name, value in state.items()}, dict(filter or {})
        early = {name: late.pop(name) for name in [*late] if methods.get(name) is None}

        def dump() -> dict[str, Any]:
            own = {name: method.own_state() for name, method in methods.items() if method is not None}
            return self.as_states({**self._with_stand_ins(state), **own}, early)

        content = Communicator().raise_on_all_ranks(dump)

        def write(whole: dict[str, Any], path: Any) -> None:
            for name, keep in late.items():  # of an optimizer, whose state was not there to be filtered
                kept = {key: value for key, value in whole.pop(name).items() if keep(key, value)}
                whole |= {name: kept} if kept else {}
            self.checkpoint_io.save_checkpoint(checkpoint=whole, path=path, storage_options=storage_options)

        self._save(content, path, storage_options is not None or filter is not None, write)

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Module | Optimizer | dict[str, Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        ours = any(map(find, state.values() if isinstance(state, dict) else [state]))
        read = functools.partial(super().load_checkpoint, path, weights_only=weights_only)
        content, rng = self._load(path, read, weights_only, ours)
        if not state:
            return content
        self._take_up(content, state, strict)
        if rng is not None and ours:
            set_rng_state(rng)
        return content if isinstance(state, dict) else {}

    def _with_stand_ins(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state, with stand-ins for schedulers that give and take data only."""
        return {name: Restored(value) if isinstance(value, LRScheduler) else value for name, value in state.items()}

    def _take_up(self, content: dict[str, Any], state: Any, strict: bool) -> None:
        """Loads a checkpoint's content into what was given for it, as Lightning does, and removes it there."""
        if not isinstance(state, dict):
            self._load_into(state, content, strict)
            return
        check_strictly(state.keys(), content.keys(), strict=strict)
        given = self._with_stand_ins(state).items()
        for name, value in sorted(given, key=lambda each: find(each[1]) is not None):  # who sets parameters is last
            if name not in content:
                continue
            if isinstance(value, (Module, Optimizer, Stateful)):
                self._load_into(value, content.pop(name), strict)
            else:
                state[name] = content.pop(name)

    def _load_into(self, value: Any, saved: Any, strict: bool) -> None:
        if isinstance(value, Module):
            self.load_module_state_dict(value, saved, strict=strict)
        else:
            (find(value) or value).load_state_dict(saved)
