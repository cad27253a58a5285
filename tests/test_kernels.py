"""The Triton kernels beyond their results: places far away, number of launches and of compilations, machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import compile_kernels
import pytest
import torch
import triton
from ops_cases import FAR, FarAway, assert_same_bits, hyper, sweep_of
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.layout import Layout, Piece, Region
from lightning_scape.ops.cuda import launch as cuda_launch
from lightning_scape.ops.cuda import residual as cuda_residual
from lightning_scape.ops.cuda import update as cuda_update

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled for the GPU here: set TRITON_INTERPRET=1 to run them on CPU tensors",
)


def launched(*works: ops.Sweep) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of sweeps, which are not run."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(kernel: Any, programs: Any, *args: Any, **meta: Any) -> None:
        found.append((kernel, args, dict(meta)))

    with patch.object(cuda_launch, "launch", note), ops.using("cuda"):
        for work in works:
            ops.sweep(work)
    return found


def test_a_sweep_takes_a_launch_for_each_dtype_of_gradients() -> None:
    assert len(launched(sweep_of(0, 2))) == len(launched(sweep_of(1, None, second=True))) == 1
    assert len(launched(sweep_of(None, 2, dtypes=(torch.float32, None, torch.bfloat16)))) == 2
    assert len(launched(sweep_of(0, 2, dtypes=(None,)))) == 1


def test_a_warm_up_of_the_sparsity_compiles_the_kernel_a_few_times() -> None:
    works = [sweep_of(rank, sent, second=rank == 1, length=40) for sent in range(1, 40) for rank in (0, 1)]
    variants = {compile_kernels.Launch(*launch).key for launch in launched(*works)}
    assert len(variants) <= 4  # of both forms; few and many


@interpreted
class TestFarAway:
    """Kernels are launched directly, on rows or parameters that lie 2**31 entries apart; nothing in between exists."""

    def test_select(self) -> None:
        memory = FarAway(2 * FAR + 16)
        for row in range(3):
            memory.at(row * FAR, 16)[5 * row] = -1.0
        chosen = torch.empty(3, 1, dtype=torch.uint8)
        geometry = {"LENGTH": 16, "LOW": 15, "KEPT_BITS": 0x7FFFFFF0, "ROWS": 4, "BLOCK": 16}
        first = memory.at(0, 16, "int32")
        cuda_launch.launch(
            cuda_residual._select_kernel,
            1,
            first,
            chosen,
            3,
            1,
            STRIDE=FAR,
            OUT=triton.language.uint8,
            **geometry,
        )
        assert chosen.tolist() == [[0], [5], [10]]

    def test_update(self) -> None:
        mask, total = torch.tensor([[1], [2]], dtype=torch.uint8), torch.tensor([[3.0], [-2.0]])
        theta, one = torch.tensor([[1.0], [3.0]]), torch.ones(())
        # First and second moment and last_step.
        near = [torch.zeros(2, 4), torch.tensor([[0.0] * 4, [5.0] * 4]), torch.zeros(2, 4, dtype=torch.int32)]
        far = [FarAway(FAR + 4).rows(4, dtype) for dtype in ("float32", "float32", "int32")]
        for matrix, values in zip(far, near, strict=True):
            matrix.copy_(values)
        thetas = []
        numbers = ops.RowNumbers(torch.tensor(9, dtype=torch.int32), one, hyper(), one * 0.5, one * 0.3)
        for update, state in ((ops.update_shard, near), (cuda_update.update_shard, far)):
            thetas.append(theta.clone())
            with ops.using("naive"):
                update(ops.ShardState(thetas[-1], *state), mask, total, total * 2, numbers, 2)
        torch.testing.assert_close(thetas[1], thetas[0])
        assert not torch.equal(thetas[0], theta)
        for matrix, expected in zip(far, near, strict=True):
            torch.testing.assert_close(matrix.clone(), expected)

    def test_gather_and_scatter(self) -> None:
        memory, piece_rows = FarAway(FAR + 64), torch.tensor([0])
        memory.at(FAR, 64)[:] = torch.arange(64.0)
        block = FAR // 64  # blocks of 64 entries, one chosen in each: FAR is the first entry of this one
        mask, values = FarAway(block + 1, 1), torch.zeros(1)
        mask.at(block, 1, "uint8")[0] = 7
        out, errors = FarAway(block + 1), FarAway(FAR + 64)
        arguments = (
            torch.tensor([memory.at(0, 1).data_ptr()]),
            piece_rows,
            torch.tensor([block + 1]),
            torch.tensor([0], dtype=torch.int32),
            torch.tensor([block]),
            mask.at(0, 1, "uint8"),
            out.at(0, 1),
            torch.ones(()),
            0,
            errors.at(0, 1),
            1,
        )
        dtype = triton.language.float32
        constants = {"BLOCK_SIZE": 64, "MASKED": True, "PARAMETER": dtype, "CHUNK": 2}
        values = out.at(block, 1)
        cuda_launch.launch(cuda_update._exchange_kernel, 1, *arguments, **constants, ADD=False, KEEP=False)
        assert values.tolist() == [7.0]
        values[0], expected = -1.0, torch.arange(64.0)
        cuda_launch.launch(cuda_update._exchange_kernel, 1, *arguments, **constants, ADD=True, KEEP=False)
        expected[7] = 6.0
        assert_same_bits(memory.at(FAR, 64), expected)
        memory.at(FAR, 64)[7], values[0] = 1.0, 2.0**-26
        cuda_launch.launch(cuda_update._exchange_kernel, 1, *arguments, **constants, ADD=True, KEEP=True)
        assert errors.at(FAR, 64).nonzero().tolist() == [[7]]
        assert float(errors.at(FAR, 64)[7]) == 2.0**-26  # 1 + 2**-26 rounds to 1

    def test_sweep(self) -> None:
        length, near = 64, Layout([100], [0], 64, 1)
        block = FAR // length
        (piece,) = near.pieces
        far = Region((slice(block, block + 2),), (Piece(0, 0, block, 2, 0, 100),))
        grads: list[Tensor | None] = [torch.randn(100)]
        shapes = {"residual": (length, 4), "mask": (1, 1), "values": (1, 4), "exp_avg_sq": (length, 4)}
        dtypes = {"mask": "uint8"}
        large = {
            name: FarAway((block + 2) * width, size)
            .at(0, (block + 2) * width, dtypes.get(name, "float32"))
            .view(-1, width)
            for name, (width, size) in shapes.items()
        }
        small = {name: torch.zeros(2, tensor.shape[1], dtype=tensor.dtype) for name, tensor in large.items()}
        small["mask"][:, 0] = torch.tensor([5, 9])
        small["residual"].view(-1)[:100] = torch.randn(100)
        for name, tensor in small.items():
            large[name][block:] = tensor
        for choice, region, given in (("cuda", far, large), ("naive", near.region(0, near.blocks), small)):
            moment = ops.SecondMoment(given.pop("exp_avg_sq"), [0.1], 2)
            rest = {"second_moment": moment, **given}
            with ops.using(choice):
                ops.sweep(ops.Sweep(region, grads=grads, scale=torch.tensor(0.7), **rest))
            given["exp_avg_sq"] = moment.exp_avg_sq
        for name, tensor in small.items():
            assert_same_bits(large[name][block:], tensor)
            assert not large[name][0].any()


# ---------------------------------------------------------------------------------- compiled, not only run


def test_kernels_compile_for_gpus_and_spill_no_registers() -> None:
    """Without a GPU: each launch of a step becomes machine code for an H100 or H200, by Triton's own assembler."""
    script = Path(__file__).with_name("compile_kernels.py")
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join([str(script.parents[1]), str(script.parent), environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), "90"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert "compiled 1 x" in done.stdout
