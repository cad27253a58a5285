"""The state of SCAPE's optimizer: N ranks save it, any number of ranks loads it.

=================== =============== ====================================================================================
key                 on other ranks  what it is
=================== =============== ====================================================================================
``exp_avg.i``, ...  the same        the shard's tensors of parameter ``i``, of which ranks own an N-th each
``residual.r.i``    the mean        what rank ``r`` has not yet sent
=================== =============== ====================================================================================

Tensors of a parameter are flat, in its memory order, and whole also where several ranks hold a replica together (FSDP2
inside a node): then ``r`` counts replicas. The mask of the coming step is not saved: from the same residual the same one
comes. In a file the state is also AdamW's: its ``state`` holds ``exp_avg``, ``exp_avg_sq`` and ``step`` of each parameter,
which share their memory with the tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from lightning_scape.core.parameters import Parameters, flatten_like
from lightning_scape.scape.config import ScapeConfig, usual_wire
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.state import SHARD_TENSORS, ScapeState

if TYPE_CHECKING:
    from lightning_scape.scape.step import Engine

METHOD = "scape"
_SILENT = ("max_skipped", "check_replicas_every", "local_group_size", "reshard_after_forward")
"""Options whose change does not change the training."""


def _shard(state: ScapeState) -> dict[str, Tensor]:
    """The shard's tensors ``[R, B]``, by name."""
    return {name: tensor for name in SHARD_TENSORS if (tensor := getattr(state, name)) is not None}


def _owned(engine: Engine, name: str, shard: Tensor) -> dict[str, Chunk]:
    return of_blocks(name, engine.parameters, engine.layout, shard, engine.layout.local(engine.comm.rank).pieces)


def _residual(engine: Engine, name: str, state: ScapeState) -> dict[str, Chunk]:
    return of_blocks(name, engine.parameters, engine.layout, state.residual, engine.layout.everything().pieces)


# ------------------------------------------------------------------------------------------------ saving


def own_state(engine: Engine, state: ScapeState, shown: Mapping[str, Any]) -> State:
    """This rank's part of the state: views, nothing is copied or sent.

    Args:
        engine: with nothing under way.
        state: its own, or a fresh one.
        shown: ``param_groups``, and what the user's hooks add to a state dict.
    """
    parameters, layout, masks, rank = engine.parameters, engine.layout, engine.masks, engine.comm.rank
    shard = _shard(state)
    chunks = {key: chunk for name, tensor in shard.items() for key, chunk in _owned(engine, name, tensor).items()}
    chunks |= _residual(engine, f"residual.{rank}", state)
    missed = [0] * len(parameters.indices) if state.missed is None else state.missed.tolist()
    facts = {
        "method": METHOD,
        "config": engine.config.as_dict(),
        "ranks": layout.world_size,
        "shards": engine.node.world_size,
        **facts_of(parameters),
        "tensors": list(shard),
        "step": int(state.step),
        "missed": dict(zip(parameters.indices, missed, strict=True)),
        "calls": state.calls,
        "warmup_steps": masks.schedule.warmup_steps,
        "skipped": [engine.skips.in_row, engine.skips.total],
    }
    return State.own(shown, facts, chunks)


def whole_state(saved: State) -> dict[str, Any]:
    """A whole state, in host memory, as a file has it."""
    facts, tensors = saved.facts, saved.wholes()

    def shaped(name: str, index: int) -> Any:
        return tensors[f"{name}.{index}"].as_strided(facts["shapes"][index], facts["strides"][index])

    state = {}
    for index in facts["shapes"]:
        first, missed = shaped("exp_avg", index), facts["missed"][index]
        # AdamS's denominator has the square of the first moment, and AdamW goes on from it.
        second = shaped("exp_avg_sq", index) if "exp_avg_sq" in facts["tensors"] else first.square()
        step = torch.tensor(float(facts["step"] - missed), dtype=torch.float32, device="cpu")
        state[index] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
    return {"state": state, **saved, METHOD: {"facts": facts, "tensors": tensors}}


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Loaded:
    """A saved state that has been read into fresh buffers. Nothing else has been changed yet."""

    param_groups: Sequence[Mapping[str, Any]]
    """As saved; their options hold from now on."""
    config: ScapeConfig
    schedule: SparsitySchedule
    notes: Sequence[str]
    """Warnings for the user."""
    skipped: tuple[int, int] | None = None
    """Skipped steps, those in a row and in all; None leaves the counters."""

    def take_up(self, engine: Engine) -> None:
        """Gives the warnings, then sets the counters."""
        for note in self.notes:
            warnings.warn(note, stacklevel=3)  # whoever calls load_state_dict
        if self.skipped is not None:
            engine.skips.in_row, engine.skips.total = self.skipped


