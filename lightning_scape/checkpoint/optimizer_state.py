"""A whole state by parameter: collected from N ranks, taken apart again on any number of them.

Format 1, tensors, numbers and strings only (``torch.load(weights_only=True)`` reads it)::

    {
      "state": {i: {"exp_avg": m, "last_step": clock, "step": t, ["master": ...], [...]}},
      "param_groups": [...],                            # as torch writes them
      "scape": {"format": 1, "config": {...}, "world_size": N, "step": t, "calls": n, "names": {i: name},
                "residuals": [{i: e}, ...],             # one dict per rank
                "mask": [blocks, q] or None, "mask_uses": n, "block_size": B, "skipped_in_row": n, "skipped_total": n},
    }

``i`` counts all parameters of the groups, as in torch's own state dicts; every tensor by parameter has its shape.

In a directory (:mod:`lightning_scape.checkpoint.dcp`) the same tensors stand under ``state.{i}.exp_avg`` etc., flat, in
the parameter's memory order, in as many chunks as shards meet the parameter; residuals under ``residual.{rank}.{i}``,
the mask's rows under ``mask``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint.dcp import Chunk, OwnShards, SavedShards
from lightning_scape.comm.collectives import Communicator
from lightning_scape.config import ScapeConfig
from lightning_scape.engine.clipping import GradientClipping
from lightning_scape.engine.mask import Masks
from lightning_scape.engine.parameters import Parameters, problem_of_group
from lightning_scape.engine.state import SHARD_TENSORS, ScapeState
from lightning_scape.layout import Layout, Piece

FORMAT = 1
_SAVED_AS = dict(
    zip(
        SHARD_TENSORS,
        ("exp_avg", "last_step", "master", "local_exp_avg", "evidence", "noise", "exp_avg_sq"),
        strict=True,
    )
)
_REMEDY = "Load it into the same model with the same parameter groups."


@dataclass(frozen=True)
class Snapshot:
    """The live objects that make up an optimizer's state."""

    state: ScapeState
    layout: Layout
    config: ScapeConfig
    parameters: Parameters
    masks: Masks
    clipping: GradientClipping


def consolidate(snapshot: Snapshot, communicator: Communicator, to: int) -> dict[str, Any] | None:
    """The whole state but for ``param_groups`` on rank ``to``, in host memory; None on the others. Collective."""
    layout, parameters, state = snapshot.layout, snapshot.parameters, snapshot.state
    step = int(state.step)
    device = state.exp_avg.device  # not the parameters': Lightning takes those to the CPU when a fit ends
    missed = _missed(snapshot)
    by_parameter: dict[int, dict[str, Any]] = {
        index: {"step": step - missed.get(index, 0)} for index in parameters.indices
    }
    for name, saved_as in _SAVED_AS.items():
        shard: Tensor | None = getattr(state, name)
        if shard is None:
            continue
        shards = communicator.gather(shard.view(-1), to, device)
        if shards is not None:
            for place, tensor in _cut(torch.cat(shards), layout, parameters):
                by_parameter[parameters.indices[place]][saved_as] = tensor
    residuals = communicator.gather(state.residual.view(-1), to, device)
    if residuals is None:
        return None
    by_rank = []
    while residuals:  # each is let go once it is cut up
        cut = _cut(residuals.pop(0), layout, parameters)
        by_rank.append({parameters.indices[place]: tensor for place, tensor in cut})
    mask = snapshot.masks.active
    whole = {
        **_describe(snapshot, communicator.world_size),
        "residuals": by_rank,
        "mask": None if mask is None else mask[: layout.used_blocks].cpu().clone(),
    }
    return {"state": by_parameter, "scape": whole}


def _describe(snapshot: Snapshot, world_size: int) -> dict[str, Any]:
    """All but the tensors."""
    return {
        "format": FORMAT,
        "config": snapshot.config.as_dict(),
        "world_size": world_size,
        "step": int(snapshot.state.step),
        "calls": snapshot.state.calls,
        "noise_samples": snapshot.state.local_samples,
        "second_moment_since": snapshot.state.exp_avg_sq_since,
        "warmup_steps": snapshot.masks.schedule.warmup_steps,
        "missed": _missed(snapshot),
        "names": dict(zip(snapshot.parameters.indices, snapshot.parameters.names, strict=True)),
        "mask_uses": snapshot.masks.uses,
        "block_size": snapshot.layout.block_size,
        "skipped_in_row": snapshot.clipping.skipped_in_row,
        "skipped_total": snapshot.clipping.skipped_total,
    }


