"""An optimizer's state as facts and chunks: what a rank holds of it, how it becomes a file or a directory, and back.

Facts are plain, and the same on all ranks. A chunk is some rows of a tensor, by the tensor's key, such as
``exp_avg.3``, of which each rank has a part, or ``residual.1.3``, which is rank 1's alone. What ranks have alike, rank
0 saves. A dict may stand in the place of a chunk: facts of one rank. What a host and its hooks see of a state is a dict
with its ``param_groups``; what they change there holds.

In a file a state is whole: ``{"state": ..., "param_groups": ..., METHOD: {"facts": ..., "tensors": {key: tensor}}}``,
and torch's optimizers take the first two. In a directory the tensors are beside it::

    DIR/rank-0.pt ... rank-{N-1}.pt   each rank's chunks, {key: (tensor, offset, length)}
    DIR/meta.pt                       rank 0's: what a file would hold but for them, and the number of ranks

All are plain files of torch.save.
"""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.checkpoint import files
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout, Piece
from lightning_scape.core.method import METHODS, named
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.words import with_plain_numbers

Where = tuple[Any, ...]
"""A state's place in a host's checkpoint: names, and numbers in lists."""


class Chunk(NamedTuple):
    """Rows ``[offset, offset + len(tensor))`` of a tensor of ``length`` rows."""

    tensor: Tensor
    offset: int
    length: int

    @property
    def end(self) -> int:
        """One past its last row."""
        return self.offset + len(self.tensor)


def of_blocks(
    name: str, parameters: Parameters, layout: Layout, blocks: Tensor, pieces: Iterable[Piece]
) -> dict[str, Chunk]:
    """Each piece's entries in a tensor of blocks, as a chunk of its flat parameter; keys are ``NAME.{index}``.

    Args:
        name: of the tensor.
        parameters: those of the layout. Empty ones have no chunk.
        layout: it gives the block length.
        blocks: ``[rows, B]``: all blocks, or the shard's.
        pieces: they count the same rows.
    """
    flat, found = blocks.view(-1), {}
    for piece in pieces:
        place = piece.index
        first, whole = parameters.first_entry(place) + piece.start, parameters.tensors[place].numel()
        found[f"{name}.{parameters.indices[place]}"] = Chunk(flat[piece.of_blocks(layout.block_size)], first, whole)
    return found


def of_flats(name: str, parameters: Parameters, flats: Sequence[Tensor]) -> dict[str, Chunk]:
    """A flat tensor for every parameter, likewise: of sharded parameters a rank holds some entries."""
    return {
        f"{name}.{index}": Chunk(flat, parameters.first_entry(place), whole.numel())
        for place, (index, flat, whole) in enumerate(zip(parameters.indices, flats, parameters.tensors, strict=True))
    }


# ------------------------------------------------------------------------------------------------ of which model


def facts_of(parameters: Parameters) -> dict[str, Any]:
    """What a state says of its parameters, by number."""
    known = list(zip(parameters.indices, parameters.tensors, strict=True))
    return {
        "names": dict(zip(parameters.indices, parameters.names, strict=True)),
        "shapes": {index: list(parameter.shape) for index, parameter in known},
        "strides": {index: list(parameter.stride()) for index, parameter in known},
    }


def check_model(facts: Mapping[str, Any], parameters: Parameters) -> None:
    """Whether a state is of these parameters, some of which may have been frozen then. Torch compares groups.

    Args:
        facts: of the state.
        parameters: that are trained now.

    Raises:
        ValueError: it is not; names the first difference.
    """
    places = dict(zip(map(_plain, parameters.names), parameters.indices, strict=True))
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        if index not in facts["shapes"]:
            continue
        for what, now in (("shapes", tuple(parameter.shape)), ("strides", parameter.stride())):
            if (then := tuple(facts[what][index])) != now and parameter.numel():
                raise ValueError(
                    f"The state's {what} must be {now} for {name!r}, got {then}. Load it into the same model."
                )
        theirs = _plain(facts["names"][index])
        if places.get(theirs, index) != index:
            raise ValueError(
                f"Parameters must come in the checkpoint's order, got {name!r} as number {index}, which was {theirs!r}"
                " there. Build the optimizer over the parameters in the same order."
            )


