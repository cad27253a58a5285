"""The kernel that sweeps, in Triton's interpreter, against the operations that it joins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import compile_kernels
import pytest
import torch
from kernel_checks import FAR, FarAway, assert_same_bits, awkward
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Piece, Region
from lightning_scape.ops import naive
from lightning_scape.ops.cuda import launch as cuda_launch
from lightning_scape.ops.registry import CUDA as cuda

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
        reason="kernels are compiled for the GPU here: set TRITON_INTERPRET=1 to run them on CPU tensors",
    ),
    # NumPy's: a gradient may be infinite.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SIZES = (500, 77, 230, 3, 401)


class Case(NamedTuple):
    """All that a sweep reads and writes."""

    region: Region
    residual: Tensor
    grads: list[Tensor | None] | None
    scale: Tensor
    mask: Tensor | None
    values: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def draw(
        cls,
        own: bool,
        length: int = 20,
        sent: int | None = 2,
        dtypes: Sequence[torch.dtype | None] = (torch.float32,),
        residual: torch.dtype = torch.float32,
        wire: torch.dtype = torch.bfloat16,
        sizes: Sequence[int] = SIZES,
        scale: Any = 0.7,
    ) -> Case:
        """The rows of rank 1 of 3, or those of all others; ``dtypes`` are the gradients', in turn, None for none."""
        generator = torch.Generator().manual_seed(length)
        layout = Layout(sizes, [0] * len(sizes), length, 3)
        region = layout.local(1) if own else layout.remote(1)
        rows = layout.shard_blocks if own else layout.blocks
        left = torch.randn(rows, length, generator=generator, dtype=residual)
        left[::5, ::3], left[1::5, ::2] = -0.0, 0.0
        grads: list[Tensor | None] = []
        for place, piece in enumerate(region.pieces):
            dtype = dtypes[place % len(dtypes)]
            drawn = torch.randn(piece.numel, generator=generator)
            grads.append(None if dtype is None else drawn.to(dtype))
            # Pads hold zeros.
            stop = (piece.row + piece.blocks) * length
            left.view(-1)[piece.row * length + piece.numel : stop] = 0.0
        mask = None
        if sent is not None:
            drawn = torch.rand(rows, length, generator=generator)
            mask = drawn.argsort(1)[:, :sent].to(naive.position_dtype(length))
        given = torch.as_tensor(scale, dtype=torch.float32)
        if given.dim():  # by parameter
            parameters = torch.zeros(rows)
            for piece in region.pieces:
                parameters[piece.row : piece.row + piece.blocks] = given[piece.segment.index % len(given)]
            given = parameters
        return cls(
            region,
            left,
            grads,
            given,
            mask,
            torch.full((rows, length if sent is None else sent), 9.0, dtype=wire),
            torch.rand(rows, length, generator=generator, dtype=residual),
        )

    def copy(self) -> Case:
        return Case(self.region, *(each.clone() if isinstance(each, Tensor) else each for each in self[1:]))

    def sweep(self, module: Any, *, second: bool = False, **options: Any) -> None:
        moment = ops.SecondMoment(self.exp_avg_sq, [0.05 + 0.1 * i for i in range(len(self.region.pieces))], 3)
        work = ops.Sweep(
            self.region,
            self.residual,
            self.grads,
            self.scale,
            self.mask,
            self.values,
            second_moment=moment if second else None,
            **options,
        )
        module.sweep(work)


def check(case: Case, launches: int | None = None, **options: Any) -> None:
    """The kernel leaves what the operations leave, to the last bit, in so many launches."""
    ours, theirs, launched = case.copy(), case.copy(), []
    launch = cuda_launch.launch

    def note(kernel: Any, *args: Any, **meta: Any) -> None:
        launched.append(kernel.__name__)
        launch(kernel, *args, **meta)

    with patch.object(cuda_launch, "launch", note):
        ours.sweep(cuda, **options)
    # On a GPU the twin adds zeros in a step that is skipped, which makes 0 of -0.
    theirs.sweep(naive, **options)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        if isinstance(a, Tensor):
            assert_same_bits(a, b)
    assert not torch.equal(ours.residual, case.residual) or not case.scale.any()
    if launches is not None:
        assert launched == ["_sweep_kernel"] * launches


@pytest.mark.parametrize(("sent", "wire"), [(1, torch.float32), (5, torch.bfloat16), (None, torch.bfloat16)])
def test_other_ranks_rows_are_folded_and_compacted_in_one_launch(sent: int | None, wire: torch.dtype) -> None:
    check(Case.draw(False, sent=sent, wire=wire), 1)


@pytest.mark.parametrize("sent", [2, 7, None])
def test_own_rows_also_have_their_second_moment(sent: int | None) -> None:
    check(Case.draw(True, sent=sent), 1, second=True)


@pytest.mark.parametrize(("length", "sent"), [(250, 25), (300, 3), (16, 16)])
def test_blocks_of_other_lengths(length: int, sent: int) -> None:
    sizes = (5 * length + 3, 2 * length, 7)
    check(Case.draw(False, length, sent, sizes=sizes), 1)
    check(Case.draw(True, length, sent, sizes=sizes), 1, second=True)


