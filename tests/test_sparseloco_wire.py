"""The wire of SparseLoCo: its size, what it carries, and that nothing is lost on it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_scape.ops.naive.wire import Wire, add_entries, pack, unpack
from lightning_scape.sparseloco import SparseLoCoConfig


def spread(rows: int, length: int, seed: int = 0) -> Tensor:
    """Blocks of all magnitudes, with heavy tails inside; some empty, some nearly, some below normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(rows, width, generator=generator) for width in (length, 1, length)]
    blocks = normal[0] * torch.exp(8 * normal[1] + 3 * normal[2])
    blocks[0] = 0
    blocks[1, 1:] = 0
    blocks[2] *= 1e-36
    blocks[3, : length // 2] = 1.5
    return blocks


def received(wire: Wire, message: Tensor) -> Tensor:
    """The message as blocks, in fp64."""
    positions, values = wire.read(message)
    blocks = torch.zeros(len(message), wire.block_size, dtype=torch.float64)
    add_entries(blocks, positions, values.double())
    return blocks


@pytest.mark.parametrize(
    ("length", "sent", "bits"), [(256, 4, 2), (256, 256, 4), (4096, 64, None), (64, 7, 8), (1, 1, 2)]
)
def test_sent_plus_left_is_what_was_there_bit_for_bit(length: int, sent: int, bits: int | None) -> None:
    wire, blocks = Wire(length, sent, bits), spread(64, length)
    left = blocks.clone()
    message = wire.take(left)
    assert message.dtype == torch.uint8
    assert message.shape == (64, wire.row_bytes)
    assert torch.equal(received(wire, message) + left.double(), blocks.double())


@given(
    bits=st.sampled_from([2, 4, 8]),
    rows=st.lists(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=8, max_size=8), min_size=1, max_size=4),
    sent=st.integers(1, 8),
)
def test_whatever_the_numbers_nothing_is_lost(bits: int, rows: list[list[float]], sent: int) -> None:
    wire, blocks = Wire(8, sent, bits), torch.tensor(rows)
    left = blocks.clone()
    assert torch.equal(received(wire, wire.take(left)) + left.double(), blocks.double())


@pytest.mark.parametrize(("bits", "least"), [(2, 0.99), (None, 1.0)])
def test_a_message_carries_most_of_what_was_chosen(bits: int | None, least: float) -> None:
    blocks = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    left = blocks.clone()
    Wire(256, 4, bits).take(left)
    chosen = blocks.abs().topk(4).values.square().sum()
    assert blocks.square().sum() - left.square().sum() >= least * chosen


def test_the_largest_entries_are_sent_and_an_example_holds() -> None:
    wire, blocks = Wire(4, 2, None), torch.tensor([[3.0, -5.0, 0.0, 1.0]])
    positions, values = wire.read(wire.take(blocks))
    assert positions is not None
    assert positions.tolist() == [[1, 0]]
    assert values.tolist() == [[-5.0, 3.0]]
    assert blocks.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_an_entry_far_below_its_level_waits() -> None:
    """Sent as the level it would be a part of that size wrong, and the difference would be rounded."""
    blocks = torch.zeros(1, 256)
    blocks[0, :3] = torch.tensor([1.0, 1.0, 1e-9])
    _, values = Wire(256, 4, 2).read(Wire(256, 4, 2).take(blocks))
    assert values[0].count_nonzero() == 2
    assert blocks[0, 2] == torch.tensor(1e-9)


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 13])
def test_packed_numbers_come_back(bits: int) -> None:
    symbols = torch.randint(0, 1 << bits, (5, 13))
    packed = pack(symbols, bits)
    assert packed.shape == (5, -(-13 * bits // 8))
    assert torch.equal(unpack(packed, bits, 13), symbols)


def test_an_entry_takes_at_most_14_and_a_half_bits_and_an_exchange_140_times_fewer_bytes() -> None:
    wire, of_authors = Wire(*SparseLoCoConfig().quota, 2), Wire(4096, 64, 2)
    assert 8 * wire.row_bytes / wire.sent == 14.0
    assert 8 * of_authors.row_bytes / of_authors.sent <= 14.5
    assert 4 * wire.block_size / wire.row_bytes >= 140


@pytest.mark.parametrize(
    ("density", "quota"),
    [(1 / 64, (256, 4)), (1.0, (256, 256)), (1 / 256, (1024, 4)), (0.1, (250, 25)), (0.5, (256, 128))],
)
def test_block_length_follows_from_the_density(density: float, quota: tuple[int, int]) -> None:
    assert SparseLoCoConfig(density=density).quota == quota


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sync_every": 0}, "`sync_every` must be a whole number >= 1, got 0"),
        ({"density": 0.0}, r"`density` must be a number in \(0, 1\], got 0.0"),
        ({"density": "1/64"}, r"`density` must be a number in \(0, 1\], got '1/64'; 0.015625 is the authors'\."),
        ({"density": 1e-6}, "`density` must be at least"),
        ({"bits": 3}, "`bits` must be None, 2, 4 or 8, got 3"),
        ({"error_decay": 1.5}, "`error_decay` must be a number"),
        ({"average": "median"}, '`average` must be "all", "geometric" or "senders"'),
    ],
)
def test_a_wrong_option_is_told_with_its_rule(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SparseLoCoConfig(**options)  # type: ignore[arg-type]
