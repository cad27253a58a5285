"""The state of SparseLoCo: N ranks save it, any number of ranks loads it; as one file or as a directory.

Inside a window ranks differ, so a checkpoint holds every rank's part. A whole state is tensors, numbers and strings
only (``torch.load(weights_only=True)`` reads it)::

    {
      "state": ..., "param_groups": ...,        # the inner optimizer's, of rank 0
      "sparseloco": {"format": 1, "config": {...}, "world_size": N, "reduction": "sharded" or "gathered",
                     "average": "all", ..., "block_size": B, "names": [...], "numels": [...],
                     "shapes": [...], "optimizer": class, "options": [...], "shards": L,
                     "progress": {...}, "dropped": [in a row, in all],
                     "start": [blocks, B], "owner_error": [blocks, B] or [0, B],
                     "ranks": [{"parameters": [...], "error": [...], "launched": [...] or None,
                                "state": ..., "param_groups": ...}, ...]},
    }

Lists by parameter hold flat tensors. ``owner_error`` is empty where messages are gathered: nobody owns. A directory
(:mod:`lightning_scape.checkpoint.dcp`) holds the rows of ``start`` and ``owner_error`` that each rank owns, and each
rank's part as the bytes that ``torch.save`` makes of it.

Where the L ranks of a node hold a replica together (:mod:`.rows`), N counts the nodes. ``start`` and ``owner_error``
are lists then, by the place in the node, and ``ranks`` has N*L parts, a node's side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint.checks import check_whole
from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.checkpoint.foreign import dense_state, residual_norm
from lightning_scape.checkpoint.source import OwnShards, SavedShards
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import piece_views
from lightning_scape.scape.optimizer_state import merge_shards
from lightning_scape.sparseloco import carried, rows
from lightning_scape.sparseloco.config import OF_THE_MESH, SparseLoCoConfig
from lightning_scape.sparseloco.packed import KEY, pack, part_key, read_part, unpack
from lightning_scape.sparseloco.state import LocoState

__all__ = ["InnerLoads", "Live", "Loaded", "SavedShards", "consolidate", "load", "own_shards"]

FORMAT = 1


@dataclass(frozen=True)
class Live:
    """The objects that make up the state."""

    config: SparseLoCoConfig
    layout: Layout
    parameters: Parameters
    communicator: Communicator
    shards: Communicator
    everyone: Communicator
    """All ranks: those of ``communicator`` times those of ``shards``."""
    optimizer: torch.optim.Optimizer
    state: LocoState
    progress: Mapping[str, Any]
    dropped: tuple[int, int]

    @property
    def place(self) -> int:
        """This rank's number in a checkpoint."""
        return self.communicator.rank * self.shards.world_size + self.shards.rank

    @property
    def rule(self) -> carried.Rule:
        """How this run averages."""
        return carried.Rule.of(self.config, self.communicator.world_size)

    def facts(self) -> dict[str, Any]:
        """All but the tensors; the same on all ranks."""
        return {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "world_size": self.communicator.world_size,
            "reduction": self.rule.reduction,
            "average": self.rule.average,
            "shards": self.shards.world_size,
            "block_size": self.layout.block_size,
            "names": list(self.parameters.names),
            "indices": list(self.parameters.indices),
            "numels": [parameter.numel() for parameter in self.parameters.tensors],
            "shapes": [list(parameter.shape) for parameter in self.parameters.tensors],
            "optimizer": type(self.optimizer).__name__,
            "options": sorted(self.optimizer.defaults),
            "progress": dict(self.progress),
            "dropped": list(self.dropped),
        }

    def part(self) -> dict[str, Any]:
        """What only this rank knows; views."""
        inner = rows.plain_state(self.optimizer.state_dict())
        return {
            "parameters": self.parameters.flat,
            "error": _by_parameter(self.state.error, self.layout, len(self.parameters.tensors)),
            "launched": self.state.launched,
            "state": inner["state"],
            "param_groups": inner["param_groups"],
        }


