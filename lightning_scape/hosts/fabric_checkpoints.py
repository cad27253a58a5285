"""Checkpoints under Fabric: one file or a directory, saved and loaded by all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.checkpoint import saver
from lightning_scape.checkpoint.paths import directory_path, local_path
from lightning_scape.checkpoint.rng import rng_state, set_rng_state
from lightning_scape.checkpoint.saver import RNG, Content, SavedContent, replicated
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import find
from lightning_scape.hosts.common import CommonStrategy
from lightning_scape.hosts.private_names import OpenedFabrics, check_strictly
from lightning_scape.hosts.schedulers import Restored, is_scheduler


class FabricCheckpoints(CommonStrategy, OpenedFabrics):
    """Base of Fabric's strategies."""

    @override
    def get_module_state_dict(self, module: Module) -> dict[str, Any]:
        return self._whole_module(super().get_module_state_dict(module))

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> Any:
        return self._state_of(optimizer, super().get_optimizer_state)

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
        special = storage_options is not None or filter is not None
        if self._saving.asked == "auto":
            local = None if special else local_path(self.broadcast(str(path)))
            self._saving.settle([local and local.parent], self.num_nodes)
        if self._saving.sharded:
            if special:
                raise TypeError(
                    '`storage_options` and `filter` must be None with state_dict_type="sharded", got one: a directory'
                    " is written by torch.distributed.checkpoint, whole. Leave them out."
                )
            shared = directory_path(self.broadcast(str(path)))
            with self._together.inside():
                content = self._content(self._with_stand_ins(state))
            self._saver.save(shared, content, self._checkpoint_ranks())
            return
        with self._together.inside():
            converted = self.as_states(self._with_stand_ins(state), filter or {})
        if any(find(value) for value in state.values()):
            converted[RNG] = Communicator().all_gather_object(rng_state())

        def write(whole: dict[str, Any], to: str | Path) -> None:
            for name, keep in (filter or {}).items() if self._saver.asynchronous else ():
                if find(state.get(name)):  # before, its state was not there to be filtered
                    kept = {key: value for key, value in whole.pop(name).items() if keep(key, value)}
                    whole |= {name: kept} if kept else {}
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint=whole, path=to, storage_options=storage_options)

        self._write_file(converted, path, write)

    def _content(self, state: Mapping[str, Any]) -> Content:
        content = Content()
        for name, value in state.items():
            if isinstance(value, Module):
                offered = self._offered_parameters(value)
                content.models[name] = replicated(self.get_module_state_dict(value), offered, self.global_rank)
            elif find(value) is not None:
                content.optimizers[name] = self.get_optimizer_state(value)
            else:
                content.rest[name] = value.state_dict() if isinstance(value, Stateful) else value
        return content

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        state: Module | Optimizer | dict[str, Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        self._saver.wait()
        ours = any(map(find, state.values() if isinstance(state, dict) else [state]))
        # Without an optimizer of ours a rank may read alone, as with DDP.
        ranks = Communicator() if ours else Communicator.alone()
        if saver.is_directory(path, ranks):
            return self._load_directory(directory_path(path), state, strict, ours, weights_only)
        read = functools.partial(super().load_checkpoint, path, weights_only=weights_only)
        content = ranks.raise_on_all_ranks(read)
        if not state:
            return content
        ranks.raise_on_all_ranks(lambda: self._take_up(content, state, strict))
        if not isinstance(state, dict):
            return {}
        if ours:
            states = content.pop(RNG, [])
            if len(states) == self.world_size:
                set_rng_state(states[self.global_rank])
        return content

    def _with_stand_ins(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state, with stand-ins for schedulers that give and take data only."""
        schedulers = {name for name, value in state.items() if is_scheduler(value) and find(value) is None}
        return {name: Restored(value) if name in schedulers else value for name, value in state.items()}

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
            self.load_module_state_dict(value, saved() if callable(saved) else saved, strict=strict)
        else:
            (find(value) or value).load_state_dict(saved)

    def _load_directory(
        self, path: Path, state: Any, strict: bool, ours: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        if not isinstance(state, dict) or not state:
            raise ValueError(
                f"A sharded checkpoint must be loaded into a state, got {type(state).__name__} for {str(path)!r}. Call"
                " `fabric.load(path, {'model': model, ...})`, or make it one file by `lightning-scape consolidate`."
            )
        ranks = self._checkpoint_ranks()
        saved = SavedContent(path, ranks, weights_only)
        models = {name: functools.partial(saved.model, name) for name in saved.models}  # read when it is asked for
        content = {**models, **saved.optimizers, **saved.rest}
        ranks.raise_on_all_ranks(lambda: self._take_up(content, state, strict))
        if ours and (generators := saved.rng(self.global_rank, self.world_size)) is not None:
            set_rng_state(generators)
        return {name: content[name] for name in saved.rest if name in content}
