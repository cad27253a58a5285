"""The scripts in ``examples/`` as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[1] / "examples"
BENCHMARKS = EXAMPLES / "benchmarks"


def load_example(name: str) -> ModuleType:
    """``examples/<name>.py`` or ``examples/benchmarks/<name>.py``, which may import its neighbours."""
    folders = [str(BENCHMARKS), str(EXAMPLES)]
    sys.path[:0] = folders
    try:
        return importlib.import_module(name)
    finally:
        for folder in folders:
            sys.path.remove(folder)