def _plain(name: str) -> str:
    """A parameter's name, whatever has wrapped the module."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def changed_options(mine: Mapping[str, Any], saved: Mapping[str, Any], silent: Collection[str]) -> list[str]:
    """A warning that names those that are no longer what they were, but for ``silent`` ones."""
    differ = ", ".join(
        f"{name}={saved.get(name)!r} (now {value!r})"
        for name, value in mine.items()
        if name not in silent and saved.get(name) != value
    )
    said = f"The checkpoint was written with other options: {differ}. Training goes on with those of now."
    return [said] if differ else []


# ------------------------------------------------------------------------------------------------ states


class State(dict[str, Any]):
    """One optimizer's state, as a rank holds it (views of the live one) or as it was saved. As a dict, what hosts see.

    Args:
        shown: ``param_groups``, what the user's hooks add to a state dict, and by the method's name a dict with
            ``facts``: the same on all ranks; ``method``, ``ranks`` and ``shards`` are among them.
        parts: of the ranks, this one's first, or functions that give them. They are asked one after the other, and only
            for what those before lack.
    """

    def __init__(self, shown: Mapping[str, Any], *parts: Mapping[str, Any] | Callable[[], Mapping[str, Any]]) -> None:
        self.facts, self._parts = saved_in(shown)["facts"], parts
        super().__init__({**shown, self.facts["method"]: {"facts": self.facts}})
        self.pop("state", None)

    @property
    def parts(self) -> Iterator[Mapping[str, Any]]:
        """One rank's after the other's: chunks, and facts of its own, by key."""
        return (part() if callable(part) else part for part in self._parts)

    def pieces(self, key: str) -> Iterator[Any]:
        """The chunks that hold a tensor, or a rank's facts."""
        for each in (part[key] for part in self.parts if key in part):
            place = (each, 0, len(each)) if isinstance(each, Tensor) else each  # a file has it whole
            yield Chunk(*place) if isinstance(place, tuple) else place

    def read(self, key: str, into: Chunk) -> None:
        """Fills a chunk's tensor, in place; converts dtypes.

        Raises:
            CheckpointError: some of its rows are nowhere.
        """
        missing, pieces = len(into.tensor), self.pieces(key)
        while missing > 0:
            if (piece := next(pieces, None)) is None:
                raise files.CheckpointError(
                    f"A state must hold all {into.length} entries of {key!r}, got {len(into.tensor) - missing} of the"
                    f" {len(into.tensor)} that this rank needs. Load it into the model that it was saved from."
                )
            first, end = max(piece.offset, into.offset), min(piece.end, into.end)
            if first < end and piece.length == into.length:
                rows = piece.tensor[first - piece.offset : end - piece.offset]
                into.tensor[first - into.offset : end - into.offset].copy_(rows)
                missing -= end - first

    def whole(self, key: str) -> Any:
        """A whole tensor, in host memory: the saved one, if it is in one piece; or a rank's facts.

        Raises:
            CheckpointError: it is not there.
        """
        first = next(self.pieces(key), None)
        if first is None:
            raise files.CheckpointError(f"A state must hold {key!r}, got none. Load another checkpoint.")
        if not isinstance(first, Chunk):
            return deepcopy(first)
        if len(first.tensor) == first.length:
            return first.tensor
        into = Chunk(first.tensor.new_empty(first.length, *first.tensor.shape[1:], device="cpu"), 0, first.length)
        self.read(key, into)
        return into.tensor

    def wholes(self) -> dict[str, Any]:
        """All of them."""
        return {key: self.whole(key) for key in dict.fromkeys(itertools.chain.from_iterable(self.parts))}

    def as_file(self) -> dict[str, Any]:
        """As a file has it: whole, as its method writes it."""
        return named(self.facts["method"]).whole_state(self)

    def read_of_ranks(self, name: str, chunks: Mapping[str, Chunk], rank: int, ranks: int) -> None:
        """Fills this rank's chunks of what each has of its own: on another number of ranks, with the mean of all.

        Args:
            name: keys are ``NAME.{rank}.{index}``.
            chunks: by ``NAME.{index}``.
            rank: this one.
            ranks: of the run that goes on.
        """
        before: int = self.facts["ranks"]
        first, *others = [rank] if before == ranks else range(before)
        for key, chunk in chunks.items():
            index = key.rpartition(".")[2]
            self.read(f"{name}.{first}.{index}", chunk)
            for other in others:
                one = chunk._replace(tensor=torch.empty_like(chunk.tensor))
                self.read(f"{name}.{other}.{index}", one)
                chunk.tensor.add_(one.tensor)
            if others:
                chunk.tensor.div_(before)


def saved_in(state: Any) -> Mapping[str, Any]:
    """The facts of a saved state, and in a file its tensors; nothing, if it is none of ours."""
    for method in METHODS if isinstance(state, Mapping) else ():
        if isinstance(held := state.get(method), Mapping) and "facts" in held:
            return held
    return {}


def with_states(content: Any, act: Callable[[Where, Any], Any], where: Where = ()) -> Any:
    """A host's checkpoint with what ``act`` gives for each state, also in a list or dict, that is not whole."""
    if held := saved_in(content):
        return content if "tensors" in held else act(where, content)
    if len(where) > 1:
        return content
    if type(content) is dict:
        return {name: with_states(each, act, (*where, name)) for name, each in content.items()}
    if type(content) is list:
        return [with_states(each, act, (*where, place)) for place, each in enumerate(content)]
    return content


