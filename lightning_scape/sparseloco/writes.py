"""What others than the optimizer write into parameters: weights loaded in mid-training, a constraint, an average.

Under DDP all ranks write the same, for they are equal after every step, and training goes on from it. Between exchanges
they differ, and a rank cannot know what the others write. So it keeps what was written until the next exchange, whose
first message carries a digest of it. What all have written alike becomes the starting point. Else it would count as
learned: all but the largest changes would be undone. What ranks have written differently belongs to their windows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.private_names import version
from lightning_scape.sparseloco.state import LocoState, Spans, Written


class Writes:
    """Finds and keeps such writes. A single rank need not: nothing that it has learned is left out.

    Args:
        parameters: those wrapped.
        spans: of the same.
        comm: the ranks that exchange.
    """

    def __init__(self, parameters: Parameters, spans: Spans, comm: Communicator) -> None:
        self._parameters, self._spans, self._comm = parameters, spans, comm
        self.forget()

    def forget(self) -> None:
        """Parameters are where they should be, whoever has written them."""
        self._seen: list[tuple[int, int]] | None = None
        self._first: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}

    def note_step(self) -> None:
        """The parameters are as the optimizer, or an exchange, has left them."""
        self._seen = self._stamps()

    def look(self, state: LocoState, in_window: bool) -> dict[int, Tensor]:
        """Keeps what was written since :meth:`note_step`, and returns it.

        Inside a window versions tell (not of a write through ``.data``, which raises none); at its beginning values do.

        Args:
            state: its starting point is where an exchange has put the parameters.
            in_window: whether parameters have taken a step since.
        """
        if self._comm.world_size == 1:
            return {}
        if in_window and self._seen in (None, self._stamps()):
            return {}
        self._parameters.flatten()
        flats = self._parameters.flat
        if in_window:
            pairs = zip(self._stamps(), self._seen or [], strict=True)
            places = [place for place, (now, before) in enumerate(pairs) if now != before]
        else:
            places = state.moved(self._spans, flats)
        found = {place: flats[place].clone() for place in places}
        (self._last if in_window else self._first).update(found)
        return found

    def _stamps(self) -> list[tuple[int, int]]:
        return [(version(each), each.data_ptr()) for each in self._parameters.local]

    def leave_out(self, state: LocoState, written: Mapping[int, Tensor]) -> None:
        """Puts such parameters back to the starting point, so that the exchange has nothing to send of them."""
        for place in written:
            self._first.pop(place, None)
            self._last.pop(place, None)
        flats = self._parameters.flat
        for _, entries, theta in self._spans.entries_of({place: flats[place] for place in written}):
            theta.copy_(state.start.view(-1)[entries])

    def take(self) -> Written:
        """What was kept, for an exchange that begins."""
        taken, self._first, self._last = Written(self._first, self._last), {}, {}
        return taken

    def resolve(self, state: LocoState) -> None:
        """Before a save: what was written alike becomes the starting point now. Collective."""
        if self._comm.world_size > 1:
            written = self.take()
            everyone = self._comm.all_gather_stacked(written.digests(self._parameters.device))
            state.take_up(self._spans, written, everyone)

    def settle(self, state: LocoState, written: Mapping[int, Tensor]) -> None:
        """Ends training with what was written after the last step, or its mean where ranks differ. Collective.

        Such as an average that a callback has taken over the steps: no exchange could send all of it.

        Args:
            state: the starting point moves there. What is not yet sent stays.
            written: what :meth:`look` has found, before the last exchange.
        """
        comm, flats = self._comm, self._parameters.flat
        found = [place in written for place in range(len(flats))]
        flags = torch.tensor(found, dtype=torch.uint8, device=self._parameters.device)
        places = comm.all_gather_stacked(flags).amax(dim=0).nonzero().view(-1).tolist()
        if not places:
            return
        values = {place: written.get(place, flats[place]) for place in places}
        sums = comm.all_gather_stacked(torch.stack([ops.checksum(each) for each in values.values()]))
        for place, alike in zip(places, (sums == sums[0]).all(dim=2).all(dim=0).tolist(), strict=True):
            if not alike:
                values[place] = comm.all_reduce_sum(values[place].float().clone()) / comm.world_size
            flats[place].copy_(values[place])
        state.set_out_from(self._spans, values, torch.ones((), dtype=torch.bool, device=sums.device))
        self.note_step()
