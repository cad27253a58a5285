"""A method whose states are saved and loaded by its parts: it says what they are, and takes them up."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_scape.checkpoint.checks import check_model
from lightning_scape.checkpoint.inner import inner_for, inner_part, placed
from lightning_scape.checkpoint.parts import OwnParts, Part, Place, Source, of_flats, read_flats
from lightning_scape.checkpoint.source import Form, SavedShards, WholeState
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.method import Method, of_whole
from lightning_scape.core.parameters import Parameters


class SavedByParts(Method):
    """Base for a method around an optimizer of torch's, which it leaves in its place.

    Every rank's inner optimizer and parameters are saved, and what :meth:`parts` adds. A subclass has ``parameters``,
    which it flattens before its first step.
    """

    parameters: Parameters

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            cls.form = Form(cls.name)

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Numbers and texts to save; the same on all ranks."""

    @abstractmethod
    def parts(self) -> list[Part]:
        """Tensors to save besides the parameters."""

    @abstractmethod
    def take_up(self, facts: Mapping[str, Any], tensors: Mapping[str, list[Tensor]]) -> None:
        """Goes on from a saved state.

        Args:
            facts: what :meth:`facts` gave.
            tensors: of every part, one flat fp32 tensor for each parameter.
        """

    @override
    def sharded_state_dict(self) -> OwnParts:
        self.parameters.flatten()
        parameters = Part("parameters", "each_rank", "mean", of_flats(self.parameters, self.parameters.flat))
        inner = self.communicator.raise_on_all_ranks(lambda: inner_part(self.optimizer))
        parts = [*self.parts(), parameters, inner]
        common = self.form.common(self.facts(), parts, self.parameters, self.communicator.world_size, 1)
        return OwnParts(common, parts, self.parameters, self.communicator)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any] | SavedShards) -> None:
        ranks = self.communicator
        if isinstance(state_dict, SavedShards):
            if state_dict.form is not self.form:
                state_dict = state_dict.form.whole_of(state_dict)
        else:
            state_dict = ranks.share(state_dict)
        if isinstance(state_dict, Mapping) and self.name not in state_dict:
            self._load_inner(state_dict)
            return
        readers = ranks if isinstance(state_dict, SavedShards) else Communicator.alone()
        inner, facts, tensors = readers.raise_on_all_ranks(lambda: self._read(state_dict))
        self.optimizer.load_state_dict(placed(inner, self.optimizer))
        self.parameters.flatten()
        with torch.no_grad():
            for flat, saved in zip(self.parameters.flat, tensors.pop("parameters"), strict=True):
                flat.copy_(saved)
        self.take_up(facts, tensors)

    def _read(self, saved: Any) -> tuple[dict[str, Any], Mapping[str, Any], dict[str, list[Tensor]]]:
        shards = isinstance(saved, SavedShards)
        source: Source = saved if shards else WholeState(self.form, saved, self.parameters)
        check_model(source.facts, self.parameters)
        if [*source.facts["shapes"]] != self.parameters.indices:
            raise ValueError(
                f"A state of {self.title} must be of the parameters that are trained, got one of numbers"
                f" {[*source.facts['shapes']]}, and {self.parameters.indices} are trained now. Freeze the parameters,"
                " and order them, as they were when it was saved, or load the model alone."
            )
        ranks, place = self.communicator.world_size, Place(self.communicator.rank)
        parts = [part for part in self.form.parts(source.common) if part.by_parameter]
        tensors = {part.name: read_flats(source, part, self.parameters, ranks, place) for part in parts}
        return inner_for(source, place), source.facts, tensors

    def _load_inner(self, state: Mapping[str, Any]) -> None:
        """A state of the inner optimizer, or of another method, whose AdamW is taken."""
        other = of_whole(state)
        inner = state if other is None else other.form.as_dense(state).state
        self.optimizer.load_state_dict(placed(inner, self.optimizer))
        warnings.warn(
            f"The checkpoint was trained without {self.title}: the inner optimizer's state carries over, and all else"
            " begins anew.",
            stacklevel=3,
        )
