"""A job whose ranks say when each step ended: for tests/test_link_faults.py, which breaks their link meanwhile."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer


def main(steps: int, timeout: float, sparsity: float) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(400, 1000))
    adamw = torch.optim.AdamW([weight], lr=1e-3)
    optimizer = ScapeOptimizer.from_optimizer(adamw, ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
    try:
        for step in range(steps):
            weight.grad = torch.randn_like(weight)
            optimizer.step()
            print(f"step {step} {time.time()}", flush=True)
            time.sleep(0.02)
    except RuntimeError as error:
        print(f"failed {time.time()} {error}", flush=True)
        os._exit(3)
    digest = weight.detach().double().sum().item()
    print(f"digest {digest:.12e} skipped {optimizer.stats.skipped_total}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
