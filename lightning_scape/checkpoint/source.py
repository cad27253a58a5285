"""A saved state and its form: a whole state and a directory are read alike, key by key (:mod:`.parts`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_scape.checkpoint import checks
from lightning_scape.checkpoint.dcp import Chunk, Directory
from lightning_scape.checkpoint.inner import INNER, inner_of
from lightning_scape.checkpoint.packed import unpack
from lightning_scape.checkpoint.parts import OwnParts, Part, Place, parameter_of
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import of_state
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.tensors import flatten_like


class Dense(NamedTuple):
    """What another strategy takes of a state."""

    state: dict[str, Any]
    """AdamW's state dict."""
    carried: str
    """Words for what carries over."""
    lost: str
    """A sentence on what does not."""


class Form:
    """How a method's states are written: the facts, and where in a whole state a tensor has its place.

    A whole state is ``{"state": ..., "param_groups": ..., name: {**facts, "tensors": {key: tensor}}}``. The first two
    are those of torch: another strategy takes them as they are. They are the inner optimizer's, of rank 0. Tensors have
    their parameters' shapes.

    Args:
        name: of the method.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def facts(self, common: Mapping[str, Any]) -> Mapping[str, Any]:
        """The method's facts, of all that is not a tensor."""
        found: Mapping[str, Any] = common[self.name]
        return found

    def common(
        self, facts: Mapping[str, Any], parts: Iterable[Part], parameters: Parameters, ranks: int, shards: int
    ) -> dict[str, Any]:
        """What all ranks know of a state: all but its tensors.

        Args:
            facts: the method's own.
            parts: of the state.
            parameters: which it is over.
            ranks: those that hold the same rows.
            shards: those that hold a replica together.
        """
        numbered = list(zip(parameters.indices, parameters.tensors, strict=True))
        about = {
            "world_size": ranks,
            "shards": shards,
            "shapes": {index: list(parameter.shape) for index, parameter in numbered},
            "strides": {index: list(parameter.stride()) for index, parameter in numbered},
            "parts": [[part.name, part.placement, part.on_other_ranks] for part in parts],
        }
        return {self.name: {**facts, **about}}

    def parts(self, common: Mapping[str, Any]) -> list[Part]:
        """The parts of a saved state."""
        return [Part(*each) for each in self.facts(common)["parts"]]

    def entries(self, common: Mapping[str, Any], whole: Mapping[str, Any] | None) -> Mapping[int, Collection[str]]:
        """Names of the tensors of each parameter that the ranks own; ``whole`` is None for a directory."""
        owned = [part.name for part in self.parts(common) if part.on_other_ranks == "cut"]
        return dict.fromkeys(self.facts(common)["shapes"], owned)

    def rows_shapes(self, common: Mapping[str, Any]) -> dict[str, list[int]]:
        """The shapes of tensors of rows of blocks, by key."""
        return {}

    def shapes(self, common: Mapping[str, Any]) -> Iterator[tuple[str, list[int] | None]]:
        """The keys of all tensors, and their shapes; None is not known."""
        facts = self.facts(common)
        ranks, shards = facts["world_size"], facts["shards"]
        for part in self.parts(common):
            if part.by_parameter:
                for rank in range(ranks if part.on_other_ranks == "mean" else 1):
                    yield from ((part.key(i, Place(rank)), shape) for i, shape in facts["shapes"].items())
            elif part.on_other_ranks == "take":
                yield from ((part.key(None, Place(number)), None) for number in range(ranks * shards))
        yield from self.rows_shapes(common).items()

    def check(self, common: Mapping[str, Any]) -> None:
        """Checks the facts of a state in a directory: what is read from it is looked for by them.

        Raises:
            ValueError: the first rule that they break.
        """
        facts = common[self.name]
        checks.check_mapping(self.name, facts)
        checks.check_places(facts)
        checks.check_parts(facts.get("parts"))

    def packed_names(self, key: str) -> set[str]:
        """What a rank's packed dict must have, by its key."""
        return {"state", "param_groups"} if key.startswith(f"{INNER}.") else set()

    # ------------------------------------------------------------------------------------------- a whole state

    def skeleton(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """A whole state without its tensors."""
        return {"state": {}, "param_groups": [], self.name: {**self.facts(common), "tensors": {}}}

    def slot(self, whole: Mapping[str, Any], key: str) -> tuple[Any, Any]:
        """The dict inside a whole state that holds a key's tensor, and the name it has there."""
        return whole[self.name]["tensors"], key

    def common_of(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Of a whole state, what is no tensor."""
        return {self.name: {name: value for name, value in whole[self.name].items() if name != "tensors"}}

    def completed(self, whole: dict[str, Any], weights_only: bool | None = False) -> dict[str, Any]:
        """A whole state, when all tensors are in place, those of this job's ranks or of a directory."""
        packed = [key for key, shape in self.shapes(self.common_of(whole)) if shape is None]
        for key in packed:
            holder, name = self.slot(whole, key)
            holder[name] = unpack(holder[name], key, self.packed_names(key), weights_only)
        first = inner_of(WholeState(self, whole), 0)
        return {**first, self.name: whole[self.name]}

    def merged(self, common: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
        """A whole state but for what :meth:`completed` does: from facts, and tensors by key in memory of their own."""
        facts, whole = self.facts(common), self.skeleton(common)
        for key, tensor in tensors:
            holder, name = self.slot(whole, key)
            index = parameter_of(key)
            shape, stride = (facts[each].get(index) for each in ("shapes", "strides"))
            holder[name] = tensor if index is None else tensor.as_strided(shape, stride)
        return whole

    def collected(self, own: OwnParts, to: int, background: Communicator | None = None) -> dict[str, Any] | None:
        """The whole state on rank ``to``, in host memory; None elsewhere. Collective.

        Args:
            own: what this rank holds of it.
            to: among all ranks.
            background: see :meth:`~lightning_scape.checkpoint.parts.OwnParts.collect`.

        Raises:
            ValueError: there is no such rank.
        """
        ranks = background or own.everyone
        if to not in range(ranks.world_size):
            raise ValueError(f"`to` must be a rank, 0 to {ranks.world_size - 1}, got {to!r}. Use 0 if unsure.")
        tensors = own.collect(to, background)
        whole = self.merged(own.common, tensors) if ranks.rank == to else None
        for _ in tensors:
            raise AssertionError("tensors arrive on one rank only")
        return ranks.raise_on_all_ranks(lambda: None if whole is None else self.completed(whole))

    def whole_of(self, saved: SavedShards) -> dict[str, Any]:
        """The whole state that the optimizer would have given, read from a directory into host memory."""
        tensors = ((key, saved.tensor(key)) for key, _ in self.shapes(saved.common))
        return self.completed(self.merged(saved.common, tensors), saved.directory.weights_only)

    def as_dense(self, whole: Mapping[str, Any]) -> Dense:
        """A whole state as AdamW's.

        Raises:
            ValueError: the state is damaged, or has none.
        """
        return Dense(
            {name: value for name, value in whole.items() if name != self.name},
            "the inner optimizer's state of rank 0 carries over",
            "What ranks have not yet sent is lost.",
        )


class WholeState:
    """A :class:`~lightning_scape.checkpoint.parts.Source` over a whole state.

    Args:
        form: of its method.
        whole: the state; its facts have been checked.
        parameters: they give the memory order in which tensors are read.
    """

    def __init__(self, form: Form, whole: Mapping[str, Any], parameters: Parameters | None = None) -> None:
        self._form, self._whole = form, whole
        self._parameters = {} if parameters is None else dict(zip(parameters.indices, parameters.tensors, strict=True))
        self.common: dict[str, Any] = form.common_of(whole)

    @property
    def facts(self) -> Mapping[str, Any]:  # noqa: D102 - of a Source
        return self._form.facts(self.common)

    @property
    def entries(self) -> Mapping[int, Collection[str]]:  # noqa: D102 - of a Source
        return self._form.entries(self.common, self._whole)

    def find(self, key: str) -> Any:  # noqa: D102 - of a Source
        holder, name = self._form.slot(self._whole, key)
        return holder.get(name)

    def read(self, targets: Mapping[str, Chunk]) -> None:  # noqa: D102 - of a Source
        for key, chunk in targets.items():
            chunk.tensor.copy_(self.tensor(key)[chunk.offset : chunk.offset + len(chunk.tensor)])

    def tensor(self, key: str) -> Tensor:  # noqa: D102 - of a Source
        found: Tensor = self.find(key)
        index = parameter_of(key)
        return found if index is None else flatten_like(found, self._parameters[index])

    def unpacked(self, key: str) -> dict[str, Any]:  # noqa: D102 - of a Source
        found: dict[str, Any] = self.find(key)
        return found


@dataclass(frozen=True)
class SavedShards:
    """A :class:`~lightning_scape.checkpoint.parts.Source` over a directory, which may hold several optimizers' states.

    Nothing is read until asked for.
    """

    directory: Directory
    key: str
    """The prefix of its keys in the directory."""
    common: dict[str, Any]

    @property
    def form(self) -> Form:
        """That of the method which has written it."""
        found: Form = of_state(self.common).form
        return found

    @property
    def facts(self) -> Mapping[str, Any]:  # noqa: D102 - of a Source
        return self.form.facts(self.common)

    @property
    def entries(self) -> Mapping[int, Collection[str]]:  # noqa: D102 - of a Source
        return self.form.entries(self.common, None)

    def find(self, key: str) -> Tensor | None:  # noqa: D102 - of a Source
        if key not in self._shapes:
            return None
        shape = self._shapes[key]
        found = self.directory.find(f"{self.key}.{key}")
        if shape is None:
            return found
        if 0 in shape:  # not stored
            return torch.empty(shape, dtype=self._dtype_beside(key), device="meta")
        return found.view(shape) if found is not None and found.numel() == math.prod(shape) else found

    def read(self, targets: Mapping[str, Chunk]) -> None:  # noqa: D102 - of a Source
        self.directory.read({f"{self.key}.{key}": chunk for key, chunk in targets.items() if len(chunk.tensor)})

    def tensor(self, key: str) -> Tensor:  # noqa: D102 - of a Source
        found = self.find(key)
        if found is not None and not found.numel():
            return torch.empty(found.shape if parameter_of(key) is None else 0, dtype=found.dtype, device="cpu")
        return self.directory.tensor(f"{self.key}.{key}")

    def unpacked(self, key: str) -> dict[str, Any]:
        """See :class:`~lightning_scape.checkpoint.parts.Source`.

        Raises:
            CheckpointError: the bytes are damaged, or hold what only executing code would load.
        """
        packed, called = self.directory.tensor(f"{self.key}.{key}"), f"{self.directory.path}, {self.key}.{key}"
        return unpack(packed, called, self.form.packed_names(key), self.directory.weights_only)

    def check_sizes(self) -> None:
        """Checks that the directory holds all that the facts speak of, in the sizes that they give.

        Raises:
            ValueError: it does not.
        """
        held = self.directory.shapes(f"{self.key}.")
        for key, shape in self._shapes.items():
            found = held.get(f"{self.key}.{key}")
            size = None if shape is None else math.prod(shape)
            if size != 0 and (found is None or size not in (None, math.prod(found))):
                must = "be there" if shape is None else f"have shape {tuple(shape)}"
                raise ValueError(f"{self.key}.{key} must {must}, got {found or 'nothing'}")

    @cached_property
    def _shapes(self) -> dict[str, list[int] | None]:
        return dict(self.form.shapes(self.common))

    def _dtype_beside(self, key: str) -> torch.dtype:
        """The dtype of a tensor without entries: that of another parameter's tensor of the same name."""
        if parameter_of(key) is None:
            return torch.uint8
        kind, first, last = key.split(".")
        for index in self.facts["shapes"]:
            other = f"state.{index}.{last}" if kind == "state" else f"{kind}.{first}.{index}"
            found = self.directory.find(f"{self.key}.{other}")
            if found is not None:
                return found.dtype
        return torch.float32
