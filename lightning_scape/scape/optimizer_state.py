"""The state of one optimizer: N ranks save it, any number of ranks loads it; as one file or as a directory of shards.

A whole state, format 1, is tensors, numbers and strings only (``torch.load(weights_only=True)`` reads it)::

    {
      "state": {i: {"exp_avg": m, "exp_avg_sq": v, "last_step": clock, "step": t, ["master": ...], [...]}},
      "param_groups": [...],                            # as torch writes them
      "scape": {"format": 1, "config": {...}, "world_size": N, "step": t, "calls": n, "names": {i: name},
                "residuals": [{i: e}, ...],             # one dict per rank
                "mask": [blocks, q] or None, "mask_uses": n, "block_size": B, "skipped_in_row": n, "skipped_total": n},
    }

``i`` counts all parameters of the groups, as in torch's own state dicts; every tensor by parameter has its shape.
AdamW and Adam take it as it is: ``exp_avg``, ``exp_avg_sq`` and ``step`` are theirs. With the update of AdamS,
``exp_avg_sq`` is for them alone (:func:`~lightning_scape.checkpoint.foreign.add_second_moment`). Where several ranks
hold a replica together, tensors are those of the whole parameters all the same, and N is the number of replicas. Only
the masks are by rank of a replica then: ``"shards": L, "masks": {rank: mask}``, and ``"mask": None``.

A directory (:mod:`lightning_scape.checkpoint.dcp`) holds the same tensors by the keys of
:mod:`lightning_scape.checkpoint.source`. They are flat, in the parameter's memory order, one chunk for each shard that
meets the parameter. A whole state is merged shards: :func:`merge_shards` reads them from a directory,
:func:`consolidate` collects them from the live ranks. :func:`load` takes either form.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint.checks import FORMAT, check, check_foreign, check_mask, check_whole
from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.checkpoint.foreign import add_second_moment, by_number, guess_second_moment, load_foreign
from lightning_scape.checkpoint.source import (
    OwnShards,
    SavedShards,
    Source,
    WholeState,
    held,
    mask_key,
    parameter_of,
    residual_key,
    slot,
    state_key,
)
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout
from lightning_scape.core.local_shards import numels_of
from lightning_scape.scape.config import REMOVED_OPTIONS
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.snapshot import Snapshot

__all__ = ["Loaded", "Snapshot", "consolidate", "load", "merge_shards", "own_shards"]


# ------------------------------------------------------------------------------------------------ saving


def own_shards(snapshot: Snapshot, communicator: Communicator, param_groups: list[dict[str, Any]]) -> OwnShards:
    """This rank's part of the state: views, nothing is copied or sent."""
    layout, parameters, rank = snapshot.layout, snapshot.parameters, communicator.rank
    tensors: dict[str, Chunk] = {}
    for name, shard in snapshot.shard():
        tensors |= snapshot.chunks(functools.partial(state_key, name=name), shard, layout.local(rank).pieces)
    residual = snapshot.state.residual.view(-1)
    tensors |= snapshot.chunks(functools.partial(residual_key, rank), residual, layout.everything().pieces)
    mask, first, shards = snapshot.masks.active, rank * layout.shard_blocks, snapshot.shards
    if mask is not None and first < layout.used_blocks:
        rows = mask[first : min(first + layout.shard_blocks, layout.used_blocks)]
        tensors[mask_key(shards.rank, shards.world_size)] = Chunk(rows, first, layout.used_blocks)
    shapes = [None if mask is None else [blocks, mask.shape[1]] for blocks in _blocks_of_shards(snapshot)]
    common = {
        **_facts(snapshot, communicator.world_size),
        "shapes": {index: list(p.shape) for index, p in zip(parameters.indices, parameters.tensors, strict=True)},
        "strides": {index: list(p.stride()) for index, p in zip(parameters.indices, parameters.tensors, strict=True)},
        "tensors": [name for name, _ in snapshot.shard()],
        "mask_shape": shapes[0] if shards.world_size == 1 else None,
        **({} if shards.world_size == 1 else {"mask_shapes": shapes, "shards": shards.world_size}),
        "param_groups": param_groups,
    }
    return OwnShards(tensors, common)


