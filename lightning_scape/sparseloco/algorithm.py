"""SparseLoCo (arXiv 2508.15706, algorithm 1): local steps, then an exchange of what they have changed.

Symbols: ``theta`` this rank's parameters, ``start`` those at the last exchange, equal on all ranks, ``e`` the error
feedback, ``beta`` = ``error_decay``, ``alpha`` = ``outer_lr``, ``N`` ranks, ``H`` = ``sync_every``.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator, all_reduce_bytes
from lightning_scape.core.layout import Layout
from lightning_scape.core.local_shards import local
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.private_names import version
from lightning_scape.core.replicas import apart, check_replicas, digest, settings
from lightning_scape.core.stats import Stats
from lightning_scape.ops.naive.masks import chunk, row_slices
from lightning_scape.ops.naive.wire import Wire, add_entries
from lightning_scape.sparseloco.config import SparseLoCoConfig

MOST_DROPPED = 10
"""Windows in a row that are dropped raise an error."""
_ALWAYS = ("lr", "betas", "eps", "weight_decay", "momentum")
"""Settings that count also where an optimizer's constructor hides them behind ``**kwargs``."""


@dataclass
class LocoState:
    """Buffers of one rank, fp32 ``[blocks, B]``; ``B`` is the block length."""

    start: Tensor
    """The parameters at the last exchange; wider than narrow parameters."""
    error: Tensor
    """e, what this rank has computed and not yet sent."""


@dataclass
class Progress:
    """Where training stands."""

    steps: int = 0
    """Inner steps so far."""
    in_window: int = 0
    """Inner steps since the last exchange."""
    exchanges: int = 0
    dropped: int = 0
    """Windows dropped because some rank's parameters were not finite."""
    dropped_in_row: int = 0
    """The last of them, one after the other."""
    written: list[int] = field(default_factory=list)
    """Parameters that others than the optimizer have written since the last exchange, by place."""


@dataclass
class ExchangeStats(Stats):
    """Figures of one exchange on one rank. ``step`` counts inner steps; ``"norm"`` is the first message."""

    METHOD = "sparseloco"
    PHASES = ("norm", "fold", "send", "outer", "set_out")
    KINDS = ("parameters", "norm")
    LOGGED = ("exchange", "delta_norm", "skipped")

    exchange: int = 0
    """Exchanges so far, this one included."""
    delta_norm: float = 0.0
    """Root mean square over ranks of the norm of the pseudo-gradient, start minus parameters."""
    skipped: bool = False
    """Whether the window was dropped because some rank's parameters were not finite."""


