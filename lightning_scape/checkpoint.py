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
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_scape.clipping import GradientClipping
from lightning_scape.collectives import Communicator
from lightning_scape.config import ScapeConfig
from lightning_scape.layout import Layout, Piece
from lightning_scape.mask import DelayedMask
from lightning_scape.parameters import Parameters
from lightning_scape.state import SHARD_TENSORS, ScapeState

FORMAT = 1
_SAVED_AS = dict(
    zip(SHARD_TENSORS, ("exp_avg", "last_step", "master", "local_exp_avg", "evidence", "noise"), strict=True)
)
_REMEDY = "Load it into the same model with the same parameter groups."


@dataclass(frozen=True)
class Snapshot:
    """The live objects that make up an optimizer's state."""

    state: ScapeState
    layout: Layout
    config: ScapeConfig
    parameters: Parameters
    masks: DelayedMask
    clipping: GradientClipping


def consolidate(snapshot: Snapshot, communicator: Communicator, to: int) -> dict[str, Any] | None:
    """The whole state but for ``param_groups`` on rank ``to``, in host memory; None on the others. Collective."""
    layout, parameters, state = snapshot.layout, snapshot.parameters, snapshot.state
    step = int(state.step)
    device = state.momentum.device  # not the parameters': Lightning takes those to the CPU when a fit ends
    by_parameter: dict[int, dict[str, Any]] = {index: {"step": step} for index in parameters.indices}
    for name, saved_as in _SAVED_AS.items():
        shard: Tensor | None = getattr(state, name)
        if shard is None:
            continue
        shards = communicator.collect(shard.view(-1), to, device)
        if shards is not None:
            for place, tensor in _cut(torch.cat(shards), layout, parameters):
                by_parameter[parameters.indices[place]][saved_as] = tensor
    residuals = communicator.collect(state.residual.view(-1), to, device)
    if residuals is None:
        return None
    by_rank = []
    while residuals:  # each is let go once it is cut up
        cut = _cut(residuals.pop(0), layout, parameters)
        by_rank.append({parameters.indices[place]: tensor for place, tensor in cut})
    mask = snapshot.masks.active
    return {
        "state": by_parameter,
        "scape": {
            "format": FORMAT,
            "config": snapshot.config.as_dict(),
            "world_size": communicator.world_size,
            "step": step,
            "calls": state.calls,
            "names": dict(zip(parameters.indices, parameters.names, strict=True)),
            "residuals": by_rank,
            "mask": None if mask is None else mask[: layout.used_blocks].cpu().clone(),
            "mask_uses": snapshot.masks.uses,
            "block_size": layout.block_size,
            "skipped_in_row": snapshot.clipping.skipped_in_row,
            "skipped_total": snapshot.clipping.skipped_total,
        },
    }


def load(snapshot: Snapshot, saved: Mapping[str, Any], rank: int, group_count: int) -> None:
    """Fills a snapshot with this rank's part of a whole state; see :meth:`ScapeOptimizer.load_state_dict`.

    Args:
        snapshot: freshly allocated buffers, and the live masks and counters.
        saved: what :meth:`ScapeOptimizer.state_dict` gave, or a state of AdamW, Adam or AdamS.
        rank: whose part is taken.
        group_count: parameter groups of the optimizer.

    Raises:
        ValueError: the state is not of this model, or of a newer format. Nothing has been changed then.
    """
    _check(snapshot, saved, group_count)
    snapshot.masks.restore(None, 0)
    if "scape" not in saved:
        _load_first_moments(snapshot, saved["state"], rank)
        return
    whole, layout, state = saved["scape"], snapshot.layout, snapshot.state
    _tell_differences(snapshot.config.as_dict(), whole["config"])
    state.step.fill_(whole["step"])
    state.clock.fill_(whole["step"])  # of the pads, which are visited at every step
    state.calls = whole["calls"]
    snapshot.clipping.skipped_in_row = whole["skipped_in_row"]
    snapshot.clipping.skipped_total = whole["skipped_total"]
    snapshot.clipping.last_skipped = whole["skipped_in_row"] > 0
    if "master" in next(iter(saved["state"].values())) and snapshot.parameters.need_masters:
        state.master = torch.zeros_like(state.momentum)
    for name, saved_as in _SAVED_AS.items():
        shard: Tensor | None = getattr(state, name)
        tensors = {index: entry[saved_as] for index, entry in saved["state"].items() if saved_as in entry}
        if shard is not None and tensors:
            _fill(shard.view(-1), tensors, snapshot, layout.shard_pieces(rank))
    _load_residual(snapshot, whole, rank)
    mask = whole["mask"]
    if mask is not None and whole["block_size"] == layout.block_size and mask.shape[0] == layout.used_blocks:
        filler = torch.arange(mask.shape[1]).expand(layout.blocks - layout.used_blocks, -1).to(mask.dtype)
        snapshot.masks.restore(torch.cat([mask, filler]).to(state.momentum.device), whole["mask_uses"])
    elif mask is not None:
        warnings.warn(
            f"The checkpoint's masks are for blocks of {whole['block_size']} entries, this run's are"
            f" {layout.block_size}: the first step makes its mask anew. All else carries over.",
            stacklevel=4,
        )


