"""The state of SparseLoCo: N ranks save it, any number of ranks loads it. Inside a window ranks differ.

======================= =============== ================================================================================
key                     on other ranks  what it is
======================= =============== ================================================================================
``start.i``             the same        where all ranks set out from
``error.r.i``           the mean        error feedback
``parameters.r.i``      the mean        where the rank's inner steps have led
``inner.r.i.name``      rank r mod N    tensors of the inner optimizer's state
``own.r``               likewise        a dict: all else of the inner optimizer's state
======================= =============== ================================================================================

Tensors of a parameter are flat, in its memory order, but for the inner optimizer's. Where several ranks hold a replica
together (``fully_shard``), ``r`` counts replicas, and each rank has rows. In a file ``state`` and ``param_groups`` are
the inner optimizer's of rank 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_scape.checkpoint.shards import (
    Chunk,
    OwnState,
    SavedState,
    changed_options,
    check_groups,
    check_model,
    facts_of,
    of_blocks,
    of_flats,
    taken,
)
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core import local_shards
from lightning_scape.core.layout import Layout
from lightning_scape.core.numbers import with_plain_numbers
from lightning_scape.core.parameters import Parameters
from lightning_scape.sparseloco.algorithm import LocoState
from lightning_scape.sparseloco.config import OF_THE_MESH, SparseLoCoConfig

METHOD = "sparseloco"


@dataclass(frozen=True)
class Live:
    """The objects that make up the state."""

    config: SparseLoCoConfig
    layout: Layout
    parameters: Parameters
    communicator: Communicator
    node: Communicator
    """The ranks of a node that hold a replica together."""
    optimizer: torch.optim.Optimizer
    state: LocoState
    progress: Mapping[str, Any]

    @property
    def ranks(self) -> int:
        """Replicas."""
        return self.communicator.world_size

    @property
    def by_number(self) -> dict[int, Tensor]:
        """The inner optimizer's parameters, by the numbers of its state dict."""
        return dict(enumerate(p for group in self.optimizer.param_groups for p in group["params"]))

    def blocks(self, name: str, blocks: Tensor) -> dict[str, Chunk]:
        """All entries of a tensor of blocks, by parameter."""
        return of_blocks(name, self.parameters, self.layout, blocks, self.layout.everything().pieces)


class InnerLoads:
    """Loads of the inner optimizer: a state that was collected from all ranks goes back to all of them.

    Fabric's ``optimizer.state_dict()`` gives such a state on rank 0, and an empty one on the others.

    Args:
        optimizer: the inner optimizer.
        load: takes up a whole state, on every rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, load: Callable[[Mapping[str, Any]], None]) -> None:
        self._optimizer, self._load, self._own = optimizer, load, False
        self._taken: dict[str, Any] | None = None
        # Before the user's hooks, which see an inner state, once.
        self.handle = optimizer.register_load_state_dict_pre_hook(self._before, prepend=True)

    def load(self, inner: dict[str, Any]) -> None:
        """Loads an inner state, or leaves that to the load of the optimizer that this one is part of."""
        if self._own:
            self._taken = inner
            return
        self._own = True
        try:
            self._optimizer.load_state_dict(inner)
        finally:
            self._own = False

    def _before(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._own or (state_dict and METHOD not in state_dict):
            return None
        self._own = True
        try:
            self._load(state_dict)
        finally:
            self._own = False
        taken, self._taken = self._taken, None
        return taken


# ------------------------------------------------------------------------------------------------ saving


def own_state(live: Live) -> OwnState:
    """This rank's part of the state: views."""
    state, parameters, rank = live.state, live.parameters, live.communicator.rank
    inner, chunks = _taken_apart(live.optimizer, f"inner.{rank}")
    chunks[f"own.{rank * live.node.world_size + live.node.rank}"] = inner
    if rank == 0:  # all have the same
        chunks |= live.blocks("start", state.start)
    chunks |= live.blocks(f"error.{rank}", state.error)
    chunks |= of_flats(f"parameters.{rank}", parameters, parameters.flat)
    facts = {
        "method": METHOD,
        "config": live.config.as_dict(),
        "ranks": live.ranks,
        "shards": live.node.world_size,
        **facts_of(parameters),
        "optimizer": type(live.optimizer).__name__,
        "step": live.progress["steps"],
        "progress": dict(live.progress),
    }
    return OwnState({"param_groups": inner["param_groups"]}, facts, chunks)


