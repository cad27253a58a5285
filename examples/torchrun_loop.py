"""SCAPE in a loop of your own, started by torchrun, without Lightning.

torchrun --nproc-per-node 2 examples/torchrun_loop.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_scape import ScapeConfig, ScapeOptimizer


def main() -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)  # all ranks must begin with the same parameters
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = ScapeOptimizer.from_optimizer(adamw, ScapeConfig(sparsity=0.99))

    generator = torch.Generator().manual_seed(dist.get_rank())  # each rank's batches are its own
    for step in range(200):  # the model is not wrapped in DDP: step() does the communication
        numbers = torch.randn(32, 16, generator=generator)
        loss = nn.functional.mse_loss(model(numbers), numbers.sum(1, keepdim=True))
        loss.backward()
        optimizer.clip_grad_norm(1.0)  # of the averaged gradient; torch's clip_grad_norm_ clips each rank's own
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, sent {optimizer.stats.bytes_total / 1e3:.1f} kB")

    optimizer.consolidate_state_dict(to=0)  # on every rank; then rank 0 has all of it
    if dist.get_rank() == 0:
        Path("out").mkdir(exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "out/torchrun_loop.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
