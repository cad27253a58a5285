"""The state of SparseLoCo: N ranks save it, any number of ranks loads it; as one file or as a directory.

Inside a window ranks differ, so a checkpoint holds every rank's part. By :mod:`lightning_scape.checkpoint.parts`:

================ ============ ==========================================================================================
part             on others    what it is
================ ============ ==========================================================================================
``start``        cut          where all ranks set out from; each saves the rows that it would own
``owner_error``  cut          what owners have averaged and not yet sent back; not there where messages are gathered
``error``        mean         error feedback
``parameters``   mean         where the rank's inner steps have led
``launched``     mean         likewise, when the exchange under way began; not there where none is
``inner``        take         the inner optimizer's state dict
================ ============ ==========================================================================================

:class:`~lightning_scape.checkpoint.source.Form` shows how it is written; ``state`` and ``param_groups`` of a whole
state are the inner optimizer's, of rank 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.checkpoint.checks import check_model, frozen_since
from lightning_scape.checkpoint.inner import inner_for, inner_part
from lightning_scape.checkpoint.parts import OwnParts, Part, Place, Source, fill, of_blocks, of_flats, read_flats
from lightning_scape.checkpoint.source import Form, SavedShards, WholeState
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.layout import Layout
from lightning_scape.core.method import Method, of_whole
from lightning_scape.core.parameters import Parameters
from lightning_scape.sparseloco.config import OF_THE_MESH, SparseLoCoConfig
from lightning_scape.sparseloco.state import LocoState

FORMAT = 1
KEY = "sparseloco"
"""Key of the facts in SparseLoCo's states."""
FORM = Form(KEY)


class Rule(NamedTuple):
    """How a run averages: its options, with the defaults filled in.

    If a load changes the rule with the number of ranks, all ranks take the mean ``e`` of the saved errors. So all send
    the same entries, every rule divides their sum by N, and the parameters move by ``e`` once. What an owner owes joins
    ``e`` as it is, because it has been divided already.
    """

    reduction: str
    average: str

    @classmethod
    def of(cls, config: SparseLoCoConfig, ranks: int) -> Rule:
        """The rule of a run."""
        return cls("gathered" if config.gathers(ranks) else "sharded", config.averages(ranks))

    def __str__(self) -> str:
        return f"{self.reduction!r} with average={self.average!r}"


@dataclass(frozen=True)
class Live:
    """The objects that make up the state."""

    config: SparseLoCoConfig
    layout: Layout
    parameters: Parameters
    communicator: Communicator
    node: Communicator
    everyone: Communicator
    """All ranks: those of ``communicator`` times those of ``node``."""
    optimizer: torch.optim.Optimizer
    state: LocoState
    progress: Mapping[str, Any]
    dropped: tuple[int, int]

    @property
    def place(self) -> Place:
        """This rank's place in a checkpoint."""
        return Place(self.communicator.rank, self.node.rank, self.node.world_size)

    @property
    def rule(self) -> Rule:
        """How this run averages."""
        return Rule.of(self.config, self.communicator.world_size)

    def facts(self) -> dict[str, Any]:
        """What SparseLoCo knows besides its tensors; the same on all ranks."""
        return {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "reduction": self.rule.reduction,
            "average": self.rule.average,
            "block_size": self.layout.block_size,
            "names": list(self.parameters.names),
            "optimizer": type(self.optimizer).__name__,
            "options": sorted(self.optimizer.defaults),
            "progress": dict(self.progress),
            "dropped": list(self.dropped),
        }

    def blocks(self, blocks: Tensor, rank: int | None = None) -> dict[Any, Any]:
        """All entries of a tensor of blocks by parameter; with ``rank``, of a tensor of that rank's shard."""
        region = self.layout.everything() if rank is None else self.layout.local(rank)
        return of_blocks(self.parameters, self.layout, blocks, region.pieces)


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
        if self._own or (state_dict and KEY not in state_dict):
            return None
        self._own = True
        try:
            self._load(state_dict)
        finally:
            self._own = False
        taken, self._taken = self._taken, None
        return taken


# ------------------------------------------------------------------------------------------------ saving


