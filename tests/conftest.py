"""Fixtures shared by all tests. Every test starts from the same process state and leaves none behind."""

from __future__ import annotations

import os

# Before torch is imported: the ranks of a test share few cores, and thread pools of several ranks fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import launcher
import pytest
import torch

if not torch.cuda.is_available():
    # Before Triton is imported: kernels then run on CPU tensors, in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
import torch.distributed as dist
from example_modules import load_example
from hypothesis import settings
from poison import poisoned_empty

torch.set_num_threads(1)

# Before Lightning is imported, here and in all processes that tests start.
QUICK_IMPORTS = Path(__file__).with_name("quick_imports")
runpy.run_path(str(QUICK_IMPORTS / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(QUICK_IMPORTS), *filter(None, [os.environ.get("PYTHONPATH")])])

# No deadline: the machine is shared with other ranks. Derandomized: a change is to blame for a failure, not the draw.
settings.register_profile("scape", deadline=None, derandomize=True, max_examples=25, database=None)
settings.load_profile("scape")


LONGEST = ["slurm", "examples", "two_hosts", "launch", "benchmarks", "matrix", "litgpt", "kernels", "trainer", "cpu"]
"""Files that take longest, for they wait for processes: they begin first, so that no core is idle at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
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
