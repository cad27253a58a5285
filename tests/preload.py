"""What ranks of tests need, imported by the server that they are forked from. See launcher.py."""

import fcntl
import gc
import itertools
import threading

import hypothesis  # noqa: F401
import launcher  # noqa: F401
import lightning.pytorch  # noqa: F401
import litgpt  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.distributed.optim  # noqa: F401 - for Lightning's DDPStrategy, when it saves
from example_modules import load_example

import lightning_scape


def take_steps() -> None:
    """A few of two simulated ranks, which load numba's usual loops. In a new clone one server compiles them for all."""
    simulated = load_example("simulated_ranks")
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for update, dtype, sparsity in itertools.product(
            ("adamw", "adams"), (torch.float32, torch.bfloat16), (0.9, 0.99)
        ):
            model = torch.nn.Linear(64, 32, dtype=dtype)
            config = lightning_scape.ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=4, update=update)
            ranks = simulated.SimulatedRanks(model, 2, config, {"lr": 1e-3})
            for _ in range(6):
                ranks.backward(
                    [torch.ones(1, 64, dtype=dtype)] * 2, lambda batch, model=model: model(batch).sum(), None
                )
                ranks.step(1e-3, max_norm=1.0)
    del ranks
    gc.collect()
    for thread in {*threading.enumerate()} - {threading.main_thread()}:  # of the ranks, which are gone
        thread.join(10)
    assert threading.active_count() == 1, f"A server that forks must have one thread, got {threading.enumerate()}"


torch.set_num_threads(1)
take_steps()
gc.freeze()