def _by_parameter(blocks: Tensor, layout: Layout, count: int) -> list[Tensor]:
    """Each parameter's entries, flat; one without entries has no block."""
    parts = [blocks.new_empty(0)] * count
    pieces = layout.everything().pieces
    for piece, part in zip(pieces, piece_views(blocks, pieces), strict=True):
        parts[piece.segment.index] = part
    return parts


class InnerLoads:
    """Loads of the inner optimizer. Given a state that was collected from all ranks, it goes back to all of them.

    Fabric's ``optimizer.state_dict()`` gives such a state on rank 0, and an empty one on the others.

    Args:
        optimizer: the inner optimizer.
        load: takes up a whole state, on every rank.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, load: Callable[[Mapping[str, Any]], None]) -> None:
        self._optimizer, self._load, self._own = optimizer, load, False
        self.handle = optimizer.register_load_state_dict_pre_hook(self._before)

    def load(self, inner: dict[str, Any]) -> None:
        """Loads an inner state."""
        self._own = True
        try:
            self._optimizer.load_state_dict(inner)
        finally:
            self._own = False

    def _before(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        if self._own or (state_dict and KEY not in state_dict):
            return None
        self._load(state_dict)
        return optimizer.state_dict()


# ------------------------------------------------------------------------------------------------ saving


def consolidate(live: Live, to: int) -> dict[str, Any] | None:
    """The whole state on rank ``to``, in host memory; None on the others. Collective.

    Args:
        live: the state.
        to: among all ranks.
    """
    used = live.layout.used_blocks
    held = live.layout.rows_of(live.communicator.rank)

    def packed_part() -> Tensor:
        own = {
            **live.part(),
            "start": live.state.start[held][: max(0, used - held.start)].clone(),  # else all of its memory is saved
            "owner_error": live.state.owner_error[: max(0, used - held.start)].clone(),
        }
        return pack(own)

    packed = live.everyone.raise_on_all_ranks(packed_part)  # an optimizer of the user's own may hold anything
    sizes = live.everyone.all_gather_object((packed.numel(), live.place))
    longest = max(size for size, _ in sizes)
    padded = torch.nn.functional.pad(packed, (0, longest - packed.numel()))
    gathered = live.everyone.gather(padded, to, live.parameters.device)
    # Rank `to` unpacks what other ranks' optimizers hold: the others learn of it where it cannot.
    return live.everyone.raise_on_all_ranks(lambda: None if gathered is None else _assembled(live, gathered, sizes))


def _assembled(live: Live, gathered: list[Tensor], sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """The whole state from every rank's bytes.

    Args:
        live: this rank's.
        gathered: every rank's packed part, padded.
        sizes: length and place of each.
    """
    shards = live.shards
    ranks: list[dict[str, Any]] = [{}] * len(sizes)
    for part, (size, at) in zip(gathered, sizes, strict=True):
        ranks[at] = unpack(part[:size], part_key(at))
    whole = {**live.facts(), "ranks": ranks}
    for name in ("start", "owner_error"):
        blocks = [part.pop(name) for part in ranks]
        each = [torch.cat(blocks[shard :: shards.world_size]) for shard in range(shards.world_size)]
        whole[name] = each[0] if len(each) == 1 else each
    first = rows.joined(ranks[: shards.world_size], rows.shapes_of(live.parameters))
    return {"state": first["state"], "param_groups": first["param_groups"], KEY: whole}


def own_shards(live: Live) -> OwnShards:
    """This rank's part of the state, for a directory. Nothing is sent."""
    layout, replicas, shards = live.layout, live.communicator, live.shards
    held = layout.rows_of(replicas.rank)
    stop = min(held.stop, layout.used_blocks)
    tensors = {part_key(live.place): Chunk.whole(pack(live.part()))}
    if held.start < stop:
        own = {"start": live.state.start[held.start : stop], "owner_error": live.state.owner_error[: stop - held.start]}
        for name, blocks in own.items():
            if not len(blocks):  # nobody owns
                continue
            tensors[_blocks_key(name, shards.rank, shards.world_size)] = Chunk(blocks, held.start, layout.used_blocks)
    return OwnShards(tensors, {KEY: live.facts()})


