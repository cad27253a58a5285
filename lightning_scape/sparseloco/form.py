"""How a state of SparseLoCo is written: format 2, by :class:`~lightning_scape.checkpoint.source.Form`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from lightning_scape.checkpoint.source import Form, SavedShards
from lightning_scape.sparseloco import older
from lightning_scape.sparseloco.older import KEY

__all__ = ["FORM", "FORMAT", "KEY"]

FORMAT = 2


class LocoForm(Form):
    """The common form; a directory of format 1 is made one file as it was written."""

    @override
    def shapes(self, common: Mapping[str, Any]) -> Iterator[tuple[str, list[int] | None]]:
        return older.keys(common) if older.is_older(common) else super().shapes(common)

    @override
    def check(self, common: Mapping[str, Any]) -> None:
        if older.is_older(common):
            older.check(common[KEY])
        else:
            super().check(common)

    @override
    def packed_names(self, key: str) -> set[str]:
        return older.IN_A_PART if key.startswith("rank.") else super().packed_names(key)

    @override
    def whole_of(self, saved: SavedShards) -> dict[str, Any]:
        return older.whole_of(saved) if older.is_older(saved.common) else super().whole_of(saved)


FORM = LocoForm(KEY)
