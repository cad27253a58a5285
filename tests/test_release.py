"""The wheel holds what an installation needs: it trains where nothing of the repository is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_scape

ROOT = Path(__file__).resolve().parents[1]
SMOKE = """
import sys, torch, lightning_scape
from lightning.pytorch import Trainer
assert lightning_scape.__file__.startswith(sys.argv[1]), lightning_scape.__file__
model = torch.nn.Linear(8, 8)
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = lightning_scape.ScapeOptimizer.from_optimizer(adamw, lightning_scape.ScapeConfig(sparsity=0.5))
losses = []
for _ in range(20):
    loss = (model(torch.eye(8)) - torch.eye(8)).square().mean()
    losses.append(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert losses[-1] < losses[0]
Trainer(strategy="scape", accelerator="cpu", devices=2, logger=False)
"""


def run(*command: object, cwd: Path, **variables: str) -> None:
    # A fresh installation compiles its operations first, for some 15 seconds.
    environ = {**os.environ, "LIGHTNING_SCAPE_OPS": "naive", **variables}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.timeout(600)
def test_the_wheel_installs_and_trains(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    wheel = tmp_path / f"lightning_scape-{lightning_scape.__version__}-py3-none-any.whl"
    target = tmp_path / "installed"
    run(*pip, "install", "-q", "--no-deps", "--target", target, wheel, cwd=tmp_path)
    script = tmp_path / "elsewhere" / "smoke.py"  # Python puts a script's folder on the path
    script.parent.mkdir()
    script.write_text(SMOKE)
    run(sys.executable, script, target, cwd=script.parent, PYTHONPATH=str(target))
