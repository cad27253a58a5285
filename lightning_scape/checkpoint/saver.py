"""Writes checkpoints, files or directories, at once or while training goes on; says which is the newest."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_scape.checkpoint import files
from lightning_scape.checkpoint.shards import (
    State,
    Where,
    collect,
    read_directory,
    saved_in,
    with_states,
    write_directory,
)
from lightning_scape.comm.collectives import Communicator, group_beside
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.core.words import with_plain_numbers

StateDictType = Literal["full", "sharded"]
RNG = "scape_rng"
"""Key of the ranks' random number generators in a checkpoint."""


def rng_state() -> dict[str, Any]:
    """The generators of Python, NumPy, torch and this process's CUDA device, as ``weights_only`` reads them."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    current: Any = np.random.get_state()
    if isinstance(current, tuple):  # else a generator of the user's own choice, of which NumPy gives a dict
        states["numpy"] = (current[0], current[1].tolist(), *current[2:])
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Takes up what :func:`rng_state` gave."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@contextlib.contextmanager
def _warning(what: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Inside, an error becomes a warning."""
    try:
        yield
    except kind as error:
        with contextlib.suppress(Warning):  # where warnings are errors
            warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=4)


def all_ranks() -> Communicator:
    """All, on a group that works in host memory and is used for checkpoints alone."""
    return Communicator(group_beside(None, "checkpoint"))


def agreed(path: str | Path | None, ranks: Communicator) -> Path | None:
    """The local path of a checkpoint that all ranks load, if it has one. Collective.

    Raises:
        ValueError: ranks load different ones, or some load none; on every rank.
    """
    local = None if path is None else files.local_path(path)
    folder = local is not None and local.is_dir()
    check_same_setup(ranks, {"the checkpoint": path and str(local or path), "its being a directory": folder})
    return local