@pytest.mark.parametrize(
    ("dtype", "residual"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_gradients_and_residuals_of_other_dtypes(dtype: torch.dtype, residual: torch.dtype) -> None:
    given: dict[str, Any] = {"dtypes": [dtype], "residual": residual}
    check(Case.draw(True, sent=2, **given), 1, second=True)
    check(Case.draw(False, sent=6, wire=torch.float16, **given), 1)


def test_gradients_of_several_dtypes_take_a_launch_each_and_rows_without_one_are_swept_once() -> None:
    dtypes = (torch.float32, None, torch.bfloat16)
    check(Case.draw(False, dtypes=dtypes, sizes=(31, 30, 30, 90, 30, 30, 30)), 2)
    check(Case.draw(True, dtypes=dtypes, sizes=(90, 31, 30, 30, 30, 90)), 2, second=True)


@pytest.mark.parametrize(("own", "sent"), [(False, 2), (True, None)])
def test_without_any_gradient_rows_are_still_compacted(own: bool, sent: int | None) -> None:
    none = Case.draw(own, dtypes=[None], sent=sent)
    check(none, 1, second=own)
    check(none._replace(grads=None), 1, second=own)


@pytest.mark.parametrize("sent", [2, None])
def test_scale_zero_changes_nothing_though_gradients_are_not_finite(sent: int | None) -> None:
    for case in (Case.draw(True, sent=sent, scale=0.0), Case.draw(True, sent=sent, scale=[0.0, 0.0])):
        assert case.grads is not None
        for grad in case.grads:
            assert grad is not None
            grad[::2] = torch.nan
        check(case, 1, second=True)
        after = case.copy()
        after.sweep(cuda, second=True)
        assert_same_bits(after.residual, case.residual)
        assert_same_bits(after.exp_avg_sq, case.exp_avg_sq)
        assert not after.values.any()


@pytest.mark.parametrize("sent", [2, 6, None])
def test_a_scale_by_row_leaves_out_parameters_that_no_rank_has_a_gradient_of(sent: int | None) -> None:
    case = Case.draw(False, sent=sent, scale=[0.7, 0.0], dtypes=[torch.float32])
    assert case.grads is not None
    for place, piece in enumerate(case.region.pieces):
        if piece.segment.index % 2:
            case.grads[place] = None
    check(case, 1, second=True)


def test_residuals_are_rounded_as_by_the_operations_whatever_they_hold() -> None:
    case = Case.draw(False, 100, 3, sizes=(2000, 900))
    values = awkward(len(case.residual), 100)
    values[~values.isfinite()] = 3e37
    for wire in (torch.float32, torch.bfloat16, torch.float16):
        given = case._replace(residual=values.clone(), values=case.values.to(wire), grads=None)
        check(given, 1)
        check(given._replace(mask=None, values=torch.zeros(len(values), 100, dtype=wire)), 1)


def test_what_the_kernel_cannot_do_is_done_one_after_the_other() -> None:
    """Long blocks."""
    case = Case.draw(True, 5000, 2, sizes=(12_000, 20_000))
    check(case, second=True)
    check(case._replace(grads=None), second=True)


def test_rows_beyond_32_bit_offsets_are_found() -> None:
    length, near = 64, Layout([100], [0], 64, 1)
    block = FAR // length
    (piece,) = near.everything().pieces
    far = Region((slice(block, block + 2),), (Piece(piece.segment, block, 2, 0, 100),))
    grads: list[Tensor | None] = [torch.randn(100)]
    shapes = {"residual": (length, 4), "mask": (1, 1), "values": (1, 4), "exp_avg_sq": (length, 4)}
    dtypes = {"mask": "uint8"}
    large = {
        name: FarAway((block + 2) * width, size).at(0, (block + 2) * width, dtypes.get(name, "float32")).view(-1, width)
        for name, (width, size) in shapes.items()
    }
    small = {name: torch.zeros(2, tensor.shape[1], dtype=tensor.dtype) for name, tensor in large.items()}
    small["mask"][:, 0] = torch.tensor([5, 9])
    small["residual"].view(-1)[:100] = torch.randn(100)
    for name, tensor in small.items():
        large[name][block:] = tensor
    for module, region, given in ((cuda, far, large), (naive, near.everything(), small)):
        moment = ops.SecondMoment(given.pop("exp_avg_sq"), [0.1], 2)
        rest = {"second_moment": moment, **given}
        module.sweep(ops.Sweep(region, grads=grads, scale=torch.tensor(0.7), **rest))
        given["exp_avg_sq"] = moment.exp_avg_sq
    for name, tensor in small.items():
        assert_same_bits(large[name][block:], tensor)
        assert not large[name][0].any()


def test_a_warm_up_of_the_sparsity_compiles_the_kernel_a_few_times() -> None:
    variants: set[str] = set()

    def note(kernel: Any, programs: Any, *args: Any, **meta: Any) -> None:
        variants.add(compile_kernels.Launch(kernel, args, dict(meta)).key)

    with patch.object(cuda_launch, "launch", note):
        for sent in range(1, 40):
            Case.draw(False, 100, sent).sweep(cuda)
            Case.draw(True, 100, sent).sweep(cuda, second=True)
    # Both forms; few and many.
    assert len(variants) <= 4
