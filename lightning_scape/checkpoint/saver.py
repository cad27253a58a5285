"""Saves and opens sharded checkpoints, for the Trainer, for Fabric and for scripts."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_scape.checkpoint import atomic_files as files
from lightning_scape.checkpoint.checks import check_mapping, check_ranks
from lightning_scape.checkpoint.collecting import copied, of_rank_0, put, states_in
from lightning_scape.checkpoint.dcp import REST, Chunk, Directory, as_bytes, write_directory
from lightning_scape.checkpoint.parts import OwnParts
from lightning_scape.checkpoint.paths import local_path
from lightning_scape.checkpoint.rng import rng_state
from lightning_scape.checkpoint.source import Dense, SavedShards
from lightning_scape.comm import under_way
from lightning_scape.comm.collectives import Communicator
from lightning_scape.comm.worker import Job, carry_out
from lightning_scape.core.local_shards import first_row, is_sharded, local
from lightning_scape.core.method import Method, names, of_state

_OF_RNG = re.compile(r"rng\.\d+$")
"""In a directory: keys of the ranks' random number generators."""
RNG = "scape_rng"
"""Key of the ranks' random number generators in a checkpoint that is one file."""


@dataclass
class Content:
    """The content of a sharded checkpoint, by the names that its user gave. When saved: this rank's part."""

    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """State dicts; see :func:`replicated`."""
    optimizers: dict[str, OwnParts] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    """Anything that ``torch.load(weights_only=True)`` reads; rank 0's is kept."""

    def tensors(self, rank: int) -> dict[str, Chunk]:
        """All chunks of this rank, by key.

        Raises:
            ValueError: two tensors would have the same key: the name of one entry goes on as another's key does.
        """
        chunks: dict[str, Chunk] = {}
        for name, key, chunk in self._named():
            whole = f"{name}.{key}"
            if whole in chunks or (self.optimizers and _OF_RNG.match(whole)):
                raise ValueError(
                    f"Each tensor of a directory must have a name of its own, got two for {whole!r}, one of them of"
                    f' {name!r}. Rename that entry of the state, or save one file (`state_dict_type="full"`).'
                )
            chunks[whole] = chunk
        if self.optimizers:
            chunks[f"rng.{rank}"] = Chunk.whole(rng_state())
        return {key: chunk for key, chunk in chunks.items() if chunk.tensor.numel()}

    def _named(self) -> Iterator[tuple[str, str, Chunk]]:
        """This rank's chunks of models and optimizers, with the entry's name and their own in it."""
        for name, model in self.models.items():
            yield from ((name, key, _chunk(t.detach())) for key, t in model.items() if isinstance(t, Tensor))
        for name, shards in self.optimizers.items():
            yield from ((name, key, chunk) for key, chunk in shards.tensors.items())

    def table(self) -> dict[str, Any]:
        """Everything but the tensors of models and optimizers."""
        return {
            "format": files.FORMAT,
            "models": {
                name: {
                    key: (None if isinstance(value, Tensor) and value.numel() else value) for key, value in m.items()
                }
                for name, m in self.models.items()
            },
            "optimizers": {name: shards.common for name, shards in self.optimizers.items()},
            "rest": self.rest,
        }


def _chunk(tensor: Tensor) -> Chunk:
    """What this rank holds of a model's tensor: some rows of a sharded one, else all."""
    if not is_sharded(tensor):
        return Chunk.whole(tensor)
    return Chunk(local(tensor), first_row(tensor), tensor.shape[0])


