"""How Lightning's hosts save and load: all ranks together, one file or a directory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_scape.checkpoint import files
from lightning_scape.checkpoint.saver import RNG, Saver
from lightning_scape.checkpoint.shards import read_directory
from lightning_scape.comm.collectives import Communicator, group_beside
from lightning_scape.hosts import two_level
from lightning_scape.hosts.private_names import WrappingIO, checkpoints
from lightning_scape.hosts.replaced import replace

StateDictType = Literal["full", "sharded"]


class Checkpoints:
    """What a strategy of either host holds for its checkpoints.

    Args:
        state_dict_type: one file or a directory.
        async_save: whether they are written while training goes on.
        nodes: the strategy's.
    """

    def __init__(self, state_dict_type: StateDictType, async_save: bool, nodes: two_level.Nodes) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(
                '`state_dict_type` must be "full" (one file) or "sharded" (a directory), got'
                f' {state_dict_type!r}. Use "full" if unsure.'
            )
        self.sharded, self.saver, self._nodes = state_dict_type == "sharded", Saver(async_save), nodes

    def check_io(self, io: CheckpointIO) -> None:
        """Raises ``ValueError`` where a plugin cannot write what the options ask for."""
        if self.sharded and not isinstance(io, ScapeCheckpointIO):
            raise ValueError(
                f'`checkpoint_io` must be None with state_dict_type="sharded", got {type(io).__name__}: each rank'
                " writes its own part of a directory. To save in the background, set `async_save=True`."
            )

    @staticmethod
    def ranks() -> Communicator:
        """All, on a group of checkpoints alone."""
        return Communicator(group_beside(None, "checkpoint"))

    def save(
        self, content: dict[str, Any], path: str, special: bool, write: Callable[[dict[Any, Any], Any], None]
    ) -> None:
        """Collective.

        Args:
            content: the host's checkpoint, with each optimizer's ``State``.
            path: rank 0's.
            special: whether options of one file were given.
            write: writes one file to a path, on rank 0.
        """
        local = files.local_path(path)
        if self.sharded and (special or local is None):
            raise ValueError(
                'With state_dict_type="sharded" a checkpoint must be at a path that all machines share, without'
                f' `storage_options` and `filter`, got {path!r}. Save it with state_dict_type="full".'
            )
        if self._nodes.several:
            content = two_level.whole(content, Communicator().rank == 0)
        ranks, one_file = self.ranks(), None if self.sharded else lambda whole: write(whole, local or path)
        self.saver.save(local, content, ranks, one_file)

    def load(
        self, path: str | Path, read: Callable[[], dict[str, Any]], weights_only: bool | None, optimizers: bool = True
    ) -> tuple[dict[str, Any], Any]:
        """The host's checkpoint, and this rank's generators: None if the number of ranks has changed.

        Args:
            path: of the checkpoint.
            read: reads one file.
            weights_only: as in ``torch.load``.
            optimizers: whether those of ours take it. Else a rank may load alone, as with DDP.
        """
        self.saver.wait()
        ranks = self.ranks() if optimizers else Communicator.alone()
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
            content = read_directory(local, ranks, weights_only, parts=optimizers)
        else:
            content = ranks.raise_on_all_ranks(read)
        states = content.pop(RNG, []) if isinstance(content, dict) else []
        return content, states[ranks.rank] if len(states) == ranks.world_size else None


class ScapeCheckpointIO(TorchCheckpointIO):
    """``torch.save`` files that are whole or not there, and are checked before they are loaded.

    The strategies' default; any other ``checkpoint_io`` takes its place. Stores (``s3://``) replace objects at once:
    Lightning writes and reads them.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or (local := files.local_path(path)) is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        files.save_file(checkpoint, local)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        if (local := files.local_path(path)) is None:
            safe = weights_only is not False  # which Lightning does not ask of a store
            return super().load_checkpoint(path, map_location, weights_only=safe)
        if not local.exists():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        loaded: dict[str, Any] = files.load_file(local, weights_only, map_location=map_location)
        return loaded


def io_of(given: CheckpointIO | None) -> CheckpointIO:
    """What writes and reads a checkpoint that is one file."""
    if isinstance(given, WrappingIO):  # which keeps the one it was given, if any
        given.checkpoint_io = ScapeCheckpointIO()
    return given or ScapeCheckpointIO()


def act_together(replaced: ExitStack, trainer: Trainer, before_save: Callable[[], None]) -> None:
    """Replaces two methods of a Trainer's connector, for what all ranks must do alike, until the stack is closed.

    Much of a save is the user's code (hooks on state dicts, callbacks' states, ``on_save_checkpoint``), between
    messages. What fails there on one rank is an error on all.
    """
    connector = checkpoints(trainer)
    dump, resume = connector.dump_checkpoint, connector.resume_start

    def dump_together(weights_only: bool | None = None) -> dict[str, Any]:
        before_save()
        checkpoint: dict[str, Any] = Communicator().raise_on_all_ranks(lambda: dump(weights_only))
        return checkpoint

    def resume_together(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Lightning has chosen the checkpoint before ranks met, each by what it sees."""
        told = Communicator().all_gather_object(None if checkpoint_path is None else str(checkpoint_path))
        if None in told and any(told):
            there = next(rank for rank, path in enumerate(told) if path is not None)
            raise FileNotFoundError(
                f"All ranks must load the checkpoint, or none, got {told[there]!r} on rank {there} and none on rank"
                f" {told.index(None)}. Save to a file system that all machines share."
            )
        resume(checkpoint_path, weights_only)

    replace(replaced, connector, "dump_checkpoint", dump_together)
    replace(replaced, connector, "resume_start", resume_together)
