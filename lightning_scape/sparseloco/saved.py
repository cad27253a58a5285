"""The state of SparseLoCo: N ranks save it, any number of ranks loads it. Inside a window ranks differ.

======================= =============== ================================================================================
key                     on other ranks  what it is
======================= =============== ================================================================================
``start.i``             the same        where all ranks set out from
``error.r.i``           the mean        error feedback
``parameters.r.i``      the mean        where the rank's inner steps have led
``inner.r.i.name``      rank r mod N    tensors of the inner optimizer's state
``own.r``               likewise        a dict: all else of the inner optimizer's state
``written.r``           by all of them  a list: parameters that others than the optimizer have written in the window
======================= =============== ================================================================================

Tensors of a parameter are flat, in its memory order, but for the inner optimizer's. Where several ranks hold a replica
together (``fully_shard``), ``r`` counts replicas, and each rank has rows. In a file ``state`` and ``param_groups`` are
the inner optimizer's of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_scape.checkpoint.shards import (
    Chunk,
    State,
    changed_options,
    check_model,
    facts_of,
    of_blocks,
    of_flats,
    taken,
)
from lightning_scape.core import local_shards
from lightning_scape.core.words import with_plain_numbers
from lightning_scape.sparseloco.algorithm import Algorithm, LocoState
from lightning_scape.sparseloco.config import OF_THE_MESH

METHOD = "sparseloco"
_APART = "a tensor, saved by its key"
"""Stands for one in an optimizer's state."""


# ------------------------------------------------------------------------------------------------ saving


def own_state(loco: Algorithm) -> State:
    """This rank's part of the state: views."""
    state, parameters, rank, node = loco.state, loco.parameters, loco.comm.rank, loco.node
    assert state is not None
    inner, chunks = _taken_apart(loco.optimizer, f"inner.{rank}")
    chunks[f"own.{rank * node.world_size + node.rank}"] = inner
    chunks[f"written.{rank}"] = loco.progress.written
    if rank == 0:  # all have the same
        chunks |= _of_blocks("start", loco, state.start)
    chunks |= _of_blocks(f"error.{rank}", loco, state.error)
    chunks |= of_flats(f"parameters.{rank}", parameters, parameters.flat)
    facts = {
        "method": METHOD,
        "config": dict(vars(loco.config)),
        "ranks": loco.comm.world_size,
        "shards": node.world_size,
        **facts_of(parameters),
        "optimizer": type(loco.optimizer).__name__,
        "step": loco.progress.steps,
        "progress": {name: value for name, value in vars(loco.progress).items() if name != "written"},
    }
    return State({"param_groups": inner["param_groups"], METHOD: {"facts": facts}}, chunks)


def _of_blocks(name: str, loco: Algorithm, blocks: Tensor) -> dict[str, Chunk]:
    """All entries of a tensor of blocks, by parameter."""
    return of_blocks(name, loco.parameters, loco.layout, blocks, loco.layout.pieces)


