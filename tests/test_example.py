"""The main job, end to end: `examples/pretrain_python.py` learns under SCAPE, next to dense training on the same data.

Margins are set from measured runs; each names the measurement it comes from.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "pretrain_python.py"


def run_example(out: Path, *options: str, timeout: float) -> str:
    """The example's output; it starts its second rank itself, as it does for a user."""
    environ = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NODE_RANK")}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    command = [sys.executable, str(EXAMPLE), f"--out={out}", *options]
    done = subprocess.run(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def read_result(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / name / "result.json").read_text())
