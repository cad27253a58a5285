"""Notebooks and ``python -i``: what works there trains, and what does not says what does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import SCRIPT_MODULE

MODEL = f"""{SCRIPT_MODULE}
import lightning_scape

def train(strategy):
    module, quiet = Module(), dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    before = float(module.layer(torch.ones(1, 4)).square())
    quiet["enable_model_summary"] = False
    L.Trainer(accelerator="cpu", devices=2, max_epochs=4, strategy=strategy, **quiet).fit(module)
    assert float(module.layer(torch.ones(1, 4)).square()) < before
    print("trained")
"""
REFUSED = """
try:
    train("scape")
except ValueError as error:
    print(error)
"""


def run_cells(folder: Path, *cells: str) -> list[str]:
    """What each cell prints, in a kernel of its own."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel (extra `test`)")
    pytest.importorskip("ipykernel", reason="needs ipykernel (extra `test`)")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient (extra `test`)")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=150, resources={"metadata": {"path": str(folder)}}).execute()
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in book.cells]


@pytest.mark.few(0)
def test_a_notebook_trains_on_two_processes_and_says_how(tmp_path: Path) -> None:
    """``strategy="scape"`` was refused with the advice to use ``ddp_notebook``."""
    _, refused, by_name, by_class = run_cells(
        tmp_path,
        MODEL,
        REFUSED,
        'train("scape_notebook")',
        'train(lightning_scape.ScapeStrategy(sparsity=0.5, start_method="fork"))',
    )
    assert "must be 'fork' in an interactive session (a notebook, python -i), got 'popen'" in refused
    assert "Use `strategy=\"scape_notebook\"` or `ScapeStrategy(start_method='fork')`" in refused
    assert "trained" in by_name
    assert "trained" in by_class


FABRIC = """
import os, torch, lightning as L, lightning_scape
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

def train(fabric):
    model, optimizer = torch.nn.Linear(4, 1), None
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(4):
        fabric.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return fabric.world_size

print("trained on", L.Fabric(accelerator="cpu", devices=2, strategy="scape_notebook").launch(train))
try:
    L.Fabric(accelerator="cpu", devices=2, strategy="scape")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_an_interactive_session_trains_with_fabric_and_says_how() -> None:
    command: list[Any] = [sys.executable, "-i", "-W", "ignore", "-c", FABRIC]
    said = subprocess.run(command, input="", capture_output=True, text=True, timeout=150, check=False)
    assert "trained on 2" in said.stdout, said.stderr
    assert "FabricScapeStrategy's `start_method` must be 'fork' in an interactive session" in said.stdout