class SavedContent:
    """A sharded checkpoint opened, complete and undamaged. Tensors are read when asked for.

    Raises:
        CheckpointError: see :class:`~lightning_scape.checkpoint.dcp.Directory`.
    """

    def __init__(self, path: Path, communicator: Communicator | None = None, weights_only: bool | None = None) -> None:
        ranks = communicator or Communicator.alone()
        self.directory = Directory(path, ranks, weights_only)
        table = ranks.raise_on_all_ranks(self._read_table)
        self.models: dict[str, dict[str, Any]] = table["models"]
        """By name: state dicts, with None in place of tensors."""
        self.rest: dict[str, Any] = table["rest"]
        self.optimizers = {
            name: SavedShards(self.directory, name, common) for name, common in table["optimizers"].items()
        }

    def _read_table(self) -> dict[str, Any]:
        table: dict[str, Any] = self.directory.rest()
        shapes = self.directory.shapes()
        parts = [table.get(name) for name in ("models", "optimizers", "rest")] if isinstance(table, dict) else [None]
        named = [value for part in parts[:2] if isinstance(part, dict) for value in part.values()]
        texts = all(isinstance(value, dict) and all(isinstance(key, str) for key in value) for value in named)
        if not texts or not all(isinstance(part, dict) for part in parts):
            raise files.CheckpointError(
                f"{str(self.directory.path / REST)!r} must be lightning_scape's table of contents, got another file."
                " Load another checkpoint."
            )
        keys = [f"{name}.{key}" for name, kept in table["models"].items() for key, at in kept.items() if at is None]
        if table["optimizers"]:
            keys += (f"rng.{rank}" for rank in range(min(self.directory.world_size, len(shapes) + 1)))
        try:
            for key in keys:
                if key not in shapes:
                    raise ValueError(f"its index must hold {key[:100]!r}, got none")
            for name, common in table["optimizers"].items():
                check_mapping("facts", common)
                form = of_state(common).form
                form.check(common)
                check_ranks(form.facts(common), self.directory.world_size)
                SavedShards(self.directory, name, common).check_sizes()
        except ValueError as error:
            remedy = "" if str(error).endswith(".") else ". Load another checkpoint."
            raise files.CheckpointError(
                f"The checkpoint {str(self.directory.path)!r} must be whole, got one that is not: {error}{remedy}"
            ) from error
        return table

    def model(self, name: str) -> dict[str, Any]:
        """A model's whole state dict, in host memory."""
        kept = self.models[name]
        return {key: self.directory.tensor(f"{name}.{key}") if value is None else value for key, value in kept.items()}

    def rng(self, rank: int, world_size: int) -> Tensor | None:
        """The saved random number generators of a rank; None if the number of ranks has changed."""
        if world_size != self.directory.world_size or not self.optimizers:
            return None
        return self.directory.tensor(f"rng.{rank}")


