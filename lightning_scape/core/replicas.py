"""Are the ranks still alike? Compares set-ups when the optimizer is built, parameters bit for bit when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.parameters import Parameters

Facts = Mapping[str, Any]
"""What must be the same on all ranks, by its name; values with a plain ``repr``."""


def check_same_setup(ranks: Communicator, setup: Facts, problem: str | None = None, place: int = 0) -> None:
    """Raises the same error on every rank if any rank has a problem, or if set-ups differ. Collective.

    Args:
        ranks: all that begin together.
        setup: what must agree. A list is compared item by item.
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
                " with the same options, and load the same checkpoint, on every rank."
            )


def digest(facts: Facts, size: int) -> int:
    """A number of so many bytes."""
    return int.from_bytes(blake2b(repr(dict(facts)).encode(), digest_size=size).digest(), "little")


def settings(param_groups: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """The numbers of every group. A tensor on CUDA makes the CPU wait for it, a float does not."""
    numbers = {
        f"{name} of group {place}": _number(group[name])
        for place, group in enumerate(param_groups)
        for name in names
        if name in group
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _number(value: Any) -> Any:
    """A number, or several; None for what is none."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_number, value))
    return float(value) if isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1) else None


def apart(communicator: Communicator, node: Communicator, facts: Facts) -> RuntimeError:
    """What is wrong where ranks differ in the facts of a step, or of an exchange; each gives its own. Collective."""
    by_place = node.all_gather_object(communicator.all_gather_object(facts))
    everyone = [said for ranks in zip(*by_place, strict=True) for said in ranks]  # in the order of the ranks
    return RuntimeError(
        "All ranks must take the same steps, with the same settings, got a difference:"
        f" {difference(dict(enumerate(everyone)))}. Nothing of this step was applied. A rank has left out a step that"
        " others take (a plain GradScaler, a look at its own gradients, fewer batches, an error that was caught), or"
        " steps its optimizers in another order: take a step on all ranks or on none, with"
        " torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler, or by what `clip_grad_norm` returns, the norm"
        " over all ranks (SCAPE skips a step by itself where that is not finite)."
        " Or it clips or has settings as others have not: a scheduler that goes by a loss must get the mean over all"
        " ranks (`self.log(..., sync_dist=True)`), a callback must not run on one rank alone. Restart all ranks from"
        " the newest checkpoint."
    )


def difference(everyone: Mapping[int, Facts]) -> str | None:
    """Which fact differs first, and which ranks say what; None: none does. A list is compared item by item.

    >>> difference({0: {"step": 3, "lr": 0.1}, 1: {"step": 3, "lr": 0.2}, 2: {"step": 3, "lr": 0.1}})
    'lr is 0.1 on ranks 0, 2 and 0.2 on rank 1'
    """
    facts = {rank: dict(_items(own)) for rank, own in everyone.items()}
    for name in dict.fromkeys(chain(*facts.values())):
        said: dict[str, list[str]] = {}
        for rank, own in facts.items():
            said.setdefault(repr(own.get(name)), []).append(str(rank))
        if len(said) > 1:
            texts = (f"{kind} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" for kind, ranks in said.items())
            return f"{name} is {' and '.join(texts)}"
    return None


def _items(facts: Facts) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, list):
            yield f"the number of {name}", len(value)
            yield from ((f"{name}[{place}]", item) for place, item in enumerate(value))
        else:
            yield name, value


def check_replicas(communicator: Communicator, parameters: Parameters, checksum: Callable[[Tensor], Tensor]) -> None:
    """Compares all ranks' parameters bit for bit, through two 64-bit checksums of each. Collective; one message.

    Args:
        communicator: the ranks.
        parameters: those compared, flattened.
        checksum: of a flat parameter, int64 ``[2]``: :func:`ops.checksum`.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs and the ranks on which it does.
    """
    flats, names = parameters.flat, parameters.names
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