class Saver:
    """What a strategy of either host saves and loads by: all ranks together, one file or a directory.

    In the background one checkpoint is written at a time, from a copy in host memory. The next save, a load, and the
    end of a Trainer's fit wait for it and raise what went wrong, on every rank; the end of a process that uses Fabric
    waits, and warns.

    Args:
        state_dict_type: one file or a directory.
        asynchronous: return from :meth:`save` as soon as the copy is made.

    Raises:
        ValueError: ``state_dict_type`` is neither.
    """

    def __init__(self, state_dict_type: StateDictType = "full", asynchronous: bool = False) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(
                '`state_dict_type` must be "full" (one file) or "sharded" (a directory), got'
                f' {state_dict_type!r}. Use "full" if unsure.'
            )
        self.sharded, self.asynchronous = state_dict_type == "sharded", asynchronous
        self._thread = ThreadPoolExecutor(1, "scape-checkpoint")
        self._pending: Future[None] | None = None

    def save(self, content: Mapping[Any, Any], path: str, write: Callable[[dict[Any, Any], Any], None]) -> None:
        """Writes a checkpoint. Collective.

        Args:
            content: the host's checkpoint, with this rank's :class:`State` of each optimizer; rank 0's is written.
            path: the same on all ranks.
            write: writes the whole content as one file to a path, on rank 0.

        Raises:
            OSError: this checkpoint, or the one before it that was written in the background, could not be written.
            ValueError: ranks save other optimizers, or a directory cannot be there.
            TypeError: a hook has put another dict in the place of an optimizer's state.
        """
        local = files.local_path(path)
        if self.sharded and local is None:
            raise ValueError(
                'With state_dict_type="sharded" a checkpoint must be at a path that all machines share, got'
                f' {path!r}. Save it with state_dict_type="full".'
            )
        self.wait()
        ranks, rng, states = all_ranks(), rng_state(), dict[Where, State]()

        def note(where: Where, state: Any) -> None:
            if not isinstance(state, State):
                raise TypeError(
                    "An optimizer's state must be saved as it is, got a dict that a hook has put in its place. Change"
                    ' the state itself: state["param_groups"] = ...'
                )
            states[where] = state

        ranks.raise_on_all_ranks(lambda: with_states(content, note))
        check_same_setup(ranks, {"saved optimizers": [*states]})
        lead, rest = ranks.rank == 0, with_states(content, lambda _, state: dict(state))
        if self.asynchronous:
            if local is not None:  # Lightning links to a checkpoint, and so needs its folder, before it is there
                folder = local.parent
                with files.explained(local):
                    ranks.raise_on_all_ranks(lambda: folder.mkdir(parents=True, exist_ok=True) if lead else None)
            rest, states = ranks.raise_on_all_ranks(lambda: _copied((rest if lead else {}, states)))

        def act() -> None:
            if states:
                rest[RNG] = ranks.all_gather_object(rng)
            if self.sharded and local is not None:
                write_directory(local, rest, states, ranks)
                return
            # Each is given up as it is collected.
            wholes = {where: collect(states.pop(where), ranks, torch.device("cpu")) for where in [*states]}
            whole = with_states(rest, lambda where, _: wholes[where])
            ranks.raise_on_all_ranks(lambda: write(with_plain_numbers(whole), local or path) if lead else None)

        if self.asynchronous:
            self._pending = self._thread.submit(act)
        else:
            act()

    def load(
        self, path: str | Path, read: Callable[[], dict[str, Any]], weights_only: bool | None, optimizers: bool = True
    ) -> tuple[dict[str, Any], Any]:
        """The host's checkpoint, and this rank's generators: None if the number of ranks has changed. Collective.

        Args:
            path: of the checkpoint.
            read: reads one file.
            weights_only: as in ``torch.load``.
            optimizers: whether those of ours take it. Else a rank may load alone, as with DDP.
        """
        self.wait()
        ranks = all_ranks() if optimizers else Communicator.alone()
        local = agreed(path, ranks)
        if local is not None and local.is_dir():
            content = read_directory(local, ranks, weights_only, parts=optimizers)
        else:
            content = ranks.raise_on_all_ranks(read)
        states = content.pop(RNG, []) if isinstance(content, dict) else []
        return content, states[ranks.rank] if len(states) == ranks.world_size else None

    def wait(self) -> None:
        """Waits until nothing is being written; raises the error of a write that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def finish(self) -> None:
        """Waits; an error becomes a warning, for another one is on its way, or the process ends."""
        with _warning("The last checkpoint was not written"):
            self.wait()

    def after(self, act: Callable[[], None]) -> None:
        """Runs ``act`` once nothing is being written: an old checkpoint is removed only after the new one is there.

        It acts on rank 0, and the others know nothing of it: what the system refuses becomes a warning.
        """
        before = self._pending

        def run() -> None:
            if before is not None:
                before.result()
            with _warning("An old checkpoint could not be removed, remove it by hand", OSError):
                act()

        if before is None:
            run()
        else:
            self._pending = self._thread.submit(run)


def _copied(content: Any) -> Any:
    """A copy in host memory. It is pickled, so that what cannot be written fails now; tied tensors stay tied."""
    copies: dict[Any, tuple[Tensor, Tensor]] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
                return None  # pickled, and with it the tensors that it is made of
            place = value.data_ptr(), value.dtype, value.shape, value.stride(), value.requires_grad
            if place not in copies:
                copy = value.detach().to("cpu", copy=True).requires_grad_(value.requires_grad)
                copies[place] = value, copy  # while the first lives, no other has its place
            return place

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: Any) -> Tensor:
            return copies[place][1]

    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(content)
    file.seek(0)
    return Unpickler(file).load()  # what this process has written


# ------------------------------------------------------------------------------------------------ on disk


def checkpoint_in(path: Path) -> Path:
    """The checkpoint in a folder that LitGPT saved, file or directory; any other path as it is."""
    inside = path / "lit_model.pth"
    return inside if inside.exists() else path


def consolidate(path: Path) -> Any:
    """A directory as the content of the one file that the host would have written.

    Raises:
        CheckpointError: there is none at ``path``, or it is torn or damaged.
    """
    return with_states(read_directory(checkpoint_in(path), Communicator.alone()), lambda _, state: state.as_file())


def verify(path: str | os.PathLike[str]) -> None:
    """Reads a whole checkpoint, file or directory, and fails where loading would. Whether it fits, a model must say.

    Args:
        path: of the checkpoint; of a folder that LitGPT saved, its ``lit_model.pth``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        CheckpointError: what is wrong with it.
    """
    path = checkpoint_in(Path(path))
    if path.is_dir():
        read_directory(path, Communicator.alone())
    else:
        files.load_file(path, mmap=True)


def newest_checkpoint(folder: str | os.PathLike[str], pattern: str = "*", *, check: bool = False) -> Path | None:
    """The newest checkpoint in a folder that is complete, to resume from after a crash.

    Looks at files and directories right in the folder (of LitGPT's ``step-...`` folders, at the ``lit_model.pth`` in
    them). The newest is the one of the latest step: the Trainer's ``global_step``, else the steps of its optimizer of
    SCAPE or SparseLoCo. Of one step, and of those that tell none, it is the last written. Warnings name those that are
    passed over. Under a process group it is collective: rank 0 looks, and all get the same answer.

    Args:
        folder: where checkpoints are.
        pattern: of their names, as in ``Path.glob``; ``"*.ckpt"`` is Lightning's.
        check: also read each fully and compare checksums, until one passes. A load does that anyhow.

    Returns:
        Its path, or None.

    Raises:
        ValueError: the folder is at a store.
    """
    if (local := files.local_path(folder)) is None:
        raise ValueError(f"`folder` must be local, got {folder!r}. Give the load a checkpoint's own path.")
    ranks = Communicator(group_beside(None, "newest"))  # a save may go on beside
    found = ranks.raise_on_all_ranks(lambda: _newest(local, pattern, check) if ranks.rank == 0 else None)
    chosen: Path | None = ranks.all_gather_object(found)[0]
    return chosen


def _newest(folder: Path, pattern: str, check: bool) -> Path | None:
    found = []
    named = [path for path in map(checkpoint_in, folder.glob(pattern)) if not path.name.startswith(".")]
    # Of a save that was killed between its two renames, the checkpoint before is still there.
    for path in [*named, *files.hidden(folder, Path(pattern).name, "previous")]:
        if path.is_dir() and not any(path.glob("rank-*.pt")):
            continue  # some other folder
        with _warning(f"Passed over {str(path)!r}"):
            found.append((_step_of(path), (path / files.META if path.is_dir() else path).stat().st_mtime_ns, path))
    for *_, path in sorted(found, reverse=True):
        with _warning(f"Passed over {str(path)!r}"):
            if check:
                verify(path)
            return path
    return None


def _step_of(path: Path) -> int:
    """Optimizer steps behind a complete checkpoint; -1 if it does not say.

    Raises:
        CheckpointError, OSError: it is not complete.
    """
    file = path / files.META if path.is_dir() else path
    files.check(file, whole=False)
    try:
        content = files.load_file(file, True, checked=False, mmap=True)  # nothing is read but the pickle
    except files.CheckpointError:  # a load may trust it
        return -1
    if path.is_dir():
        for number in range(content["ranks"]):
            files.check(path / f"rank-{number}.pt", whole=False)
        content = content["rest"]
    if not isinstance(content, dict):
        return -1
    states = (each for value in content.values() for each in (value if isinstance(value, list) else [value]))
    counts = content.get("global_step"), *(saved_in(each).get("facts", {}).get("step") for each in states)
    return next((count for count in counts if type(count) is int), -1)
