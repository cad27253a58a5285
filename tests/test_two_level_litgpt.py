"""LitGPT on nodes of several ranks: models sharded as by its own strategy."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch

pytest.importorskip("litgpt", reason="LitGPT's models need litgpt")
pytest.importorskip("jsonargparse")

from litgpt.utils import chunked_cross_entropy
from test_litgpt import family_model
from two_level_helpers import whole

from lightning_scape import FabricScapeStrategy, ScapeConfig

NAMES = ["pythia-14m", "Mixtral-8x7B-v0.1"]


def _train(rank: int, world_size: int, names: list[str], sparsity: float, steps: int) -> dict[str, Any]:
    """Losses of flat ranks and of nodes of two, by family; and parameters without a gradient on this rank at first."""
    warmup = 0 if sparsity else None
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=warmup, wire_dtype="fp32", clip_norm="local")
    found: dict[str, Any] = {name: [] for name in names}
    for size in (1, 2):
        strategy = FabricScapeStrategy(config=dataclasses.replace(config, local_group_size=size))
        fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        for name in names:
            model = family_model(name)
            model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
            # On each rank the same few tokens at every step: enough to learn, too few for every expert.
            tokens = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(rank))
            losses, untouched = [], 0
            for step in range(steps):
                loss = chunked_cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], chunk_size=0)
                fabric.backward(loss)
                if step == 0:
                    untouched = sum(p.grad is None or not p.grad.any() for p in model.parameters())
                fabric.clip_gradients(model, optimizer, max_norm=100.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(fabric.all_reduce(loss.detach())))
            assert all(bool(torch.isfinite(whole(parameter)).all()) for parameter in model.parameters())
            found[name].append((losses, untouched))
    return found


def test_models_train_at_density_1_as_on_flat_ranks(run_ranks: Any) -> None:
    found = run_ranks(_train, 4, NAMES, 0.0, 4)
    for name in NAMES:
        (flat, _), (nodes, _) = found[0][name]
        assert nodes == pytest.approx(flat, rel=2e-3), name  # fp32 sums in another order, steps of 0.005
        assert nodes[-1] < nodes[0] - 0.1
    # Mixtral: flat, some experts meet no token on a rank, others none on another rank.
    assert sum(each["Mixtral-8x7B-v0.1"][0][1] > 0 for each in found) >= 2
