"""What a load has put in place, until the first step after it: weights that the user loads in between must count."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.replicas import check_replicas
from lightning_scape.core.tensors import bytes_of, piece_views
from lightning_scape.sparseloco.state import LocoState


def changed_since(
    flats: Sequence[Tensor], restored: Sequence[Tensor | None], ranks: Communicator, shards: Communicator
) -> list[int]:
    """Places of the parameters that are not what a load has restored, on any rank. Collective.

    Args:
        flats: every parameter, flat.
        restored: likewise, as they were loaded; None is no part of what was loaded, and counts as changed.
        ranks: those that hold the same parameters, or the same rows of them.
        shards: the ranks of a node.
    """
    pairs = zip(flats, restored, strict=True)
    mine = [saved is None or not torch.equal(bytes_of(flat), bytes_of(saved.to(flat))) for flat, saved in pairs]
    flags = torch.tensor(mine, dtype=torch.uint8, device=flats[0].device if flats else None)
    for group in (ranks, shards):
        flags = group.all_gather_stacked(flags).amax(dim=0)
    return [place for place, changed in enumerate(flags.tolist()) if changed]  # once after a load: waiting is fine


def set_out_from_changed(
    restored: Sequence[Tensor | None],
    state: LocoState,
    parameters: Parameters,
    layout: Layout,
    ranks: Communicator,
    shards: Communicator,
) -> None:
    """Makes parameters that were changed since a load the starting point: the window goes on from what the user loaded.

    Else the next exchange would take the change for a pseudo-gradient, of which only the largest entries are sent: all
    others would be undone. What ranks and owners still owe stays. Collective.

    Args:
        restored: every parameter, flat, as it was loaded.
        state: its starting point is changed.
        parameters: all of them, flattened.
        layout: blocks and shards.
        ranks: as in :func:`changed_since`, as the next.
        shards: the ranks of a node.

    Raises:
        RuntimeError: on every rank, if ranks have changed them differently.
    """
    flats, names = parameters.flat, parameters.names
    if not (changed := changed_since(flats, restored, ranks, shards)):
        return
    theirs = [flats[place] for place in changed], [names[place] for place in changed]
    shards.raise_on_all_ranks(lambda: check_replicas(ranks, *theirs, ops.checksum))
    pieces = [piece for piece in layout.everything().pieces if piece.segment.index in set(changed)]
    for piece, start in zip(pieces, piece_views(state.start, pieces), strict=True):
        start.copy_(flats[piece.segment.index])
    if state.launched is not None:
        for place in changed:
            state.launched[place].copy_(flats[place])
    told = [names[place] for place in changed if restored[place] is not None]
    if told and ranks.rank == shards.rank == 0:
        warnings.warn(
            f"{len(told)} of {len(flats)} parameters, the first {told[0]!r}, were changed after"
            " SparseLoCo's state was loaded: all ranks go on from the new values, and what is not yet sent stays. If"
            " they are of the same checkpoint, load the model before the optimizer, or both at once.",
            stacklevel=4,
        )