def _blocks_of_shards(snapshot: Snapshot) -> list[int]:
    """Blocks that hold parameters, on each rank of a replica."""
    parameters, layout, shards = snapshot.parameters, snapshot.layout, snapshot.shards.world_size
    if shards == 1:
        return [layout.used_blocks]
    numels = [numels_of(parameters.tensors, shards, shard) for shard in range(shards)]
    return [Layout(each, parameters.groups, layout.block_size, layout.world_size).used_blocks for each in numels]


def _facts(snapshot: Snapshot, world_size: int) -> dict[str, Any]:
    """The facts of a state: all but its tensors and parameter groups."""
    return {
        "format": FORMAT,
        "config": snapshot.config.as_dict(),
        "world_size": world_size,
        "step": int(snapshot.state.step),
        "calls": snapshot.state.calls,
        "noise_samples": snapshot.state.local_samples,
        "second_moment_since": snapshot.state.exp_avg_sq_since,
        "warmup_steps": snapshot.masks.schedule.warmup_steps,
        "warmup_shape": snapshot.masks.schedule.shape,
        "missed": snapshot.missed(),
        "names": dict(zip(snapshot.parameters.indices, snapshot.parameters.names, strict=True)),
        "mask_uses": 0,  # for older versions, where a mask could serve several steps
        "block_size": snapshot.layout.block_size,
        "skipped_in_row": snapshot.clipping.skipped_in_row,
        "skipped_total": snapshot.clipping.skipped_total,
    }


def consolidate(snapshot: Snapshot, communicator: Communicator, to: int) -> dict[str, Any] | None:
    """The whole state but for ``param_groups`` on rank ``to``, in host memory; None on the others. Collective.

    While it collects, it needs memory for two more of the shards' tensors, whole (``8 P`` bytes), and then for all
    ranks' residuals of one parameter. Where L ranks hold a replica, rank ``to`` is the rank ``to % L`` of replica
    ``to // L``.
    """
    replica, place = divmod(to, snapshot.shards.world_size)
    tensors = _collected(snapshot, communicator, replica)
    if communicator.rank == replica and snapshot.shards.world_size > 1:
        tensors = _joined(snapshot, tensors, place)
    if (communicator.rank, snapshot.shards.rank) == (replica, place):
        return _merged(own_shards(snapshot, communicator, []).common, tensors)
    for _ in tensors:
        raise AssertionError("tensors arrive on one rank only")
    return None


