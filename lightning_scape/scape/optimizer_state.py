"""The state of one optimizer: N ranks save it, any number of ranks loads it; as one file or as a directory of shards.

What is saved, as :mod:`lightning_scape.checkpoint.parts` has it: the shard's tensors are owned by the ranks and cut
anew on another number of them; every rank has a residual, and on another number of ranks each starts from their mean;
the mask is dropped if the blocks differ. :mod:`.form` shows how it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_scape.checkpoint.checks import frozen_since
from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.checkpoint.parts import OwnParts, Place, Source, fill
from lightning_scape.checkpoint.source import SavedShards, WholeState
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout
from lightning_scape.core.local_shards import numels_of
from lightning_scape.core.method import of_state
from lightning_scape.core.private_names import before_load
from lightning_scape.scape import keys
from lightning_scape.scape.checks import FORMAT, check, check_foreign, check_mask, check_whole
from lightning_scape.scape.config import ScapeConfig, usual_wire
from lightning_scape.scape.foreign import by_number, guess_second_moment, load_foreign
from lightning_scape.scape.form import FORM
from lightning_scape.scape.mask import SparsitySchedule
from lightning_scape.scape.snapshot import Snapshot
from lightning_scape.scape.state_elsewhere import StateElsewhere

__all__ = ["Loaded", "Snapshot", "hooked", "load", "own_parts"]


# ------------------------------------------------------------------------------------------------ saving


def own_parts(snapshot: Snapshot, communicator: Communicator, beside_state: Mapping[str, Any]) -> OwnParts:
    """This rank's part of the state: views, nothing is copied or sent.

    Args:
        snapshot: of the live state.
        communicator: its ranks.
        beside_state: ``param_groups``, and what the user's hooks add to a state dict.
    """
    layout, parameters, node, rank = snapshot.layout, snapshot.parameters, snapshot.node, communicator.rank
    pieces = layout.local(rank).pieces
    parts = [snapshot.owned(name, shard, pieces) for name, shard in snapshot.shard()]
    parts.append(snapshot.residual())
    mask, first = snapshot.masks.active, rank * layout.shard_blocks
    shapes = [None if mask is None else [blocks, mask.shape[1]] for blocks in _blocks_of_node(snapshot)]
    if mask is not None:
        rows = mask[first : min(first + layout.shard_blocks, layout.used_blocks)]
        parts.append(keys.mask({None: Chunk(rows, first, layout.used_blocks)} if len(rows) else {}))
    of_masks = {"mask_shape": shapes[0]} if node.world_size == 1 else {"mask_shape": None, "mask_shapes": shapes}
    added = {name: value for name, value in beside_state.items() if name != "param_groups"}
    facts = {**_facts(snapshot), **of_masks, "param_groups": beside_state["param_groups"]}
    facts |= {"beside_state": added} if added else {}
    common = FORM.common(facts, parts, parameters, communicator.world_size, node.world_size)
    return OwnParts(common, parts, parameters, communicator, node)


def _blocks_of_node(snapshot: Snapshot) -> list[int]:
    """Blocks that hold parameters, on each rank of a replica."""
    parameters, layout, shards = snapshot.parameters, snapshot.layout, snapshot.node.world_size
    if shards == 1:
        return [layout.used_blocks]
    numels = [numels_of(parameters.tensors, shards, shard) for shard in range(shards)]
    return [Layout(each, parameters.groups, layout.block_size, layout.world_size).used_blocks for each in numels]


def _facts(snapshot: Snapshot) -> dict[str, Any]:
    """What SCAPE knows besides its tensors."""
    return {
        "format": FORMAT,
        "config": snapshot.config.as_dict(),
        "step": int(snapshot.state.step),
        "calls": snapshot.state.calls,
        "second_moment_since": snapshot.state.exp_avg_sq_since,
        "warmup_steps": snapshot.masks.schedule.warmup_steps,
        "missed": snapshot.missed(),
        "names": dict(zip(snapshot.parameters.indices, snapshot.parameters.names, strict=True)),
        "block_size": snapshot.layout.block_size,
        "skipped_in_row": snapshot.clipping.skipped_in_row,
        "skipped_total": snapshot.clipping.skipped_total,
    }


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Loaded:
    """A saved state that has been read into fresh buffers. Nothing else has been changed yet."""

    param_groups: list[dict[str, Any]]
    """As saved; their options hold from now on."""
    notes: list[str]
    """Warnings for the user."""
    schedule: SparsitySchedule
    config: ScapeConfig
    """From now on."""
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


def hooked(optimizer: Optimizer, saved: Any) -> Any:
    """What the user's hooks make of a state that is about to be loaded.

    Args:
        optimizer: whose hooks; its ``state`` stands for tensors that are still on disk.
        saved: whole, or in a directory: of that they see what is beside its tensors.
    """
    if isinstance(saved, Mapping):
        return before_load(optimizer, dict(saved))
    if not isinstance(saved, SavedShards) or saved.form is not FORM:
        return saved  # which is an error
    groups, added = saved.common["param_groups"], saved.common.get("beside_state", {})
    changed = before_load(optimizer, {**added, "state": optimizer.state, "param_groups": groups})
    if not isinstance(changed["state"], StateElsewhere):
        return changed
    return replace(saved, common={**saved.common, "param_groups": changed["param_groups"]})


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
        if saved.form is not FORM:
            method = of_state(saved.common).title
            raise ValueError(
                f"A sharded state must be one of SCAPE, got one of {method}. Load it with {method}, and save it again"
                ' with state_dict_type="full": ScapeOptimizer takes the inner optimizer\'s state from that file.'
            )
        return _load(snapshot, saved, rank, groups)
    check_whole(saved)
    if "scape" not in saved:
        saved = by_number(saved, dict(zip(snapshot.parameters.indices, snapshot.parameters.names, strict=True)))
    source = WholeState(FORM, saved, snapshot.parameters)
    return (_load if "scape" in saved else _load_foreign)(snapshot, source, rank, groups)


def _load(snapshot: Snapshot, source: Source, rank: int, groups: Sequence[Mapping[str, Any]]) -> Loaded:
    """:func:`load` of a state of SCAPE, in either form."""
    common = source.common
    renamed = check(source, snapshot.parameters, groups)
    config, kept_on = _with_saved_wire(snapshot.config, common["config"])
    snapshot = replace(snapshot, config=config)
    changed = frozen_since(source.entries, snapshot.parameters)
    new = dict.fromkeys(set(snapshot.parameters.indices) - set(source.entries), common["step"])
    snapshot.set_steps(common["step"], {**common["missed"], **new}, rank)
    snapshot.state.calls = common["calls"]
    _read_shard(snapshot, source, rank)
    _set_second_moment(snapshot, source, rank, _from_now_on(groups, common["param_groups"]))
    resharded = _read_residual(snapshot, source, rank)
    mask, dropped = (None, []) if changed else _read_mask(snapshot, source)
    return Loaded(
        param_groups=common["param_groups"],
        notes=[*renamed, *changed, *_differences(config, common["config"]), *kept_on, *resharded, *dropped],
        schedule=_schedule(snapshot, common),
        config=config,
        mask=mask,
        skipped=(common["skipped_in_row"], common["skipped_total"]),
    )


def _load_foreign(snapshot: Snapshot, source: Source, rank: int, groups: Sequence[Mapping[str, Any]]) -> Loaded:
    """:func:`load` of a state of AdamW, Adam or AdamS."""
    saved = source.common["param_groups"]
    check_foreign(source, snapshot.parameters, groups)
    carried_over = load_foreign(snapshot, source, rank, _from_now_on(groups, saved))
    return Loaded(saved, [carried_over], snapshot.masks.schedule, snapshot.config)


def _from_now_on(mine: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups after the load: the saved options hold."""
    return [{**own, **theirs} for own, theirs in zip(mine, saved, strict=True)]


