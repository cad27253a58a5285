"""Are the ranks still alike? Compares set-ups when the optimizer is built, parameters bit for bit when asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_scape.comm.collectives import Communicator


def check_same_setup(
    communicator: Communicator, setup: Mapping[str, Any], problem: str | None, device: torch.device
) -> None:
    """Raises the same error on every rank if any rank has a problem, or if set-ups differ.

    One message of 8 bytes when all is well.

    Args:
        communicator: the ranks.
        setup: what must agree, by name; values with a plain ``repr``. A list is compared item by item.
        problem: what this rank found wrong with its own parameters or options, or None.
        device: where the message is made.

    Raises:
        ValueError: naming the rank, what differs first, and both values.
    """
    digest = blake2b(repr((dict(setup), problem)).encode(), digest_size=8).digest()
    digests = communicator.all_gather_stacked(torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device))
    if bool((digests == digests[0]).all()):  # set-up: waiting for the device is fine
        if problem is not None:
            raise ValueError(problem)
        return
    everyone = communicator.all_gather_object((dict(setup), problem))
    for rank, (_, other_problem) in enumerate(everyone):
        if other_problem is not None:
            raise ValueError(f"On rank {rank}: {other_problem}")
    reference = everyone[0][0]
    for rank, (other, _) in enumerate(everyone):
        difference = _first_difference(reference, other)
        if difference is not None:
            raise ValueError(
                f"All ranks must be set up alike, got a difference: {difference[0]} is {difference[2]} on rank {rank}"
                f" and {difference[1]} on rank 0. Build the same model, in the same order, with the same options on"
                " every rank."
            )


def check_same_setup_everywhere(
    communicator: Communicator,
    node: Communicator,
    setup: Mapping[str, Any],
    problem: str | None,
    device: torch.device,
) -> None:
    """:func:`check_same_setup` where several ranks hold a replica: an error on one rank is raised on all.

    Args:
        communicator: the ranks with the same rows, one of each replica.
        node: the ranks of one replica.
        setup: as there; it may differ between the ranks of a replica in what their rows make different.
        problem: as there.
        device: where the message is made.
    """
    found = [each for each in node.all_gather_object(problem) if each is not None]
    problem = found[0] if found else None
    node.raise_on_all_ranks(lambda: check_same_setup(communicator, setup, problem, device))


def _first_difference(reference: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str, str] | None:
    for name in reference:
        mine, theirs = reference[name], other.get(name)
        if mine == theirs:
            continue
        if not isinstance(mine, list) or not isinstance(theirs, list):
            return name, repr(mine), repr(theirs)
        if len(mine) != len(theirs):
            return f"the number of {name}", str(len(mine)), str(len(theirs))
        place = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        return f"{name}[{place}]", repr(mine[place]), repr(theirs[place])
    return None


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
