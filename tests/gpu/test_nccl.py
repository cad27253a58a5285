"""NCCL between ranks on one GPU: each is a node of its own to NCCL, which then takes the path that lies between nodes.

NCCL does not support this, and it may be slow: correctness only. The file is also the job that each rank runs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_scape import ScapeStrategy

pytestmark = pytest.mark.gpu

STEPS = 50
WITHIN = 240.0
"""Seconds for all ranks; a rank waits for another 60 s at most."""
NODES = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Nothing but sockets is left between ranks; ``NCCL_HOSTID`` tells them apart."""


# ------------------------------------------------------------------------------------------------------- the job


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 30))

    def training_step(self, batch: Tensor) -> Tensor:
        """On data of this step and rank, wherever a run begins."""
        generator = torch.Generator().manual_seed(100 * self.global_step + self.global_rank)
        given = torch.randn(4, 40, generator=generator).to(self.device)
        return (self.net(given) - given[:, :30]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Event(Callback):
    """What happens to rank 1 before a step."""

    def __init__(self, what: str | None, step: int = 10) -> None:
        self.what, self.step = what, step

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            if self.what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "apart":
                module.net[0].bias.data[0] += 1.0


def job(folder: Path, backend: str, device: str, sparsity: float, event: str | None, resume: bool) -> None:
    """One rank's training; leaves its parameters in the folder, and a checkpoint from halfway."""
    torch.manual_seed(0)
    strategy = ScapeStrategy(
        sparsity=sparsity,
        sparsity_warmup_steps=10,
        check_replicas_every=5,
        process_group_backend=backend,
        timeout=60.0,
        state_dict_type="sharded",
    )
    trainer = Trainer(
        accelerator=device,
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_steps=STEPS,
        gradient_clip_val=1.0,
        callbacks=[Event(event), ModelCheckpoint(folder, "saved", every_n_train_steps=STEPS // 2 + 1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module, DataLoader(range(100 * STEPS)), ckpt_path=str(folder / "saved.ckpt") if resume else None)
    flat = torch.cat([parameter.detach().cpu().flatten() for parameter in module.parameters()])
    torch.save(flat, folder / f"rank{trainer.global_rank}.pt")


# ----------------------------------------------------------------------------------------------------- the tests


class Ended(list[int]):
    """Exit codes of all ranks, and what they said."""

    said: list[str]


def run(folder: Path, ranks: int, **options: Any) -> Ended:
    """The job on every rank; those that still run when time is up are killed, and have a code below 0."""
    given = {"backend": "nccl", "device": "gpu", "sparsity": 0.9, "event": None, "resume": False}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    everyone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), **NODES}
    processes = []
    for rank in range(ranks):
        own = {"NODE_RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"}
        command = [sys.executable, __file__, json.dumps({"folder": str(folder), **given, **options})]
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env={**os.environ, **everyone, **own}, stdout=log, stderr=log))
    try:
        for process in processes:
            process.wait(WITHIN)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
    ended = Ended(process.wait() for process in processes)
    ended.said = [(folder / f"rank{rank}.log").read_text() for rank in range(ranks)]
    return ended


def trained(folder: Path, ranks: int, **options: Any) -> Tensor:
    """The parameters, which are the same on all ranks."""
    folder.mkdir(exist_ok=True)
    ended = run(folder, ranks, **options)
    assert not any(ended), ended.said[0][-3000:]
    if options.get("backend", "nccl") == "nccl":
        assert all("NET/Socket" in said for said in ended.said)  # else nothing went the way between nodes
    first, *others = (torch.load(folder / f"rank{rank}.pt") for rank in range(ranks))
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.timeout(600)
@pytest.mark.parametrize("sparsity", [0.9, 0.99])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_alike_and_like_ranks_over_gloo(tmp_path: Path, ranks: int, sparsity: float) -> None:
    over_nccl = trained(tmp_path / "nccl", ranks, sparsity=sparsity)
    over_gloo = trained(tmp_path / "gloo", ranks, sparsity=sparsity, backend="gloo")
    far = (over_nccl - over_gloo).abs() > 1e-4  # where a sum's order decides, an entry may be rounded another way
    assert float(far.float().mean()) < 0.02


@pytest.mark.timeout(600)
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = trained(tmp_path, 2)
    assert torch.equal(trained(tmp_path, 2, resume=True), whole)


@pytest.mark.timeout(300)
def test_a_rank_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    first, second = run(tmp_path, 2, event="killed")
    assert second == -signal.SIGKILL
    assert first not in (0, -signal.SIGKILL)


@pytest.mark.timeout(300)
def test_parameters_that_are_apart_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    ended = run(tmp_path, 2, event="apart")
    assert all(ended)
    assert all("must hold bitwise equal parameters" in said for said in ended.said)


if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    job(Path(words.pop("folder")), **words)
