"""Buffers that a module updates from its own batch: compared now and then, or handed on from rank 0 as DDP does.

Knows no host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_scape.comm.collectives import Communicator, broadcast_tensors, world_size
from lightning_scape.core.private_names import IGNORED_BY_DDP, BatchNorm
from lightning_scape.core.tensors import bytes_of

STEPS_BEFORE_A_LOOK = 100


class Buffers:
    """The buffers of one module or more.

    Args:
        broadcast: hand rank 0's values on before each forward pass of the training.
    """

    def __init__(self, broadcast: bool = False) -> None:
        if not isinstance(broadcast, bool):
            raise ValueError(f"`broadcast_buffers` must be True or False, got {broadcast!r}. Leave it out for False.")
        self.broadcast = broadcast
        self.forget()

    def forget(self) -> None:
        """Another run begins."""
        self._looked: set[str] = set()
        self._steps = 0

    def at_start(self, module: nn.Module, strategy: str) -> str | None:
        """What to tell the user before the first step; None: nothing."""
        if self.broadcast or world_size() == 1 or not any(_local_batch_norms(module)):
            return None
        return (
            f"{strategy} sends no buffers after the start: the running statistics of BatchNorm will"
            " differ between ranks and checkpoints hold rank 0's. Set `Trainer(sync_batchnorm=True)` to share them, or"
            f" `{strategy}(broadcast_buffers=True)` to go on from rank 0's, as DDP does."
        )

    def hand_on(self, module: nn.Module) -> None:
        """Overwrites the buffers with rank 0's, where that was asked for. Collective."""
        if self.broadcast and world_size() > 1:
            broadcast_tensors([buffer for _, buffer in _shared_buffers(module)])

    def count_step(self) -> bool:
        """Whether the step that has been taken is the one after which to look."""
        self._steps += 1
        return self._steps == STEPS_BEFORE_A_LOOK

    def hand_on_before_forward(self, module: nn.Module) -> None:
        """:meth:`hand_on` before each forward pass with gradients, from now on."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                self.hand_on(module)

        if self.broadcast:
            module.register_forward_pre_hook(before, prepend=True)

    def compare(self, modules: Iterable[nn.Module], strategy: str, occasion: str) -> str | None:
        """Compares all ranks' buffers, once for each occasion. Collective.

        BatchNorm's statistics, of which :meth:`at_start` speaks, are left out.

        Args:
            modules: whose, in the same order on all ranks.
            strategy: its name, for the user.
            occasion: the same on all ranks.

        Returns:
            What to tell the user, at most once; None: they are equal.
        """
        if self.broadcast or world_size() == 1 or occasion in self._looked or "told" in self._looked:
            return None
        self._looked.add(occasion)
        own: dict[str, str] = {}
        for module in modules:
            told = {id(buffer) for layer in _local_batch_norms(module) for buffer in layer.buffers()}
            digests = {name: _digest(buffer) for name, buffer in _shared_buffers(module) if id(buffer) not in told}
            own = {**digests, **own}
        # Sent also where there are none: a buffer may come to be on one rank first.
        everyone = Communicator(None, None).all_gather_object(own)
        differ = [name for name, digest in own.items() if any(other.get(name, digest) != digest for other in everyone)]
        if not differ:
            return None
        self._looked.add("told")
        names = ", ".join(map(repr, differ[:5])) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
        return (
            f"All ranks should have the same buffers, got different values of {names}. {strategy} sends no buffers"
            " after the start: each rank goes on with what its own batches make of them, and a checkpoint holds rank"
            " 0's. DDP hands rank 0's on before each forward pass:"
            f" `{strategy}(broadcast_buffers=True)` does the same. Or update them alike on all ranks."
        )


def _shared_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that DDP would send: not what the user has told it to leave alone, nor rows of a sharded one."""
    ignored = getattr(module, IGNORED_BY_DDP, ())
    for name, buffer in module.named_buffers():
        plain = buffer.layout == torch.strided and not buffer.is_meta and not isinstance(buffer, DTensor)
        if plain and buffer.numel() and name not in ignored:
            yield name, buffer


def _digest(buffer: Tensor) -> str:
    what = f"{tuple(buffer.shape)} {buffer.dtype} ".encode()
    return hashlib.blake2b(what + bytes_of(buffer.cpu()).numpy().tobytes(), digest_size=16).hexdigest()


def _local_batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    """Those that keep statistics which each rank computes from its own data alone."""
    for layer in module.modules():
        is_batch_norm = isinstance(layer, BatchNorm)
        if is_batch_norm and not isinstance(layer, nn.SyncBatchNorm) and layer.track_running_stats:
            yield layer