def taken(given: Any, method: str) -> Any:
    """What a load was given: a :class:`State` if it is of the method, else a dict such as torch's optimizers have.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(given, State):
        return given if given.facts["method"] == method else given.as_file()
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= given.keys():
        raise ValueError(
            "An optimizer state must have `state` and `param_groups`, got"
            f" {sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__}. Load another state."
        )
    saved = given.get(method)
    return given if saved is None else State(given, saved.get("tensors", {}))


# ------------------------------------------------------------------------------------------------ one file


def not_collected(rank: int, call: str) -> RuntimeError:
    """The error of a rank that is asked for the whole state and has a part; ``call`` collects it."""
    return RuntimeError(
        f"The state must be collected from all ranks before it is read, got a call of state_dict() on rank {rank}"
        f" without it. Call {call} on every rank, then state_dict() on rank 0."
    )


def collect(state: State, ranks: Communicator, device: torch.device, to: int = 0) -> dict[str, Any] | None:
    """The state of all ranks on rank ``to``, whole, as a file has it, in host memory; None elsewhere. Collective.

    Args:
        state: this rank's.
        ranks: all that hold a part of it.
        device: by way of which tensors travel.
        to: among the ranks.
    """
    own = next(state.parts)
    mine = {key: each for key, each in own.items() if isinstance(each, Chunk)}
    plan = {key: each._replace(tensor=each.tensor.detach().to("meta")) for key, each in mine.items()}
    facts = {key: each for key, each in own.items() if key not in mine}
    ranks.raise_on_all_ranks(lambda: pickle.dumps(facts))  # an optimizer of the user's may hold what cannot be sent
    told = ranks.all_gather_object({**facts, **plan})
    wholes: dict[str, Any] = {}
    into: list[list[Tensor]] = [[] for _ in told]
    for rows, part in zip(into, told, strict=True) if ranks.rank == to else ():
        for key, each in part.items():
            if not isinstance(each, Chunk):
                wholes[key] = each
                continue
            if key not in wholes:
                wholes[key] = each.tensor.new_empty(each.length, *each.tensor.shape[1:], device="cpu")
            rows.append(wholes[key][each.offset : each.end])
    ranks.carry([chunk.tensor for chunk in mine.values()], into, to, device)
    return State(state, wholes).as_file() if ranks.rank == to else None


# ------------------------------------------------------------------------------------------------ a directory


def write_directory(path: Path, rest: Any, states: Mapping[Where, State], ranks: Communicator) -> None:
    """Writes a checkpoint that is a directory. Collective; all ranks must see the same folder.

    Args:
        path: the same on all ranks.
        rest: the host's checkpoint, with states without tensors; rank 0's is written.
        states: of this rank.
        ranks: those that write.

    Raises:
        OSError: it could not be written; on every rank.
    """
    lead = ranks.rank == 0
    parts = {
        where: {key: tuple(each) if isinstance(each, Chunk) else each for key, each in next(state.parts).items()}
        for where, state in states.items()
    }
    with files.explained(path), ExitStack() as stack:
        name = ranks.raise_on_all_ranks(lambda: str(stack.enter_context(files.replacing(path, True))) if lead else "")
        folder = Path(ranks.all_gather_object(name)[0])
        own = {"token": folder.name, "states": parts}
        ranks.raise_on_all_ranks(lambda: files.write(own, folder / f"rank-{ranks.rank}.pt"))

        def complete() -> None:
            if lead:
                meta = {"token": folder.name, "ranks": ranks.world_size, "rest": with_plain_numbers(rest)}
                files.write(meta, folder / files.META)
                stack.close()

        ranks.raise_on_all_ranks(complete)


def read_directory(path: Path, ranks: Communicator, weights_only: bool | None = None, parts: bool = True) -> Any:
    """The host's checkpoint in a directory, with its optimizers' :class:`State`: tensors are read when they are needed.

    Args:
        path: of the directory.
        ranks: each checks its share of the parts.
        weights_only: as in ``torch.load``.
        parts: whether optimizers' states are needed. Else no part is looked at.

    Raises:
        CheckpointError: it is torn or damaged; on every rank.
    """

    def read(name: str, check: bool, **options: Any) -> dict[str, Any]:
        with suppress(FileNotFoundError, NotADirectoryError):
            content = files.load_file(path / name, weights_only, check, **options)
            if isinstance(content, dict) and "token" in content and token in (None, content["token"]):
                return content
        raise files.CheckpointError(
            f"The checkpoint {str(path)!r} is torn, or no directory of ours: {name} is missing, or is not of one save"
            " with the others. Load another one."
        )

    @functools.cache
    def part(number: int) -> dict[Where, dict[str, Any]]:
        """A rank's, its tensors mapped: memory is used where they are read."""
        states: dict[Where, dict[str, Any]] = read(f"rank-{number}.pt", number in mine, mmap=True)["states"]
        return states

    def state(where: Where, value: Any) -> State:
        gives = (functools.partial(lambda number: part(number)[where], number) for number in order)
        return State(value, *gives)

    token = None
    meta = ranks.raise_on_all_ranks(lambda: read(files.META, True))
    token, before = meta["token"], meta["ranks"]
    mine = range(before)[ranks.rank :: ranks.world_size]
    if parts:
        ranks.raise_on_all_ranks(lambda: [*map(part, mine)])
    own = ranks.rank * before // ranks.world_size  # a rank's own first, where as many have saved
    order = sorted(range(before), key=lambda number: number != own)
    return with_states(meta["rest"], state)