class Saver:
    """Writes checkpoints, directories or files, at once or while training goes on.

    In the background one checkpoint is written at a time, from a copy in host memory (this rank's part, and the
    model); the next save, a load, and the end of a Trainer's fit wait for it and raise what went wrong, on every rank;
    the end of a process that uses Fabric waits, and warns.

    Args:
        asynchronous: return from :meth:`save` and :meth:`save_file` as soon as the copy is made.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For who copies or pickles a strategy: what is being written is left to this one."""
        return {**self.__dict__, "_executor": None, "_pending": None}

    def save(self, path: Path, content: Content, communicator: Communicator) -> None:
        """Collective.

        Args:
            path: of the directory, the same on all ranks.
            content: this rank's part.
            communicator: the ranks, on a group that works in host memory, used for nothing else.

        Raises:
            OSError: this checkpoint, or the one before it that was written in the background, could not be written.
            ValueError: a rank lacks an optimizer that rank 0 saves; on every rank.
        """
        self.wait()
        content.optimizers = of_rank_0(content.optimizers, communicator)
        rank = communicator.rank
        tensors, rest = communicator.raise_on_all_ranks(
            lambda: (content.tensors(rank), as_bytes(content.table()) if rank == 0 else b"")
        )
        if not self.asynchronous:
            write_directory(path, tensors, rest, communicator)
            return
        _make_folder(path, communicator)
        copies = communicator.raise_on_all_ranks(lambda: {key: chunk.copied() for key, chunk in tensors.items()})
        self._begin(functools.partial(write_directory, path, copies, rest, communicator), communicator)

    def collected(self, own: OwnParts, background: Communicator | None = None) -> dict[str, Any] | None:
        """An optimizer's whole state on rank 0, None elsewhere. Collective.

        Args:
            own: what this rank holds of it.
            background: see :meth:`~lightning_scape.checkpoint.parts.OwnParts.collect`.
        """
        whole: dict[str, Any] | None = of_state(own.common).form.collected(own, 0, background)
        return whole

    def save_file(
        self,
        path: Path | None,
        content: Mapping[str, Any],
        write: Callable[[dict[str, Any]], None],
        communicator: Communicator,
    ) -> None:
        """Writes one file in the background: this rank's part of it is copied at once. Collective.

        Args:
            path: of the file, the same on all ranks; None is none of this machine's.
            content: rank 0's is written. Optimizers' states are ``OwnParts``, as values or in a list.
            write: writes what it is given; called on rank 0.
            communicator: as in :meth:`save`.

        Raises:
            OSError: as in :meth:`save`.
            ValueError: ranks have other optimizers; on every rank.
        """
        self.wait()
        if path is not None:
            _make_folder(path, communicator)
        own, lead = of_rank_0(dict(states_in(content)), communicator), communicator.rank == 0
        states, whole = communicator.raise_on_all_ranks(
            lambda: ({where: parts.copied() for where, parts in own.items()}, copied(content) if lead else {})
        )

        def collect_and_write() -> None:
            for where in [*states]:  # each is given up as it is collected
                put(whole, where, self.collected(states.pop(where), communicator))
            communicator.raise_on_all_ranks(lambda: write(whole) if lead else None)

        self._begin(collect_and_write, communicator)

    def _begin(self, act: Callable[[], None], communicator: Communicator) -> None:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scape-checkpoint")
        self._pending = job = Job()
        if communicator.process_group is not None:  # which another strategy may use next
            under_way.note(communicator.process_group, job)
        self._executor.submit(carry_out, job, act)

    def wait(self) -> None:
        """Waits until nothing is being written; raises the error of a write that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def finish(self, raising: bool) -> None:
        """Waits and ends the thread. With ``raising=False`` an error becomes a warning: another error is on its way."""
        try:
            self.wait()
        except Exception as error:
            if raising:
                raise
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(f"The last checkpoint was not written: {error}", stacklevel=2)
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def after(self, act: Callable[[], None]) -> None:
        """Runs ``act`` once nothing is being written: an old checkpoint is removed only after the new one is there.

        It acts on rank 0, and the others know nothing of it: what the system refuses becomes a warning, for an error
        would be that rank's alone.
        """
        if self._pending is None or self._executor is None:
            _tried(act)
            return
        pending, executor = self._pending, self._executor

        def run() -> None:
            pending.result()
            _tried(act)

        self._pending = executor.submit(run)


def _make_folder(path: Path, communicator: Communicator) -> None:
    """Lightning links to a checkpoint, and so needs its folder, before it is there."""
    with files.explained_oserror(path):
        lead = communicator.rank == 0
        communicator.raise_on_all_ranks(lambda: path.parent.mkdir(parents=True, exist_ok=True) if lead else None)


def _tried(remove: Callable[[], None]) -> None:
    try:
        remove()
    except OSError as error:
        warnings.warn(f"An old checkpoint must be removable, got {error!r}. Remove it by hand.", stacklevel=4)


def consolidate(path: Path, optimizer: str = "kept") -> dict[str, Any]:
    """A checkpoint as the content of the one file that the same host would have written.

    Args:
        path: a sharded checkpoint's directory, or a full checkpoint's file.
        optimizer: whose state is written: the method's as it was saved, or ``"adamw"`` with what carries over.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: the checkpoint is torn, damaged, foreign or newer.
    """
    files.check_there(path)
    if not path.is_dir():
        whole = files.load_file(path)
        return _with_adamw(whole, path) if optimizer == "adamw" else whole
    saved = SavedContent(path)
    whole = dict(saved.rest)
    whole |= {name: saved.model(name) for name in saved.models}
    states = {name: shards.form.whole_of(shards) for name, shards in saved.optimizers.items()}
    if optimizer == "adamw":
        states = {name: _adamw(state, path) for name, state in states.items()}
    elif saved.optimizers:
        world_size = saved.directory.world_size
        whole[RNG] = [saved.rng(rank, world_size) for rank in range(world_size)]
    if "pytorch-lightning_version" in whole:  # the Trainer's: optimizers are a list
        whole |= {"optimizer_states": list(states.values())} if states else {}
    else:
        whole |= states
    return whole


def _with_adamw(whole: Any, path: Path) -> dict[str, Any]:
    """A full checkpoint whose states of a method, in dicts and lists wherever they are, are AdamW's."""
    found = 0

    def converted(value: Any) -> Any:
        nonlocal found
        if type(value) is list:
            return [converted(each) for each in value]
        if type(value) is not dict:  # such as a module's state
            return value
        if "state" in value and any(name in value for name in names()):
            found += 1
            return _adamw(value, path)
        return {name: converted(each) for name, each in value.items()}

    content: dict[str, Any] = converted(whole)
    if not found:
        raise files.CheckpointError(
            f"{path} must hold an optimizer state of one of {names()}, got none. Nothing needs converting."
        )
    return content