def own_parts(live: Live) -> OwnParts:
    """This rank's part of the state: views, except for the inner optimizer's state, which is packed.

    Collective, because packing may fail: a user's own optimizer may hold anything.
    """
    state, rank, parameters = live.state, live.communicator.rank, live.parameters
    mine = state.start[live.layout.rows_of(rank)]
    parts = [Part("start", "owned", "cut", live.blocks(mine, rank))]
    if live.rule.reduction == "sharded":
        parts.append(Part("owner_error", "owned", "cut", live.blocks(state.owner_error, rank)))
    parts.append(Part("error", "each_rank", "mean", live.blocks(state.error)))
    parts.append(Part("parameters", "each_rank", "mean", of_flats(parameters, parameters.flat)))
    if state.launched is not None:
        parts.append(Part("launched", "each_rank", "mean", of_flats(parameters, state.launched)))
    parts.append(live.everyone.raise_on_all_ranks(lambda: inner_part(live.optimizer)))
    ranks, node = live.communicator, live.node
    common = FORM.common(live.facts(), parts, parameters, ranks.world_size, node.world_size)
    return OwnParts(common, parts, parameters, ranks, node)


# ------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Loaded:
    """A saved state that has been read. Nothing has been changed yet."""

    inner: dict[str, Any]
    """State dict of the inner optimizer."""
    state: LocoState | None = None
    """None: a window begins at the next step."""
    parameters: Sequence[Tensor | None] | None = None
    """This rank's, flat. None: they stay; None for one of them: it was frozen, and stays."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    dropped: tuple[int, int] = (0, 0)
    notes: list[str] = field(default_factory=list)
    """Warnings for the user."""

    def warn(self) -> None:
        """Gives the warnings."""
        for note in self.notes:
            warnings.warn(note, stacklevel=4)  # whoever calls load_state_dict


def load(live: Live, saved: Mapping[str, Any] | SavedShards) -> Loaded:
    """Fills the buffers of ``live`` with this rank's part of a saved state; see :meth:`SparseLoCo.load_state_dict`.

    Args:
        live: its buffers are freshly allocated; only they are changed.
        saved: a state of SparseLoCo, of its inner optimizer, or of another method.

    Raises:
        ValueError: the state is not of this model, is of a newer format, or does not fit the inner optimizer.
    """
    content = saved.common if isinstance(saved, SavedShards) else saved
    if not isinstance(content, Mapping) or KEY not in content:
        return _load_inner(saved, live)
    source: Source = saved if isinstance(saved, SavedShards) else WholeState(FORM, saved, live.parameters)
    facts = source.facts
    _check(facts, live)
    before, now, place = facts["world_size"], live.communicator.world_size, live.place
    inner = inner_for(source, place)
    _check_groups(inner, live.optimizer)
    notes = _differences(live.config.as_dict(), facts["config"])
    if (rule := Rule(facts["reduction"], facts["average"])) != live.rule:
        notes.append(
            f"The reduction was {rule}, and is now {live.rule}: it goes by the number of ranks where it is not given."
        )
    notes += frozen_since(source.entries, live.parameters)
    if before != now:
        notes.append(
            f"The checkpoint was written by {before} ranks, this run has {now}: starting point and owners' errors carry"
            " over exactly; each rank takes the mean of the saved error feedbacks and parameters, and the inner"
            f" optimizer's state of rank {place.replica % before}."
        )

    def flats(name: str) -> list[Tensor]:
        each = read_flats(source, Part(name, "each_rank", "mean"), live.parameters, now, place)
        return [flat.to(parameter.dtype) for flat, parameter in zip(each, live.parameters.local, strict=True)]

    fill(source, Part("start", "owned", "cut", live.blocks(live.state.start)), now, place)
    fill(source, Part("error", "each_rank", "mean", live.blocks(live.state.error)), now, place)
    saved_parts = {part.name for part in FORM.parts(source.common)}
    if "owner_error" in saved_parts:
        _carry(source, live)
    if "launched" in saved_parts:
        live.state.launched = flats("launched")
    own, known = zip(live.parameters.indices, flats("parameters"), strict=True), source.entries
    return Loaded(
        inner=inner,
        state=live.state,
        parameters=[flat if index in known else None for index, flat in own],
        progress=facts["progress"],
        dropped=tuple(facts["dropped"]),
        notes=notes,
    )


def _carry(source: Source, live: Live) -> None:
    """Takes up what the owners owe."""
    state = live.state
    owed = torch.zeros_like(state.start)
    fill(source, Part("owner_error", "owned", "cut", live.blocks(owed)), live.communicator.world_size, live.place)
    if live.rule.reduction == "sharded":
        state.owner_error.copy_(owed[live.layout.rows_of(live.communicator.rank)])
    else:  # nobody owns: it joins every rank's error, and so their mean
        state.error += owed


def _load_inner(saved: Mapping[str, Any] | SavedShards, live: Live) -> Loaded:
    """A state without SparseLoCo's part: of the inner optimizer, or of another method, whose AdamW is taken."""
    if isinstance(saved, SavedShards):
        saved = saved.form.whole_of(saved)
    is_mapping = isinstance(saved, Mapping)
    if is_mapping and (method := of_whole(saved)) is not None:
        return _load_other(method, saved, live)
    if not is_mapping or not {"state", "param_groups"} <= set(saved):
        raise ValueError(
            "The state must be one of SparseLoCo, of SCAPE, or of the inner optimizer, got"
            f" {sorted(map(str, saved)) if is_mapping else type(saved).__name__}. Load the model alone, or another"
            " checkpoint."
        )
    note = "The checkpoint was trained without SparseLoCo: error feedback begins at zero, and a window begins now."
    return Loaded(dict(saved), progress=_progress_of(saved), notes=[note])


