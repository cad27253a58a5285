"""The state of SCAPE's optimizer: N ranks save it, any number of ranks loads it.

=================== =============== ====================================================================================
key                 on other ranks  what it is
=================== =============== ====================================================================================
``exp_avg.i``, ...  the same        the shard's tensors of parameter ``i``, of which ranks own an N-th each
``residual.r.i``    the mean        what rank ``r`` has not yet sent
=================== =============== ====================================================================================

Tensors of a parameter are flat, in its memory order, and whole also where several ranks hold a replica together (FSDP2
inside a node): then ``r`` counts replicas. The mask of the coming step is not saved: it comes again from the same
residual. In a file the state is also AdamW's: its ``state`` holds ``exp_avg``, ``exp_avg_sq`` and ``step`` of each
parameter, which share their memory with the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.checkpoint.shards import (
    Chunk,
    State,
    changed_options,
    check_model,
    facts_of,
    of_blocks,
    taken,
)
from lightning_scape.core.parameters import flatten_like
from lightning_scape.scape.state import ScapeState

if TYPE_CHECKING:
    from lightning_scape.scape.step import Engine

METHOD = "scape"
_SHARD_TENSORS = ("exp_avg", "last_step", "master", "exp_avg_sq", "change_error")
"""Of a state, each ``[R, B]`` or None."""
_SILENT = ("max_skipped", "check_replicas_every", "local_group_size", "reshard_after_forward")
"""Options whose change does not change the training."""


def _chunks(engine: Engine, state: ScapeState, name: str, key: str | None = None) -> dict[str, Chunk]:
    """Of a tensor of the shard's blocks, or of the residual, which has all."""
    pieces = engine.layout.pieces if name == "residual" else engine.shard.region.pieces
    return of_blocks(key or name, engine.parameters, engine.layout, getattr(state, name), pieces)


# ------------------------------------------------------------------------------------------------ saving


def own_state(engine: Engine, shown: Mapping[str, Any]) -> State:
    """This rank's part of the state: views, nothing is copied or sent.

    ``shown`` has ``param_groups``, and what the user's hooks add to a state dict.
    """
    parameters, state = engine.parameters, engine.state_at_rest()
    tensors = [name for name in _SHARD_TENSORS if getattr(state, name) is not None]
    chunks = _chunks(engine, state, "residual", f"residual.{engine.comm.rank}")
    for name in tensors:
        chunks |= _chunks(engine, state, name)
    missed = [0] * len(parameters.indices) if state.missed is None else state.missed.tolist()
    facts = {
        "method": METHOD,
        "config": engine.config.as_dict(),
        "ranks": engine.comm.world_size,
        "shards": engine.node.world_size,
        **facts_of(parameters),
        "tensors": tensors,
        "step": int(state.step),
        "missed": dict(zip(parameters.indices, missed, strict=True)),
        "calls": state.calls,
        "skipped": [state.skipped_in_row, state.skipped_total],
        "sparse": state.sparse,
    }
    return State({**shown, METHOD: {"facts": facts}}, chunks)


def whole_state(saved: State) -> dict[str, Any]:
    """A whole state, in host memory, as a file has it."""
    facts, tensors = saved.facts, saved.wholes()

    def shaped(name: str, index: int) -> Any:
        flat = tensors.get(f"{name}.{index}", torch.empty(0, device="cpu"))  # an empty parameter has none
        return flat.as_strided(facts["shapes"][index], facts["strides"][index])

    state = {}
    for index in facts["shapes"]:
        first, missed = shaped("exp_avg", index), facts["missed"][index]
        # AdamS's denominator has the square of the first moment, and AdamW goes on from it.
        second = shaped("exp_avg_sq", index) if "exp_avg_sq" in facts["tensors"] else first.square()
        step = torch.tensor(float(facts["step"] - missed), dtype=torch.float32, device="cpu")
        state[index] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    return {"state": state, **saved, METHOD: {"facts": facts, "tensors": tensors}}


# ------------------------------------------------------------------------------------------------ loading


class Loaded(NamedTuple):
    """A saved state that has been read. Nothing has been changed yet."""

    state: ScapeState
    param_groups: Sequence[Mapping[str, Any]]
    """As saved; their options hold from now on."""
    notes: Sequence[str]
    """Warnings for the user."""


