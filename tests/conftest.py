"""Fixtures shared by all tests. Every test starts from the same process state and leaves none behind."""

from __future__ import annotations

import os

# Before torch is imported: the ranks of a test share few cores, and thread pools of several ranks fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import compile_once
import launcher
import pytest
import short_form
import torch
import warm_python

if not torch.cuda.is_available():
    # Before Triton is imported: kernels then run on CPU tensors, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
import torch.distributed as dist
from example_modules import load_example
from hypothesis import settings
from poison import poisoned_empty

torch.set_num_threads(1)

# No deadline: the machine is shared with other ranks. Derandomized: a change is to blame for a failure, not the draw.
settings.register_profile("scape", deadline=None, derandomize=True, max_examples=25, database=None)
settings.register_profile("scape-slow", settings.get_profile("scape"), max_examples=100)
settings.load_profile("scape")


LONGEST = """
cpu kernels litgpt two_hosts apart report cli slurm example doctor unwrapped crash resume sharded release planner
strategy_advice sparseloco_litgpt two_level strangers two_level_litgpt strategy_life sparseloco_resume sparseloco
strategy_options sparseloco_hosts odd_uses two_level_trainer fabric optimizer_life scape_simple browser features
sweep_cuda strategy restarts two_level_fabric sparseloco_features imports two_level_checkpoint failing value_wire
preemption
""".split()  # noqa: SIM905 - a list would take a line for each
"""Files whose tests take longest. They come first, so that no worker is left alone with one of them at the end.

Of these, those that start new interpreters come when numba's loops lie on disk: each would compile them for itself.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run all cases, also of the tests marked few")
    parser.addoption("--run-slow", action="store_true", help="--whole, and the tests marked slow (minutes each)")
    parser.addoption("--fresh-processes", action="store_true", help="every process of a test imports all it needs")


def pytest_configure(config: pytest.Config) -> None:
    short_form.whole = _is_whole(config)
    if config.getoption("--run-slow"):
        settings.load_profile("scape-slow")
    if config.getoption("--fresh-processes"):
        warm_python.wanted = False
    elif warm_python.wanted and config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        warm_python.start()  # one for all workers, and in time for their first tests
    if hasattr(config, "workerinput"):
        compile_once.patch()
    config.option.loadscopereorder = False  # --dist loadfile: the order is ours, not that of the numbers of tests


def _is_whole(config: pytest.Config) -> bool:
    """Who names a test wants all of it."""
    named = any("::" in argument for argument in config.args)
    return named or config.getoption("--whole") or config.getoption("--run-slow")


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if short_form.whole else "the short form: a few cases of the tests marked few; --whole runs all"


def _keep_few(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test's cases as many as its mark says, spread evenly."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and "slow" not in item.keywords:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for each in cases.values():
        (count,) = each[0].get_closest_marker("few").args
        kept = {number * len(each) // count for number in range(count)}
        left_out.update(item for number, item in enumerate(each) if number not in kept)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not short_form.whole:
        _keep_few(config, items)
    begun_first = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: begun_first.get(item.path.name, len(LONGEST)))
    for item in items:
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: needs --run-slow"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="gpu: needs a CUDA device"))
        if "two_host" in item.keywords and not _has_network_namespaces():
            item.add_marker(pytest.mark.skip(reason="two_host: needs Linux, root, iproute2 and network namespaces"))


@functools.cache
def _has_network_namespaces() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, launcher.World]]:
    """The ranks of a module of tests, by how many they are."""
    found: dict[int, launcher.World] = {}
    yield found
    for world in found.values():
        world.end()


@pytest.fixture
def run_ranks(worlds: dict[int, launcher.World], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """``run_ranks(fn, world_size, *args, timeout=120.0, expect_errors=False)``: see :meth:`launcher.World.run`.

    Ranks are those of the module's earlier tests. With ``expect_errors`` and ``fresh`` they are new ones.
    """

    def run(fn: Callable[..., Any], size: int, *args: Any, fresh: bool = False, **options: Any) -> list[Any]:
        __tracebackhide__ = True
        if fresh or options.get("expect_errors") or size not in worlds or not worlds[size].alive:
            if size in worlds:
                worlds.pop(size).end()
            worlds[size] = launcher.World(size, tmp_path_factory.mktemp("ranks"))
        return worlds[size].run(fn, *args, **options)

    return run


@pytest.fixture(scope="session")
def bench_gpu() -> ModuleType:
    """``examples/benchmarks/gpu.py``, whose ranks without a network the tests on a GPU use, too."""
    return load_example("gpu")


@pytest.fixture
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch.compile's code goes: empty at first, and filled by no pool of processes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Trial programs that show what the processor can do take longer to compile than the few kernels of a test.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Each test sees the environment, Lightning's rank and torch's globals as at the start of the session."""
    environ = dict(os.environ)
    torch.manual_seed(0)
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environ)
    launcher.reset_rank_zero()
    if torch.are_deterministic_algorithms_enabled():  # asking is free, telling imports the compiler
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Code that reads memory it never wrote meets NaN, here and on every rank."""
    with poisoned_empty():
        yield