def _progress_of(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Steps that an inner state has behind it, as far as its optimizer counts them."""
    counts = [entry["step"] for entry in inner["state"].values() if isinstance(entry, Mapping) and "step" in entry]
    return {"steps": max((int(count) for count in counts), default=0)}


def _load_other(method: type[Method], saved: Mapping[str, Any], live: Live) -> Loaded:
    """A state of SCAPE."""
    dense = method.form.as_dense(saved)
    if not isinstance(live.optimizer, (torch.optim.AdamW, torch.optim.Adam)):
        raise ValueError(
            f"SparseLoCo must wrap AdamW or Adam to go on from a state of {method.title}, got"
            f" {type(live.optimizer).__name__}. Wrap AdamW, or load the model alone."
        )
    for index, parameter in zip(live.parameters.indices, live.parameters.tensors, strict=True):
        found = dense.state["state"].get(index, {}).get("exp_avg")
        got = tuple(found.shape) if isinstance(found, Tensor) else None
        if got not in (None, tuple(parameter.shape)):  # one that was frozen has none
            raise ValueError(
                f"The state must be of this model, got first moments of shape {got} for parameter {index}, which has"
                f" {tuple(parameter.shape)}. Build the model as it was when it was saved."
            )
    note = (
        f"The checkpoint was trained with {method.title}: {dense.carried} as AdamW's. {dense.lost} Error feedback"
        " begins at zero, and a window begins now."
    )
    return Loaded(dense.state, progress=_progress_of(dense.state), notes=[note])


def _check(facts: Mapping[str, Any], live: Live) -> None:
    if facts["format"] > FORMAT:
        raise ValueError(
            f"The state's format must be at most {FORMAT}, got {facts['format']}: a newer lightning_scape wrote it."
            " Update the package."
        )
    check_model(facts, live.parameters)
    mine = live.facts()
    saved = dict(zip(facts["shapes"], facts["names"], strict=True))
    here = dict(zip(live.parameters.indices, live.parameters.names, strict=True))
    both = [index for index in here if index in saved]  # the others were frozen, or are now
    _check_order([saved[index] for index in both], [here[index] for index in both])
    _check_optimizer(facts, mine)


def _check_order(saved: Sequence[str], here: Sequence[str]) -> None:
    """All names may differ (a host's, a wrapper's). But if they are the same, their order must be the same, too."""
    if set(saved) != set(here):
        return
    for place, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        if theirs != ours:
            raise ValueError(
                f"The state must be of this model, got {theirs!r} in place {place}, where the optimizer has {ours!r}."
                " Give the parameters to the optimizer in the order in which they were saved."
            )


def _check_groups(inner: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    saved, here = ([len(group["params"]) for group in each] for each in (inner["param_groups"], optimizer.param_groups))
    if saved != here:
        raise ValueError(
            f"The state must be of this model, got groups of {saved} parameters, and the optimizer's have {here}. Give"
            " it the parameters, frozen ones included, that it had when it was saved."
        )


def _check_optimizer(facts: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Its class must be the same, and its options, except for those that another release of torch adds or drops."""
    saved, here = (set(each["options"]) for each in (facts, mine))
    if (name := facts["optimizer"]) != mine["optimizer"]:
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
