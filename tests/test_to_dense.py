"""From SCAPE back to dense training: what plain AdamW under ``strategy="ddp"`` makes of our checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import build, train
from trainer_helpers import MARKS, Regression, make_trainer, weights

from lightning_scape import ScapeConfig, ScapeOptimizer, ScapeStrategy
from lightning_scape.checkpoint.atomic_files import load_file
from lightning_scape.tools.commands import main

RunRanks = Callable[..., list[Any]]
pytestmark = MARKS


def scape_then_ddp(rank: int, world_size: int, folder: str, update: str) -> float:
    trainer, module = make_trainer(ScapeStrategy(sparsity=0.9, update=update), max_steps=4), Regression()
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/full.ckpt")
    saved = weights(module)
    module = Regression()
    trainer = make_trainer("ddp", max_steps=8, max_epochs=9)
    trainer.fit(module, ckpt_path=f"{folder}/full.ckpt")
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is torch.optim.AdamW
    assert [float(state["step"]) for state in optimizer.state.values()] == [8.0] * 4
    assert trainer.global_step == 8
    return float((weights(module) - saved).abs().max())


def test_ddp_trains_on_from_a_full_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    """It ended in a bare ``KeyError: 'exp_avg_sq'`` in torch's first step."""
    one, other = run_ranks(scape_then_ddp, 2, str(tmp_path), "adamw")
    assert one == other
    assert 0 < one < 0.2  # four steps of AdamW at a rate of 0.01


@pytest.mark.parametrize("update", ["adamw", "adams"])
def test_a_full_state_is_adamws_and_the_converted_one_says_the_same(tmp_path: Path, update: str) -> None:
    params, optimizer = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update=update), torch.float32)
    train(params, optimizer, 0, range(6))
    path = tmp_path / "c"
    torch.save({"optimizer": optimizer.state_dict()}, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(["consolidate", "--optimizer", "adamw", str(path), str(tmp_path / "adamw")]) == 0
    ends = []
    for state in (load_file(path)["optimizer"], load_file(tmp_path / "adamw")["optimizer"]):
        twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
        dense = torch.optim.AdamW([{"params": twins[:2]}, {"params": twins[2:]}])
        dense.load_state_dict(state)
        for twin in twins:
            twin.grad = torch.ones_like(twin)
        dense.step()
        ends.append(torch.cat([twin.detach().reshape(-1) for twin in twins]))
    assert torch.equal(*ends)


def save_sharded(rank: int, world_size: int, folder: str) -> None:
    trainer = make_trainer(ScapeStrategy(sparsity=0.9, state_dict_type="sharded"), max_steps=4)
    trainer.fit(Regression())
    trainer.save_checkpoint(f"{folder}/c.ckpt")


def ddp_goes_on(rank: int, world_size: int, folder: str) -> int:
    if rank == 0:
        assert main(["consolidate", "--optimizer", "adamw", f"{folder}/c.ckpt", f"{folder}/one.ckpt"]) == 0
    dist.barrier()
    trainer = make_trainer("ddp", max_steps=8, max_epochs=9)
    trainer.fit(Regression(), ckpt_path=f"{folder}/one.ckpt")
    return int(trainer.global_step)


def test_a_directory_says_what_to_run_and_ddp_trains_on_after_that(run_ranks: RunRanks, tmp_path: Path) -> None:
    """``strategy="ddp"`` ended in ``IsADirectoryError``, and nothing said what to do."""
    run_ranks(save_sharded, 2, str(tmp_path))
    text = (tmp_path / "c.ckpt" / "README.txt").read_text()
    assert "lightning-scape consolidate --optimizer adamw THIS_DIRECTORY NEW_FILE" in text
    assert run_ranks(ddp_goes_on, 2, str(tmp_path)) == [8, 8]


def test_consolidate_replaces_a_file_only_when_forced(tmp_path: Path, capsys: Any) -> None:
    """It overwrote whatever was there."""
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.5))
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "c")
    (tmp_path / "there").write_text("mine")
    command = ["consolidate", str(tmp_path / "c"), str(tmp_path / "there")]
    assert main(command) == 1
    assert "which exists. Name a new file, or add --force to replace it." in capsys.readouterr().err
    assert (tmp_path / "there").read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert "optimizer" in load_file(tmp_path / "there")
    assert main(["consolidate", "--optimizer=adamw", *command[1:], "--force"]) == 0
    assert capsys.readouterr().err.startswith("lightning-scape: SCAPE's state as AdamW's: ")  # no line of our code
    with pytest.raises(SystemExit):  # it wrote into the working directory
        main(["consolidate", str(tmp_path / "c"), "s3://bucket/c"])
    assert "argument file: it must be a path of a file system, got 's3://bucket/c'" in capsys.readouterr().err
