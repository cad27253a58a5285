"""The benchmark of a step on a CPU, dry: one rank, a small model."""

from __future__ import annotations

import argparse
import os
import queue
from types import ModuleType

import pytest
import torch
from example_modules import load_example


@pytest.fixture
def bench() -> ModuleType:
    return load_example("bench_step")


def test_two_wires_are_timed_in_turns_beside_adamw(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of its table: who goes first changes from step to step."""

    def build(model: str, dtype: str, rank: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        module = torch.nn.Linear(60, 50)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        return module, list(module.parameters())

    plain, order = bench.seconds_of, []

    def seconds_of(step: object, *rest: object) -> tuple[float, float]:
        order.append(getattr(step, "__self__", step))
        took: tuple[float, float] = plain(step, *rest)
        return took

    for name, value in {"build": build, "seconds_of": seconds_of, "copy_bandwidth": lambda: 1e9}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    results: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    args = argparse.Namespace(model="small", ranks=1, wire_dtype="int4", against="bf16", steps=3)
    bench.measure(0, args, 0.9, "fp32", "", results)
    found = results.get()
    assert {"scape_wall", "against_wall", "more", "adamw", "fused", "phase/sweep"} <= set(found["milliseconds"])  # type: ignore[call-overload]
    scapes = [each for each in order if isinstance(each, bench.ScapeOptimizer)]
    assert len(scapes) == 2 * 7
    first, second = scapes[:2]
    assert scapes == [first, second, second, first] * 3 + [first, second]
    assert first is not second
    assert "a step takes" in bench.table([found])


def test_memory_is_what_was_alive_at_once(bench: ModuleType) -> None:
    held: list[torch.Tensor] = []
    assert bench.copy_bandwidth(1) > 0
    assert bench.peak_bytes(lambda: held.append(torch.ones(1 << 20))) >= 4 << 20