def _missed(snapshot: Snapshot) -> dict[int, int]:
    """By parameter, the steps in which it had a gradient on no rank, where there are any."""
    missed = [] if snapshot.state.missed is None else snapshot.state.missed.tolist()  # a checkpoint waits anyhow
    return {index: count for index, count in zip(snapshot.parameters.indices, missed, strict=False) if count}


def load(snapshot: Snapshot, saved: Mapping[str, Any], rank: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """Fills a snapshot with this rank's part of a whole state; see :meth:`ScapeOptimizer.load_state_dict`.

    Args:
        snapshot: freshly allocated buffers, and the live masks and counters.
        saved: what :meth:`ScapeOptimizer.state_dict` gave, or a state of AdamW, Adam or AdamS.
        rank: whose part is taken.
        groups: parameter groups of the optimizer.

    Raises:
        ValueError: the state is not of this model, or of a newer format. Nothing has been changed then.
    """
    _check(snapshot, saved, groups)
    groups = _groups_from_now_on(groups, saved["param_groups"])
    snapshot.masks.restore(None, 0)
    if "scape" not in saved:
        _load_foreign(snapshot, saved["state"], rank, groups)
        return
    whole, layout, state = saved["scape"], snapshot.layout, snapshot.state
    _tell_differences(snapshot.config.as_dict(), whole["config"])
    _load_clocks(snapshot, whole)
    _load_schedule(snapshot, whole)
    _load_history(snapshot, whole)
    held = set(next(iter(saved["state"].values())))
    if "master" in held and snapshot.parameters.need_masters:
        state.master = torch.zeros_like(state.exp_avg)
    _make_room_for_noise(state, held)
    for name, saved_as in _SAVED_AS.items():
        shard: Tensor | None = getattr(state, name)
        tensors = {index: entry[saved_as] for index, entry in saved["state"].items() if saved_as in entry}
        if shard is not None and tensors:
            _fill(shard.view(-1), tensors, snapshot, layout.local(rank).pieces)
    _load_noise(snapshot, whole, held)
    _load_second_moment(snapshot, whole, held, groups, rank)
    _load_residual(snapshot, whole, rank)
    _load_mask(snapshot, whole["mask"], whole)


# ---------------------------------------------------------------------------------------- shards, each by its own rank


def own_shards(snapshot: Snapshot, communicator: Communicator, param_groups: list[dict[str, Any]]) -> OwnShards:
    """This rank's part of the state: views, nothing is copied or sent."""
    layout, parameters, state, rank = snapshot.layout, snapshot.parameters, snapshot.state, communicator.rank
    tensors: dict[str, Chunk] = {}
    for name, saved_as in _SAVED_AS.items():
        shard: Tensor | None = getattr(state, name)
        if shard is not None:
            tensors |= _chunks(f"state.{{}}.{saved_as}", shard.view(-1), snapshot, layout.local(rank).pieces)
    tensors |= _chunks(f"residual.{rank}.{{}}", state.residual.view(-1), snapshot, layout.everything().pieces)
    mask, first = snapshot.masks.active, rank * layout.shard_blocks
    if mask is not None and first < layout.used_blocks:
        rows = mask[first : min(first + layout.shard_blocks, layout.used_blocks)]
        tensors["mask"] = Chunk(rows, first, layout.used_blocks)
    common = {
        **_describe(snapshot, communicator.world_size),
        "shapes": {index: list(p.shape) for index, p in zip(parameters.indices, parameters.tensors, strict=True)},
        "strides": {index: list(p.stride()) for index, p in zip(parameters.indices, parameters.tensors, strict=True)},
        "tensors": [saved_as for name, saved_as in _SAVED_AS.items() if getattr(state, name) is not None],
        "mask_shape": None if mask is None else [layout.used_blocks, mask.shape[1]],
        "param_groups": param_groups,
    }
    return OwnShards(tensors, common)


def load_shards(snapshot: Snapshot, saved: SavedShards, rank: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """As :func:`load`, from a directory, of which only this rank's part is read.

    Raises:
        ValueError: as :func:`load`.
        OSError: a file cannot be read.
    """
    common, layout, state = saved.common, snapshot.layout, snapshot.state
    _check_shards(snapshot, common, groups)
    groups = _groups_from_now_on(groups, common["param_groups"])
    _load_clocks(snapshot, common)
    held = set(common["tensors"])
    if "master" in held and snapshot.parameters.need_masters:
        state.master = torch.zeros_like(state.exp_avg)
    _make_room_for_noise(state, held)
    targets: dict[str, Chunk] = {}
    for name, saved_as in _SAVED_AS.items():
        shard: Tensor | None = getattr(state, name)
        if shard is not None and saved_as in held:
            key = f"{saved.key}.state.{{}}.{saved_as}"
            targets |= _chunks(key, shard.view(-1), snapshot, layout.local(rank).pieces)
    saved.directory.read(targets)
    _load_noise(snapshot, common, held)
    _load_second_moment(snapshot, common, held, groups, rank)
    _read_residual(snapshot, saved, rank)
    mask = None
    if common["mask_shape"] is not None:
        mask = saved.directory.tensor(f"{saved.key}.mask")
        _check_mask(mask, common["block_size"])
    # From here on nothing fails.
    _tell_differences(snapshot.config.as_dict(), common["config"])
    snapshot.masks.restore(None, 0)
    _load_schedule(snapshot, common)
    _load_history(snapshot, common)
    _load_mask(snapshot, mask, common)


def _chunks(key: str, flat: Tensor, snapshot: Snapshot, pieces: Iterable[Piece]) -> dict[str, Chunk]:
    """Each piece's entries in ``flat``, the blocks that the pieces count, as a chunk of its whole parameter."""
    return {
        key.format(snapshot.parameters.indices[piece.segment.index]): Chunk(
            flat[piece.of_blocks(snapshot.layout.block_size)], piece.start, piece.segment.numel
        )
        for piece in pieces
    }


def _read_residual(snapshot: Snapshot, saved: SavedShards, rank: int) -> None:
    layout, residual = snapshot.layout, snapshot.state.residual.view(-1)
    before = saved.common["world_size"]
    if before == layout.world_size:
        saved.directory.read(
            _chunks(f"{saved.key}.residual.{rank}.{{}}", residual, snapshot, layout.everything().pieces)
        )
        return
    part = torch.zeros_like(residual)
    for other in range(before):
        saved.directory.read(_chunks(f"{saved.key}.residual.{other}.{{}}", part, snapshot, layout.everything().pieces))
        residual += part
    residual /= before
    _tell_resharding(before, layout.world_size)


def merge_shards(saved: SavedShards) -> dict[str, Any]:
    """The whole state that :meth:`ScapeOptimizer.state_dict` would have given, read into host memory."""
    common = dict(saved.common)
    shapes, strides, tensors = common.pop("shapes"), common.pop("strides"), common.pop("tensors")
    groups, mask_shape = common.pop("param_groups"), common.pop("mask_shape")

    def read(key: str, index: int) -> Tensor:
        if 0 in shapes[index]:
            return torch.empty(shapes[index])
        flat = saved.directory.tensor(f"{saved.key}.{key}")
        return flat.as_strided(shapes[index], strides[index]).contiguous()

    missed = common.get("missed", {})
    state = {
        index: {
            "step": common["step"] - missed.get(index, 0),
            **{name: read(f"state.{index}.{name}", index) for name in tensors},
        }
        for index in shapes
    }
    residuals = [
        {index: read(f"residual.{rank}.{index}", index) for index in shapes} for rank in range(common["world_size"])
    ]
    mask = None if mask_shape is None else saved.directory.tensor(f"{saved.key}.mask")
    return {"state": state, "scape": {**common, "residuals": residuals, "mask": mask}, "param_groups": groups}


# ------------------------------------------------------------------------------------------------ into dense optimizers


def as_adamw(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A whole state of :class:`ScapeOptimizer` as one that ``torch.optim.AdamW`` and ``Adam`` take.

    Moments, step and options carry over. The update of AdamS has no second moment: it is set to the first one's square,
    as AdamS's denominator has it. Residuals (what was computed and not yet sent) are lost; a warning says so.
    """
    kept = all("exp_avg_sq" in entry for entry in saved["state"].values())
    betas = {index: group["betas"][1] for group in saved["param_groups"] for index in group["params"]}
    since = saved["scape"].get("second_moment_since", 0)

    def second(index: int, entry: Mapping[str, Any]) -> Tensor:
        if not kept:
            return torch.square(entry["exp_avg"])
        started = 1 - betas[index] ** entry["step"]
        moment: Tensor = entry["exp_avg_sq"] * (started / (1 - betas[index] ** max(1, entry["step"] - since)))
        return moment

    state = {
        index: {
            "step": torch.tensor(float(entry["step"])),
            "exp_avg": entry["exp_avg"],
            "exp_avg_sq": second(index, entry),
        }
        for index, entry in saved["state"].items()
    }
    moments = (
        "both moments and step carry over"
        if kept
        else "first moments and step carry over; the second moment, which AdamS does not have, is set to the first"
        " one's square"
    )
    warnings.warn(
        f"SCAPE's state as AdamW's: parameters, {moments}; residuals, clocks and masks do not carry over.",
        stacklevel=2,
    )
    return {"state": state, "param_groups": saved["param_groups"]}


# ------------------------------------------------------------------------------------------------ parts of loading


def _groups_from_now_on(mine: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups as they will be once the state is loaded, whose options hold."""
    return [{**own, **theirs} for own, theirs in zip(mine, saved, strict=True)]


def _load_clocks(snapshot: Snapshot, whole: Mapping[str, Any]) -> None:
    state = snapshot.state
    state.step.fill_(whole["step"])
    state.last_step.fill_(whole["step"])  # of the pads, which are visited at every step
    state.calls = whole["calls"]
    _set_missed(snapshot, whole.get("missed", {}))


def _load_schedule(snapshot: Snapshot, whole: Mapping[str, Any]) -> None:
    schedule, saved = snapshot.masks.schedule, whole["config"]
    warmup = whole.get("warmup_steps", saved.get("sparsity_warmup_steps"))
    if snapshot.config.sparsity_warmup_steps is None and warmup is not None and saved.get("sparsity"):
        # The default of the run that wrote it, whose length may have been another one.
        snapshot.masks.schedule = replace(schedule, warmup_steps=0 if snapshot.config.dense else warmup)


def _set_missed(snapshot: Snapshot, missed: Mapping[int, int]) -> None:
    if any(missed.values()):
        counts = [missed.get(index, 0) for index in snapshot.parameters.indices]
        snapshot.state.missed = torch.tensor(counts, dtype=torch.int32).to(snapshot.state.step.device)


def _load_noise(snapshot: Snapshot, whole: Mapping[str, Any], held: set[str]) -> None:
    """Restores the number of samples behind the estimate.

    It is the averaged gradient's noise, and stays that over another number of ranks with the same global batch.
    """
    if snapshot.state.local_exp_avg_sq is not None and "noise" in held:
        snapshot.state.local_samples = whole.get("noise_samples", whole["calls"])


def _make_room_for_noise(state: ScapeState, held: set[str]) -> None:
    """A state of AdamS's update gives AdamW's its second moment."""
    if state.exp_avg_sq is not None and "noise" in held and "exp_avg_sq" not in held:
        state.local_exp_avg_sq = torch.zeros_like(state.exp_avg_sq)


def _load_second_moment(
    snapshot: Snapshot, whole: Mapping[str, Any], held: set[str], groups: Sequence[Mapping[str, Any]], rank: int
) -> None:
    """After the tensors are in: from which step on the second moment counts; where AdamS wrote it, what it is."""
    state = snapshot.state
    if state.exp_avg_sq is None:
        return
    if "exp_avg_sq" in held:
        state.exp_avg_sq_since = whole.get("second_moment_since", 0)
        return
    noise, state.local_exp_avg_sq = state.local_exp_avg_sq, None
    if noise is None or not state.local_samples:
        _guess_second_moment(snapshot, groups, rank)
        return
    for piece in snapshot.layout.local(rank).pieces:
        entries = piece.of_blocks(snapshot.layout.block_size)
        started = 1 - float(groups[piece.segment.group]["betas"][1]) ** whole["step"]
        state.exp_avg_sq.view(-1)[entries] = noise.view(-1)[entries] * started
    state.local_samples = 0


_GUESS_COUNTS = 10
"""Steps for which a guessed second moment counts: about as many gradients as a first moment remembers."""


def _guess_second_moment(snapshot: Snapshot, groups: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Where only first moments are known: for noise, ``E[g**2] = E[m**2] * (1 + b1) / (1 - b1)``.

    Without it the first step would divide a moment of many gradients by the root of a single one.
    """
    state = snapshot.state
    assert state.exp_avg_sq is not None
    step = int(state.step)
    state.exp_avg_sq_since = max(0, step - _GUESS_COUNTS)
    for piece in snapshot.layout.local(rank).pieces:
        entries = piece.of_blocks(snapshot.layout.block_size)
        beta1, beta2 = (float(beta) for beta in groups[piece.segment.group]["betas"])
        weight = 1 - beta2 ** (step - state.exp_avg_sq_since)
        noise = state.exp_avg.view(-1)[entries].square() * (weight * (1 + beta1) / (1 - beta1))
        state.exp_avg_sq.view(-1)[entries] = noise


def _load_history(snapshot: Snapshot, whole: Mapping[str, Any]) -> None:
    snapshot.clipping.skipped_in_row = whole["skipped_in_row"]
    snapshot.clipping.skipped_total = whole["skipped_total"]
    snapshot.clipping.last_skipped = whole["skipped_in_row"] > 0


def _load_mask(snapshot: Snapshot, mask: Tensor | None, whole: Mapping[str, Any]) -> None:
    layout = snapshot.layout
    if mask is None:
        return
    if whole["block_size"] != layout.block_size or mask.shape[0] != layout.used_blocks:
        warnings.warn(
            f"The checkpoint's masks are for blocks of {whole['block_size']} entries, this run's are"
            f" {layout.block_size}: the first step makes its mask anew. All else carries over.",
            stacklevel=5,
        )
        return
    filler = torch.arange(mask.shape[1], device="cpu").expand(layout.blocks - layout.used_blocks, -1).to(mask.dtype)
    snapshot.masks.restore(torch.cat([mask, filler]).to(snapshot.state.exp_avg.device), whole["mask_uses"])


def _tell_resharding(before: int, now: int) -> None:
    warnings.warn(
        f"The checkpoint was written by {before} ranks, this run has {now}: momentum, clocks, masters and masks carry"
        " over exactly; each rank starts from the mean of the saved residuals.",
        stacklevel=6,
    )


def _tell_differences(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Warns of options that change how training goes on; where the residual lives and what is checked does not."""
    silent = ["residual_device", "max_skipped", "check_replicas_every"]
    if mine["sparsity_warmup_steps"] is None:  # then the checkpoint's holds
        silent.append("sparsity_warmup_steps")
    saved = {**saved, "update": saved.get("update", "adams")}  # the only one before there was a choice
    differ = [
        f"{name}={saved.get(name)!r} (now {value!r})"
        for name, value in mine.items()
        if name not in silent and repr(saved.get(name)) != repr(value)
    ]
    if differ:
        warnings.warn(
            f"The checkpoint was written with other options: {', '.join(differ)}. Training goes on with those of now.",
            stacklevel=5,
        )


def _load_foreign(
    snapshot: Snapshot, saved: Mapping[int, Mapping[str, Any]], rank: int, groups: Sequence[Mapping[str, Any]]
) -> None:
    """Takes the moments and steps of an AdamW, Adam or AdamS."""
    state, parameters = snapshot.state, snapshot.parameters
    steps = {index: int(saved[index].get("step", 0)) if index in saved else 0 for index in parameters.indices}
    step = max(steps.values(), default=0)
    state.step.fill_(step)
    state.last_step.fill_(step)
    _set_missed(snapshot, {index: step - own for index, own in steps.items()})
    pieces = list(snapshot.layout.local(rank).pieces)
    for piece in pieces:
        entries = piece.of_blocks(snapshot.layout.block_size)
        state.last_step.view(-1)[entries] = steps[parameters.indices[piece.segment.index]]

    def fill(shard: Tensor, name: str) -> None:
        moments = {
            index: saved[index][name] if index in saved else torch.zeros(parameter.shape)
            for index, parameter in zip(parameters.indices, parameters.tensors, strict=True)
        }
        _fill(shard.view(-1), moments, snapshot, pieces)

    fill(state.exp_avg, "exp_avg")
    carried = "first moments"
    if state.exp_avg_sq is not None:
        if all("exp_avg_sq" in entry for entry in saved.values()):
            fill(state.exp_avg_sq, "exp_avg_sq")
            carried = "first and second moments"
        else:
            _guess_second_moment(snapshot, groups, rank)
    warnings.warn(
        f"The checkpoint was not written by SCAPE: {carried} and step ({step}) carry over"
        + (", a second moment does not" if carried == "first moments" else "")
        + "; residuals start at zero.",
        stacklevel=5,
    )


def _load_residual(snapshot: Snapshot, whole: Mapping[str, Any], rank: int) -> None:
    residual, world_size = snapshot.state.residual.view(-1), snapshot.layout.world_size
    saved: Sequence[Mapping[int, Tensor]] = whole["residuals"]
    if len(saved) == world_size:
        _fill(residual, saved[rank], snapshot, snapshot.layout.everything().pieces)
        return
    # Every rank takes the mean: the mean over ranks, which is what training depends on, stays what it was.
    mean = {index: torch.stack([part[index] for part in saved]).mean(0) for index in saved[0]}
    _fill(residual, mean, snapshot, snapshot.layout.everything().pieces)
    _tell_resharding(len(saved), world_size)


# ------------------------------------------------------------------------------------------------ checks


def _check(snapshot: Snapshot, saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise ValueError(
            "An optimizer state must have `state` and `param_groups`, got"
            f" {sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__}. {_REMEDY}"
        )
    whole = saved.get("scape")
    if whole is not None:
        _check_description(whole)
    _check_groups(saved["param_groups"], groups)
    parameters, state = snapshot.parameters, saved["state"]
    _check_mapping("state", state)
    odd = sorted(set(state) ^ set(parameters.indices), key=str)
    if whole is None:  # torch leaves out what never had a gradient
        odd = sorted(set(state) - set(parameters.indices), key=str)
    if odd:
        raise ValueError(
            f"The state must hold the model's {len(parameters.indices)} trained parameters, got {len(state)}; the first"
            f" that only one of them has is number {odd[0]}. {_REMEDY}"
        )
    expected = None if whole is None else _expected_entries(state.values())
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        if index in state:
            _check_entry(state[index], f"{name!r} (number {index})", parameter, expected)
    if whole is None:
        return
    _check_names(parameters, whole["names"])
    _check_residuals(parameters, whole)
    if whole.get("mask", "nothing") is not None:
        _check_mask(whole.get("mask"), whole["block_size"])
    clocks = [entry["last_step"] for entry in state.values() if entry["last_step"].numel()]
    if any(int(clock.min()) < 0 or int(clock.max()) > whole["step"] for clock in clocks):
        raise ValueError(
            f"The clocks of a state must be between 0 and its step ({whole['step']}), got others. The state is damaged:"
            " load another checkpoint."
        )


def _check_description(whole: Mapping[str, Any]) -> None:
    _check_mapping("scape", whole)
    version = whole.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(
            f"The state's format must be at most {FORMAT}, got {version}: it was written by a newer lightning_scape."
            " Upgrade this installation."
        )
    _check_mapping("missed", whole.get("missed", {}))
    names = ("format", "world_size", "block_size", "step", "calls", "mask_uses", "skipped_in_row", "skipped_total")
    counts = {name: whole.get(name) for name in names}
    later = ("noise_samples", "second_moment_since", "warmup_steps")  # which older states lack
    counts |= {name: whole[name] for name in later if name in whole}
    counts |= {f"missed[{index!r}]": count for index, count in whole.get("missed", {}).items()}
    for name, value in counts.items():
        least = int(name in names[:3])
        if not isinstance(value, int) or not least <= value < 2**31:  # clocks are int32
            raise ValueError(
                f"`{name}` of a SCAPE state must be a whole number from {least} to 2**31 - 1, got {value!r}. The state"
                " is damaged: load another checkpoint."
            )
    for name in ("config", "names"):
        _check_mapping(name, whole.get(name))


def _check_mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"`{name}` of an optimizer state must be a dict, got {type(value).__name__}. The state is damaged: load"
            " another checkpoint."
        )


def _check_groups(saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    if not isinstance(saved, list) or len(saved) != len(groups):
        got = len(saved) if isinstance(saved, list) else type(saved).__name__
        raise ValueError(f"The state must have {len(groups)} parameter groups, got {got}. {_REMEDY}")
    for number, (theirs, mine) in enumerate(zip(saved, groups, strict=True)):
        _check_mapping(f"param_groups[{number}]", theirs)
        given = theirs.get("params")
        count = len(given) if isinstance(given, list) else None
        if count != len(mine["params"]):
            raise ValueError(
                f"Parameter group {number} of the state must have {len(mine['params'])} parameters, got {count}."
                f" {_REMEDY}"
            )
        try:
            problem = problem_of_group({**mine, **theirs})
        except (TypeError, ValueError) as error:
            problem = f"{error}."
        if problem is not None:
            raise ValueError(f"Parameter group {number} of the state cannot be taken: {problem}")


def _expected_entries(entries: Iterable[Any]) -> set[str]:
    """What every parameter's state must hold: what any of them holds."""
    held = [set(entry) for entry in entries if isinstance(entry, Mapping)]
    return {"exp_avg", "last_step"} | (set().union(*held) & set(_SAVED_AS.values()))


def _check_entry(entry: Any, name: str, parameter: Tensor, expected: set[str] | None) -> None:
    """One parameter's state; ``expected`` are the tensors that SCAPE's must hold, None for another optimizer's."""
    _check_mapping(f"state of {name}", entry)
    if "exp_avg" not in entry:
        raise ValueError(
            f"The state of {name} must hold a first moment `exp_avg`, got {sorted(map(str, entry))}. Load a state of"
            " AdamW, Adam, AdamS or ScapeOptimizer."
        )
    for kind in sorted(expected or {"exp_avg"} | ({"exp_avg_sq"} & set(entry))):
        _check_tensor(entry.get(kind), f"{kind} of {name}", parameter, integer=kind == "last_step")


def _check_tensor(tensor: Any, name: str, parameter: Tensor, *, integer: bool = False) -> None:
    kind = "integer" if integer else "floating-point"
    if not isinstance(tensor, Tensor) or tensor.is_floating_point() == integer or tensor.is_complex():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"The state's {name} must be a {kind} tensor, got {got}. {_REMEDY}")
    if tuple(tensor.shape) != tuple(parameter.shape):
        raise ValueError(
            f"The state's {name} must have shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}. {_REMEDY}"
        )


def _check_residuals(parameters: Parameters, whole: Mapping[str, Any]) -> None:
    residuals = whole.get("residuals")
    if not isinstance(residuals, list) or len(residuals) != whole["world_size"]:
        got = len(residuals) if isinstance(residuals, list) else type(residuals).__name__
        raise ValueError(
            f"A state of {whole['world_size']} ranks must hold as many residuals, got {got}. The state is damaged: load"
            " another checkpoint."
        )
    for rank, residual in enumerate(residuals):
        _check_mapping(f"residuals[{rank}]", residual)
        for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
            _check_tensor(residual.get(index), f"residual of {name!r} on rank {rank}", parameter)


def _check_mask(mask: Any, block_size: int) -> None:
    problem = None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype not in (torch.uint8, torch.uint16):
        problem = f"a {tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    elif mask.numel():
        rows = mask.to(torch.int32).sort(dim=1).values
        if int(rows.max()) >= block_size or bool((rows[:, 1:] == rows[:, :-1]).any()):
            problem = "positions that are outside or not distinct"
    if problem is not None:
        raise ValueError(
            f"A mask must be [blocks, q] uint8 or uint16, of distinct positions below {block_size}, got {problem}. The"
            " state is damaged: load another checkpoint."
        )


def _check_names(parameters: Parameters, saved: Mapping[int, str]) -> None:
    """Parameters are taken by position: one that stands elsewhere by its name would be given another's state."""
    mine = dict(zip(parameters.indices, parameters.names, strict=True))
    known = {name: index for index, name in mine.items()}
    renamed = []
    for index, name in mine.items():
        theirs = _plain_name(str(saved.get(index, "")))
        if theirs == _plain_name(name) or "parameter " in name or "parameter " in theirs:
            continue
        renamed.append(f"{theirs!r} (now {name!r})")
        if theirs in known:
            raise ValueError(
                f"Parameters must come in the checkpoint's order, got {name!r} as number {index}, which was {theirs!r}"
                " there. Build the optimizer over the parameters in the same order."
            )
    if renamed:
        warnings.warn(
            f"The checkpoint knows {len(renamed)} parameters by other names, the first as {renamed[0]}; shapes agree,"
            " and they are taken by position.",
            stacklevel=6,
        )


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _check_shards(snapshot: Snapshot, common: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    _check_description(common)
    _check_groups(common.get("param_groups"), groups)
    parameters = snapshot.parameters
    shapes, strides = common["shapes"], common["strides"]
    if set(shapes) != set(parameters.indices):
        odd = sorted(set(shapes) ^ set(parameters.indices))
        raise ValueError(
            f"The state must hold the model's {len(parameters.indices)} trained parameters, got {len(shapes)}; the"
            f" first that only one of them has is number {odd[0]}. {_REMEDY}"
        )
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        if tuple(shapes[index]) != tuple(parameter.shape):
            raise ValueError(
                f"The state of {name!r} (number {index}) must have shape {tuple(parameter.shape)}, got"
                f" {tuple(shapes[index])}. {_REMEDY}"
            )
        if tuple(strides[index]) != parameter.stride() and parameter.numel():
            raise ValueError(
                f"A sharded state of {name!r} must have its memory order {parameter.stride()}, got"
                f" {tuple(strides[index])}. Make it one file by `lightning-scape consolidate`, which has none."
            )
    _check_names(parameters, common["names"])


# ------------------------------------------------------------------------------- blocks <-> parameters


def _cut(flat: Tensor, layout: Layout, parameters: Parameters) -> Iterator[tuple[int, Tensor]]:
    """Each parameter's place and its part of ``flat [blocks * B]``, in its shape, as a contiguous copy."""
    found = {segment.index: segment for segment in layout.segments}
    for place, parameter in enumerate(parameters.tensors):
        if place not in found:  # a parameter without entries
            yield place, torch.empty(parameter.shape, dtype=flat.dtype)
            continue
        part = flat[found[place].first_block * layout.block_size :]
        yield place, part.as_strided(parameter.shape, parameter.stride()).clone(memory_format=torch.contiguous_format)


def _in_memory_order(tensor: Tensor, parameter: Tensor) -> Tensor:
    ordered = torch.empty_like(parameter, dtype=tensor.dtype, device="cpu")
    ordered.copy_(tensor)
    return ordered.as_strided((ordered.numel(),), (1,))


def _fill(flat: Tensor, tensors: Mapping[int, Tensor], snapshot: Snapshot, pieces: Iterable[Piece]) -> None:
    """Writes each piece's part of its parameter's tensor to its place in ``flat``, the blocks that the pieces count."""
    parameters = snapshot.parameters
    for piece in pieces:
        place = piece.segment.index
        source = _in_memory_order(tensors[parameters.indices[place]], parameters.tensors[place])
        flat[piece.of_blocks(snapshot.layout.block_size)].copy_(source[piece.of_parameter])