def _joined(snapshot: Snapshot, tensors: Iterable[tuple[str, Tensor]], to: int) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all ranks of a replica, rows after rows, on its rank ``to``. Collective over the replica."""
    shards, parameters = snapshot.shards, snapshot.parameters
    device, ranks = snapshot.state.exp_avg.device, range(shards.world_size)
    place_of = {index: place for place, index in enumerate(parameters.indices)}
    numels = [numels_of(parameters.tensors, shards.world_size, rank) for rank in ranks]
    blocks = _blocks_of_shards(snapshot)
    for key, part in tensors:
        index = parameter_of(key)
        sizes = [blocks[rank] * part.shape[1] if index is None else numels[rank][place_of[index]] for rank in ranks]
        if not any(sizes):  # no message for nothing
            parts: list[Tensor] | None = [part.reshape(-1)] * len(sizes) if shards.rank == to else None
        else:  # as bytes, of the same number: gloo knows no uint16
            padded = torch.zeros(max(sizes), dtype=part.dtype, device=part.device)
            padded[: part.numel()] = part.reshape(-1)
            parts = shards.gather(padded.view(torch.uint8), to, device)
        if parts is None:
            continue
        cut = [each.view(part.dtype)[:size] for each, size in zip(parts, sizes, strict=True)]
        if index is not None:
            yield key, torch.cat(cut)
            continue
        yield from ((mask_key(rank, len(cut)), mask.view(blocks[rank], part.shape[1])) for rank, mask in enumerate(cut))


def merge_shards(saved: SavedShards) -> dict[str, Any]:
    """The whole state that :meth:`ScapeOptimizer.state_dict` would have given, read into host memory."""
    return {**_merged(saved.common, saved.tensors()), "param_groups": saved.common["param_groups"]}


def _merged(common: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """A whole state but for ``param_groups``, from its facts and its tensors by key, flat."""
    facts = dict(common)
    shapes, strides = facts.pop("shapes"), facts.pop("strides")
    for name in ("tensors", "mask_shape", "param_groups"):
        del facts[name]
    masks: dict[str, Any] = {"masks": {}} if facts.pop("mask_shapes", None) is not None else {}
    missed = facts.get("missed", {})
    residuals: list[dict[int, Tensor]] = [{} for _ in range(facts["world_size"])]
    whole = {
        "state": {index: {"step": facts["step"] - missed.get(index, 0)} for index in shapes},
        "scape": {**facts, "residuals": residuals, "mask": None, **masks},
    }
    for key, flat in tensors:
        place, name = slot(whole, key)
        index = parameter_of(key)
        shaped = flat if index is None else flat.as_strided(shapes[index], strides[index])
        # A copy, so that the memory behind the flat tensor can be freed.
        place[name] = torch.empty(shaped.shape, dtype=shaped.dtype, device="cpu").copy_(shaped)
    add_second_moment(whole)
    return whole


def _collected(snapshot: Snapshot, communicator: Communicator, to: int) -> Iterator[tuple[str, Tensor]]:
    """All ranks' shards on rank ``to``, as whole flat tensors by key; use each before the next. Collective."""
    layout, parameters, state = snapshot.layout, snapshot.parameters, snapshot.state
    device = state.exp_avg.device  # not the parameters': Lightning takes those to the CPU when a fit ends
    pieces = {piece.segment.index: piece for piece in layout.everything().pieces}
    places = {
        index: pieces[place].of_blocks(layout.block_size) if place in pieces else slice(0, 0)
        for place, index in enumerate(parameters.indices)
    }
    for name, shard in snapshot.shard():
        shards = communicator.gather(shard, to, device)
        if shards is not None:
            blocks = torch.cat(shards)
            del shards
            for index, entries in places.items():
                yield state_key(index, name), blocks[entries]
            del blocks
    residual = state.residual.view(-1)
    for index, entries in places.items():
        if entries.start == entries.stop:  # no message for nothing
            parts = [residual[entries]] * communicator.world_size if communicator.rank == to else []
        else:
            parts = communicator.gather(residual[entries], to, device) or []
        for rank, part in enumerate(parts):
            yield residual_key(rank, index), part
    if snapshot.masks.active is not None and communicator.rank == to:
        yield "mask", snapshot.masks.active[: layout.used_blocks]


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Loaded:
    """A saved state that has been read into fresh buffers. Nothing else has been changed yet."""

    param_groups: list[dict[str, Any]]
    """As saved; their options hold from now on."""
    notes: list[str]
    """Warnings for the user."""
    schedule: SparsitySchedule
    mask: Tensor | None = None
    skipped: tuple[int, int] | None = None
    """Skipped steps, those in a row and in all; None leaves the counters."""

    def take_up(self, snapshot: Snapshot) -> None:
        """Gives the warnings, then sets masks, schedule and counters. The second part cannot fail."""
        for note in self.notes:
            warnings.warn(note, stacklevel=3)  # whoever calls load_state_dict
        snapshot.masks.restore(self.mask)
        snapshot.masks.schedule = self.schedule
        if self.skipped is not None:
            clipping = snapshot.clipping
            clipping.skipped_in_row, clipping.skipped_total = self.skipped
            clipping.last_skipped = clipping.skipped_in_row > 0


def load(
    snapshot: Snapshot, saved: Mapping[str, Any] | SavedShards, rank: int, groups: Sequence[Mapping[str, Any]]
) -> Loaded:
    """Fills a snapshot's buffers with this rank's part of a saved state; see :meth:`ScapeOptimizer.load_state_dict`.

    Args:
        snapshot: its buffers are freshly allocated; only they are changed.
        saved: what :meth:`ScapeOptimizer.state_dict` gave, a state of AdamW, Adam or AdamS, or one in a directory.
        rank: its part is taken.
        groups: parameter groups of the optimizer.

    Returns:
        The rest. Take it up when all ranks have read their parts.

    Raises:
        ValueError: the state is not of this model, is damaged, or is of a newer format.
        OSError: a file cannot be read.
    """
    if isinstance(saved, SavedShards):
        if "sparseloco" in saved.common:
            raise ValueError(
                "A sharded state must be one of SCAPE, got one of SparseLoCo. Load it with SparseLoCo, and save it"
                ' again with state_dict_type="full": ScapeOptimizer takes the inner optimizer\'s state from that file.'
            )
        return _load(snapshot, saved, rank, groups)
    check_whole(saved)
    if "scape" not in saved:
        saved = by_number(saved, dict(zip(snapshot.parameters.indices, snapshot.parameters.names, strict=True)))
    source = WholeState(saved, snapshot.parameters)
    return (_load if "scape" in saved else _load_foreign)(snapshot, source, rank, groups)