def load(engine: Engine, given: Any) -> Loaded:
    """Fills fresh buffers with this rank's part of a saved state; raises where that is not of this model, or damaged.

    Args:
        engine: is not changed.
        given: a whole state of SCAPE, of another method, or of AdamW, Adam or AdamS; or a :class:`State`.
    """
    saved, state = taken(given, METHOD), engine.allocate()
    if not isinstance(saved, State):
        return _load_dense(engine, state, saved)
    facts, indices, rank, ranks = saved.facts, engine.parameters.indices, engine.comm.rank, engine.comm.world_size
    check_model(facts, engine.parameters)
    if state.exp_avg_sq is not None and "exp_avg_sq" not in facts["tensors"]:
        raise ValueError(
            'With update="adamw" a state must hold second moments, got one of update="adams", which has none. Go on'
            ' with update="adams", or load the model alone.'
        )
    notes = changed_options(engine.config.as_dict(), facts["config"], _SILENT)
    if gone := len({*facts["shapes"]} ^ {*indices}):
        notes.append(
            f"The checkpoint was trained with other parameters frozen: {gone} begin anew or lose their state; all else"
            " carries over."
        )
    if facts["ranks"] != ranks:
        notes.append(
            f"The checkpoint was written by {facts['ranks']} ranks, this run has {ranks}: moments and steps carry over"
            " exactly; each rank starts from the mean of the saved residuals."
        )
    set_steps(engine, state, facts["step"], {**dict.fromkeys(indices, facts["step"]), **facts["missed"]})
    state.calls, (state.skipped_in_row, state.skipped_total) = facts["calls"], facts["skipped"]
    state.sparse = facts["sparse"]

    def old(chunks: Mapping[str, Chunk]) -> dict[str, Chunk]:
        known = {str(index) for index in facts["shapes"]}
        return {key: chunk for key, chunk in chunks.items() if key.rpartition(".")[2] in known}

    for name in facts["tensors"]:  # what another wire has kept goes: it is a rounding error of one change
        for key, chunk in old(_chunks(engine, state, name)).items() if getattr(state, name) is not None else ():
            saved.read(key, chunk)
    saved.read_of_ranks("residual", old(_chunks(engine, state, "residual")), rank, ranks)
    return Loaded(state, saved["param_groups"], notes)


def _load_dense(engine: Engine, state: ScapeState, given: Mapping[str, Any]) -> Loaded:
    """Moments and steps of an AdamW, Adam or AdamS. Residuals start at zero."""
    parameters, entries = engine.parameters, {index: entry for index, entry in given["state"].items() if entry}
    names = ["exp_avg", "exp_avg_sq"] if state.exp_avg_sq is not None else ["exp_avg"]
    flats: dict[str, Tensor] = {}
    steps = dict.fromkeys(parameters.indices, 0)
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        for each in names if index in entries else ():  # torch leaves out those that never had a gradient
            moment = entries[index].get(each)
            got = tuple(moment.shape) if isinstance(moment, Tensor) else type(moment).__name__
            if got != tuple(parameter.shape):
                raise ValueError(
                    f"The state must hold {each} of {name!r} with shape {tuple(parameter.shape)}, got {got}. Load a"
                    " state of AdamW or Adam over the same model."
                )
            flats[f"{each}.{index}"] = flatten_like(moment, parameter)
            steps[index] = int(entries[index].get("step") or 0)
    step = max(steps.values(), default=0)
    set_steps(engine, state, step, {index: step - own for index, own in steps.items()})
    for each in names:
        for key, chunk in _chunks(engine, state, each).items():
            if key in flats:
                chunk.tensor.copy_(flats[key][chunk.offset : chunk.end])
    moments = "first and second moments" if len(names) > 1 else "first moments"
    note = f"The checkpoint was not written by SCAPE: {moments} and step ({step}) carry over; residuals start at zero."
    return Loaded(state, given["param_groups"], [note])


def set_steps(engine: Engine, state: ScapeState, step: int, missed: Mapping[int, int]) -> None:
    """Sets step and missed steps, and the last step of the rank's entries to their parameter's own step."""
    indices = engine.parameters.indices
    state.step.fill_(step)
    state.last_step.fill_(step)  # right for pads
    for piece in engine.shard.region.pieces:
        entries = piece.of_blocks(engine.layout.block_size)
        state.last_step.view(-1)[entries] -= missed.get(indices[piece.index], 0)
    counts = [missed.get(index, 0) for index in indices]
    if any(counts):
        state.missed = torch.tensor(counts, dtype=torch.int32, device="cpu").to(state.step.device)