def whole_state(saved: SavedShards) -> dict[str, Any]:
    """The whole state that :meth:`SparseLoCo.state_dict` would have given, read from a directory into host memory."""
    facts = saved.common[KEY]
    shards: int = facts.get("shards", 1)
    ranks = [read_part(saved, place) for place in range(facts["world_size"] * shards)]
    whole = {**facts, "ranks": ranks}
    for name in ("start", "owner_error"):
        keys = [f"{saved.key}.{_blocks_key(name, shard, shards)}" for shard in range(shards)]
        empty = torch.empty(0, facts["block_size"], dtype=torch.float32, device="cpu")  # is not stored
        each = [empty if saved.directory.find(key) is None else saved.directory.tensor(key) for key in keys]
        whole[name] = each[0] if shards == 1 else each
    indices = facts.get(
        "indices", range(len(facts["shapes"]))
    )  # older states: without frozen parameters they are these
    shapes = {index: shape for index, shape in zip(indices, facts["shapes"], strict=True) if shape}
    first = rows.joined(ranks[:shards], shapes)
    return {"state": first["state"], "param_groups": first["param_groups"], KEY: whole}


def _blocks_key(name: str, shard: int, shards: int) -> str:
    return name if shards == 1 else f"{name}.{shard}"


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Loaded:
    """A saved state that has been read. Nothing has been changed yet."""

    inner: dict[str, Any]
    """State dict of the inner optimizer."""
    state: LocoState | None = None
    """None: a window begins at the next step."""
    parameters: list[Tensor] | None = None
    """This rank's, flat; None: they stay."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)
    """Warnings for the user."""

    def warn(self) -> None:
        """Gives the warnings."""
        for note in self.notes:
            warnings.warn(note, stacklevel=4)  # whoever calls load_state_dict


class _Saved:
    """A saved state, whole or in a directory, as what this rank holds of its parameters."""

    def __init__(self, saved: Mapping[str, Any] | SavedShards, live: Live) -> None:
        self._saved, self._live = saved, live
        self.facts: Mapping[str, Any] = saved.common[KEY] if isinstance(saved, SavedShards) else saved[KEY]
        self.shards: int = self.facts.get("shards", 1)

    @property
    def owned(self) -> bool:
        """Whether it holds an owners' error. States of before do also where messages were gathered: zeros."""
        return bool(self.facts.get("reduction") != "gathered")

    def flats(self, name: str) -> list[Tensor]:
        """``start`` or ``owner_error``, by parameter, flat."""
        if self.shards == self._live.shards.world_size:
            return self._flats_of(name, self._live.shards.rank)
        each = [self._flats_of(name, shard) for shard in range(self.shards)]
        whole = [torch.cat(parts) for parts in zip(*each, strict=True)]
        return rows.own_rows(whole, self._live.parameters)

    def part(self, replica: int) -> dict[str, Any]:
        """Of a saved replica."""
        if self.shards == self._live.shards.world_size:
            return self._part(replica * self.shards + self._live.shards.rank)
        parts = [self._part(replica * self.shards + shard) for shard in range(self.shards)]
        return rows.cut(rows.joined(parts, rows.shapes_of(self._live.parameters)), self._live.parameters)

    def _flats_of(self, name: str, shard: int) -> list[Tensor]:
        live, facts = self._live, self.facts
        layout = rows.layout_of(live.parameters, facts["block_size"], facts["world_size"], self.shards, shard)
        return _by_parameter(self._blocks(name, shard, layout), layout, len(live.parameters.tensors))

    def _blocks(self, name: str, shard: int, layout: Layout) -> Tensor:
        if not layout.used_blocks:  # nothing is saved
            return torch.empty(0, layout.block_size, dtype=torch.float32, device="cpu")
        if isinstance(self._saved, SavedShards):
            return self._saved.directory.tensor(f"{self._saved.key}.{_blocks_key(name, shard, self.shards)}")
        found: Tensor = self.facts[name] if self.shards == 1 else self.facts[name][shard]
        return found

    def _part(self, place: int) -> dict[str, Any]:
        if isinstance(self._saved, SavedShards):
            return read_part(self._saved, place)
        found: dict[str, Any] = self.facts["ranks"][place]
        return found