def _adamw(state: Any, path: Path) -> dict[str, Any]:
    method: type[Method] = of_state(state)
    try:
        dense: Dense = method.form.as_dense(state)
    except Exception as error:  # whatever a damaged state makes arithmetic trip over
        raise files.CheckpointError(
            f"{path} must hold a whole optimizer state, got one of {method.title} that is not:"
            f" {type(error).__name__}: {error}. Convert another checkpoint."
        ) from error
    warnings.warn(f"{method.title}'s state as AdamW's: parameters, {dense.carried}. {dense.lost}", stacklevel=4)
    return dense.state


def host_checkpoint(saved: SavedContent) -> dict[str, Any]:
    """The checkpoint that Lightning's Trainer loads; optimizer states stay on disk until an optimizer takes them."""
    checkpoint: dict[str, Any] = {**saved.rest, **{name: saved.model(name) for name in saved.models}}
    if saved.optimizers:
        checkpoint["optimizer_states"] = list(saved.optimizers.values())
    return checkpoint


def replicated(state_dict: Mapping[str, Any], parameters: Iterable[str], rank: int) -> dict[str, Any]:
    """The part of a model's state dict that a rank offers: rank 0 all of it, others the parameters, by name.

    Parameters are the same on all ranks; any of them may write one. Buffers may differ (BatchNorm).
    """
    if rank == 0:
        return dict(state_dict)
    return {name: state_dict[name] for name in parameters if name in state_dict}


def host_content(checkpoint: Mapping[str, Any], parameters: Iterable[str], rank: int) -> Content:
    """The Trainer's checkpoint taken apart; the optimizers are called ``optimizer_0`` and so on."""
    rest = dict(checkpoint)
    # A hook may have dropped either, or have put something of its own there.
    models = {"state_dict": replicated(rest.pop("state_dict"), parameters, rank)} if "state_dict" in rest else {}
    states = rest.get("optimizer_states")
    if not isinstance(states, list) or not states or not all(isinstance(state, OwnParts) for state in states):
        return Content(models, {}, rest)
    del rest["optimizer_states"]
    return Content(models, {f"optimizer_{number}": state for number, state in enumerate(states)}, rest)


def is_directory(path: str | PathLike[str], ranks: Communicator | None = None) -> bool:
    """Whether a checkpoint is one that was saved with ``state_dict_type="sharded"``.

    Args:
        path: of the checkpoint.
        ranks: all that are about to load it, for a collective call; None asks this one alone.

    Raises:
        CheckpointError: not all ranks see the same there.
    """
    local = local_path(path)
    seen = (ranks or Communicator.alone()).all_gather_object(local is not None and local.is_dir())
    if any(seen) and not all(seen):
        raise files.CheckpointError(
            f"All ranks must see the same checkpoint, got a directory at {str(path)!r} on rank {seen.index(True)} and"
            f" none on rank {seen.index(False)}. Save to a file system that all machines share."
        )
    return bool(seen[0])
