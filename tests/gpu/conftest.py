"""What tests on a GPU share."""

from __future__ import annotations

from types import ModuleType

import pytest
from example_modules import load_example


@pytest.fixture(scope="session")
def bench_gpu() -> ModuleType:
    """``examples/benchmarks/gpu.py``, whose ranks without a network the tests on a GPU use, too."""
    return load_example("gpu")