class Algorithm:
    """The local steps and the exchanges of one rank.

    Args:
        optimizer: the inner one.
        config: all options.
        parameters: those wrapped.
        comm: the ranks that exchange.
        node: the ranks of a node, where they hold a replica together; parameters are then this rank's rows, and
            ``comm`` reaches those of the other nodes that hold the same.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: SparseLoCoConfig,
        parameters: Parameters,
        comm: Communicator,
        node: Communicator,
    ) -> None:
        self.optimizer, self.config, self.parameters = optimizer, config, parameters
        self.comm, self.node = comm, node
        sent, bits = config.quota.sent, config.bits
        numels = [parameter.numel() for parameter in parameters.local]
        self.layout = layout = Layout(numels, parameters.groups, config.quota.block_size, 1)
        if comm.world_size == 1:  # nobody to send to: nothing needs to be chosen or rounded
            sent, bits = layout.block_size, None
        self.wire = Wire(layout.block_size, sent, bits)
        self.state: LocoState | None = None
        """Made at the first step, or by a load."""
        self.progress = Progress()
        self.stats: ExchangeStats | None = None
        """Of the last exchange."""
        self._seen: list[tuple[int, int]] = []

    @property
    def _state(self) -> LocoState:
        assert self.state is not None
        return self.state

    # ------------------------------------------------------------------------------------------- around a step

    def begin(self) -> None:
        """Makes the parameters the starting point of the first window, collectively; else looks for writes."""
        if self.state is None:
            self.parameters.flatten()
            self._check_equal()
            self.state = self.allocate()
            for _, entries, theta in self._parts():
                self.state.start.view(-1)[entries].copy_(theta)
        self.look_for_writes()

    def allocate(self) -> LocoState:
        """Buffers, all zeros."""
        shape, device = (self.layout.blocks, self.layout.block_size), self.parameters.device
        return LocoState(*(torch.zeros(shape, dtype=torch.float32, device=device) for _ in range(2)))

    def after_step(self) -> None:
        """Counts the inner step; exchanges when its time has come."""
        self.note()
        self.progress.steps += 1
        self.progress.in_window += 1
        if self.progress.in_window >= self.config.sync_every:
            self.exchange()

    def exchange(self) -> None:
        """Sends what this rank has learned, and moves all ranks to a new starting point. Collective.

        ======== =========================================================================================
        norm     all-gather of the squared norm of ``delta = start - theta``, and of what must be the same
        fold     ``e = beta * e + delta``
        send     the q largest entries of each block of ``e`` leave it, quantized: all-gather
        outer    ``start -= alpha * mean``, the mean of all messages, in rank order, so the same on all ranks
        set_out  ``theta = start``
        ======== =========================================================================================

        Where a rank's parameters are not finite, nothing is folded: the window is dropped. Where no rank has begun a
        window, nothing happens.

        Raises:
            RuntimeError: ranks are apart; on every rank, before anything is changed.
            FloatingPointError: too many windows in a row were dropped; on every rank.
        """
        progress, comm = self.progress, self.comm
        stats = ExchangeStats(density=self.wire.sent / self.layout.block_size)
        self.parameters.flatten()
        with stats.phase("norm"):
            norm, written = self._meet()
        if not (progress.in_window or written):
            comm.traffic.take()
            return
        if math.isfinite(norm):
            if written:
                self._start_from_what_was_written()
            if progress.in_window:
                self._outer_step(stats)
        with stats.phase("set_out"):
            for _, entries, theta in self._parts():
                theta.copy_(self._state.start.view(-1)[entries])
        progress.in_window, progress.written = 0, []
        progress.exchanges += 1
        stats.skipped = not math.isfinite(norm)
        progress.dropped_in_row = progress.dropped_in_row + 1 if stats.skipped else 0
        if stats.skipped:
            self._drop()
        stats.step, stats.exchange, stats.skipped_total = progress.steps, progress.exchanges, progress.dropped
        stats.delta_norm = norm
        stats.bytes_dense = all_reduce_bytes(self.parameters.local, comm.world_size)
        stats.bytes_sent, stats.message_seconds = comm.traffic.take()
        self.stats = stats
        self._check_equal()

    # ------------------------------------------------------------------------------------ the parts of an exchange

    def _outer_step(self, stats: ExchangeStats) -> None:
        """Folds, sends, and moves the starting point."""
        state, config = self._state, self.config
        with stats.phase("fold"):
            for _, entries, theta in self._parts():
                state.error.view(-1)[entries].mul_(config.error_decay).add_(self._delta(entries, theta))
        with stats.phase("send"):
            messages = self._send(state.error)
        with stats.phase("outer"):
            for rows in row_slices(state.start, self.layout.block_size):
                state.start[rows] -= config.outer_lr * self._mean(messages[:, rows], state.start[rows])

    def _meet(self) -> tuple[float, bool]:
        """The first message: the norm, and whether others than the optimizer have written on any rank.

        On CUDA the CPU waits for it.

        Raises:
            RuntimeError: ranks differ in what must be the same; on every rank.
        """
        device, comm, node, facts = self.parameters.device, self.comm, self.node, self.facts()
        square = torch.zeros(1, dtype=torch.float32, device=device)
        for _, entries, theta in self._parts():
            square += self._delta(entries, theta).square_().sum()
        mine = [bool(self.progress.written), digest(facts, 6)]  # a double holds 48 bits exactly
        message = torch.cat([square.double(), torch.tensor(mine, dtype=torch.float64).to(device)])
        everyone = node.all_gather_stacked(comm.all_gather_stacked(message, "norm")).view(-1, len(message)).cpu()
        squares, written, digests = everyone.unbind(1)
        if (digests != digests[0]).any():
            raise apart(comm, node, facts)
        return math.sqrt(squares.sum() / comm.world_size), bool(written.any())

    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks. What an optimizer computes itself and keeps in its groups is no part."""
        given = inspect.signature(type(self.optimizer).__init__).parameters
        names = [name for name in dict.fromkeys([*given, *_ALWAYS]) if name != "params"]
        return {
            "the optimizer's number": self.comm.number,
            "the number of steps since the last exchange": self.progress.in_window,
            **settings(self.optimizer.param_groups, names),
        }

    def _delta(self, entries: slice, theta: Tensor) -> Tensor:
        """fp32: the starting point minus the parameters."""
        # The ranks set out from the rounded starting point, where parameters are narrower than fp32.
        return self._state.start.view(-1)[entries].to(theta.dtype).float() - theta.float()

    def _send(self, blocks: Tensor) -> Tensor:
        """Every rank's message, ``[N, blocks, W]``; what is in this rank's leaves ``blocks``."""
        message = torch.empty(len(blocks), self.wire.row_bytes, dtype=torch.uint8, device=blocks.device)
        for rows in row_slices(blocks, self.layout.block_size):
            message[rows] = self.wire.take(blocks[rows])
        return self.comm.all_gather(message).wait().view(self.comm.world_size, *message.shape)

    def _mean(self, messages: Tensor, like: Tensor) -> Tensor:
        """The sum of the ranks' messages, in rank order, as blocks like ``like``, divided as ``average`` says."""
        total, senders = torch.zeros_like(like), torch.zeros_like(like)
        everything = self.wire.dense or self.config.average == "all"
        for message in messages:
            positions, values = self.wire.read(message)
            add_entries(total, positions, values)
            if not everything:
                add_entries(senders, positions, (values != 0).float())
        if everything:
            return total / self.comm.world_size
        senders.clamp_(min=1)
        return total / (senders if self.config.average == "senders" else senders.mul_(self.comm.world_size).sqrt_())

    def _drop(self) -> None:
        """Warns of a dropped window, and forgets what is not finite in the optimizer: else later ones were spoilt, too.

        Raises:
            FloatingPointError: too many in a row.
        """
        progress = self.progress
        progress.dropped += 1
        if progress.dropped_in_row >= MOST_DROPPED:
            raise FloatingPointError(
                "Parameters must be finite at the end of a window, got NaN or inf on at least one rank in"
                f" {MOST_DROPPED} windows in a row; all ranks are back at the starting point of the first of them."
                " Lower the learning rate, clip gradients, or look for a bad batch."
            )
        if self.comm.rank == self.node.rank == 0:
            warnings.warn(
                "Parameters were not finite on at least one rank: the window is dropped, all ranks are back at its"
                f" starting point ({progress.dropped_in_row} in a row, an error at {MOST_DROPPED}; {progress.dropped}"
                " in total).",
                stacklevel=5,
            )
        for state in self.optimizer.state.values():
            # An entry that is no parameter's may be anything: a count, a tensor.
            for value in state.values() if isinstance(state, Mapping) else [state]:
                if isinstance(value, Tensor) and value.is_floating_point():
                    local(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _check_equal(self) -> None:
        """Raises on every rank where parameters differ between replicas. Collective."""
        self.node.raise_on_all_ranks(lambda: check_replicas(self.comm, self.parameters, ops.checksum))

    def _parts(self) -> Iterator[tuple[int, slice, Tensor]]:
        """The parameters in parts, so that temporaries are small: place, entries in the blocks (flat), and the part."""
        for piece in self.layout.pieces:
            first, flat = piece.row * self.layout.block_size, self.parameters.flat[piece.index]
            for part in flat.split(chunk(flat)):
                yield piece.index, slice(first, first + len(part)), part
                first += len(part)

    # ------------------------------------------------- what others write: loaded weights, a constraint, an average

    # Under DDP all ranks write the same, and training goes on from it. An exchange would take such a change for
    # something learned, and undo all but its largest entries. So the next exchange averages these parameters as they
    # are.

    def note(self) -> None:
        """The parameters are as the optimizer, an exchange or a load has left them."""
        self._seen = [(version(each), each.data_ptr()) for each in self.parameters.local]

    def look_for_writes(self) -> None:
        """Notes which parameters others than the optimizer have written.

        In a window versions tell (not of a write through ``.data``, which raises none); at its beginning values do.
        """
        seen, progress = self._seen, self.progress
        self.note()
        if progress.in_window:
            found = [place for place, each in enumerate(zip(seen, self._seen, strict=True)) if each[0] != each[1]]
        else:
            self.parameters.flatten()
            moved = torch.zeros(len(self.parameters.flat), dtype=torch.bool, device=self.parameters.device)
            for place, entries, theta in self._parts():
                moved[place] |= self._delta(entries, theta).any()
            found = moved.nonzero().view(-1).tolist()  # the CPU waits once
        progress.written = sorted({*progress.written, *found})

    def _start_from_what_was_written(self) -> None:
        """Makes parameters that any rank's others have written, or their mean, the starting point. Collective.

        What was not yet sent of them is dropped: it was learned before.
        """
        state = self._state
        flags = torch.zeros(len(self.parameters.flat), dtype=torch.uint8, device=self.parameters.device)
        flags[self.progress.written] = 1
        places = self.comm.all_gather_stacked(flags).amax(dim=0).nonzero().view(-1).tolist()
        for _, entries, theta in (part for part in self._parts() if part[0] in places):
            everyone = self.comm.all_gather(theta.float().unsqueeze(0)).wait()
            mean = everyone.double().mean(dim=0).float()  # of equal values exactly that value
            state.start.view(-1)[entries] = mean
            theta.copy_(mean)
            state.error.view(-1)[entries] = 0

    # ---------------------------------------------------------------------------------------- saves, and loads

    def resume(self, state: LocoState | None, progress: Mapping[str, Any]) -> None:
        """Goes on from what was loaded, with the parameters in place.

        Args:
            state: buffers; None: a window begins at the next step.
            progress: as it was saved.
        """
        self.state, self.stats = state, None
        vars(self.progress).update(vars(Progress(**progress)))
        self.note()