def _load(snapshot: Snapshot, source: Source, rank: int, groups: Sequence[Mapping[str, Any]]) -> Loaded:
    """:func:`load` of a state of SCAPE, in either form."""
    common = source.common
    renamed = check(source, snapshot.parameters, groups)
    snapshot.set_steps(common["step"], common.get("missed", {}))
    snapshot.state.calls = common["calls"]
    _read_shard(snapshot, source, rank)
    _set_second_moment(snapshot, source, rank, _from_now_on(groups, common["param_groups"]))
    resharded = _read_residual(snapshot, source, rank)
    mask, dropped = _read_mask(snapshot, source)
    return Loaded(
        param_groups=common["param_groups"],
        notes=[*renamed, *_differences(snapshot.config.as_dict(), common["config"]), *resharded, *dropped],
        schedule=_schedule(snapshot, common),
        mask=mask,
        skipped=(common["skipped_in_row"], common["skipped_total"]),
    )


def _load_foreign(snapshot: Snapshot, source: Source, rank: int, groups: Sequence[Mapping[str, Any]]) -> Loaded:
    """:func:`load` of a state of AdamW, Adam or AdamS."""
    saved = source.common["param_groups"]
    check_foreign(source, snapshot.parameters, groups)
    carried_over = load_foreign(snapshot, source, rank, _from_now_on(groups, saved))
    return Loaded(saved, [carried_over], snapshot.masks.schedule)


