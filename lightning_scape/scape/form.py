"""How a state of SCAPE is written: format 1, by :class:`~lightning_scape.checkpoint.source.Form`.

A whole state is tensors, numbers and strings only (``torch.load(weights_only=True)`` reads it)::

    {
      "state": {i: {"exp_avg": m, "exp_avg_sq": v, "last_step": clock, "step": t, ["master": ...], [...]}},
      "param_groups": [...],                            # as torch writes them
      "scape": {"format": 1, "config": {...}, "world_size": N, "step": t, "calls": n, "names": {i: name},
                "residuals": [{i: e}, ...],             # one dict per rank
                "mask": [blocks, q] or None, "block_size": B, "skipped_in_row": n, "skipped_total": n},
    }

``i`` counts all parameters of the groups, as in torch's own state dicts; every tensor by parameter has its shape.
AdamW and Adam take it as it is: ``exp_avg``, ``exp_avg_sq`` and ``step`` are theirs. With the update of AdamS,
``exp_avg_sq`` is for them alone. Where several ranks hold a replica together, tensors are those of the whole parameters
all the same, and N is the number of replicas. Only the masks are by rank of a replica then: ``"shards": L, "masks":
{rank: mask}``, and ``"mask": None``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_scape.checkpoint.parts import Part, Place
from lightning_scape.checkpoint.source import Dense, Form
from lightning_scape.core.parameters import Parameters
from lightning_scape.scape import checks, foreign, keys


class ScapeForm(Form):
    """Facts stand bare in a directory, under ``"scape"`` in a whole state, where tensors have places of their own."""

    @override
    def facts(self, common: Mapping[str, Any]) -> Mapping[str, Any]:
        return common

    @override
    def common(
        self, facts: Mapping[str, Any], parts: Iterable[Part], parameters: Parameters, ranks: int, shards: int
    ) -> dict[str, Any]:
        """The facts, with ``tensors``, the names of those by parameter; the masks' shapes stand among the facts."""
        about: dict[str, Any] = super().common(facts, parts, parameters, ranks, shards)[self.name]
        about["tensors"] = [name for name, _, others in about.pop("parts") if others == "cut"]
        return about

    @override
    def parts(self, common: Mapping[str, Any]) -> list[Part]:
        return [*map(keys.owned, common["tensors"]), keys.residual(), keys.mask()]

    @override
    def entries(self, common: Mapping[str, Any], whole: Mapping[str, Any] | None) -> Mapping[int, Collection[str]]:
        if whole is None:
            return dict.fromkeys(common["shapes"], common["tensors"])
        if self.name in whole and not keys.has_second(common):  # what is there is for AdamW
            return {index: set(entry) - {"exp_avg_sq"} for index, entry in whole["state"].items()}
        return {index: entry for index, entry in whole["state"].items() if entry}  # a look at torch's makes one

    @override
    def rows_shapes(self, common: Mapping[str, Any]) -> dict[str, list[int]]:
        shapes: list[list[int] | None] = common.get("mask_shapes") or [common.get("mask_shape")]
        places = (Place(shard=shard, shards=len(shapes)) for shard in range(len(shapes)))
        return {
            keys.mask().key(None, place): shape
            for place, shape in zip(places, shapes, strict=True)
            if shape is not None
        }

    @override
    def check(self, common: Mapping[str, Any]) -> None:
        checks.check_directory(common)

    @override
    def skeleton(self, common: Mapping[str, Any]) -> dict[str, Any]:
        facts = dict(common)
        shapes = facts.pop("shapes")
        groups, beside = facts.pop("param_groups"), facts.pop("beside_state", {})
        for name in ("strides", "tensors", "mask_shape"):
            facts.pop(name, None)
        masks: dict[str, Any] = {"masks": {}} if facts.pop("mask_shapes", None) is not None else {}
        residuals: list[dict[int, Tensor]] = [{} for _ in range(facts["world_size"])]
        missed = facts["missed"]
        return {
            "state": {index: {"step": facts["step"] - missed.get(index, 0)} for index in shapes},
            "param_groups": groups,
            **beside,
            "scape": {**facts, "residuals": residuals, "mask": None, **masks},
        }

    @override
    def slot(self, whole: Mapping[str, Any], key: str) -> tuple[Any, Any]:
        kind, *path = key.split(".")
        if kind == "state":
            return whole["state"][int(path[0])], path[1]
        if kind == "residual":
            return whole["scape"]["residuals"][int(path[0])], int(path[1])
        return (whole["scape"].get("masks", {}), int(path[0])) if path else (whole["scape"], kind)

    @override
    def common_of(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """The facts; a state of AdamW, Adam or AdamS has none."""
        tensors = ("residuals", "mask", "masks")
        facts = {name: value for name, value in whole.get("scape", {}).items() if name not in tensors}
        return {**facts, "param_groups": whole["param_groups"]}

    @override
    def completed(self, whole: dict[str, Any], weights_only: bool | None = False) -> dict[str, Any]:
        foreign.add_second_moment(whole)
        return whole

    @override
    def as_dense(self, whole: Mapping[str, Any]) -> Dense:
        checks.check_whole(whole)
        state, moments = foreign.dense_state(whole)
        lost = (
            "Its residuals, last steps and masks do not carry over: what was not yet sent has an L2 norm of"
            f" {foreign.residual_norm(whole):.3g} (root mean square over {whole['scape']['world_size']} ranks)."
        )
        return Dense(state, moments, lost)


FORM = ScapeForm("scape")
