"""Are the ranks still alike? Compares set-ups when the optimizer is built, parameters bit for bit when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_scape.comm.collectives import Communicator


def check_same_setup(ranks: Communicator, setup: Mapping[str, Any], problem: str | None = None, place: int = 0) -> None:
    """Raises the same error on every rank if any rank has a problem, or if set-ups differ. Collective.

    Args:
        ranks: all that begin together.
        setup: what must agree, by name; values with a plain ``repr``. A list is compared item by item.
        problem: what this rank found wrong with its own parameters or options, or None.
        place: of this rank in its node: only ranks at the same place must agree, for they hold the same rows.

    Raises:
        ValueError: naming the rank, what differs first, and both values.
    """
    told = ranks.all_gather_object((place, problem, dict(setup)))
    for rank, (_, other_problem, _) in enumerate(told):
        if other_problem is not None:
            raise ValueError(problem if len({each[1] for each in told}) == 1 else f"On rank {rank}: {other_problem}")
    for here in {each[0] for each in told}:
        alike = {rank: facts for rank, (there, _, facts) in enumerate(told) if there == here}
        if (found := difference(alike)) is not None:
            raise ValueError(
                f"All ranks must be set up alike, got a difference: {found}. Build the same model, in the same order,"
                " with the same options on every rank."
            )


def difference(everyone: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Which fact differs first, and which ranks say what; None: none does. A list is compared item by item.

    >>> difference({0: {"step": 3, "lr": 0.1}, 1: {"step": 3, "lr": 0.2}, 2: {"step": 3, "lr": 0.1}})
    'lr is 0.1 on ranks 0, 2 and 0.2 on rank 1'
    """
    facts = {rank: dict(_items(own)) for rank, own in everyone.items()}
    for name in dict.fromkeys(chain(*facts.values())):
        said = {rank: repr(own.get(name)) for rank, own in facts.items()}
        if len({*said.values()}) > 1:
            return f"{name} is {by_rank(said)}"
    return None


def _items(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, list):
            yield f"the number of {name}", len(value)
            yield from ((f"{name}[{place}]", item) for place, item in enumerate(value))
        else:
            yield name, value


def by_rank(said: Mapping[int, str]) -> str:
    """What ranks say, each once, with the ranks that say it."""
    found = []
    for kind in dict.fromkeys(said.values()):
        ranks = [str(rank) for rank, own in said.items() if own == kind]
        found.append(f"{kind} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}")
    return " and ".join(found)


def check_replicas(
    communicator: Communicator, flats: Sequence[Tensor], names: Sequence[str], checksum: Callable[[Tensor], Tensor]
) -> None:
    """Compares all ranks' parameters bit for bit, through two 64-bit checksums of each. Collective; one message.

    Args:
        communicator: the ranks.
        flats: every parameter, flat.
        names: their names, for the error.
        checksum: of a flat parameter, int64 ``[2]``: :func:`ops.checksum`.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs and the ranks on which it does.
    """
    if communicator.world_size == 1 or not flats:
        return
    sums = communicator.all_gather_stacked(torch.stack([checksum(flat) for flat in flats]))
    differs = (sums != sums[0]).any(dim=2).cpu()  # waits for the device: meant, this check is rare
    if not differs.any():
        return
    first = int(differs.any(dim=0).int().argmax())
    ranks = [rank for rank in range(communicator.world_size) if differs[rank, first]]
    raise RuntimeError(
        f"All ranks must hold bitwise equal parameters, got {names[first]!r} of {flats[first].numel()} entries"
        f" different from rank 0's on rank {', '.join(map(str, ranks))} ({int(differs.any(dim=0).sum())} parameters of"
        f" {len(names)} differ). Before the first step: seed all ranks alike or broadcast the parameters. Later:"
        " something other than the optimizer changes parameters on single ranks."
    )
