"""What ranks of tests need, imported by the server that they are forked from. See launcher.py."""

import fcntl
import gc
import itertools

import hypothesis  # noqa: F401
import launcher  # noqa: F401
import lightning.pytorch  # noqa: F401
import litgpt  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed.optim  # noqa: F401 - for Lightning's DDPStrategy, when it saves

import lightning_scape


def take_steps() -> None:
    """A few, so that numba has loaded the usual loops. In a new clone one server compiles, the others wait for it."""
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for update, dtype in itertools.product(("adamw", "adams"), (torch.float32, torch.bfloat16)):
            parameter = torch.nn.Parameter(torch.ones(700, dtype=dtype))
            config = lightning_scape.ScapeConfig(sparsity=0.9, update=update, sparsity_warmup_steps=2)
            optimizer = lightning_scape.ScapeOptimizer([parameter], lr=1e-3, config=config)
            for _ in range(4):
                parameter.grad = torch.ones_like(parameter)
                optimizer.clip_grad_norm(1.0)
                optimizer.step()
            optimizer.drain()


torch.set_num_threads(1)
for name in lightning_scape.__all__:
    getattr(lightning_scape, name)  # imports the module that it lies in
take_steps()
gc.freeze()
