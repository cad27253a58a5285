"""The table of operations: back end x operation x case; and who computes what."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import (
    CASES,
    FAR,
    ONE,
    Case,
    FarAway,
    assert_close,
    assert_same_bits,
    copied,
    hyper,
    mask_of,
    sweep_of,
    tensors_in,
)
from rank_checks import train_on, train_scaled
from torch import Tensor

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.core.layout import Layout
from lightning_scape.ops import cpu, cuda, dispatch
from lightning_scape.ops.cpu import loops
from lightning_scape.scape.opening import SKETCH_WIDTHS, random_signs

COMPILED = torch.cuda.is_available() and not os.environ.get("TRITON_INTERPRET")
DEVICES = {"cpu": "cpu", "cuda": "cuda" if COMPILED else "cpu"}
MODULES = {"cpu": cpu, "cuda": cuda}
ROUNDS = {"sketch": (1e-5, 2e-5), "update_shard": (4e-6, 4e-5)}
"""Operations that round otherwise than their definition; the others are bitwise equal to it."""
TABLE = [
    pytest.param(backend, case, id=f"{backend}-{case.operation}-{case.name}")
    for backend, module in MODULES.items()
    for case in CASES
    if hasattr(module, case.operation)
]
# NumPy's: a gradient may be infinite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("backend", "case"), TABLE)
def test_a_back_end_computes_what_the_definition_says(
    backend: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, done = DEVICES[backend], []
    ours, theirs = copied(case.args, device), copied(case.args)
    function = getattr(MODULES[backend], case.operation)

    def noted(*args: Any) -> Any:
        result = function(*args)
        done.append(backend)
        return result

    with monkeypatch.context() as patched, ops.using(backend):
        patched.setattr(MODULES[backend], case.operation, noted)
        result = getattr(ops, case.operation)(*ours)
    with ops.using("naive"):
        expected = getattr(ops, case.operation)(*theirs)
    assert bool(done) == (backend not in case.declined_by)
    exact = case.operation not in ROUNDS or not done
    compare = assert_same_bits if exact else assert_close(*ROUNDS[case.operation])
    if COMPILED and case.operation == "sweep" and device == "cuda":  # second moments: a division rounds otherwise
        compare = assert_close(1e-6, 0.0)
    found = zip(tensors_in([copied(result), copied(ours)]), tensors_in([expected, theirs]), strict=True)
    for place, (mine, twin) in enumerate(found):
        # After a wait of one step no exp is involved: all but parameters.
        bitwise = not twin.is_floating_point() or (backend == "cpu" and case.name == "waits of one step" and place > 1)
        (assert_same_bits if bitwise else compare)(mine.cpu(), twin)


def test_every_operation_and_every_function_of_a_back_end_is_in_the_table() -> None:
    in_table = {case.operation for case in CASES}
    for module in MODULES.values():
        functions = {
            name
            for name, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__.startswith(module.__name__) and name[0] != "_"
        }
        assert functions <= in_table
    assert in_table == set(dispatch.OPERATIONS)


def test_twins_have_the_signature_of_their_definition() -> None:
    for name, operation in dispatch.OPERATIONS.items():
        for module in MODULES.values():
            twin = inspect.signature(getattr(module, name, operation)).parameters.values()
            ours = [(each.name, each.kind, each.default) for each in twin]
            definition = inspect.signature(operation).parameters.values()
            assert ours == [(each.name, each.kind, each.default) for each in definition]


# ------------------------------------------------------------------------------------- numbers drawn at random (numba)


@given(st.data(), st.integers(0, 70), st.integers(1, 300), st.integers(0, 2**20))
def test_select_equals_its_definition_for_all_quotas(data: st.DataObject, rows: int, length: int, seed: int) -> None:
    sent, generator = data.draw(st.integers(1, length)), torch.Generator().manual_seed(seed)
    statistic = torch.randn(rows, length, generator=generator)
    statistic *= 10.0 ** torch.randint(-12, 12, (rows, length), generator=generator)  # heavy tails
    kind = torch.randint(0, 12, (rows, length), generator=generator)
    for place, number in enumerate((0.0, -0.0, 1e-41, 2.5)):
        statistic[kind == place] = number
    ours = cpu.select(statistic, sent)
    with ops.using("naive"):
        assert torch.equal(ours, ops.select(statistic, sent))


@given(st.integers(1, 256), st.data(), st.sampled_from([0.7, 0.0, [0.0, 0.3, 1.0]]))
def test_sweep_equals_its_definition_for_all_shapes(length: int, data: st.DataObject, scale: Any) -> None:
    sent, packed = data.draw(st.none() | st.integers(1, length)), data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 900), min_size=1, max_size=5))
    rank, second = data.draw(st.sampled_from([None, 0, 1, 2])), data.draw(st.booleans())
    dtypes = data.draw(st.sampled_from([(torch.float32,), (torch.bfloat16, None)]))
    options = {"packed": packed, "dtypes": dtypes, "scale": scale, "second": second, "length": length, "sizes": sizes}
    work = sweep_of(rank, sent, **options)
    results = []
    for choice in ("cpu", "naive"):
        own = copied(work)
        with ops.using(choice):
            ops.sweep(own)
        results.append(tensors_in(own))
    for ours, theirs in zip(*results, strict=True):
        assert_same_bits(ours, theirs)


# --------------------------------------------------------------------------------------- small parts, threads, far away


@pytest.mark.parametrize("operation", sorted(dispatch.OPERATIONS))
def test_definitions_do_not_depend_on_how_many_rows_they_take_at_a_time(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = [], []
    for found, entries in ((whole, 1 << 18), (parts, 1)):  # 64 rows, or a group, or an entry
        for module in ("masks", "gradients"):
            patched = importlib.import_module(f"lightning_scape.ops.naive.{module}")
            monkeypatch.setattr(patched, "chunk", lambda tensor, entries=entries: entries)
        for case in [case for case in CASES if case.operation == operation][:9]:
            own = copied(case.args)
            with ops.using("naive"):
                found += tensors_in([getattr(ops, operation)(*own), own])
    for one, other in zip(whole, parts, strict=True):
        assert_same_bits(one, other)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_GRAIN", 256)
    cases = [case for case in CASES if hasattr(cpu, case.operation) and "cpu" not in case.declined_by][::3]
    results = []
    for count in (1, 3):
        with threads(count):
            args = [copied(case.args) for case in cases]
            found = [getattr(cpu, case.operation)(*own) for case, own in zip(cases, args, strict=True)]
            results.append(tensors_in([found, args]))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


def test_loops_reach_places_beyond_32_bit_offsets() -> None:
    size, row, like = FAR + 64, FAR // 64, np.empty(0, np.float32)
    residual, flat = FarAway(size), FarAway(size)
    residual.at(FAR, 64)[:], flat.at(FAR, 64)[:] = 2 * torch.arange(64.0), torch.arange(64.0)
    matrix = np.frombuffer(residual.memory, np.float32, size).reshape(-1, 64)
    mask, sent = np.full((row + 1, 1), 5, np.uint8), np.zeros((row + 1, 1), np.float32)
    loops.compact(matrix, mask, sent, np.ones(1, np.float32), row, row + 1)
    assert sent[row, 0] == 10.0
    assert residual.at(FAR, 8).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 0.0, 12.0, 14.0]
    table, out = np.array([[flat.at(0, 1).data_ptr(), 0, 0, row + 1, 0]]), np.zeros((row + 1, 1), np.float32)
    none = np.empty((0, 0), np.float32)
    loops.exchange(0, table, mask, out, none, 64, like, row, row + 1)
    assert out[row, 0] == 5.0
    loops.exchange(2, table, mask, out, none, 64, like, row, row + 1)
    assert flat.at(FAR, 8).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 10.0, 6.0, 7.0]


# ----------------------------------------------------------------------------------------------- examples of docstrings


@pytest.mark.parametrize("choice", ["naive", "cpu", "cuda"])
def test_examples_of_the_docstrings(choice: str) -> None:
    device = DEVICES.get(choice, "cpu")

    def tensor(values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    one, mask = tensor(1.0), tensor([[1], [0], [0]], torch.uint8)
    with ops.using(choice):
        assert ops.select(tensor([[3.0, -5, 0, 0], [0, 0, 0, 0]]), 2).tolist() == [[1, 0], [0, 1]]
        residual = tensor([1.0, 1.0])
        ops.fold(residual, tensor([3.0, -8.0]), tensor(0.5))
        assert residual.tolist() == [2.5, -3.0]
        residual = tensor([[1.0, 5.0]])
        assert ops.compact(residual, tensor([[0]], torch.uint8), one).tolist() == [[1.0]]
        assert residual.tolist() == [[0.0, 5.0]]
        packed = ops.pack_mask(tensor([[9, 0]], torch.uint8), 10)
        assert (packed.tolist(), ops.unpack_mask(packed, 2, 10).tolist()) == ([[1, 2]], [[0, 9]])
        values = tensor([3.5, -7.0, 0.25])
        message = ops.quantize(values)
        assert message.tolist() == [[0x0B, *[0x77] * 31, 0x80, 0x3F]]
        assert values.tolist() == [-0.5, 0.0, 0.25]
        assert_same_bits(ops.dequantize(message.unsqueeze(0), 3).cpu(), torch.tensor([[4.0, -7.0, -0.0]]))
        theta, total, single = tensor([[3.0]]), tensor([[-2.0]]), (tensor(v) for v in (1.0, 0.0, 0.0, 1e-30, 0.0))
        shard = ops.ShardState(theta, tensor([[0.0, 0.0]]), tensor([[0.0, 0.5]]), tensor([[0, 0]], torch.int32))
        numbers = ops.RowNumbers(tensor(1, torch.int32), one, ops.Hyper.of(torch.float32, *single), one, one)
        ops.update_shard(shard, tensor([[1]], torch.uint8), total, total / 2, numbers, 2)
        assert [each.tolist() for each in shard] == [[[4.0]], [[0.0, -2.0]], [[0.0, 4.0]], [[0, 1]]]
        flats, out = [tensor([5.0, 6.0, 7.0]), tensor([8.0])], torch.zeros(3, 1, device=device)
        entries = ops.ParamEntries(flats, Layout([3, 1], [0, 0], 2, 1).pieces, mask, 2)
        ops.gather_params(entries, out)
        assert out.tolist() == [[6.0], [7.0], [8.0]]
        ops.scatter_params(entries, -out, False, one)
        ops.scatter_params(entries, torch.full_like(out, 0.5), True, one)
        assert [flat.tolist() for flat in flats] == [[5.0, -5.5, -6.5], [-7.5]]
        pieces, masters = Layout([2], [0], 2, 1).pieces, tensor([[1.001, 2.0]])
        ops.gather_params(ops.ParamEntries([tensor([1.0, 3.0], torch.bfloat16)], pieces, None, 2), masters, renew=True)
        assert_same_bits(masters.cpu(), torch.tensor([[1.001, 3.0]]))
        pieces, error, small = Layout([1], [0], 1, 1).pieces, tensor([[0.0]]), tensor([[0.003]])
        entries = ops.ParamEntries([tensor([1.0], torch.bfloat16)], pieces, tensor([[0]], torch.uint8), 1)
        ops.scatter_params(entries, small, True, one, error)
        assert (entries.flats[0].tolist(), error.tolist()) == ([1.0], small.tolist())


# ------------------------------------------------------------------------------------------------------------- dispatch


def test_tensors_of_a_device_go_through_its_back_end_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for name, module in MODULES.items():
        monkeypatch.setattr(module, "select", functools.partial(lambda name, *_: used.append(name), name))
    ops.select(torch.zeros(1, 4), 1)
    with ops.using("cuda"):
        ops.select(torch.zeros(1, 4), 1)
        with ops.using("naive"):
            assert ops.select(torch.zeros(1, 4), 1).tolist() == [[0]]
    monkeypatch.setenv(ops.VARIABLE, "cuda")
    ops.select(torch.zeros(1, 4), 1)
    assert used == ["cpu", "cuda", "cuda"]


def test_an_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with ops.using("triton"), pytest.raises(ValueError, match="must be one of auto, naive, cpu, cuda, got 'triton'"):
        ops.select(torch.zeros(1, 4), 1)
    monkeypatch.setenv(ops.VARIABLE, "fast")
    with pytest.raises(ValueError, match=r"\$LIGHTNING_SCAPE_OPS \(or `using`\) must be one of"):
        ops.select(torch.zeros(1, 4), 1)


@pytest.mark.parametrize(
    ("choice", "needs", "problem"),
    [
        ("cpu", "numba", "None in sys.modules"),
        ("cuda", "triton", "None in sys.modules"),
        ("cpu", "numba", "NUMBA_DISABLE_JIT"),
        ("cpu", "numba", "needs an older NumPy"),
    ],
)
def test_without_a_compiler_that_works_the_definitions_serve_and_say_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, needs: str, problem: str
) -> None:
    monkeypatch.setattr(dispatch, "_module", functools.cache(dispatch._module.__wrapped__))
    if problem == "NUMBA_DISABLE_JIT":
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    elif problem == "needs an older NumPy":
        (tmp_path / "numba.py").write_text(f"raise ImportError({problem!r})")
        monkeypatch.delitem(sys.modules, "numba")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, needs, None)
    for name in [name for name in sys.modules if name.startswith(f"lightning_scape.ops.{choice}")]:
        monkeypatch.delitem(sys.modules, name)
    with ops.using(choice), pytest.warns(UserWarning, match=f"operations need {needs}, got none.*{problem}") as told:
        chosen = [ops.select(torch.zeros(1, 4), 1).tolist() for _ in range(2)]
    assert chosen == [[[0]]] * 2
    assert len(told) == 1


# ------------------------------------------------------------------------------------------------------ whole trainings


def train(choice: str, config: ScapeConfig, dtype: torch.dtype, follow: bool) -> list[Tensor]:
    """Steps with two parameter groups, skipped steps and gaps; gradients may follow the parameters."""
    generator, device = torch.Generator().manual_seed(3), DEVICES.get(choice, "cpu")
    sizes = (450, 40, 311)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(device, dtype)) for n in sizes]
    goals = [torch.randn(n, generator=generator) for n in sizes]
    groups = [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 5e-3, "weight_decay": 0.0}]
    optimizer = ScapeOptimizer(groups, config=config)
    with ops.using(choice):
        for step in range(9):
            for parameter, goal in zip(parameters, goals, strict=True):
                noise = torch.randn(goal.shape, generator=generator)
                at = parameter.detach().cpu() if follow else 0.0
                parameter.grad = (at - goal + noise).to(device, dtype)
            if step % 4 == 1:
                parameters[1].grad = None  # on every rank: it is left alone
            if step == 7:
                parameters[0].grad[3] = float("nan")  # skipped: nothing may have changed
            if step % 3 == 0 and follow:  # back ends add a norm up in other orders
                optimizer.clip_grad_norm(5.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.drain()
    state = optimizer.engine.state
    assert state is not None
    found = [state.residual, state.last_step, state.exp_avg, state.exp_avg_sq, *parameters]
    return [tensor.detach().cpu() for tensor in found if tensor is not None]


@pytest.mark.parametrize("choice", ["cpu", "cuda"])
@pytest.mark.parametrize(("sparsity", "dtype"), [(0.99, torch.bfloat16), (0.9, torch.float32)])
@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_trainings_by_back_ends_are_those_of_the_definitions(choice: str, sparsity: float, dtype: torch.dtype) -> None:
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=3, update="adamw")
    for follow in (False, True) if sparsity == 0.9 else (False,):
        ours, theirs = (train(each, config, dtype, follow) for each in (choice, "naive"))
        if not follow:  # every entry is chosen alike, and what is left is the same
            assert_same_bits(ours[0], theirs[0])
            assert_same_bits(ours[1], theirs[1])
        # Of order 1 after steps of 1e-2: rounding alone. An entry chosen otherwise would be off by 1e-2.
        compare = assert_close(2**-7 if dtype == torch.bfloat16 else 1e-5, 1e-4 if follow else 1e-5)
        for a, b in zip(ours, theirs, strict=True):
            compare(a, b)


def test_two_ranks_train_alike_in_numba_and_by_definition(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for choice in ("cpu", "naive"):
        monkeypatch.setenv(ops.VARIABLE, choice)
        results.append(run_ranks(train_on, 2, "cpu", "fp32", 0.99))
    for (ours, residual), (theirs, their_residual) in zip(*results, strict=True):
        for a, b, first in zip(ours, theirs, results[0][0][0], strict=True):
            assert torch.equal(a, first)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        torch.testing.assert_close(residual, their_residual, rtol=0, atol=1e-4)


def test_an_inf_on_one_rank_makes_the_scaler_skip_the_step_on_all(run_ranks) -> None:
    (first, calls, scale), (second, other_calls, other_scale) = run_ranks(train_scaled, 2, "cpu")
    assert torch.equal(first, second)
    assert calls == other_calls == 5
    assert scale == other_scale == 512.0


def test_pads_stay_zero_when_a_state_with_missed_steps_is_loaded() -> None:
    for update, sparsity in (("adamw", 0.5), ("adams", 0.0)):
        config, saved = ScapeConfig(sparsity=sparsity, update=update, sparsity_warmup_steps=0), None
        for _ in range(2):
            parameter = torch.nn.Parameter(torch.ones(13))
            optimizer = ScapeOptimizer([parameter], config=config)
            if saved is not None:
                optimizer.load_state_dict(saved)
            for step in range(4):
                parameter.grad = None if step == 1 else torch.ones_like(parameter)
                optimizer.step()
            optimizer.drain()
            saved, state = optimizer.state_dict(), optimizer.engine.state
            assert state is not None
            for shard in (state.residual, state.exp_avg, state.exp_avg_sq):
                assert shard is None or not shard.view(-1)[13:].any()
            assert parameter.isfinite().all()


def test_what_the_loops_cannot_read_the_definition_computes() -> None:
    """Views with the negative bit: what lies in memory has the other sign."""
    imaginary = torch.randn(40, dtype=torch.complex64).conj().imag
    with ops.using("cpu"):
        given = random_signs(1 << 14), SKETCH_WIDTHS
        torch.testing.assert_close(ops.sketch([imaginary], *given), ops.sketch([imaginary.clone()], *given))
        flat, values = torch.zeros(80, dtype=torch.float32)[::2], torch.ones(2, 1)
        pieces = Layout([40], [0], 20, 1).pieces
        ops.scatter_params(ops.ParamEntries([flat], pieces, mask_of(2, 20, 1), 20), values, True, ONE)
        assert flat.sum() == 2
        theta = torch.zeros(1, 1)
        shard = ops.ShardState(theta, theta.clone(), theta.clone(), torch.zeros(1, 1, dtype=torch.int32))
        numbers = ops.RowNumbers(torch.tensor(1, dtype=torch.int32), ONE * 0, hyper(), ONE, ONE)
        ops.update_shard(shard, None, theta + float("nan"), None, numbers, 2)
        assert not any(each.any() for each in shard)