def _read_shard(snapshot: Snapshot, source: Source, rank: int) -> None:
    """Makes the buffers that the saved state needs, and reads this rank's part of every tensor of the shard."""
    state, names, known = snapshot.state, keys.held(source), source.entries
    if "master" in names and snapshot.parameters.need_masters:
        state.master = torch.zeros_like(state.exp_avg)
    packs = snapshot.config.wire_bits is not None
    # fp32 parameters lose it when the wire changes: it is less than a unit in an entry's last place.
    if "change_error" in names and (packs or snapshot.parameters.need_masters):
        state.change_error = torch.zeros_like(state.exp_avg)
    pieces = snapshot.layout.local(rank).pieces
    targets: dict[str, Chunk] = {}
    for name, shard in snapshot.shard():
        if name in names:
            part = snapshot.owned(name, shard, pieces)
            targets |= {part.key(index, Place()): chunk for index, chunk in part.held.items() if index in known}
    source.read(targets)


def _set_second_moment(snapshot: Snapshot, source: Source, rank: int, groups: Sequence[Mapping[str, Any]]) -> None:
    """Sets the step from which the second moment counts; guesses one for AdamS's state. The shard has been read."""
    state, common = snapshot.state, source.common
    if state.exp_avg_sq is None:
        return
    if "exp_avg_sq" in keys.held(source):
        state.exp_avg_sq_since = common["second_moment_since"]
    else:
        guess_second_moment(snapshot, groups, rank)


