"""The Triton kernels in Triton's interpreter, against their twins; and that the two cannot drift apart."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from kernel_checks import FAR, FarAway, KernelChecks, assert_same_bits, hyper
from rank_checks import train_scaled

from lightning_scape import ops
from lightning_scape.ops import naive
from lightning_scape.ops.cuda import gradients as cuda_gradients
from lightning_scape.ops.cuda import launch as cuda_launch
from lightning_scape.ops.cuda import masks as cuda_masks
from lightning_scape.ops.cuda import update as cuda_update
from lightning_scape.ops.registry import CHUNKED, CPU, NAIVE, OPERATIONS
from lightning_scape.ops.registry import CUDA as cuda

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET"),
    reason="kernels are compiled for the GPU here: set TRITON_INTERPRET=1 to run them on CPU tensors",
)


@interpreted
class TestInterpreted(KernelChecks):
    device = "cpu"


# ----------------------------------------------------------------------------- same names, same signatures


@pytest.mark.parametrize("operation", ops.DISPATCHED, ids=lambda operation: operation.__name__)
def test_twins_have_the_same_signature(operation) -> None:
    def parameters(function) -> list[tuple]:
        signature = inspect.signature(function)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    name = operation.__name__
    assert parameters(getattr(cuda, name)) == parameters(getattr(naive, name)) == parameters(operation)
    assert getattr(ops, name) is operation


def test_every_operation_is_called_by_the_name_of_its_definition() -> None:
    assert [operation.__name__ for operation in ops.DISPATCHED] == list(OPERATIONS)
    for operation in ops.DISPATCHED:
        name = operation.__name__
        assert getattr(ops, name) is operation
        assert getattr(NAIVE, name) is getattr(naive, name) is OPERATIONS[name] is inspect.unwrap(operation)


def test_every_public_function_of_the_reference_is_an_operation_or_a_known_helper() -> None:
    functions = {name: value for name, value in vars(naive).items() if inspect.isfunction(value)}
    ours = {name for name, value in functions.items() if value.__module__.startswith("lightning_scape.ops.naive.")}
    helpers = {
        "position_dtype",
        "to_device",
        "group_bytes",
        "bits_in",
        "as_bits",
        "mask_bytes",
        "pack_by",
        "column",
        "cut",
    }
    helpers |= {"draw", "within", "feed_error_back", "to_scale", "from_scale", "column_and_row_sums"}
    rules = {"adams_step", "adamw_step"}  # pure: the same for all
    assert ours - helpers - {"checksum_of_sums"} - rules == OPERATIONS.keys()
    for name in rules:
        assert getattr(ops, name) is getattr(naive, name)


WITH_EXAMPLES = (
    *("pack_mask", "unpack_mask", "scatter_params"),
    *("select", "fold", "compact", "quantize", "dequantize", "update_adamw", "gather_params"),
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_has_an_example(name: str) -> None:
    assert "Example:" in inspect.getdoc(getattr(naive, name))  # KernelChecks runs it, for both


# ------------------------------------------------------------------------------------------------------------- dispatch


def test_cpu_tensors_go_through_numba_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("lightning_scape.ops.cpu")  # now: it registers its operations
    used: list[str] = []
    for backend in (CHUNKED, CPU, cuda):
        monkeypatch.setattr(backend, "select", functools.partial(lambda name, *_: used.append(name), backend.name))
    ops.select(torch.zeros(1, 4), 1)
    with ops.using("cuda"):
        ops.select(torch.zeros(1, 4), 1)
        with ops.using("naive"):
            ops.select(torch.zeros(1, 4), 1)
    monkeypatch.setenv("LIGHTNING_SCAPE_OPS", "cuda")
    ops.select(torch.zeros(1, 4), 1)
    assert used == ["cpu", "cuda", "chunked", "cuda"]


def test_an_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ValueError, match="must be one of auto, naive, cpu, cuda, got 'triton'"),
        ops.using("triton"),
    ):
        pass
    monkeypatch.setenv("LIGHTNING_SCAPE_OPS", "fast")
    with pytest.raises(ValueError, match=r"\$LIGHTNING_SCAPE_OPS must be one of"):
        ops.select(torch.zeros(1, 4), 1)


def test_without_triton_the_reference_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ops._cuda.cache_clear()
    monkeypatch.setattr(ops, "find_spec", lambda _: None)
    try:
        with pytest.warns(UserWarning, match="Install lightning-scape"):
            assert ops._implementation(on_cuda=True) is CHUNKED
        with ops.using("cuda"), pytest.raises(ModuleNotFoundError, match="need Triton"):
            ops.select(torch.zeros(1, 4), 1)
    finally:
        ops._cuda.cache_clear()


# ---------------------------------------------------------------------------------------------------------- two ranks


def test_an_inf_on_one_rank_makes_the_scaler_skip_the_step_on_all(run_ranks) -> None:
    (first, calls, scale), (second, other_calls, other_scale) = run_ranks(train_scaled, 2, "cpu")
    assert torch.equal(first, second)
    assert calls == other_calls == 5
    assert scale == other_scale == 512.0


# ----------------------------------------------------------------------------------------- places beyond 32-bit offsets


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
            cuda_masks._select_kernel,
            1,
            first,
            chosen,
            3,
            1,
            STRIDE=FAR,
            BITS_GIVEN=True,
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
        for module, (first, second, last_step) in ((naive, near), (cuda, far)):
            thetas.append(theta.clone())
            shard = ops.ShardState(thetas[-1], first, second, last_step)
            rest = torch.tensor(9, dtype=torch.int32), one, hyper("cpu", torch.float32)
            module.update_adamw(shard, mask, total, total * 2, ops.RowNumbers(*rest, one * 0.5, one * 0.3), 2)
        torch.testing.assert_close(thetas[1], thetas[0])
        assert not torch.equal(thetas[0], theta)
        for matrix, expected in zip(far, near, strict=True):
            torch.testing.assert_close(matrix.clone(), expected)

    def test_norm(self) -> None:
        grads, dtype = FarAway(FAR + 64), triton.language.float32
        grads.at(FAR, 64)[:] = torch.arange(64.0)
        # The program that takes the last 64 entries of a gradient of 2**31 + 128.
        tables = (torch.tensor([FAR + 64]), torch.tensor([0], dtype=torch.int32), torch.tensor([FAR]))
        place = torch.tensor([grads.at(0, 1).data_ptr()])
        partial = torch.empty(1)
        cuda_launch.launch(
            cuda_gradients._squares_kernel, 1, place, *tables, partial, GRAD=dtype, ALIGNED=True, CHUNK=128
        )
        assert float(partial) == float(torch.arange(64.0).square().sum())

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
        constants = {"BLOCK_SIZE": 64, "MASKED": True, "PARAMETER": dtype, "VALUES": dtype, "CHUNK": 2, "SCALED": True}
        constants["KEEP"] = False
        values = out.at(block, 1)
        for renew in (False, True):
            values[0] = 6.5
            rule = {"TO_PARAMETER": False, "ADD": False, "RENEW": renew}
            cuda_launch.launch(cuda_update._exchange_kernel, 1, *arguments, **rule, **constants)
            assert values.tolist() == [7.0]
        values[0] = -1.0
        expected = torch.arange(64.0)
        for add, result in ((False, -1.0), (True, -2.0)):
            rule = {"TO_PARAMETER": True, "ADD": add, "RENEW": False}
            cuda_launch.launch(cuda_update._exchange_kernel, 1, *arguments, **rule, **constants)
            expected[7] = result
            assert_same_bits(memory.at(FAR, 64), expected)
        memory.at(FAR, 64)[7], values[0] = 1.0, 2.0**-26
        rule = {"TO_PARAMETER": True, "ADD": True, "RENEW": False, "KEEP": True}
        cuda_launch.launch(cuda_update._exchange_kernel, 1, *arguments, **constants | rule)
        assert errors.at(FAR, 64).nonzero().tolist() == [[7]]
        assert float(errors.at(FAR, 64)[7]) == 2.0**-26  # 1 + 2**-26 rounds to 1


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