def _check(snapshot: Snapshot, saved: Mapping[str, Any], group_count: int) -> None:
    parameters = snapshot.parameters
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        raise ValueError(
            "An optimizer state must have `state` and `param_groups`, got"
            f" {sorted(saved) if isinstance(saved, Mapping) else type(saved).__name__}. {_REMEDY}"
        )
    version = saved.get("scape", {}).get("format", FORMAT)
    if version > FORMAT:
        raise ValueError(
            f"The state's format must be at most {FORMAT}, got {version}: it was written by a newer lightning_scape."
            " Upgrade this installation."
        )
    if len(saved["param_groups"]) != group_count:
        raise ValueError(
            f"The state must have {group_count} parameter groups, got {len(saved['param_groups'])}. {_REMEDY}"
        )
    state = saved["state"]
    odd = sorted(set(state) ^ set(parameters.indices))
    if "scape" not in saved:  # torch leaves out what never had a gradient
        odd = sorted(set(state) - set(parameters.indices))
    if odd:
        raise ValueError(
            f"The state must hold the model's {len(parameters.indices)} trained parameters, got {len(state)}; the first"
            f" that only one of them has is number {odd[0]}. {_REMEDY}"
        )
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        if index not in state:
            continue
        if "exp_avg" not in state[index]:
            raise ValueError(
                f"The state of {name!r} (number {index}) must hold a first moment `exp_avg`, got"
                f" {sorted(state[index])}. Load a state of AdamW, Adam, AdamS or ScapeOptimizer."
            )
        shape = tuple(state[index]["exp_avg"].shape)
        if shape != tuple(parameter.shape):
            raise ValueError(
                f"The state of {name!r} (number {index}) must have shape {tuple(parameter.shape)}, got {shape}."
                f" {_REMEDY}"
            )


def _tell_differences(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Warns of options that change how training goes on; where the residual lives and what is checked does not."""
    silent = ("residual_device", "max_skipped", "check_replicas_every")
    differ = [
        f"{name}={saved.get(name)!r} (now {value!r})"
        for name, value in mine.items()
        if name not in silent and saved.get(name) != value
    ]
    if differ:
        warnings.warn(
            f"The checkpoint was written with other options: {', '.join(differ)}. Training goes on with those of now.",
            stacklevel=5,
        )


def _load_first_moments(snapshot: Snapshot, state: Mapping[int, Mapping[str, Any]], rank: int) -> None:
    step = max((int(entry.get("step", 0)) for entry in state.values()), default=0)
    snapshot.state.step.fill_(step)
    snapshot.state.clock.fill_(step)
    moments = {
        index: state[index]["exp_avg"] if index in state else torch.zeros(parameter.shape)
        for index, parameter in zip(snapshot.parameters.indices, snapshot.parameters.tensors, strict=True)
    }
    _fill(snapshot.state.momentum.view(-1), moments, snapshot, snapshot.layout.shard_pieces(rank))
    warnings.warn(
        f"The checkpoint was not written by SCAPE: first moments and step ({step}) carry over; a second moment, if any,"
        " does not (AdamS has none), and residuals start at zero.",
        stacklevel=5,
    )


def _load_residual(snapshot: Snapshot, whole: Mapping[str, Any], rank: int) -> None:
    residual, world_size = snapshot.state.residual.view(-1), snapshot.layout.world_size
    saved: Sequence[Mapping[int, Tensor]] = whole["residuals"]
    if len(saved) == world_size:
        _fill(residual, saved[rank], snapshot, snapshot.layout.pieces())
        return
    # Every rank takes the mean: the mean over ranks, which is what training depends on, stays what it was.
    mean = {index: torch.stack([part[index] for part in saved]).mean(0) for index in saved[0]}
    _fill(residual, mean, snapshot, snapshot.layout.pieces())
    warnings.warn(
        f"The checkpoint was written by {len(saved)} ranks, this run has {world_size}: momentum, clocks, masters and"
        " masks carry over exactly; each rank starts from the mean of the saved residuals.",
        stacklevel=5,
    )


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
