"""Buffers that a module updates from its own batch: compared now and then, or handed on from rank 0 as DDP does.

So are parameters that no optimizer trains, such as a teacher's that average the trained ones: under DDP they are equal,
with local steps they are not. A look reads all of them, for a write through ``.data`` leaves no trace. Only those that
were found to differ are handed on, never a frozen backbone.

Knows no host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator, ProcessGroup, broadcast_tensors, world_size
from lightning_scape.core.local_shards import first_entry, local
from lightning_scape.core.private_names import IGNORED_BY_DDP, BatchNorm
from lightning_scape.core.tensors import can_be_sent, entries_of

STEPS_BEFORE_A_LOOK = 100


class Buffers:
    """The buffers of one module or more, and its untrained parameters.

    Args:
        broadcast: hand on rank 0's values: of buffers before each forward pass of the training, of parameters after
            each exchange, when the trained ones are equal.
    """

    def __init__(self, broadcast: bool = False) -> None:
        if not isinstance(broadcast, bool):
            raise ValueError(f"`broadcast_buffers` must be True or False, got {broadcast!r}. Leave it out for False.")
        self.broadcast = broadcast
        self._hooks: list[Any] = []
        """On forward passes."""
        self.forget()

    def forget(self) -> None:
        """Another run begins."""
        self._looked: set[str] = set()
        self._steps = self._handed_on = 0
        self._trained: set[int] = set()
        self._apart: set[str] = set()
        """Parameters that were found to differ."""

    def trained_by(self, optimizer: Optimizer) -> None:
        """Leaves out what an optimizer trains: that is its method's business."""
        self._trained |= {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}

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

    def count_step(self, exchanged: bool) -> str | None:
        """The occasion for a look after a step; None: there is none.

        Args:
            exchanged: whether an exchange has ended in it; the same on all ranks.
        """
        self._steps += 1
        if self.broadcast:
            return "exchange" if exchanged else None
        return "steps" if self._steps == STEPS_BEFORE_A_LOOK else None

    def hand_on_before_forward(self, module: nn.Module) -> None:
        """:meth:`hand_on` before each forward pass with gradients, from now on."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                self.hand_on(module)

        if self.broadcast:
            self._hooks.append(module.register_forward_pre_hook(before, prepend=True))

    def let_go(self) -> None:
        """The run is over: forward passes no longer hand anything on."""
        self.forget()
        while self._hooks:
            self._hooks.pop().remove()

    def compare(
        self, modules: Iterable[nn.Module], strategy: str, occasion: str, rows: ProcessGroup | None = None
    ) -> str | None:
        """Compares all ranks' buffers and untrained parameters, once for each occasion. Collective.

        BatchNorm's statistics, of which :meth:`at_start` warns, are left out. If rank 0's buffers are handed on, so are
        the parameters that differ, after exchanges and at the end. Which these are is looked up after the 1st, 2nd,
        4th, 8th exchange and so on.

        Args:
            modules: those to compare, in the same order on all ranks.
            strategy: its name, for the user.
            occasion: the same on all ranks.
            rows: the ranks that hold the same rows of a sharded parameter; None is all.

        Returns:
            What to tell the user, at most once; None: they are equal.
        """
        if world_size() == 1:
            return None
        if self.broadcast:
            if occasion in ("exchange", "end"):
                self._hand_on_untrained(modules, occasion == "end", rows)
            return None
        if occasion in self._looked or "told" in self._looked:
            return None
        self._looked.add(occasion)
        own: dict[str, Tensor] = {}
        for module in modules:
            told = {id(buffer) for layer in _local_batch_norms(module) for buffer in layer.buffers()}
            own = {**{name: buffer for name, buffer in _shared_buffers(module) if id(buffer) not in told}, **own}
        if not (differ := _different({**own, **self._untrained_of(modules)})):
            return None
        self._looked.add("told")
        names = ", ".join(map(repr, differ[:5])) + (f" and {len(differ) - 5} more" if len(differ) > 5 else "")
        return (
            "All ranks should have the same buffers, and the same parameters where no optimizer trains them, got"
            f" different values of {names}. {strategy} sends no buffers after the start, nor such parameters: each rank"
            " goes on with what its own batches and steps make of them, and a checkpoint holds rank 0's. DDP hands"
            f" rank 0's buffers on before each forward pass: `{strategy}(broadcast_buffers=True)` does so, and hands on"
            " the parameters after each exchange. Or update them alike on all ranks."
        )

    def _hand_on_untrained(self, modules: Iterable[nn.Module], at_end: bool, rows: ProcessGroup | None) -> None:
        self._handed_on += 1
        looks = at_end or self._handed_on.bit_count() == 1
        if not looks and not self._apart:  # as in nearly every step, where each is an exchange
            return
        untrained = self._untrained_of(modules)
        if looks:
            self._apart.update(_different(untrained))
        broadcast_tensors([each for name, each in untrained.items() if name in self._apart], rows)

    def _untrained_of(self, modules: Iterable[nn.Module]) -> dict[str, Tensor]:
        return {name: each for module in reversed([*modules]) for name, each in self._untrained(module)}

    def _untrained(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Parameters that no optimizer trains. Of sharded ones this rank's rows: ranks compare the same rows."""
        for name, parameter in module.named_parameters():
            if id(parameter) not in self._trained:
                rows = f" from entry {first_entry(parameter)} on" if isinstance(parameter, DTensor) else ""
                yield from _sent_by_ddp(module, [(name + rows, local(parameter))])


def _shared_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return _sent_by_ddp(module, module.named_buffers())


def _sent_by_ddp(module: nn.Module, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Those that DDP would send: not what the user told it to leave alone, nor rows of a sharded tensor."""
    ignored = getattr(module, IGNORED_BY_DDP, ())
    for name, tensor in named:
        plain = can_be_sent(tensor) and not tensor.is_meta and not isinstance(tensor, DTensor)
        if plain and tensor.numel() and name not in ignored:
            yield name, tensor


def _different(own: Mapping[str, Tensor]) -> list[str]:
    """Names of this rank's tensors that have another value on some rank. Collective.

    A rank without tensors takes part, too: one may appear on one rank first.
    """
    sums = {name: ops.checksum(entries_of(each)).tolist() for name, each in own.items()}
    mine = {name: f"{tuple(each.shape)} {each.dtype} {sums[name]}" for name, each in own.items()}
    everyone = Communicator().all_gather_object(mine)
    return [name for name, each in mine.items() if any(other.get(name, each) != each for other in everyone)]


def _local_batch_norms(module: nn.Module) -> Iterator[nn.Module]:
    """Those that keep statistics which each rank computes from its own data alone."""
    for layer in module.modules():
        is_batch_norm = isinstance(layer, BatchNorm)
        if is_batch_norm and not isinstance(layer, nn.SyncBatchNorm) and layer.track_running_stats:
            yield layer