def load(live: Live, saved: Mapping[str, Any] | SavedShards) -> Loaded:
    """Fills the buffers of ``live`` with this rank's part of a saved state; see :meth:`SparseLoCo.load_state_dict`.

    Args:
        live: its buffers are freshly allocated; only they are changed.
        saved: a state of SparseLoCo, of its inner optimizer, or of SCAPE.

    Raises:
        ValueError: the state is not of this model, is of a newer format, or does not fit the inner optimizer.
    """
    content = saved.common if isinstance(saved, SavedShards) else saved
    if KEY not in content:
        return _load_inner(saved, live)
    source = _Saved(saved, live)
    _check(source.facts, live)
    facts = source.facts
    before, now, rank = facts["world_size"], live.communicator.world_size, live.communicator.rank
    _fill(live.state.start, live.layout, source.flats("start"))
    notes = _differences(live.config.as_dict(), facts["config"]) + carried.notes(carried.Rule.saved(facts), live.rule)
    part = source.part(rank % before)
    if before != now:
        part = {**part, **_means(source, before)}
        notes.append(
            f"The checkpoint was written by {before} ranks, this run has {now}: starting point and owners' errors carry"
            " over exactly; each rank takes the mean of the saved error feedbacks and parameters, and the inner"
            f" optimizer's state of rank {rank % before}."
        )
    _fill(live.state.error, live.layout, part["error"])
    _carry(source, live)
    if part["launched"] is not None:
        device = live.parameters.device
        live.state.launched = [
            flat.to(device, parameter.dtype, copy=True)
            for flat, parameter in zip(part["launched"], live.parameters.tensors, strict=True)
        ]
    return Loaded(
        inner={"state": part["state"], "param_groups": part["param_groups"]},
        state=live.state,
        parameters=part["parameters"],
        progress=facts["progress"],
        dropped=tuple(facts["dropped"]),
        notes=notes,
    )


def _carry(source: _Saved, live: Live) -> None:
    """Takes up what the owners owe."""
    if not source.owned:
        return
    state = live.state
    owed = state.start.new_zeros(state.start.shape)
    _fill(owed, live.layout, source.flats("owner_error"))
    if live.rule.reduction == "sharded":
        state.owner_error.copy_(owed[live.layout.rows_of(live.communicator.rank)])
    else:  # nobody owns: it joins every rank's, so their mean
        state.error += owed


def _load_inner(saved: Mapping[str, Any] | SavedShards, live: Live) -> Loaded:
    """A state without SparseLoCo's part: of the inner optimizer, or of SCAPE, whose AdamW is taken."""
    content = saved.common if isinstance(saved, SavedShards) else saved
    if "scape" in content or (isinstance(saved, SavedShards) and "shapes" in content):
        return _load_scape(merge_shards(saved) if isinstance(saved, SavedShards) else saved, live)
    if not {"state", "param_groups"} <= set(content):
        raise ValueError(
            "The state must be one of SparseLoCo, of SCAPE, or of the inner optimizer, got"
            f" {sorted(map(str, content))}. Load the model alone, or another checkpoint."
        )
    note = "The checkpoint was trained without SparseLoCo: error feedback begins at zero, and a window begins now."
    return Loaded(dict(content), progress=_progress_of(content), notes=[note])


