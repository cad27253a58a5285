"""Sharded checkpoints: what is in the directory, other numbers of ranks, one file of it, who holds what."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_helpers import parameters, values
from test_checkpoint import build, everything, train
from torch import Tensor, nn

from lightning_scape import AdamS, CheckpointError, ScapeConfig, ScapeOptimizer
from lightning_scape.checkpoint.atomic_files import save_file
from lightning_scape.checkpoint.dcp import Directory
from lightning_scape.checkpoint.inspection import verify
from lightning_scape.checkpoint.saver import Content, SavedContent, Saver, consolidate
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.tensors import piece_views
from lightning_scape.tools.commands import main

RunRanks = Callable[..., list[Any]]
CONFIG = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adams", wire_dtype="bf16")
ADAMW = replace(CONFIG, update="adamw", wire_dtype=None)
PAPERS = replace(CONFIG, second_moment="reconstructed")
RESHARDINGS = [(2, 3, CONFIG), (3, 2, ADAMW), (1, 4, ADAMW)]
EXACTER = replace(ADAMW, wire_dtype="bf16")  # one rank sends nothing, and rounds nothing to 4 bits
RESHARDINGS += [pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 1, EXACTER), (1, 4, CONFIG))]


def name_of(value: Any) -> str:
    """A parameter of a test, for its name."""
    if not isinstance(value, ScapeConfig):
        return str(value)
    return f"{value.update}-paper" if value == PAPERS else str(value.update)


def save(path: str | Path, optimizer: ScapeOptimizer, model: dict[str, Any], **rest: Any) -> None:
    content = Content({"model": model}, {"optimizer": optimizer.sharded_state_dict()}, rest)
    Saver(asynchronous=False).save(Path(path), content, Communicator())


def load(path: str | Path, optimizer: ScapeOptimizer) -> SavedContent:
    saved = SavedContent(Path(path), Communicator())
    optimizer.load_state_dict(saved.optimizers["optimizer"])
    return saved


def numbered(params: list[Any]) -> dict[str, Tensor]:
    return {str(i): value for i, value in enumerate(values(params))}


def whole_state(optimizer: ScapeOptimizer) -> dict[str, Any] | None:
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if optimizer.communicator.rank == 0 else None


# --------------------------------------------------------------------------------------- another number of ranks


def build_model(config: ScapeConfig) -> tuple[nn.Module, ScapeOptimizer]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = ScapeOptimizer(model.parameters(), lr=3e-3, config=config)
    optimizer.name_parameters(model.named_parameters())
    return model, optimizer


DATA = torch.randn(12, 6, generator=torch.Generator().manual_seed(8))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows[:, :3].sin() * 2).square().mean()


def descend(model: nn.Module, optimizer: ScapeOptimizer, steps: int) -> list[float]:
    """The global batch is the same for any number of ranks. The first bias has no gradient in every third step."""
    rank, world_size = optimizer.communicator.rank, optimizer.communicator.world_size
    losses = []
    for step in range(steps):
        loss_of(model, DATA[rank::world_size]).backward()
        if step % 3 == 1:
            model[0].bias.grad = None  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_of(model, DATA).item())
    return losses


def mean_residual(optimizer: ScapeOptimizer) -> Tensor:
    state = optimizer.engine.state
    assert state is not None
    mean = torch.cat(piece_views(state.residual, optimizer.engine.layout.everything().pieces)).clone()
    if dist.get_world_size() > 1:
        dist.all_reduce(mean)
    return mean / dist.get_world_size()


def write_both(rank: int, world_size: int, folder: str, config: ScapeConfig) -> Any:
    model, optimizer = build_model(config)
    losses = descend(model, optimizer, 60)
    save(f"{folder}/sharded", optimizer, model.state_dict())
    whole = whole_state(optimizer)
    if rank == 0:
        save_file({"optimizer": whole, "model": model.state_dict()}, f"{folder}/full")
    return whole, mean_residual(optimizer), losses, descend(model, optimizer, 30)


def read_either(rank: int, world_size: int, folder: str, kind: str, config: ScapeConfig) -> Any:
    model, optimizer = build_model(config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind == "sharded":
            model.load_state_dict(load(f"{folder}/sharded", optimizer).model("model"))
        else:
            content = torch.load(f"{folder}/full", weights_only=True)
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])
    optimizer.mark_masters_stale()
    mean, whole = mean_residual(optimizer), whole_state(optimizer)
    return whole, mean, [str(w.message) for w in caught], descend(model, optimizer, 30)


@pytest.mark.few(1)
@pytest.mark.parametrize(("before", "after", "config"), RESHARDINGS, ids=name_of)
def test_resharding_is_exact_keeps_the_mean_residual_and_the_loss(
    run_ranks: RunRanks, tmp_path: Path, before: int, after: int, config: ScapeConfig
) -> None:
    whole, mean, losses, straight = run_ranks(write_both, before, str(tmp_path), config)[0]
    assert whole["scape"]["missed"] == {1: 20}
    assert [entry["step"] for entry in whole["state"].values()] == [60, 40, 60, 60]
    assert all("exp_avg_sq" in entry for entry in whole["state"].values())
    for kind in ("full", "sharded"):
        found, found_mean, texts, further = run_ranks(read_either, after, str(tmp_path), kind, config)[0]
        assert found["scape"]["missed"] == whole["scape"]["missed"]
        assert any(f"was written by {before} ranks, this run has {after}" in text for text in texts)
        assert found["state"].keys() == whole["state"].keys()
        for index, entry in whole["state"].items():
            assert entry.keys() == found["state"][index].keys()
            for name, value in entry.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(found["state"][index][name]))
        assert torch.equal(whole["scape"]["mask"], found["scape"]["mask"])
        # To the rounding of a sum over ranks, whose terms may nearly cancel.
        peak = max(float(e.abs().max()) for part in whole["scape"]["residuals"] for e in part.values())
        torch.testing.assert_close(found_mean, mean, rtol=0.0, atol=4 * torch.finfo(torch.float32).eps * peak)
        assert mean.norm() > 0
        # The very next step is the one that would have come, to the wire's rounding; other ranks' masks come after it.
        # With AdamW's update, to its owner's gradient, which is that of another part of the batch now.
        assert further[0] == pytest.approx(straight[0], rel=1e-4 if config.update == "adams" else 5e-3)
        assert max(further) < 1.02 * losses[-1]  # single steps go up by 1 to 2% in runs that never stopped too
        assert further[-1] < 0.8 * losses[-1]


# ------------------------------------------------------------------------------------------------ stop, resume, go on


def stop_and_go_everywhere(rank: int, world_size: int, folder: str, config: ScapeConfig, bad: int) -> int:
    """Saves after each of nine steps, one of which is skipped, and goes on from every one of them to the end."""
    params, optimizer = build(config, torch.bfloat16)
    for step in range(9):
        train(params, optimizer, rank, range(step, step + 1), bad)
        save(f"{folder}/{step}", optimizer, numbered(params))
    train(params, optimizer, rank, range(9, 12), bad)
    expected = everything(params, optimizer)
    for step in range(9):
        again, other = build(config, torch.bfloat16)
        content = load(f"{folder}/{step}", other).model("model")
        for place, parameter in enumerate(again):
            parameter.data.copy_(content[str(place)])
        train(again, other, rank, range(step + 1, 12), bad)
        for a, b in zip(expected, everything(again, other), strict=True):
            assert torch.equal(a, b), f"resumed after step {step}"
        assert other.engine.clipping.skipped_total == 1
    return int(optimizer.engine.state_at_rest().step)


@pytest.mark.few(1)
@pytest.mark.parametrize("config", [CONFIG, replace(ADAMW, dense_steps=1, sparsity_warmup_steps=3)], ids=name_of)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_directory_of_any_step_goes_on_bit_for_bit(
    run_ranks: RunRanks, tmp_path: Path, world_size: int, config: ScapeConfig
) -> None:
    assert run_ranks(stop_and_go_everywhere, world_size, str(tmp_path), config, 5) == [11] * world_size


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [(ADAMW, ADAMW), (CONFIG, ADAMW), (ADAMW, CONFIG), (PAPERS, ADAMW), (PAPERS, CONFIG)],
    ids=name_of,
)
def test_a_directory_is_loaded_as_the_full_state_is(tmp_path: Path, before: ScapeConfig, after: ScapeConfig) -> None:
    """Whatever update it was written by, and is to go on with."""
    params, optimizer = build(before, torch.float32)
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)  # which the state brings with it
    train(params, optimizer, 0, range(13))
    save(tmp_path / "c", optimizer, numbered(params))
    found = []
    for sharded in (True, False):
        again, other = build(after, torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            load(tmp_path / "c", other) if sharded else other.load_state_dict(optimizer.state_dict())
        found.append(everything(again, other))
        train(again, other, 0, range(13, 15))
        found[-1] += everything(again, other)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_directory_that_cannot_be_read_changes_no_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, sparsity_warmup_steps=None)
    params, optimizer = build(config, torch.float32)
    save(tmp_path / "c", optimizer, numbered(params))
    _, other = build(config, torch.float32, total_steps=7)

    def fail(*arguments: Any) -> None:
        raise OSError("no such disk")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "read", fail)
        with pytest.raises(OSError, match="no such disk"):
            load(tmp_path / "c", other)
    assert other.schedule.warmup_steps == 7
    load(tmp_path / "c", other)
    assert other.schedule.warmup_steps == 1000


# ------------------------------------------------------------------------------------- in the directory, on the ranks


def save_and_measure(rank: int, world_size: int, folder: str, config: ScapeConfig) -> tuple[int, int]:
    params, optimizer = build(config, torch.bfloat16)
    train(params, optimizer, rank, range(3))
    save(f"{folder}/c", optimizer, numbered(params))
    own = optimizer.sharded_state_dict().tensors
    # Views: nothing but the rank's own shard, residual and rows of the mask.
    state = optimizer.engine.state
    assert state is not None
    names = ("exp_avg", "last_step", "master", "change_error", "local_exp_avg_sq", "exp_avg_sq", "residual")
    held = [getattr(state, name) for name in names] + [optimizer.engine.masks.active]
    homes = {t.untyped_storage().data_ptr() for t in held if t is not None}
    assert {chunk.tensor.untyped_storage().data_ptr() for chunk in own.values()} <= homes
    return sum(c.tensor.numel() for k, c in own.items() if k.endswith(".exp_avg")), sum(p.numel() for p in params)


@pytest.mark.few(1)
@pytest.mark.parametrize("config", [CONFIG, ADAMW], ids=name_of)
def test_every_rank_writes_its_own_shard_and_none_the_whole_state(
    run_ranks: RunRanks, tmp_path: Path, config: ScapeConfig
) -> None:
    parts = run_ranks(save_and_measure, 3, str(tmp_path), config)
    assert sum(part for part, _ in parts) == parts[0][1]
    assert all(part < 0.5 * whole for part, whole in parts)
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    shards = ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert names == [".metadata", "README.txt", *shards, "manifest.json", "meta.pt"]
    assert not list(tmp_path.glob(".*"))
    # torch's own reader agrees on what is in it.
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "c", tmp_path / "torch.pt")
    content = torch.load(tmp_path / "torch.pt", weights_only=True)
    directory = Directory(tmp_path / "c")
    assert content.keys() == directory.shapes().keys()
    assert all(torch.equal(value, directory.tensor(key)) for key, value in content.items())


def write_masters(rank: int, world_size: int, folder: str, update: str) -> Any:
    params, optimizer = build(replace(CONFIG, mask_statistic="first_moment", update=update), torch.bfloat16)
    train(params, optimizer, rank, range(5))
    save(f"{folder}/c", optimizer, numbered(params), step=5)
    return whole_state(optimizer), numbered(params)


@pytest.mark.few(1)
@pytest.mark.parametrize("update", ["adams", "adamw"])
def test_consolidated_directory_is_the_full_checkpoint(
    run_ranks: RunRanks, tmp_path: Path, capsys: Any, update: str
) -> None:
    whole, model = run_ranks(write_masters, 2, str(tmp_path), update)[0]
    assert main(["consolidate", str(tmp_path / "c"), str(tmp_path / "one.pt")]) == 0
    assert main(["verify", str(tmp_path / "c"), str(tmp_path / "one.pt")]) == 0
    assert "complete and undamaged" in capsys.readouterr().out
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert one["step"] == 5
    assert len(one["scape_rng"]) == 2
    assert_equal(one["model"], model)
    assert_equal(one["optimizer"], whole)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def test_the_tool_names_what_is_wrong_and_fails(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "c").mkdir()
    assert main(["consolidate", str(tmp_path / "c"), str(tmp_path / "one.pt")]) == 1
    assert "must hold manifest.json" in capsys.readouterr().err
    assert not (tmp_path / "one.pt").exists()


@pytest.mark.parametrize("config", [CONFIG, ADAMW], ids=name_of)
def test_scape_goes_on_as_adamw_and_as_adams_with_what_carries_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: ScapeConfig
) -> None:
    params, optimizer = build(config, torch.float32)
    train(params, optimizer, 0, range(6))
    save(tmp_path / "c", optimizer, numbered(params))
    assert main(["consolidate", str(tmp_path / "c"), str(tmp_path / "w.pt"), "--optimizer", "adamw"]) == 0
    assert "residuals, last steps and masks do not carry over" in capsys.readouterr().err
    assert main(["consolidate", str(tmp_path / "c"), str(tmp_path / "kept.pt"), "--optimizer", "kept"]) == 0
    whole = optimizer.state_dict()
    assert_equal(torch.load(tmp_path / "kept.pt")["optimizer"], whole)
    for kind in (torch.optim.AdamW, AdamS):
        twins = parameters()
        dense = kind([{"params": twins[:2]}, {"params": twins[2:]}])
        if kind is AdamS:
            with pytest.warns(UserWarning, match="first moments, step and options carry over to AdamS; residuals"):
                dense.load_state_dict(whole)
        else:
            dense.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True)["optimizer"])
            # A full checkpoint's file converts as well, in the Trainer's form and in Fabric's.
            for name, content in (("t", {"optimizer_states": [whole]}), ("f", {"optimizer": whole, "step": 6})):
                save_file(content, tmp_path / f"{name}.pt")
                command = ["consolidate", "--force", "--optimizer", "adamw"]
                command += [str(tmp_path / f"{name}.pt"), str(tmp_path / "v.pt")]
                assert main(command) == 0
                assert "do not carry over" in capsys.readouterr().err
                found = torch.load(tmp_path / "v.pt", weights_only=True)
                state = found["optimizer_states"][0] if name == "t" else found["optimizer"]
                assert_equal(state, torch.load(tmp_path / "w.pt", weights_only=True)["optimizer"])
        for index, twin in enumerate(twins):
            assert torch.equal(dense.state[twin]["exp_avg"], whole["state"][index]["exp_avg"])
            assert int(dense.state[twin]["step"]) == (4 if index == 3 and config == ADAMW else 6)
            if kind is torch.optim.AdamW and config == ADAMW:
                assert torch.equal(dense.state[twin]["exp_avg_sq"], whole["state"][index]["exp_avg_sq"])
            twin.grad = torch.zeros_like(twin)
        assert dense.param_groups[0]["lr"] == 3e-2
        before = [twin.detach().clone() for twin in twins]
        dense.step()
        for twin, old in zip(twins, before, strict=True):
            assert (twin - old).abs().max() < 0.2  # a step, not an explosion
            assert twin.isfinite().all()


# ------------------------------------------------------------------------------------------------ unfit directories


def mutate(original: bytes, rng: random.Random) -> bytes:
    """One of the ways in which files go bad, at a random place."""
    data = bytearray(original)
    place, length = rng.randrange(len(data)), rng.choice([1, 8, 100, 512])
    kind = rng.randrange(7)
    if kind == 0:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        del data[place : place + length]
    elif kind == 3:
        data[place:place] = rng.randbytes(length)
    elif kind == 4:
        data[place : place + length] = bytes(len(data[place : place + length]))
    elif kind == 5:
        other = rng.randrange(len(data))
        data[place : place + length] = data[other : other + length]
    else:
        data[place : place + length] = rng.randbytes(len(data[place : place + length]))
    return bytes(data)


def one_directory(tmp_path: Path, config: ScapeConfig = CONFIG) -> tuple[list[Any], ScapeOptimizer, Path]:
    params, optimizer = build(config, torch.float32)
    train(params, optimizer, 0, range(4))
    save(tmp_path / "c", optimizer, numbered(params))
    return params, optimizer, tmp_path / "c"


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "meta.pt", "README.txt", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_to_any_file_is_found_before_anything_is_loaded(tmp_path: Path, name: str, damage: str) -> None:
    params, optimizer, path = one_directory(tmp_path)
    before = [t.clone() for t in everything(params, optimizer)]
    file = path / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-7])
    else:
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    with pytest.raises(CheckpointError, match=r"torn|damaged|cannot be read") as caught:
        load(path, optimizer)
    assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError):
        verify(path)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(params, optimizer), strict=True))


def test_three_hundred_mutated_directories_are_refused(tmp_path: Path) -> None:
    _, optimizer, path = one_directory(tmp_path)
    names = sorted(file.name for file in path.iterdir())
    originals, rng, refused = {name: (path / name).read_bytes() for name in names}, random.Random(0), 0
    for _ in range(300):
        name = rng.choice(names)
        data = mutate(originals[name], rng)
        (path / name).write_bytes(data)
        if data != originals[name]:
            with pytest.raises(CheckpointError):
                load(path, optimizer)
            refused += 1
        (path / name).write_bytes(originals[name])
    assert refused > 280
    load(path, optimizer)


def test_a_newer_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("lightning_scape.checkpoint.atomic_files.FORMAT", 7)
        _, optimizer, path = one_directory(tmp_path)
    with pytest.raises(CheckpointError, match="must be at most 1, got 7.*Upgrade"):
        load(path, optimizer)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", r"exp_avg of 'parameter 1' \(number 1\) must have shape \(6,\), got \(5,\)"),
        ("count", "must hold the model's 5 trained parameters, got 6; the first that only one of them has is number 5"),
        ("groups", "must have 1 parameter groups, got 2"),
        ("order", "must come in the checkpoint's order, got 'b' as number 0, which was 'a' there"),
    ],
)
def test_another_models_directory_is_refused_naming_the_first_difference(tmp_path: Path, kind: str, words: str) -> None:
    params, optimizer = build(CONFIG, torch.float32)
    if kind == "order":
        optimizer.name_parameters([("a", params[0]), ("b", params[1])])
    train(params, optimizer, 0, range(4))
    save(tmp_path / "c", optimizer, {})
    others = parameters()
    if kind == "shape":
        others[1] = nn.Parameter(torch.zeros(6))
    groups = [{"params": others[:2]}, {"params": others[2:]}]
    if kind == "count":
        groups[1]["params"] = others[2:-1]
        words = words.replace("must hold", "")
    if kind == "groups":
        groups = [{"params": others}]
    other = ScapeOptimizer(groups, config=CONFIG)
    if kind == "order":
        other.name_parameters([("b", others[0]), ("a", others[1])])
    if kind == "count":
        words = "Parameter group 1 of the state must have 3 parameters, got 4"
    with pytest.raises(ValueError, match=words):
        load(tmp_path / "c", other)
    assert other.engine.state is None


def test_other_options_are_told_and_the_mask_is_made_anew(tmp_path: Path) -> None:
    _, optimizer, path = one_directory(tmp_path)
    _, other = build(ScapeConfig(sparsity=0.99, wire_dtype="fp32", sparsity_warmup_steps=0), torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(path, other)
    texts = " ".join(str(warning.message) for warning in caught)
    assert "sparsity=0.9 (now 0.99)" in texts
    assert "wire_dtype='bf16' (now 'fp32')" in texts
    assert "masks are for blocks of 250 entries, this run's are 200" in texts
    assert_equal(optimizer.state_dict()["state"], other.state_dict()["state"])


def test_another_memory_order_is_refused_and_one_file_has_none(tmp_path: Path) -> None:
    def make(memory_format: torch.memory_format) -> tuple[Any, ScapeOptimizer]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 4, 5, 5).to(memory_format=memory_format))
        weight.grad = torch.randn_like(weight)
        return weight, ScapeOptimizer([weight], config=CONFIG)

    _, optimizer = make(torch.channels_last)
    optimizer.step()
    save(tmp_path / "c", optimizer, {})
    _, other = make(torch.contiguous_format)
    with pytest.raises(ValueError, match="memory order.*lightning-scape consolidate"):
        load(tmp_path / "c", other)
    other.load_state_dict(consolidate(tmp_path / "c")["optimizer"])
    assert_equal(optimizer.state_dict()["state"], other.state_dict()["state"])


def test_tensors_that_would_have_the_same_name_are_refused() -> None:
    """One of them would be lost: nothing else tells them apart in a directory."""
    tensor = torch.ones(3)
    optimizers: Any = {"optimizer": SimpleNamespace(tensors={})}
    models = {"model": {"ema.weight": tensor, "body.weight": tensor}, "model.ema": {"bias": tensor}}
    assert len(Content(models, optimizers).tensors(0)) == 4  # and the random number generator
    models["model.ema"]["weight"] = tensor
    with pytest.raises(ValueError, match=r"got two for 'model\.ema\.weight', one of them of 'model\.ema'"):
        Content(models).tensors(0)
    with pytest.raises(ValueError, match=r"got two for 'rng\.1', one of them of 'rng'"):
        Content({"rng": {"1": tensor}}, optimizers).tensors(0)
    assert list(Content({"rng": {"1": tensor}}).tensors(0)) == ["rng.1"]
