"""Cases of the operations: for each, arguments of all kinds; and how results are compared."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Region
from lightning_scape.scape.opening import SKETCH_WIDTHS, random_signs

FAR = 2**31 + 64
"""Entries from the start of a buffer to a place that 32-bit offsets do not reach."""
ONE = torch.ones(())
SCALES = {"one": ONE, "0.7": torch.tensor(0.7), "zero": torch.zeros(())}


class Case(NamedTuple):
    """Arguments of an operation."""

    operation: str
    name: str
    args: tuple[Any, ...]
    declined_by: str = ""
    """The back ends that leave it to the definition."""


# ------------------------------------------------------------------------------------------------------------ numbers


def awkward(rows: int, length: int) -> Tensor:
    """Blocks of random numbers, ties, zeros, denormals, infinities, NaN and pads; fp32."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    matrix = torch.randn(rows, length, generator=generator)
    matrix *= torch.logspace(-20, 20, rows).unsqueeze(1)
    matrix[1 % rows] = 2.0
    matrix[2 % rows] = 0.0
    matrix[3 % rows] = torch.randint(0, 3, (length,), generator=generator) * 1e-40
    matrix[4 % rows, : length // 2] = 0.0
    matrix[5 % rows, length // 2 :] = -0.0
    matrix[6 % rows, 0] = float("nan")
    matrix[7 % rows, -1] = -float("inf")
    return matrix


def groups_of_all_kinds(shards: int, count: int) -> Tensor:
    """fp32 ``[shards, count]``; groups of 64: of different sizes, with ties, of zeros, of tiny and of huge numbers."""
    generator, levels = torch.Generator().manual_seed(count), 7
    groups = (shards, -(-count // 64), 64)
    kind, power = (torch.randint(*ends, (*groups[:2], 1), generator=generator) for ends in ((0, 5), (-90, 60)))
    normal, sign = torch.randn(groups, generator=generator), torch.randint(-1, 2, groups, generator=generator)
    halves = torch.randint(-2 * levels, 2 * levels + 1, groups, generator=generator) / 2
    halves[..., 0] = levels  # the unit is 1
    kinds = (normal * 2.0**power, halves * 2.0**power, levels * normal * 1e-30, 3.2e38 * sign, -0.0 * sign)
    values = torch.stack(kinds).take_along_dim(kind.expand(groups).unsqueeze(0), 0)[0]
    return values.flatten(1)[:, :count].contiguous()


def hyper(dtype: torch.dtype = torch.float32, lr: Any = 1e-3, beta1: float = 0.9, decay: float = 0.1) -> ops.Hyper:
    given = (torch.as_tensor(v, dtype=torch.float64) for v in (lr, beta1, 0.95, 1e-8, decay))
    return ops.Hyper.of(dtype, *torch.broadcast_tensors(*given))


def mask_of(rows: int, length: int, sent: int, pieces: Sequence[Any] = ()) -> Tensor:
    """As select leaves it: pads come last in their block."""
    statistic = torch.rand(rows, length, generator=torch.Generator().manual_seed(sent)) + 1
    for piece in pieces:
        statistic[piece.row : piece.row + piece.blocks].view(-1)[piece.numel :] = 0
    return ops.select(statistic, sent)


# -------------------------------------------------------------------------------------------------------------- cases


def selections() -> Iterator[Case]:
    shapes = [(23, 200, 2), (9, 250, 5), (40, 250, 25), (5, 256, 32), (9, 100, 60), (9, 8, 8), (2, 1000, 1), (3, 1, 1)]
    for rows, length, sent in shapes:
        yield Case("select", f"{sent} of {length}", (awkward(rows, length), sent), "cuda" if sent > 32 else "")
    yield Case("select", "long blocks", (awkward(2, 5000), 3), "cuda")
    yield Case("select", "nothing", (torch.zeros(0, 200), 2))
    yield Case("select", "rows apart", (awkward(9, 300)[:, :200], 2), "cpu cuda")
    for rows, length, sent in [(23, 200, 30), (9, 250, 249), (70, 100, 100), (9, 8, 1), (3, 1000, 70), (2, 5000, 900)]:
        bits = ops.pack_mask(mask_of(rows, length, sent), length)
        yield Case("unpack_mask", f"{sent} of {length}", (bits, sent, length), "cuda" if length > 4096 else "")


def sketches() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        grads = [torch.randn(20_000).to(dtype), None, torch.randn(5).to(dtype), torch.randn(9_001)]
        yield Case("sketch", str(dtype), (grads, random_signs(1 << 14), SKETCH_WIDTHS))
    yield Case("sketch", "whole chunks", ([torch.randn(70_000)], random_signs(1 << 17), SKETCH_WIDTHS))


def messages() -> Iterator[Case]:
    for shards, count in [(1, 1), (3, 64), (2, 700), (3, 2081), (2, 0)]:
        values = groups_of_all_kinds(shards, count)
        packed = torch.full((shards, -(-count // 64), 34), 7, dtype=torch.uint8)
        yield Case("pack_values", f"{shards} x {count}", (torch.randn(shards, count), None, values, packed))
        rows, mask = torch.randn(shards * count, 20), mask_of(shards * count, 20, 1)
        yield Case("pack_values", f"{shards} x {count}, masked", (rows, mask, values.view(-1, 1), packed))
        message = torch.stack([ops.quantize(row.clone()) for row in values])
        yield Case("dequantize", f"{shards} x {count}", (message, count))
    for rows, sent, scale in [(70, 3, ONE), (90, None, ONE), (70, 3, SCALES["zero"]), (70, 20, torch.arange(70) % 3.0)]:
        theirs = awkward(rows, 20).clamp(-1e20, 1e20)
        theirs[8, :2] = torch.tensor([float("inf"), float("nan")])
        values = torch.randn(rows, sent or 20)
        before = values.roll(1).where(torch.arange(rows).unsqueeze(1) % 5 > 0, values)  # some stand still
        rest = None if sent is None else mask_of(rows, 20, sent), values, before, scale
        yield Case("quantize_with_error", f"{sent}, {scale.dim()}, {scale.max():.0f}", (theirs, *rest), "")
        if sent == 3 and scale is ONE:
            double = theirs.double(), rest[0], values.double(), before.double(), scale
            yield Case("quantize_with_error", "fp64", double, "cpu")


def sweep_of(
    rank: int | None,
    sent: int | None,
    *,
    packed: bool = False,
    dtypes: Sequence[torch.dtype | None] = (torch.float32, None, torch.float32),
    state: torch.dtype = torch.float32,
    scale: Any = 0.7,
    second: bool = False,
    length: int = 20,
    sizes: Sequence[int] = (500, 77, 230, 3, 401),
    odd: bool = False,
) -> ops.Sweep:
    """All rows (None), those of another rank's peers (0, 2) or those of rank 1; gradients of ``dtypes`` in turn."""
    generator = torch.Generator().manual_seed(length)
    layout = Layout(sizes, [0] * len(sizes), length, 3)
    region = layout.region(0, layout.blocks) if rank is None else layout.local(1) if rank == 1 else layout.remote(rank)
    rows = layout.shard_blocks if rank == 1 else layout.blocks
    entries = torch.randn(rows, length, generator=generator)
    if odd:
        numbers = [0.0, -0.0, 1e-40, -1e-45, 3.4e38, -3.4e38, 65520.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 2.0]
        entries = torch.tensor(numbers)[torch.randint(0, 10, entries.shape, generator=generator)]
    grads: list[Tensor | None] = []
    for place, size in enumerate(sizes):
        dtype, grad = dtypes[place % len(dtypes)], torch.randn(size, generator=generator) * (1e-3 if odd else 1)
        grads.append(None if dtype is None else grad.to(dtype))
    factor, by_row, residual = torch.as_tensor(scale, dtype=torch.float32), torch.ones(rows), entries.clone()
    for part in region.rows:
        residual[part] = 0  # pads
    for place, piece in enumerate(region.pieces):
        inside, grad = piece.of_blocks(length), grads[piece.index]
        residual.view(-1)[inside] = entries.view(-1)[inside]
        if factor.dim():  # by piece
            by_row[piece.row : piece.row + piece.blocks] = factor[place % len(factor)]
            if not factor[place % len(factor)] and grad is not None:
                grad[piece.of_parameter][::2] = float("nan")
    factor = by_row if factor.dim() else factor
    shards, columns = 1 if rank == 1 else 3, sent or length
    room = (shards, -(-rows // shards * columns // 64), 34)
    moments = torch.rand(rows, length, generator=generator, dtype=state)
    weights = [0.05 + 0.1 * place for place in range(len(region.pieces))]
    return ops.Sweep(
        region,
        residual,
        grads,
        factor,
        None if sent is None else mask_of(rows, length, sent),
        torch.full((rows, columns), 7.0),
        ops.SecondMoment(moments, weights, 3) if second else None,
        torch.full(room, 7, dtype=torch.uint8) if packed else None,
    )


def sweeps() -> Iterator[Case]:
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    made: dict[str, ops.Sweep] = {
        "all rows, second moments": sweep_of(None, 2, second=True),
        "own rows": sweep_of(1, 7, second=True),
        "own rows, everything": sweep_of(1, None, second=True),
        "others' rows": sweep_of(0, 1),
        "others' rows, everything": sweep_of(2, None),
        "several dtypes": sweep_of(None, 2, dtypes=(fp32, None, bf16), second=True),
        "in 4 bits": sweep_of(0, 2, packed=True, dtypes=(fp32, bf16)),
        "everything in 4 bits": sweep_of(2, None, packed=True),
        "scale zero": sweep_of(None, 2, second=True, scale=[0.0]),
        "scale zero in 4 bits": sweep_of(None, 2, packed=True, scale=[0.0]),
        "scale by row": sweep_of(None, 6, second=True, scale=[0.0, 0.3, 1.0]),
        "scale by row in 4 bits": sweep_of(0, 2, packed=True, scale=[0.0, 0.3, 1.0]),
        "odd numbers": sweep_of(None, 3, odd=True),
        "odd numbers, everything": sweep_of(None, None, odd=True),
        "length 250": sweep_of(1, 25, length=250, sizes=(1253, 500, 7), second=True),
        "length 16": sweep_of(0, 16, length=16, sizes=(83, 32, 7)),
        "a shard of pads alone": sweep_of(1, 2, second=True, sizes=(5,)),
    }
    for name, work in made.items():
        yield Case("sweep", name, (work,))
    yield Case("sweep", "no gradient", (made["own rows"]._replace(grads=[None] * 5),))
    yield Case("sweep", "folded before", (made["several dtypes"]._replace(grads=None),))
    yield Case("sweep", "folds only", (made["own rows"]._replace(values=None, mask=None),), "cuda")
    nothing = made["others' rows"]._replace(region=Region((), ()), grads=[])
    yield Case("sweep", "an empty region", (nothing,))
    yield Case("sweep", "fp64", (sweep_of(1, 2, dtypes=(fp64,), state=fp64, second=True),), "cpu cuda")
    yield Case("sweep", "fp16", (sweep_of(0, 2, dtypes=(torch.float16,)),), "cpu cuda")
    yield Case("sweep", "long blocks", (sweep_of(1, 2, length=5000, sizes=(12_000, 20_000), second=True),), "cuda")


def updates() -> Iterator[Case]:
    """Entries have waited for one step, a few, or thousands. A third of the rows stays out of a step by row."""
    rows, length = 90, 20
    for name, sent, by_row, longest, options in [
        ("masked", 3, False, 2000, {}),
        ("waits of one step", 3, False, 1, {}),
        ("everything, by row", None, True, 2000, {}),
        ("masked, by row", 3, True, 2000, {}),
        ("no decay", 3, False, 5, {"decay": 0.0, "beta1": 0.999}),
        ("a decay beyond one", None, False, 5, {"decay": 1500.0}),
        ("fp64", 3, False, 2000, {"dtype": torch.float64}),
    ]:
        generator, dtype = torch.Generator().manual_seed(longest), options.get("dtype", torch.float32)
        theta, total, own = (torch.randn(rows, sent or length, generator=generator, dtype=dtype) for _ in range(3))
        first = torch.randn(rows, length, generator=generator, dtype=dtype)
        second = 10 ** (-6 * torch.rand(rows, length, generator=generator, dtype=dtype))
        total[0], total[1], second[3] = 0.0, 1e-30, 0.0
        tau = torch.randint(1, longest + 1, (rows, length), generator=generator)
        tau[2], tau[4] = 0, -3  # after a load, a pad's last step may be later than this one
        step, scale, lr, group = torch.tensor(5000), ONE, 1e-3, None
        corrections = torch.tensor(0.3, dtype=dtype), torch.tensor(0.2, dtype=dtype)
        if by_row:
            step, scale = 5000 + torch.arange(rows) // 11 % 2, torch.arange(rows) % 3 * 0.5
            lr, group = torch.tensor([1e-3, 2e-3, 3e-4]), (torch.arange(rows) // 7 % 3).int()
            corrections, total[::3] = (torch.linspace(0.1, 1, rows), torch.linspace(0.2, 0.3, rows)), float("nan")
        last = ((step.unsqueeze(1) if by_row else step) - tau).int()
        shard = ops.ShardState(theta, first, second, last)
        numbers = ops.RowNumbers(step.int(), scale, hyper(lr=lr, **options), *corrections, group)
        rest = (None, total, None) if sent is None else (mask_of(rows, length, sent), total, own)
        yield Case("update_shard", name, (shard, *rest, numbers, 4), "cpu cuda" if name == "fp64" else "")
    # Squares beyond fp32, of what arrives and of what the owner has seen: their difference must not be NaN.
    sizes = torch.tensor([0.0, 1.0, 1e15, 1e19, 3e19, 3e38])
    total = sizes.view(6, 1).expand(6, 12).contiguous()
    second = sizes.square().clamp(max=3.4e38).view(1, 6).expand(6, 6).repeat(1, 2).contiguous()
    last = torch.tensor([[8] * 6 + [0] * 6] * 6, dtype=torch.int32)
    shard = ops.ShardState(torch.zeros(6, 12), torch.zeros(6, 12), second, last)
    numbers = ops.RowNumbers(torch.tensor(9, dtype=torch.int32), ONE, hyper(), ONE / 2, ONE / 2)
    adams = ops.ShardState(shard.theta, shard.exp_avg, None, last)
    yield Case("update_shard", "AdamS", (adams, None, total * 0 + 2, None, numbers, 4), "cpu cuda")
    yield Case("update_shard", "huge numbers", (shard, mask_of(6, 12, 12), total, total.flip(0), numbers, 4))
    yield Case("update_shard", "huge numbers, everything", (shard, None, total, None, numbers, 4))


def exchanges() -> Iterator[Case]:
    sizes = [300, 7, 409, 33, 1]
    layout = Layout(sizes, [0] * len(sizes), 50, 3)
    for name, rank, sent, dtype in [
        ("masked", None, 3, torch.float32),
        ("a shard", 2, 3, torch.bfloat16),
        ("everything", 0, None, torch.bfloat16),
        ("fp64", None, 3, torch.float64),
    ]:
        pieces = list((layout.region(0, layout.blocks) if rank is None else layout.local(rank)).pieces)
        rows = layout.blocks if rank is None else layout.shard_blocks
        flats = [torch.randn(n).to(dtype if i % 2 == 0 else torch.float32) for i, n in enumerate(sizes)]
        entries = ops.ParamEntries(flats, pieces, None if sent is None else mask_of(rows, 50, sent, pieces), 50)
        declined = "cpu cuda" if dtype == torch.float64 else "cpu" if sent is None else ""
        values = torch.randn(rows, sent or 50)
        yield Case("gather_params", name, (entries, torch.full_like(values, 7.0)), declined)
        masters = torch.full_like(values, 7.0, dtype=torch.promote_types(dtype, torch.float32))
        ops.gather_params(entries, masters)
        masters *= 1 + torch.randint(-1, 2, masters.shape) * torch.finfo(dtype).eps * 0.4  # some round to it, some not
        masters[::2, ::3] = 0.0
        yield Case("gather_params", f"{name}, renewed", (entries, masters, True), "cpu cuda")
        by_row = torch.ones(rows)
        by_row[pieces[0].row : pieces[0].row + pieces[0].blocks] = 0.0
        error = torch.randn(rows, 50) / 1000
        for how, rest in {
            "written": (values, False, ONE),
            "added": (values / 100, True, ONE),
            "with errors": (values / 100, True, ONE, error),
            "by row": (values / 100, True, by_row, error),
            "scale zero": (values, True, SCALES["zero"]),
        }.items():
            where = f"{declined} cuda" if how == "written" else declined
            yield Case("scatter_params", f"{name}, {how}", (entries, *rest), where)


with ops.using("naive"):
    CASES = [case for cases in (selections, sketches, messages, sweeps, updates, exchanges) for case in cases()]


# ---------------------------------------------------------------------------------------------------------- comparisons


def copied(value: Any, device: str = "cpu") -> Any:
    """An argument of an operation, with copies of its tensors on a device."""
    if isinstance(value, Tensor):
        own = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        return own.copy_(value)
    if isinstance(value, (list, tuple)):
        items = [copied(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a NamedTuple, or a plain one
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """All of nested lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which 0 is not -0."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    """Which NaN it is is left open."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    known = ~a.isnan() if a.is_floating_point() else torch.ones_like(a, dtype=torch.bool)
    if a.is_floating_point():
        assert torch.equal(known, ~b.isnan())
    assert torch.equal(bits(a)[known], bits(b)[known])


def assert_close(rtol: float, atol: float) -> Callable[[Tensor, Tensor], None]:
    def compare(a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)

    return compare


class FarAway:
    """Host memory of 2**32 entries and more, of which only the pages that are touched exist."""

    def __init__(self, entries: int, itemsize: int = 4) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self.memory = mmap.mmap(-1, entries * itemsize, flags=flags)

    def at(self, entry: int, count: int, dtype: Any = np.float32) -> Tensor:
        """A tensor of ``count`` entries, whose storage is not larger than that."""
        return torch.from_numpy(np.frombuffer(self.memory, dtype, count, entry * np.dtype(dtype).itemsize))

    def rows(self, length: int, dtype: Any = np.float32) -> Tensor:
        """Two rows, ``FAR`` apart."""
        return self.at(0, FAR + length, dtype).as_strided((2, length), (FAR, 1))