def _taken_apart(optimizer: torch.optim.Optimizer, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """An optimizer's state dict with its tensors apart. Those of one number stay."""
    saved = optimizer.state_dict()
    state, chunks = dict[Any, Any](), dict[str, Any]()
    for index, entry in saved.pop("state").items():
        state[index] = entry  # an optimizer may keep others beside the parameters' own, such as a count
        if isinstance(entry, Mapping):
            apart = {key: value for key, value in entry.items() if isinstance(value, Tensor) and value.dim()}
            state[index] = {**entry, **dict.fromkeys(apart, _APART)}
            for key, value in apart.items():
                rows = local_shards.local(value), local_shards.first_row(value), len(value)
                chunks[f"{name}.{index}.{key}"] = Chunk(*rows)
    return {**with_plain_numbers(saved), "state": state}, chunks


def whole_state(saved: State) -> dict[str, Any]:
    """A whole state, in host memory, as a file has it."""
    tensors = saved.wholes()
    inner = _put_together(tensors["own.0"], lambda index, name: tensors[f"inner.0.{index}.{name}"])
    return {**inner, **saved, METHOD: {"facts": saved.facts, "tensors": tensors}}


def _put_together(own: Mapping[str, Any], tensor: Callable[[Any, str], Any]) -> dict[str, Any]:
    """The reverse of :func:`_taken_apart`."""
    state = {
        index: {name: tensor(index, name) if value == _APART else value for name, value in entry.items()}
        if isinstance(entry, Mapping)
        else entry
        for index, entry in own["state"].items()
    }
    return {**own, "state": state}


# ------------------------------------------------------------------------------------------------ loading


class Loaded(NamedTuple):
    """A saved state that has been read. Nothing has been changed yet."""

    inner: dict[str, Any]
    """State dict of the inner optimizer."""
    progress: Mapping[str, Any]
    notes: list[str]
    """Warnings for the user."""
    state: LocoState | None = None
    """None: a window begins at the next step."""
    parameters: Sequence[Tensor] = ()
    """This rank's, flat, in fp32. Empty: they stay."""


def load(loco: Algorithm, given: Any) -> Loaded:
    """Reads this rank's part of a saved state.

    Args:
        loco: as it is; it is not changed.
        given: a whole state of SparseLoCo, of another method, or of the inner optimizer; or a :class:`State`.

    Raises:
        ValueError: the state is not of this model, is damaged, or does not fit the inner optimizer.
        OSError: a file cannot be read.
    """
    saved = taken(given, METHOD)
    if not isinstance(saved, State):
        return _load_inner(loco, saved)
    kind = type(loco.optimizer).__name__
    if saved.facts["optimizer"] != kind:
        raise ValueError(
            f"The state must be of the inner optimizer, got one of {saved.facts['optimizer']}, and SparseLoCo wraps"
            f" {kind}. Wrap the optimizer that it was saved with, or load the model alone."
        )
    check_model(saved.facts, loco.parameters)
    facts, state, here = saved.facts, loco.allocate(), loco.parameters.local
    rank, ranks, before = loco.comm.rank, loco.comm.world_size, saved.facts["ranks"]
    flats = [torch.zeros(each.numel(), dtype=torch.float32, device=each.device) for each in here]
    for key, chunk in _of_blocks("start", loco, state.start).items():
        saved.read(key, chunk)
    saved.read_of_ranks("error", _of_blocks("error", loco, state.error), rank, ranks)
    saved.read_of_ranks("parameters", of_flats("parameters", loco.parameters, flats), rank, ranks)
    written = {place for other in range(rank % before, before, ranks) for place in saved.whole(f"written.{other}")}
    notes = changed_options(vars(loco.config), facts["config"], OF_THE_MESH)
    if before != ranks:
        notes.append(
            f"The checkpoint was written by {before} ranks, this run has {ranks}: the starting point carries"
            " over exactly; each rank takes the mean of the saved error feedbacks and parameters, and the inner"
            f" optimizer's state of rank {rank % before}."
        )
    return Loaded(_inner(loco, saved), {**facts["progress"], "written": sorted(written)}, notes, state, flats)


def _inner(loco: Algorithm, saved: State) -> dict[str, Any]:
    """The inner optimizer's state, as it takes it. A group may hold numbers of the rank: a hook's changes are added."""
    shards = saved.facts["shards"]
    replica = loco.comm.rank % saved.facts["ranks"]
    own = saved.whole(f"own.{replica * shards + (loco.node.rank if shards == loco.node.world_size else 0)}")
    place = _places(loco.optimizer)
    inner = _put_together(own, lambda index, name: place(index, saved.whole(f"inner.{replica}.{index}.{name}")))
    groups = zip(own["param_groups"], saved.whole("own.0")["param_groups"], saved["param_groups"], strict=True)
    inner["param_groups"] = [
        {**mine, **{name: value for name, value in now.items() if name not in before or before[name] != value}}
        for mine, before, now in groups
    ]
    return inner


def _places(optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], Any]:
    """Gives a function of a parameter's index and a saved value of its state, which copies the value for this rank.

    Of a whole tensor like a sharded parameter that is a DTensor with the rank's rows.
    """
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

    def place(index: Any, value: Any) -> Any:
        like = parameters.get(index)
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) or not isinstance(like, DTensor) or value.shape != like.shape:
            return value.clone()  # else a mapped file would outlive the load
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # sends nothing

    return place


def _load_inner(loco: Algorithm, given: Mapping[str, Any]) -> Loaded:
    """A state without SparseLoCo's part: of the inner optimizer, or of another method, whose AdamW is taken."""
    counts = [entry["step"] for entry in given["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    place, inner = _places(loco.optimizer), {name: value for name, value in given.items() if name != "scape"}
    inner["state"] = {
        index: {name: place(index, value) for name, value in entry.items()} if isinstance(entry, Mapping) else entry
        for index, entry in given["state"].items()
    }
    note = "The checkpoint was trained without SparseLoCo: error feedback begins at zero, and a window begins now."
    return Loaded(inner, {"steps": max((int(count) for count in counts), default=0)}, [note])