def _read_residual(snapshot: Snapshot, source: Source, rank: int) -> list[str]:
    """Reads this rank's residual. On another number of ranks, reads the mean of all, and returns a warning.

    Training depends on the residuals' mean over ranks, and that stays the same.
    """
    before, now = source.common["world_size"], snapshot.layout.world_size
    fill(source, snapshot.residual(), now, Place(rank))
    if before == now:
        return []
    flat = snapshot.node.world_size == source.common["shards"] == 1
    who, what = ("ranks", "masters and masks") if flat else ("replicas", "masters")
    return [
        f"The checkpoint was written by {before} {who}, this run has {now}: moments, last steps, {what}"
        " carry over exactly; each rank starts from the mean of the saved residuals."
    ]


def _read_mask(snapshot: Snapshot, source: Source) -> tuple[Tensor | None, list[str]]:
    """The saved mask, completed for all blocks. If it does not fit this run's blocks: None, and a warning."""
    layout, block_size, node = snapshot.layout, source.common["block_size"], snapshot.node
    if (saved := source.common["shards"]) != node.world_size:
        if source.find(keys.mask().key(None, Place(shards=saved))) is None:
            return None, []
        return None, [
            f"The checkpoint's masks are for {saved} ranks that hold a replica, this run has {node.world_size}: the"
            " first step makes its mask anew. All else carries over."
        ]
    key = keys.mask().key(None, Place(shard=node.rank, shards=saved))
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
    if snapshot.config.sparsity_warmup_steps is None and saved.get("sparsity"):
        warmup = 0 if snapshot.config.dense else common["warmup_steps"]
        return replace(schedule, warmup_steps=warmup)
    return schedule


def _with_saved_wire(config: ScapeConfig, saved: Mapping[str, Any]) -> tuple[ScapeConfig, list[str]]:
    """Options that go on with the checkpoint's wire, where none is chosen now; and a warning if it is unusual."""
    wire = saved.get("wire_dtype")
    if config.wire_dtype is not None or wire is None:
        return config, []
    usual, config = config.wire, replace(config, wire_dtype=wire)
    if wire == usual:
        return config, []
    return config, [
        f"The checkpoint was written with wire_dtype={wire!r}, and training goes on with it, for none is chosen now."
        f" New runs take {usual!r}: set wire_dtype={usual!r} to switch."
    ]


def _differences(config: ScapeConfig, saved: Mapping[str, Any]) -> list[str]:
    """A warning that names changed options, where they change the training."""
    mine = {**config.as_dict(), "wire_dtype": config.wire}
    silent = ["max_skipped", "check_replicas_every", "local_group_size", "reshard_after_forward"]
    if mine["sparsity_warmup_steps"] is None:  # then the checkpoint's holds
        silent.append("sparsity_warmup_steps")
    if saved.get("wire_dtype") is None and isinstance(sparsity := saved.get("sparsity"), (int, float)):
        saved = {**saved, "wire_dtype": usual_wire(sparsity)}
    differ = [
        f"{name}={saved.get(name)!r} (now {value!r})"
        for name, value in mine.items()
        if name not in silent and repr(saved.get(name)) != repr(value)
    ]
    if not differ:
        return []
    return [f"The checkpoint was written with other options: {', '.join(differ)}. Training goes on with those of now."]
