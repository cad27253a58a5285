"""The windows of local steps, and the exchange that ends each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape.comm.collectives import Communicator, all_reduce_bytes
from lightning_scape.core.layout import Layout
from lightning_scape.core.local_shards import local
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import OnItsWay, bytes_of
from lightning_scape.sparseloco import phase
from lightning_scape.sparseloco.config import SparseLoCoConfig
from lightning_scape.sparseloco.exchange import Exchange
from lightning_scape.sparseloco.phase import Opened, Place, Settings
from lightning_scape.sparseloco.state import LocoState, Progress
from lightning_scape.sparseloco.stats import ExchangeRecord, ExchangeStats
from lightning_scape.sparseloco.writes import Writes


class Windows:
    """Counts the steps of a window; exchanges when it is over.

    Args:
        optimizer: the inner one.
        config: all options.
        parameters: those wrapped.
        layout: blocks and shards.
        comm: the ranks that exchange.
        node: the ranks of a node, where they hold a replica together.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: SparseLoCoConfig,
        parameters: Parameters,
        layout: Layout,
        comm: Communicator,
        node: Communicator,
    ) -> None:
        self._optimizer, self._config, self._parameters, self._layout = optimizer, config, parameters, layout
        self._comm, self._node = comm, node
        self.exchange = Exchange(config, layout, comm, parameters.device, node)
        self.state: LocoState | None = None
        """Made at the first step, or by a load."""
        self.progress = Progress()
        self.dropped = DroppedWindows(config.max_skipped, speaks=comm.rank == node.rank == 0)
        self._writes = Writes(parameters, self.exchange.spans, comm)
        self._ended: ExchangeRecord | None = None
        """The record of the last exchange that has ended."""
        self._stats: ExchangeStats | None = None
        self._opened: Opened | None = None
        self._restored: Sequence[Tensor | None] | None = None
        """Parameters as they were loaded, until the first step."""

    # ------------------------------------------------------------------------------------------- around a step

    @torch.no_grad()
    def before_step(self) -> None:
        """Makes the parameters the starting point of the first step; on CUDA, looks how the last exchange went."""
        self._take_up_changes()
        self._judge()
        if self.state is None:
            self._parameters.flatten()
            self.exchange.check_equal(self._parameters.flat, self._parameters.names)
            self.state = self.exchange.allocate()
            self.exchange.begin_at(self.state, dict(enumerate(self._parameters.flat)))
        else:
            self._look(self.state)
        if phase.changed(self._parameters, self._optimizer.param_groups):
            self._end(changed=True)  # with the other ranks, whose windows may be longer
            self._judge()

    def after_step(self) -> None:
        """Counts the inner step; exchanges when its time has come."""
        progress = self.progress
        self._writes.note_step()
        progress.steps += 1
        progress.in_window += 1
        if progress.in_window >= self._config.sync_every:
            self._exchange()

    def end(self) -> None:
        """Ends the window that has begun, if any. Collective."""
        self._take_up_changes()
        self._judge()
        if self.state is not None:
            written = self._look(self.state)
            self._end(written=written)
            self._judge()
            self._writes.settle(self.state, written)

    def _look(self, state: LocoState) -> dict[int, Tensor]:
        """What others than the optimizer have written since the last step or exchange, by place."""
        return self._writes.look(state, in_window=self.progress.in_window > 0)

    def _end(self, changed: bool = False, written: Mapping[int, Tensor] = {}) -> None:  # noqa: B006 - not changed
        """Exchanges at once if a window has begun on any rank. All of them learn which from the first message.

        Args:
            changed: whether this rank's optimizer has other parameters now. Those that were wrapped are exchanged;
                all ranks raise an error afterwards.
            written: parameters that are no part of the window: they were written after its last step.
        """
        state = self.state
        assert state is not None
        self._parameters.flatten()
        self._writes.leave_out(state, written)
        self._exchange(changed, unless_idle=True)

    # --------------------------------------------------------------------------------------------- one exchange

    def _exchange(self, changed: bool | None = None, unless_idle: bool = False) -> None:
        """Ends the window: parameters move to the new starting point, which all ranks share.

        Args:
            changed: see :meth:`_end`; None: to be found out.
            unless_idle: not if no rank has begun a window.
        """
        state, progress, record = self.state, self.progress, ExchangeRecord()
        assert state is not None
        self._parameters.flatten()
        if changed is None:
            changed = phase.changed(self._parameters, self._optimizer.param_groups)
        here, written = self._here(changed), self._writes.take()
        self.exchange.run(state, self._parameters.flat, record, *here, written, unless_idle=unless_idle)
        self._opened = record.opened
        if record.idle:
            return
        progress.in_window = 0
        progress.exchanges += 1
        with record.phase("set_out"):
            self._parameters.flatten()
            self.exchange.set_out(state, self._parameters.flat)
            self._writes.note_step()
        self._ended, self._stats = record, None
        record.step, record.exchange = progress.steps, progress.exchanges
        every = self._config.check_replicas_every
        if every and progress.exchanges % every == 0:
            self.exchange.check_starts(state, self._parameters.names)
        self.dropped.note(record.norm)
        if record.norm.device.type != "cuda":
            self._judge()

    def _here(self, changed: bool) -> tuple[Place, Settings]:
        settings, now = Settings.of(self._optimizer, self._parameters.groups), self.progress
        return Place(now.steps, now.in_window, changed, self._comm.number + 1, settings.digest), settings

    def _judge(self) -> None:
        """Looks how the last exchange went: whether all ranks were at the same step, and their parameters finite."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.judge(self._comm)
        if self.dropped.judge():
            clear_nonfinite(self._optimizer)

    def stats(self) -> ExchangeStats | None:
        """Figures of the last exchange that has ended; None before the first."""
        ended, state = self._ended, self.state
        if self._stats is None and ended is not None:
            assert state is not None
            norm = self.exchange.error_norm(state)
            sent, dropped = self.exchange.wire.sent, self.dropped.total
            dense = all_reduce_bytes(self._parameters.local, self._comm.world_size)
            self._stats = ExchangeStats.of(ended, self._layout, sent, dense, float(norm), dropped)
        return self._stats

    # ---------------------------------------------------------------------------------------- saves, and loads

    def rest(self) -> None:
        """Before the state is saved: nothing is on its way, and what is known of the last exchange is up to date."""
        if self._restored is not None:  # a load whose first step is still to come, also after this
            self._take_up_changes()
            self._restored = [flat.clone() for flat in self._parameters.flat]
        if self.state is None:  # before the first step
            self.before_step()
        else:
            self._judge()
            self._look(self.state)
            self._writes.resolve(self.state)

    def resume(
        self,
        state: LocoState | None,
        progress: Mapping[str, Any],
        dropped: tuple[int, int],
        parameters: Sequence[Tensor | None] | None,
    ) -> None:
        """Goes on from what was loaded.

        Args:
            state: buffers; None: a window begins at the next step.
            progress: as it was saved.
            dropped: windows in a row, and in all.
            parameters: this rank's own, flat; None: the model's stay, all or this one.
        """
        self._ended = self._stats = self._opened = None
        self._writes.forget()
        self.state = state
        vars(self.progress).update(vars(Progress(**progress)))
        self.dropped.forget()
        self.dropped.in_row, self.dropped.total = dropped
        self._restored = parameters
        self.restore_parameters()

    @torch.no_grad()
    def restore_parameters(self) -> None:
        """Puts this rank's own parameters back, as they were loaded; does nothing once a step was taken."""
        if self._restored is not None:
            self._parameters.flatten()
            for flat, saved in zip(self._parameters.flat, self._restored, strict=True):
                if saved is not None:
                    flat.copy_(saved)

    def _take_up_changes(self) -> None:
        """Makes weights that the user has loaded since :meth:`resume` the starting point. Collective.

        Else the next exchange would take the change for a pseudo-gradient, of which only the largest entries are sent:
        all others would be undone. What ranks and owners still owe stays.

        Raises:
            RuntimeError: on every rank, if ranks have changed them differently.
        """
        restored, self._restored = self._restored, None
        state = self.state
        if restored is None or state is None:
            return
        self._parameters.flatten()
        flats, names = self._parameters.flat, self._parameters.names
        if not (changed := _changed_since(flats, restored, (self._comm, self._node))):
            return
        theirs = {place: flats[place] for place in changed}
        self.exchange.check_equal([*theirs.values()], [names[place] for place in changed])
        self.exchange.begin_at(state, theirs)
        told = [names[place] for place in changed if restored[place] is not None]
        if told and self._comm.rank == self._node.rank == 0:
            warnings.warn(
                f"{len(told)} of {len(flats)} parameters, the first {told[0]!r}, were changed after"
                " SparseLoCo's state was loaded: all ranks go on from the new values, and what is not yet sent stays."
                " If they are of the same checkpoint, load the model before the optimizer, or both at once.",
                stacklevel=3,
            )

    @torch.no_grad()
    def restart(self) -> None:
        """Makes the parameters, as they are now, the starting point of a new window. Collective."""
        self._restored = None
        self._writes.forget()
        if self.state is None:
            return  # the first step makes the parameters the starting point
        self._parameters.flatten()
        self._judge()
        self.exchange.check_equal(self._parameters.flat, self._parameters.names)
        self.exchange.begin_at(self.state, dict(enumerate(self._parameters.flat)))
        self.progress.in_window = 0