def _progress_of(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Steps that an inner state has behind it, as far as its optimizer counts them."""
    counts = [entry["step"] for entry in inner["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    return {"steps": max((int(count) for count in counts), default=0)}


def _load_scape(saved: Mapping[str, Any], live: Live) -> Loaded:
    check_whole(saved)
    if not isinstance(live.optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        raise ValueError(
            "SparseLoCo must wrap AdamW or Adam to go on from a state of SCAPE, got"
            f" {type(live.optimizer).__name__}. Wrap AdamW, or load the model alone."
        )
    for index, parameter in zip(live.parameters.indices, live.parameters.tensors, strict=True):
        found = saved["state"].get(index, {}).get("exp_avg")
        got = tuple(found.shape) if isinstance(found, Tensor) else None
        if got != tuple(parameter.shape):
            raise ValueError(
                f"The state must be of this model, got first moments of shape {got} for parameter {index}, which has"
                f" {tuple(parameter.shape)}. Build the model, and freeze its parameters, as when it was saved."
            )
    inner, moments = dense_state(saved)
    note = (
        f"The checkpoint was trained with SCAPE: {moments} as AdamW's. Its residuals, gradients that were not yet sent,"
        f" are dropped: an L2 norm of {residual_norm(saved):.3g} (root mean square over {saved['scape']['world_size']}"
        " ranks). Error feedback begins at zero, and a window begins now."
    )
    return Loaded(inner, progress=_progress_of(inner), notes=[note])


def _check(facts: Mapping[str, Any], live: Live) -> None:
    if facts["format"] > FORMAT:
        raise ValueError(
            f"The state's format must be at most {FORMAT}, got {facts['format']}: a newer lightning_scape wrote it."
            " Update the package."
        )
    mine = live.facts()
    if facts["numels"] != mine["numels"]:
        raise ValueError(
            f"The state must be of this model, got parameters of {facts['numels']} entries, and the optimizer has"
            f" {mine['numels']}. Build the model, and freeze its parameters, as they were when it was saved."
        )
    for place, (saved, here) in enumerate(zip(facts.get("shapes", mine["shapes"]), mine["shapes"], strict=True)):
        if list(saved) != here:
            raise ValueError(
                f"The state must be of this model, got shape {tuple(saved)} for {mine['names'][place]!r}, which has"
                f" {tuple(here)}. Build the model, and order its parameters, as they were when it was saved."
            )
    _check_order(facts["names"], mine["names"])
    _check_optimizer(facts, mine)


def _check_order(saved: Sequence[str], here: Sequence[str]) -> None:
    """Names may all be others (of a host, of a wrapper); but where they are the same ones, so must be their order."""
    if set(saved) != set(here):
        return
    for place, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        if theirs != ours:
            raise ValueError(
                f"The state must be of this model, got {theirs!r} in place {place}, where the optimizer has {ours!r}."
                " Give the parameters to the optimizer in the order in which they were saved."
            )


def _check_optimizer(facts: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Its class must be the same. So must its options, but for those that another release of torch adds or drops."""
    saved, here = (set(each.get("options", mine["options"])) for each in (facts, mine))
    name = facts.get("optimizer", mine["optimizer"])
    if name != mine["optimizer"]:
        said = f"one of {name}, and SparseLoCo wraps {mine['optimizer']}"
    elif not (saved <= here or here <= saved):
        said = f"one with the options {sorted(saved)}, and {mine['optimizer']} has {sorted(here)}"
    else:
        return
    raise ValueError(
        f"The state must be of the inner optimizer, got {said}. Wrap the optimizer that it was saved with, or load the"
        " model alone."
    )


def _differences(mine: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    changed = [
        f"{name}={value!r} (checkpoint: {saved.get(name)!r})"
        for name, value in mine.items()
        if name not in OF_THE_MESH and value != saved.get(name)
    ]
    if not changed:
        return []
    return [f"Options differ from the checkpoint's, and those given now hold: {', '.join(changed)}."]


def _fill(blocks: Tensor, layout: Layout, flats: Sequence[Tensor]) -> None:
    """Copies each parameter's entries into the blocks; pads stay."""
    pieces = layout.everything().pieces
    for piece, place in zip(pieces, piece_views(blocks, pieces), strict=True):
        place.copy_(flats[piece.segment.index])


def _means(source: _Saved, count: int) -> dict[str, Any]:
    """Means over the saved ranks, in fp32: training goes on from the same mean error and the same mean parameters."""
    means: dict[str, Any] = {}
    for rank in range(count):
        part = source.part(rank)
        for name in ("parameters", "error", "launched"):
            flats = part[name]
            if flats is None:
                means[name] = None
                continue
            total = means.setdefault(name, [torch.zeros_like(flat, dtype=torch.float32) for flat in flats])
            for sum_, flat in zip(total, flats, strict=True):
                sum_ += flat.float() / count
    return means
