"""Checkpoints of nodes of several ranks: exact resume, and any other number of nodes and of ranks of a node."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_two_level import SHAPES
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trainer_helpers import MARKS, make_trainer, ours
from two_level_helpers import Holder, gradient, make_mesh, mean_gradient, node_of, sharded

from lightning_scape import ScapeConfig, ScapeOptimizer
from lightning_scape.checkpoint.saver import Content, SavedContent, Saver, consolidate
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.tensors import piece_views

pytestmark = MARKS
CONFIG = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adamw")


def build(
    nodes: int, dtype: torch.dtype = torch.float32, config: ScapeConfig = CONFIG
) -> tuple[Holder, ScapeOptimizer]:
    """On ``nodes`` nodes of several ranks; 0 is flat."""
    holder = Holder(SHAPES, dtype)
    group = None
    if nodes:
        mesh = make_mesh(nodes)
        sharded(holder, mesh)
        group = mesh["replicate"].get_group() if nodes > 1 else None
    parameters = list(holder.held)
    groups = [{"params": parameters[:2], "lr": 3e-2}, {"params": parameters[2:], "weight_decay": 0.0}]
    return holder, ScapeOptimizer(groups, lr=1e-2, config=CONFIG, process_group=group)


def train(holder: Holder, optimizer: ScapeOptimizer, nodes: int, steps: range) -> None:
    rank, plain = dist.get_rank(), Holder(SHAPES, holder.held[0].dtype)
    for step in steps:
        grads: list[Tensor | None] = [*mean_gradient(plain, node_of(rank, nodes), step)] if nodes else []
        grads = grads or [*gradient(plain, rank, step)]
        if step % 3 == 1:
            grads[3] = None
        holder.set_gradients(grads)
        optimizer.clip_grad_norm(20.0)
        optimizer.step()
    optimizer.drain()


def everything(optimizer: ScapeOptimizer) -> list[Tensor]:
    engine = optimizer.engine
    state = engine.state
    assert state is not None
    mask, missed = engine.masks.active, state.missed
    assert mask is not None
    shard = [
        part
        for tensor in (state.exp_avg, state.exp_avg_sq, state.last_step, state.change_error)
        if tensor is not None
        for part in piece_views(tensor, engine.shard.region.pieces)
    ]
    held = [state.residual, state.step, mask, missed]
    return [each for each in held if each is not None] + shard + engine.parameters.local


def saved_full(optimizer: ScapeOptimizer, holder: Holder) -> bytes:
    """What rank 0 would write, on every rank."""
    optimizer.consolidate_state_dict(to=0)
    whole = holder.whole()
    box = [b""]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save({"optimizer": optimizer.state_dict(), "model": whole}, file)
        box = [file.getvalue()]
    dist.broadcast_object_list(box, 0)
    return box[0]


def fill(holder: Holder, values: list[Tensor]) -> None:
    """Whole values, of which each rank takes its rows."""
    holder.set_gradients(values)
    with torch.no_grad():
        for parameter in holder.held:
            parameter.copy_(parameter.grad)
            parameter.grad = None


def stop_and_go(rank: int, world_size: int, nodes: int, dtype: torch.dtype, folder: str) -> None:
    holder, optimizer = build(nodes, dtype)
    train(holder, optimizer, nodes, range(4))
    full = torch.load(io.BytesIO(saved_full(optimizer, holder)), weights_only=True)
    ranks = Communicator()
    content = Content({"model": holder.state_dict()}, {"optimizer": optimizer.sharded_state_dict()}, {})
    Saver(False).save(Path(folder) / "sharded", content, ranks)
    train(holder, optimizer, nodes, range(4, 9))
    wanted = [tensor.clone() for tensor in everything(optimizer)]
    directory = SavedContent(Path(folder) / "sharded", ranks)
    assert [*directory.model("model").values()][0].shape == SHAPES[0]
    for state in (full["optimizer"], directory.optimizers["optimizer"]):
        again, other = build(nodes, dtype)
        fill(again, full["model"])
        other.load_state_dict(state)
        train(again, other, nodes, range(4, 9))
        for a, b in zip(everything(other), wanted, strict=True):
            assert torch.equal(a, b)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "nodes", "dtype"), [(4, 2, torch.float32), (4, 2, torch.bfloat16), (2, 1, torch.float32)]
)
def test_resume_on_the_same_mesh_is_exact_bit_for_bit(
    run_ranks: Any, tmp_path: Path, ranks: int, nodes: int, dtype: torch.dtype
) -> None:
    run_ranks(stop_and_go, ranks, nodes, dtype, str(tmp_path))


# ------------------------------------------------------------------------------------------------ another mesh


def save_both(rank: int, world_size: int, nodes: int, folder: str) -> dict[str, Any]:
    holder, optimizer = build(nodes, torch.bfloat16)
    train(holder, optimizer, nodes, range(4))
    content = Content({"model": holder.state_dict()}, {"optimizer": optimizer.sharded_state_dict()}, {})
    Saver(False).save(Path(folder) / "sharded", content, Communicator())
    (Path(folder) / f"full-{rank}").write_bytes(saved_full(optimizer, holder))
    return torch.load(Path(folder) / f"full-{rank}", weights_only=True)


def load_both(rank: int, world_size: int, nodes: int, folder: str) -> list[dict[str, Any]]:
    full = torch.load(Path(folder) / "full-0", weights_only=True)
    states: list[Any] = [full["optimizer"]]
    states.append(SavedContent(Path(folder) / "sharded", Communicator()).optimizers["optimizer"])
    found = []
    for state in states:
        holder, optimizer = build(nodes, torch.bfloat16)
        fill(holder, full["model"])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.load_state_dict(state)
        dropped = any("makes its mask anew" in str(each.message) for each in told)
        assert dropped == (full["optimizer"]["scape"].get("shards", 1) != (world_size // nodes if nodes else 1))
        content = torch.load(io.BytesIO(saved_full(optimizer, holder)), weights_only=True)
        found.append(content)
        train(holder, optimizer, nodes, range(4, 6))  # and it trains on
    return found


def mean_residuals(state: dict[str, Any]) -> list[Tensor]:
    everyone = state["scape"]["residuals"]
    return [torch.stack([each[index].double() for each in everyone]).mean(0) for index in range(len(SHAPES))]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The checkpoint")
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 0), (4, 2)), ((4, 2), (3, 0)), ((4, 2), (2, 1)), pytest.param((6, 2), (4, 2), marks=pytest.mark.slow)],
    ids=lambda mesh: f"{mesh[0]} ranks on {mesh[1]} nodes" if mesh[1] else f"{mesh[0]} flat",
)
def test_any_mesh_goes_on_from_any_other(
    run_ranks: Any, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    saved = run_ranks(save_both, before[0], before[1], str(tmp_path))[0]["optimizer"]
    for content in run_ranks(load_both, after[0], after[1], str(tmp_path))[0]:
        loaded = content["optimizer"]
        for index, entry in saved["state"].items():
            for name in ("exp_avg", "exp_avg_sq", "last_step", "change_error"):
                assert torch.equal(entry[name], loaded["state"][index][name]), (index, name)
        for mine, theirs in zip(mean_residuals(loaded), mean_residuals(saved), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)  # a mean of two or three, rounded to fp32
    # A directory becomes the file that the same mesh would have written.
    one_file = consolidate(tmp_path / "sharded")["optimizer"]
    assert one_file["scape"].keys() == saved["scape"].keys()
    for mine, theirs in zip(one_file["scape"]["residuals"], saved["scape"]["residuals"], strict=True):
        assert all(torch.equal(mine[index], theirs[index]) for index in theirs)
    for shard, mask in one_file["scape"].get("masks", {}).items():
        assert torch.equal(mask, saved["scape"]["masks"][shard])


# ------------------------------------------------------------------------------------------------ AdamW's


def from_adamw(rank: int, world_size: int, kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    if kind == "FSDP2":
        fully_shard(model)
    wrapped: Any = DistributedDataParallel(model) if kind == "DDP" else model
    dense = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(3):
        inputs = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank))
        wrapped(inputs).square().mean().backward()
        dense.step()
        dense.zero_grad()
    state = dense.state_dict()
    if kind == "FSDP2":
        state = get_optimizer_state_dict(model, dense, options=StateDictOptions(full_state_dict=True))

    mesh = make_mesh(2)
    torch.manual_seed(0)
    other = torch.nn.Sequential(torch.nn.Linear(9, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    fully_shard(other, mesh=mesh["shard"])
    optimizer = ScapeOptimizer(other.parameters(), config=CONFIG, process_group=mesh["replicate"].get_group())
    optimizer.name_parameters(other.named_parameters())
    with pytest.warns(UserWarning, match=r"first and second moments and step \(3\) carry over"):
        optimizer.load_state_dict(state)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        mine = optimizer.state_dict()["state"]
        for entry, theirs in zip(mine.values(), state["state"].values(), strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(entry[name], theirs[name].cpu())


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*scalar")
@pytest.mark.parametrize("kind", ["FSDP2", "DDP"])
def test_it_goes_on_from_plain_adamw(run_ranks: Any, kind: str) -> None:
    run_ranks(from_adamw, 4, kind)


# ------------------------------------------------------------------------------------------------ under the Trainer


def _resume(rank: int, world_size: int, kind: str, folder: str) -> None:
    from test_two_level_trainer import Blocks, strategy, wholes

    def fit(size: Any, epochs: int, path: str | None = None, **options: Any) -> tuple[Any, Any]:
        module = Blocks()
        trainer = make_trainer(strategy(size, 0.9, **options), max_epochs=epochs, gradient_clip_val=1.0)
        trainer.fit(module, ckpt_path=path)
        return module, trainer

    module, trainer = fit(2, 1, state_dict_type=kind)
    path = f"{folder}/{kind}.ckpt"
    trainer.save_checkpoint(path)
    straight, _ = fit(2, 2, state_dict_type=kind)
    resumed, again = fit(2, 2, path)
    assert torch.equal(wholes(resumed), wholes(straight))
    assert ours(again).engine.state.calls == 8
    before = wholes(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat, _ = fit(1, 1, path)  # nothing is left to train: the weights are those saved
    assert torch.equal(wholes(flat), before)
    losses = []
    for size in (1, 2):  # evaluation alone shards too
        evaluated = make_trainer(strategy(size), limit_val_batches=1.0)
        evaluated.validate(Blocks(), ckpt_path=path, verbose=False)
        losses.append(float(evaluated.callback_metrics["val_loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_the_trainer_resumes_exactly_and_flat_ranks_load_the_checkpoint(
    run_ranks: Any, kind: str, tmp_path: Path
) -> None:
    run_ranks(_resume, 4, kind, str(tmp_path))