def _changed_since(
    flats: Sequence[Tensor], restored: Sequence[Tensor | None], groups: Sequence[Communicator]
) -> list[int]:
    """Places of the parameters that are not as they were loaded, on any rank; None counts as changed."""
    pairs = zip(flats, restored, strict=True)
    mine = [saved is None or not torch.equal(bytes_of(flat), bytes_of(saved.to(flat))) for flat, saved in pairs]
    flags = torch.tensor(mine, dtype=torch.uint8, device=flats[0].device if flats else None)
    for group in groups:
        flags = group.all_gather_stacked(flags).amax(dim=0)
    return [place for place, changed in enumerate(flags.tolist()) if changed]  # once after a load: waiting is fine


class DroppedWindows:
    """Counts windows that are dropped because some rank's parameters were not finite.

    On CUDA the CPU learns of a dropped window a step late, and never waits for the device.

    Args:
        most: number in a row that raises an error.
        speaks: whether this rank warns.
    """

    def __init__(self, most: int, speaks: bool) -> None:
        self.most, self.speaks = most, speaks
        self.in_row = 0
        self.total = 0
        self._norm: OnItsWay | None = None
        """The norm of an exchange whose outcome nobody has looked at."""

    def note(self, norm: Tensor) -> None:
        """Takes the norm of an exchange, 0-dim, on its way to the CPU."""
        self._norm = OnItsWay(norm)

    def judge(self) -> bool:
        """Whether the last window was dropped, asked once for each exchange; later calls say False.

        Raises:
            FloatingPointError: too many in a row; on every rank.
        """
        norm, self._norm = self._norm, None
        if norm is None:
            return False
        if math.isfinite(float(norm.read())):
            self.in_row = 0
            return False
        self.in_row += 1
        self.total += 1
        if self.in_row >= self.most:
            raise FloatingPointError(
                f"Parameters must be finite at the end of a window, got NaN or inf in {self.in_row} windows in a row"
                f" (max_skipped={self.most}) on at least one rank; all ranks are back at the starting point of the"
                " first of them. Lower the learning rate, clip gradients, or look for a bad batch; raise `max_skipped`"
                " to wait longer."
            )
        if self.speaks:
            warnings.warn(
                "Parameters were not finite on at least one rank: the window is dropped, all ranks are back at its"
                f" starting point ({self.in_row} in a row, {self.total} in total; an error at {self.most} in a row).",
                stacklevel=5,
            )
        return True

    def forget(self) -> None:
        """Drops a norm that has not been looked at: another state is loaded."""
        self._norm = None


def clear_nonfinite(optimizer: torch.optim.Optimizer) -> None:
    """Sets entries of the optimizer's state that are inf or NaN to zero: else they would spoil every later window."""
    for state in optimizer.state.values():
        # An entry that is no parameter's may be anything: a count, a tensor.
        for value in state.values() if isinstance(state, Mapping) else [state]:
            if isinstance(value, Tensor) and value.is_floating_point():
                local(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