def _from_now_on(mine: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups after the load: the saved options hold."""
    return [{**own, **theirs} for own, theirs in zip(mine, saved, strict=True)]


def _read_shard(snapshot: Snapshot, source: Source, rank: int) -> None:
    """Makes the buffers that the saved state needs, and reads this rank's part of every tensor of the shard."""
    state, names = snapshot.state, held(source)
    if "master" in names and snapshot.parameters.need_masters:
        state.master = torch.zeros_like(state.exp_avg)
    packs = snapshot.config.wire_bits is not None and snapshot.parameters.travel_as_changes(torch.uint8)
    if "change_error" in names and packs:  # else it ends with the wire that made it: less than a unit of each entry
        state.change_error = torch.zeros_like(state.exp_avg)
    if state.exp_avg_sq is not None and "noise" in names and "exp_avg_sq" not in names:
        state.local_exp_avg_sq = torch.zeros_like(state.exp_avg_sq)  # AdamS's gives AdamW's its second moment
    pieces = snapshot.layout.local(rank).pieces
    targets: dict[str, Chunk] = {}
    for name, shard in snapshot.shard():
        if name in names:
            targets |= snapshot.chunks(functools.partial(state_key, name=name), shard, pieces)
    source.read(targets)
    if state.local_exp_avg_sq is not None and "noise" in names:
        # The estimate is for the averaged gradient: it holds on any number of ranks with the same global batch.
        state.local_samples = source.common.get("noise_samples", source.common["calls"])


def _set_second_moment(snapshot: Snapshot, source: Source, rank: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """Sets the step from which the second moment counts; makes one from AdamS's state. The shard has been read."""
    state, common = snapshot.state, source.common
    if state.exp_avg_sq is None:
        return
    if "exp_avg_sq" in held(source):
        state.exp_avg_sq_since = common.get("second_moment_since", 0)
        return
    measured, state.local_exp_avg_sq = state.local_exp_avg_sq, None
    if measured is None or not state.local_samples:
        guess_second_moment(snapshot, groups, rank)
        return
    for piece in snapshot.layout.local(rank).pieces:
        entries = piece.of_blocks(snapshot.layout.block_size)
        started = 1 - float(groups[piece.segment.group]["betas"][1]) ** common["step"]
        state.exp_avg_sq.view(-1)[entries] = measured.view(-1)[entries] * started
    state.local_samples = 0


def _read_residual(snapshot: Snapshot, source: Source, rank: int) -> list[str]:
    """Reads this rank's residual. On another number of ranks, reads the mean of all, and returns a warning.

    Training depends on the residuals' mean over ranks, and that stays the same.
    """
    residual, layout = snapshot.state.residual.view(-1), snapshot.layout
    before, pieces = source.common["world_size"], layout.everything().pieces
    if before == layout.world_size:
        source.read(snapshot.chunks(functools.partial(residual_key, rank), residual, pieces))
        return []
    part = torch.zeros_like(residual)
    for other in range(before):
        source.read(snapshot.chunks(functools.partial(residual_key, other), part, pieces))
        residual += part
    residual /= before
    flat = snapshot.shards.world_size == source.common.get("shards", 1) == 1
    who, what = ("ranks", "masters and masks") if flat else ("replicas", "masters")
    return [
        f"The checkpoint was written by {before} {who}, this run has {layout.world_size}: moments, last steps, {what}"
        " carry over exactly; each rank starts from the mean of the saved residuals."
    ]


def _read_mask(snapshot: Snapshot, source: Source) -> tuple[Tensor | None, list[str]]:
    """The saved mask, completed for all blocks. If it does not fit this run's blocks: None, and a warning."""
    layout, block_size, shards = snapshot.layout, source.common["block_size"], snapshot.shards
    if (saved := source.common.get("shards", 1)) != shards.world_size:
        if source.find(mask_key(0, saved)) is None:
            return None, []
        return None, [
            f"The checkpoint's masks are for {saved} ranks that hold a replica, this run has {shards.world_size}: the"
            " first step makes its mask anew. All else carries over."
        ]
    key = mask_key(shards.rank, saved)
    if source.find(key) is None:
        return None, []
    mask = source.tensor(key)
    check_mask(mask, block_size)
    if block_size != layout.block_size or mask.shape[0] != layout.used_blocks:
        return None, [
            f"The checkpoint's masks are for blocks of {block_size} entries, this run's are {layout.block_size}: the"
            " first step makes its mask anew. All else carries over."
        ]
    positions = torch.arange(mask.shape[1], dtype=torch.int64, device="cpu").to(mask.dtype)
    filler = positions.expand(layout.blocks - layout.used_blocks, -1)
    return torch.cat([mask.cpu(), filler]).to(snapshot.state.exp_avg.device), []


def _schedule(snapshot: Snapshot, common: Mapping[str, Any]) -> SparsitySchedule:
    """The sparsity schedule after the load: a default warm-up goes on as in the run that wrote the state."""
    schedule, saved = snapshot.masks.schedule, common["config"]
    warmup = common.get("warmup_steps", saved.get("sparsity_warmup_steps"))
    if snapshot.config.sparsity_warmup_steps is None and warmup is not None and saved.get("sparsity"):
        shape = common.get("warmup_shape", "geometric")  # older states: there was no other
        return replace(schedule, warmup_steps=0 if snapshot.config.dense else warmup, shape=shape)
    return schedule


def _differences(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """A warning that names changed options, where they change the training."""
    silent = ["residual_device", "max_skipped", "check_replicas_every", "local_group_size", "reshard_after_forward"]
    if mine["sparsity_warmup_steps"] is None:  # then the checkpoint's holds
        silent.append("sparsity_warmup_steps")
    saved = {**saved, "update": saved.get("update", "adams")}  # the only one before there was a choice
    differ = [
        f"{name}={saved.get(name)!r} (now {value!r})"
        for name, value in mine.items()
        if name not in silent and repr(saved.get(name)) != repr(value)
    ]
    differ += [
        f"{name}={saved[name]!r} (now always {removed.now!r})"
        for name, removed in REMOVED_OPTIONS.items()
        if name in saved and repr(saved[name]) != repr(removed.now)
    ]
    if not differ:
        return []
    return [f"The checkpoint was written with other options: {', '.join(differ)}. Training goes on with those of now."]
