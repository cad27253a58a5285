"""The exchange of SparseLoCo (arXiv 2508.15706, algorithm 1), with its reduction sharded over the ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout
from lightning_scape.core.replicas import check_replicas
from lightning_scape.core.tensors import piece_views
from lightning_scape.sparseloco import phase
from lightning_scape.sparseloco.config import SparseLoCoConfig
from lightning_scape.sparseloco.phase import Opened, Place, Settings
from lightning_scape.sparseloco.state import LocoState, Spans, Written
from lightning_scape.sparseloco.stats import ExchangeRecord
from lightning_scape.wire.blocks import Wire


class Exchange:
    """One exchange, of one rank.

    Symbols: ``theta`` this rank's parameters, ``start`` those at the last exchange, ``e`` the error feedback, ``u`` the
    owner's, ``beta`` = ``error_decay``, ``alpha`` = ``outer_lr``, ``N`` ranks.

    Args:
        config: all options.
        layout: blocks and shards.
        comm: sends the messages.
        device: the parameters', where the arithmetic runs.
        node: the ranks of a node, where they hold a replica together; layout and parameters are then this rank's
            rows, and ``comm`` reaches those of the other nodes that hold the same.
    """

    def __init__(
        self,
        config: SparseLoCoConfig,
        layout: Layout,
        comm: Communicator,
        device: torch.device,
        node: Communicator,
    ) -> None:
        self.config, self.layout, self.comm, self._node = config, layout, comm, node
        self.wire = Wire(*config.quota, config.bits)
        """To the owners, and back to all ranks."""
        self.spans = Spans(layout, device)
        self._divisor = config.averages(comm.world_size)
        self._gathers = config.gathers(comm.world_size)
        self._reduce = self._gathered if self._gathers else self._sharded
        if comm.world_size == 1:
            self._reduce = self._alone

    def allocate(self) -> LocoState:
        """The buffers of a rank, all zeros."""
        return LocoState.allocate(self.layout, self.spans.device, owns=not self._gathers)

    def run(
        self,
        state: LocoState,
        flats: Sequence[Tensor],
        record: ExchangeRecord,
        place: Place,
        settings: Settings,
        written: Written = Written(),  # noqa: B008 - a tuple
        *,
        unless_idle: bool = False,
    ) -> None:
        """Sends what this rank has learned, and moves the starting point. Parameters are only read. Collective.

        ========= =============================================================================================
        norm      all-gather of the squared norm of ``delta = start - theta``, and of the place in the window; if it is
                  not finite, or ranks are apart, nothing is folded; ``start`` takes up what all have written alike
        fold      ``e = beta * e + delta``
        send      the q largest entries of each block of ``e`` leave it, quantized, for their owners: all-to-all
        average   the owner adds up what arrives, in rank order, divides by N (see ``average``), and adds that to ``u``
        return    the largest entries of each block of ``u`` leave it, likewise, for all ranks: all-gather
        outer     ``start -= alpha * what arrives``, the same on all ranks, bit for bit
        ========= =============================================================================================

        With ``reduction="gathered"`` the messages of ``send`` go to all ranks, by an all-gather. Every rank adds them
        up itself, and by default divides by more where more ranks sent an entry. There is no owner, nothing comes back.

        Args:
            state: changed.
            flats: every parameter at the end of the window, flat.
            record: takes the figures.
            place: where this rank stands.
            settings: of this rank's optimizer.
            written: what others than the optimizer have written.
            unless_idle: end after the first message if no rank has a window; on CUDA the CPU then waits for it.

        Raises:
            RuntimeError, ValueError: ranks are apart; on every rank, before anything is changed. On CUDA the CPU
                learns it later (:meth:`~.phase.Opened.judge`); nothing is folded there either.
        """
        with record.phase("norm"):
            openings = self._open(state, flats, place, written)
            record.norm, apart = self._norm(openings)
            record.opened = Opened(openings, apart, settings)
            if openings.device.type != "cuda" and (record.opened.apart or settings.problem):
                record.opened.judge(self.comm)
        if unless_idle and record.opened.idle:
            record.idle = True
            self.comm.traffic.take()
            return
        with record.phase("fold"):
            state.take_up(self.spans, written, phase.written(openings))
            self._fold(state, flats, torch.isfinite(record.norm))
        self._reduce(state, record)
        record.bytes_sent, record.message_seconds = self.comm.traffic.take()

    def _sharded(self, state: LocoState, record: ExchangeRecord) -> None:
        """From ``send`` to ``outer``, by way of the owners."""
        with record.phase("send"):
            message = self._take(state.error)
            arriving = self.comm.all_to_all(message)
        with arriving, record.phase("average"):
            own = message[self.layout.rows_of(self.comm.rank)]
            self._average(state.owner_error, arriving.wait(), own)
        with record.phase("return"):
            message = self._take(state.owner_error)
            returned = self.comm.all_gather(message).wait()
        with record.phase("outer"):
            for rows in self.spans.rows(len(state.start)):
                self.wire.read(returned[rows]).add_to(state.start[rows], -self.config.outer_lr)

    def _gathered(self, state: LocoState, record: ExchangeRecord) -> None:
        """The same where every rank gets all messages, and averages them itself."""
        with record.phase("send"):
            message = self._take(state.error)
            everyone = self.comm.all_gather(message).wait().view(self.comm.world_size, *message.shape)
        with record.phase("outer"):
            for rows in self.spans.rows(len(state.start)):
                state.start[rows] -= self.config.outer_lr * self._mean(everyone[:, rows], state.start[rows])

    def _open(self, state: LocoState, flats: Sequence[Tensor], at: Place, written: Written) -> Tensor:
        """``[N, 10]``: every rank's first message, see :mod:`.phase`."""
        total = torch.zeros(1, dtype=torch.float32, device=self.spans.device)
        for place, theta in self.spans.entries(flats):
            total += self._delta(state, place, theta).square_().sum()
        return self.comm.all_gather_facts(phase.opening(total, at, written.digests(total.device)))

    def _alone(self, state: LocoState, record: ExchangeRecord) -> None:
        """The same for one rank: nothing is sent, so nothing needs to be chosen or rounded."""
        with record.phase("outer"):
            for owed in (state.error, state.owner_error):
                for rows in self.spans.rows(len(owed)):
                    state.start[rows] -= self.config.outer_lr * owed[rows]
                    owed[rows] = 0

    def _norm(self, openings: Tensor) -> tuple[Tensor, Tensor]:
        """0-dim fp32: root mean square over replicas of the norm of ``delta``; not finite if any rank's is not.

        And 0-dim bool: whether ranks are apart, those of this node included; the norm is NaN then.
        """
        mean = phase.squares(openings).sum(dim=0, keepdim=True) / self.comm.world_size
        apart = phase.apart(openings)
        if self._node.world_size > 1:  # over all rows of a replica
            own = torch.cat([mean.view(torch.int32), apart.view(1).int(), openings[self.comm.rank, 2:]])
            rows = self._node.all_gather_stacked(own)
            mean = rows[:, 0].contiguous().view(torch.float32).sum(dim=0, keepdim=True)
            apart = rows[:, 1].any() | phase.apart(rows)
        return torch.where(apart, torch.nan, mean.sqrt_()).view(()), apart

    def _delta(self, state: LocoState, place: slice, theta: Tensor) -> Tensor:
        """fp32: the starting point minus the parameters."""
        start = state.start.view(-1)[place]
        # The ranks set out from the rounded starting point, where parameters are narrower than fp32.
        return start.to(theta.dtype).float() - theta.float()

    def _fold(self, state: LocoState, flats: Sequence[Tensor], finite: Tensor) -> None:
        """Folds the window into the error feedback, or leaves it as it is where ``finite`` (0-dim bool) is false."""
        kept = torch.full((), self.config.error_decay, dtype=torch.float32, device=finite.device)
        decay = torch.where(finite, kept, 1.0)  # from two plain numbers it would have torch's default dtype
        for place, theta in self.spans.entries(flats):
            delta = torch.where(finite, self._delta(state, place, theta), 0.0)
            state.error.view(-1)[place].mul_(decay).add_(delta)

    def _take(self, blocks: Tensor) -> Tensor:
        """The message ``[rows, W]`` of a whole buffer ``[rows, B]``, a part at a time."""
        message = torch.empty(len(blocks), self.wire.row_bytes, dtype=torch.uint8, device=self.spans.device)
        for rows in self.spans.rows(len(blocks)):
            message[rows] = self.wire.take(blocks[rows])
        return message

    def _average(self, owner_error: Tensor, received: Tensor, own: Tensor) -> None:
        """Adds the mean of the N messages for this shard.

        Args:
            owner_error: ``[R, B]``, changed.
            received: ``[N, R, W]``; the place of this rank holds nothing.
            own: ``[R, W]``, this rank's.
        """
        for rows in self.spans.rows(len(owner_error)):
            messages = [own if rank == self.comm.rank else message for rank, message in enumerate(received)]
            owner_error[rows] += self._mean([message[rows] for message in messages], owner_error[rows])

    def _mean(self, messages: Iterable[Tensor], like: Tensor) -> Tensor:
        """The sum of the ranks' messages, in rank order, as blocks like ``like``, divided as ``average`` says."""
        total = torch.zeros_like(like)
        senders = None if self._divisor == "all" else torch.zeros_like(like)
        for message in messages:
            entries = self.wire.read(message)
            entries.add_to(total)
            if senders is not None:
                entries._replace(values=(entries.values != 0).float()).add_to(senders)
        if senders is None:
            return total / self.comm.world_size
        senders.clamp_(min=1)
        return total / (senders if self._divisor == "senders" else senders.mul_(self.comm.world_size).sqrt_())

    def set_out(self, state: LocoState, flats: Sequence[Tensor]) -> None:
        """Puts the parameters at the starting point."""
        for place, theta in self.spans.entries(flats):
            theta.copy_(state.start.view(-1)[place])

    def check_starts(self, state: LocoState, names: Sequence[str]) -> None:
        """Raises on every rank if starting points differ. Collective, like the next."""
        pieces = self.layout.everything().pieces
        self.check_equal(piece_views(state.start, pieces), [names[piece.segment.index] for piece in pieces])

    def check_equal(self, flats: list[Tensor], names: Sequence[str]) -> None:
        """Raises on every rank if any of the tensors differ between replicas."""
        self._node.raise_on_all_ranks(lambda: check_replicas(self.comm, flats, names, ops.checksum))

    def error_norm(self, state: LocoState) -> Tensor:
        """0-dim, on the device: L2 norm of the error feedback."""
        total = torch.zeros((), dtype=torch.float32, device=self.spans.device)
        for rows in self.spans.rows(len(state.error)):
            total += state.error[rows].square().sum()
        return total.sqrt_()

    def begin_at(self, state: LocoState, flats: Mapping[int, Tensor]) -> None:
        """Makes some parameters, flat, by place, the starting point."""
        for _, place, theta in self.spans.entries_of(flats):
            state.start.view(-1)[place].copy_(theta)