def load(engine: Engine, state: ScapeState, given: Any) -> Loaded:
    """Fills fresh buffers with this rank's part of a saved state.

    Args:
        engine: is not changed.
        state: the buffers.
        given: a whole state of SCAPE, of another method, or of AdamW, Adam or AdamS; or a :class:`State`.

    Returns:
        The rest. Take it up when all ranks have read their parts.

    Raises:
        ValueError: the state is not of this model, or is damaged.
        OSError: a file cannot be read.
    """
    saved = taken(given, METHOD)
    if not isinstance(saved, State):
        return _load_dense(engine, state, saved)
    facts, parameters, config, layout = saved.facts, engine.parameters, engine.config, engine.layout
    check_model(facts, parameters)
    notes = []
    frozen_alike = facts["shapes"].keys() == set(parameters.indices)
    new = {index: facts["step"] for index in parameters.indices if index not in facts["shapes"]}
    if not frozen_alike:
        gone = facts["shapes"].keys() - set(parameters.indices)
        notes.append(
            f"The checkpoint was trained with other parameters frozen: {len(new)} begin anew, {len(gone)} lose their"
            " state; all else carries over."
        )
    if config.wire_dtype is None:
        config = replace(config, wire_dtype=facts["config"]["wire_dtype"])  # a run goes on with its wire
    set_steps(engine, state, facts["step"], {**facts["missed"], **new})
    state.calls = facts["calls"]
    _make_buffers(facts["tensors"], state, parameters, config)
    known = {str(index) for index in facts["shapes"]}

    def old(chunks: Mapping[str, Chunk]) -> dict[str, Chunk]:
        return {key: chunk for key, chunk in chunks.items() if key.rpartition(".")[2] in known}

    for name, tensor in _shard(state).items():
        if name in facts["tensors"]:
            for key, chunk in old(_owned(engine, name, tensor)).items():
                saved.read(key, chunk)
    rank, ranks = engine.comm.rank, layout.world_size
    saved.read_of_ranks("residual", old(_residual(engine, "residual", state)), rank, ranks)
    if facts["ranks"] != ranks:
        notes.append(
            f"The checkpoint was written by {facts['ranks']} ranks, this run has {ranks}: moments and steps carry over"
            " exactly; each rank starts from the mean of the saved residuals."
        )
    schedule = engine.masks.schedule
    if config.sparsity_warmup_steps is None and facts["config"].get("sparsity"):  # a default one goes on as it began
        schedule = replace(schedule, warmup_steps=0 if config.dense else facts["warmup_steps"])
    then = {
        **facts["config"],
        "wire_dtype": facts["config"].get("wire_dtype") or usual_wire(facts["config"]["sparsity"]),
    }
    silent = [*_SILENT, *(["sparsity_warmup_steps"] if config.sparsity_warmup_steps is None else [])]
    notes += changed_options({**config.as_dict(), "wire_dtype": config.wire}, then, silent)
    in_row, total = facts["skipped"]
    return Loaded(saved["param_groups"], config, schedule, notes, (in_row, total))


def _make_buffers(names: Sequence[str], state: ScapeState, parameters: Parameters, config: ScapeConfig) -> None:
    """Makes the buffers that the saved state needs and that are made late."""
    if "master" in names and parameters.need_masters:
        state.master = torch.zeros_like(state.exp_avg)
    # fp32 parameters lose it when the wire changes: it is less than a unit in an entry's last place.
    if "change_error" in names and (config.packed or parameters.need_masters):
        state.change_error = torch.zeros_like(state.exp_avg)
    if state.exp_avg_sq is not None and "exp_avg_sq" not in names:
        raise ValueError(
            'With update="adamw" a state must hold second moments, got one of update="adams", which has none. Go on'
            ' with update="adams", or load the model alone.'
        )


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
        for key, chunk in _owned(engine, each, getattr(state, each)).items():
            if key in flats:
                chunk.tensor.copy_(flats[key][chunk.offset : chunk.end])
    moments = "first and second moments" if len(names) > 1 else "first moments"
    note = f"The checkpoint was not written by SCAPE: {moments} and step ({step}) carry over; residuals start at zero."
    return Loaded(given["param_groups"], engine.config, engine.masks.schedule, [note])


def set_steps(engine: Engine, state: ScapeState, step: int, missed: Mapping[int, int]) -> None:
    """Sets step and missed steps, and the last step of the rank's entries to their parameter's own step."""
    indices = engine.parameters.indices
    state.step.fill_(step)
    state.last_step.fill_(step)  # right for pads
    for piece in engine.layout.local(engine.comm.rank).pieces:
        entries = piece.of_blocks(engine.layout.block_size)
        state.last_step.view(-1)[entries] -= missed.get(indices[piece.segment.index], 0)
    counts = [missed.get(index, 0) for index in indices]
    if any(counts):
        state.missed = torch.tensor(counts, dtype=torch.int32, device="cpu").to(state.step.device)