def _taken_apart(optimizer: torch.optim.Optimizer, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's state dict with its tensors apart: ``tensors`` names them, by parameter. Small ones stay."""
    saved = optimizer.state_dict()
    state: dict[Any, Any] = {}
    tensors: dict[Any, list[str]] = {}
    chunks: dict[str, Any] = {}
    for index, entry in saved.pop("state").items():
        if not isinstance(entry, Mapping):  # what an optimizer keeps beside the parameters' states, such as a count
            state[index] = entry
            continue
        apart = [key for key, value in entry.items() if isinstance(value, Tensor) and value.dim()]
        state[index], tensors[index] = {key: value for key, value in entry.items() if key not in apart}, apart
        for key in apart:
            value = entry[key]
            chunks[f"{name}.{index}.{key}"] = Chunk(
                local_shards.local(value), local_shards.first_row(value), len(value)
            )
    return {**with_plain_numbers(saved), "state": state, "tensors": tensors}, chunks


def whole_state(saved: SavedState) -> dict[str, Any]:
    """A whole state, in host memory, as a file has it."""
    tensors = saved.wholes()
    inner = _put_together(tensors["own.0"], lambda index, name: tensors[f"inner.0.{index}.{name}"])
    return {**inner, **saved, METHOD: {"facts": saved.facts, "tensors": tensors}}


def _put_together(own: Mapping[str, Any], tensor: Callable[[Any, str], Any]) -> dict[str, Any]:
    """The reverse of :func:`_taken_apart`."""
    state = {
        index: {**entry, **{name: tensor(index, name) for name in own["tensors"].get(index, ())}}
        if isinstance(entry, Mapping)
        else entry
        for index, entry in own["state"].items()
    }
    return {**{name: value for name, value in own.items() if name != "tensors"}, "state": state}


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Loaded:
    """A saved state that has been read. Nothing has been changed yet."""

    inner: dict[str, Any]
    """State dict of the inner optimizer."""
    state: LocoState | None = None
    """None: a window begins at the next step."""
    parameters: Sequence[Tensor] | None = None
    """This rank's, flat. None: they stay."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    """Warnings for the user."""

    def warn(self) -> None:
        """Gives the warnings."""
        for note in self.notes:
            warnings.warn(note, stacklevel=4)  # whoever calls load_state_dict


def load(live: Live, given: Any) -> Loaded:
    """Fills the buffers of ``live`` with this rank's part of a saved state.

    Args:
        live: its buffers are freshly allocated; only they are changed.
        given: a whole state of SparseLoCo, of another method, or of the inner optimizer; or a :class:`SavedState`.

    Raises:
        ValueError: the state is not of this model, is damaged, or does not fit the inner optimizer.
        OSError: a file cannot be read.
    """
    given = taken(given, METHOD)
    if not isinstance(given, SavedState):
        return _load_inner(live, given)
    saved, facts, state, ranks = given, given.facts, live.state, live.ranks
    _check(live, saved)
    notes = []
    rank, before = live.communicator.rank, facts["ranks"]
    saved.read_all(live.blocks("start", state.start))
    saved.read_of_ranks("error", live.blocks("error", state.error), rank, ranks)

    def flats(name: str) -> list[Tensor]:
        each = [torch.zeros(p.numel(), dtype=torch.float32, device=p.device) for p in live.parameters.local]
        saved.read_of_ranks(name, of_flats(name, live.parameters, each), rank, ranks)
        return [flat.to(parameter.dtype) for flat, parameter in zip(each, live.parameters.local, strict=True)]

    if before != ranks:
        notes.append(
            f"The checkpoint was written by {before} ranks, this run has {ranks}: the starting point carries"
            " over exactly; each rank takes the mean of the saved error feedbacks and parameters, and the inner"
            f" optimizer's state of rank {rank % before}."
        )
    notes += changed_options(live.config.as_dict(), facts["config"], OF_THE_MESH)
    return Loaded(_inner(live, saved), state, flats("parameters"), facts["progress"], notes)


def _check(live: Live, saved: SavedState) -> None:
    """Raises ValueError unless the state is of this model and this kind of optimizer."""
    facts, trained, kind = saved.facts, live.parameters.indices, type(live.optimizer).__name__
    if facts["optimizer"] != kind:
        raise ValueError(
            f"The state must be of the inner optimizer, got one of {facts['optimizer']}, and SparseLoCo wraps {kind}."
            " Wrap the optimizer that it was saved with, or load the model alone."
        )
    if [*facts["shapes"]] != trained:
        raise ValueError(
            f"The state must be of the {len(trained)} parameters that are trained now, got one of"
            f" {len(facts['shapes'])}: others were frozen. Freeze the same, or load the model alone."
        )
    check_model(facts, saved["param_groups"], live.parameters, live.optimizer.param_groups)


def _inner(live: Live, saved: SavedState) -> dict[str, Any]:
    """The inner optimizer's state, as it takes it: tensors of a sharded parameter become DTensors like it."""
    facts = saved.facts
    replica = live.communicator.rank % facts["ranks"]
    same_node = facts["shards"] == live.node.world_size
    own = saved.whole(f"own.{replica * facts['shards'] + (live.node.rank if same_node else 0)}")
    given = live.by_number

    def tensor(index: Any, name: str) -> Any:
        key, parameter = f"inner.{replica}.{index}.{name}", given.get(index)
        first = next(saved.pieces(key), None)
        if first is None or not isinstance(parameter, DTensor) or first.length != len(parameter):
            return saved.whole(key)
        here, rest = local_shards.local(parameter), first.tensor.shape[1:]
        rows = torch.empty(len(here), *rest, dtype=first.tensor.dtype, device=here.device)
        saved.read(key, Chunk(rows, local_shards.first_row(parameter), first.length))
        return _like(parameter, rows) if rest == parameter.shape[1:] else rows

    inner = _put_together(own, tensor)
    groups = _edited(own["param_groups"], saved.whole("own.0")["param_groups"], saved["param_groups"])
    return {**inner, "param_groups": groups}


def _like(parameter: DTensor, rows: Tensor) -> Tensor:
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape
    found: Tensor = DTensor.from_local(rows, mesh, placements, run_check=False, shape=shape, stride=parameter.stride())
    return found


def _cut(parameter: Any, value: Any) -> Any:
    """A whole tensor of a sharded parameter as a DTensor like it; anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    here, first = local_shards.local(parameter), local_shards.first_row(parameter)
    return _like(parameter, value[first : first + len(here)].to(here.device, copy=True))


def _edited(
    mine: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """This rank's parameter groups with what a hook has changed in rank 0's: a group may hold numbers of the rank."""
    return [
        {**own, **{name: value for name, value in after.items() if name not in first or first[name] != value}}
        for own, first, after in zip(mine, before, now, strict=True)
    ]


def _load_inner(live: Live, given: Mapping[str, Any]) -> Loaded:
    """A state without SparseLoCo's part: of the inner optimizer, or of another method, whose AdamW is taken."""
    check_groups(given["param_groups"], live.optimizer.param_groups)
    counts = [entry["step"] for entry in given["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    steps = max((int(count) for count in counts), default=0)
    if "scape" in given and not isinstance(live.optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        raise ValueError(
            "SparseLoCo must wrap AdamW or Adam to go on from a state of SCAPE, got"
            f" {type(live.optimizer).__name__}. Wrap AdamW, or load the model alone."
        )
    parameters = live.by_number
    state = {
        index: {name: _cut(parameters.get(index), value) for name, value in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for index, entry in given["state"].items()
    }
    inner = {**{name: value for name, value in given.items() if name != "scape"}, "state": state}
    note = "The checkpoint was trained without SparseLoCo: error feedback begins at zero, and a window begins now."
    return Loaded(inner, progress={"steps": steps}, notes=[note])
