"""Layout: blocks, shards and pieces, on the docstring's example and on random shapes."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from lightning_scape.core.layout import Layout, Piece


def test_example_of_the_docstring() -> None:
    layout = Layout([6, 9], [0, 0], block_size=4, world_size=2)
    assert (layout.used_blocks, layout.blocks, layout.shard_blocks) == (5, 6, 3)
    whole = [(p.index, p.row, p.blocks, p.start, p.numel) for p in layout.pieces]
    assert whole == [(0, 0, 2, 0, 6), (1, 2, 3, 0, 9)]
    first = [(p.index, p.row, p.blocks, p.start, p.numel) for p in layout.local(0).pieces]
    assert first == [(0, 0, 2, 0, 6), (1, 2, 1, 0, 4)]
    second = [(p.index, p.row, p.blocks, p.start, p.numel) for p in layout.local(1).pieces]
    assert second == [(1, 0, 2, 4, 5)]
    assert list(layout.remote(1).pieces) == list(layout.local(0).pieces)
    assert layout.rows_of(0) == slice(0, 3)
    assert (layout.local(0).rows, layout.remote(0).rows) == ((slice(0, 3),), (slice(3, 6),))
    three = Layout([6, 9], [0, 0], 4, 3)
    assert three.rows_of(1) == slice(2, 4)
    assert (three.local(1).rows, three.remote(1).rows) == ((slice(0, 2),), (slice(0, 2), slice(4, 6)))
    assert [(p.index, p.row, p.blocks, p.start, p.numel) for p in layout.remote(0).pieces] == [(1, 3, 2, 4, 5)]


def test_kept_counts_entries_and_leaves_out_pads() -> None:
    (piece,) = Layout([9], [0], block_size=4, world_size=1).pieces
    assert [piece.kept(sent, 4) for sent in (1, 2, 4)] == [3, 5, 9]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 5), st.data())
def test_shards_are_equal_and_cover_every_entry_once(
    numels: list[int], block_size: int, world_size: int, data: st.DataObject
) -> None:
    layout = Layout(numels, [0] * len(numels), block_size, world_size)
    assert layout.blocks == layout.shard_blocks * world_size
    assert layout.blocks - layout.used_blocks < world_size
    seen = set()
    sent = data.draw(st.integers(1, block_size))
    kept = 0
    for rank in range(world_size):
        for piece in layout.local(rank).pieces:
            assert piece.row >= 0
            assert piece.row + piece.blocks <= layout.shard_blocks
            entries = {(piece.index, i) for i in range(piece.start, piece.start + piece.numel)}
            assert not entries & seen
            seen |= entries
            kept += piece.kept(sent, block_size)
    assert seen == {(index, i) for index, numel in enumerate(numels) for i in range(numel)}
    assert kept == sum(piece.kept(sent, block_size) for piece in layout.pieces)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 5))
def test_a_shard_and_what_lies_beside_it_are_everything(numels: list[int], block_size: int, world_size: int) -> None:
    layout = Layout(numels, [0] * len(numels), block_size, world_size)

    def rows(pieces: Iterable[Piece], first: int) -> set[tuple[int, int, int]]:
        """Each block with the parameter and the entry that it begins at."""
        return {
            (first + piece.row + i, piece.index, piece.start + i * block_size)
            for piece in pieces
            for i in range(piece.blocks)
        }

    for rank in range(world_size):
        own = rows(layout.local(rank).pieces, rank * layout.shard_blocks)
        beside = rows(layout.remote(rank).pieces, 0)
        assert not own & beside
        assert own | beside == rows(layout.pieces, 0)
