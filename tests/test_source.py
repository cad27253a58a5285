"""A saved state, key by key: a whole one and a directory are read alike, told alike and refused alike."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sharded import assert_equal, save
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer
from lightning_scape.checkpoint.dcp import Chunk
from lightning_scape.checkpoint.parts import Source
from lightning_scape.checkpoint.saver import SavedContent, consolidate
from lightning_scape.checkpoint.source import SavedShards, WholeState
from lightning_scape.comm.collectives import Communicator
from lightning_scape.scape.form import FORM
from lightning_scape.scape.keys import held, residual_key, state_key

RunRanks = Callable[..., list[Any]]
CONFIG = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=2, block_size=10, update="adamw")


def build(config: ScapeConfig = CONFIG) -> ScapeOptimizer:
    """Parameters in several memory orders, one without entries, a scalar, and one that is frozen."""
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(7, 5)),
        nn.Parameter(torch.randn(0, 3)),
        nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(3), requires_grad=False),
        nn.Parameter(torch.randn(11, 6).t()),
        nn.Parameter(torch.randn(())),
    ]
    groups = [{"params": params[:2]}, {"params": params[2:], "betas": (0.8, 0.9)}]
    return ScapeOptimizer(groups, lr=1e-2, config=config)


def trained(config: ScapeConfig = CONFIG) -> ScapeOptimizer:
    optimizer = build(config)
    for step in range(5):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        if step == 4:
            optimizer.param_groups[0]["params"][0].grad.fill_(float("nan"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    return optimizer


def shards_of(optimizer: ScapeOptimizer, path: Path) -> SavedShards:
    save(path, optimizer, {})
    return SavedContent(path, Communicator()).optimizers["optimizer"]


def keys(source: SavedShards) -> Iterator[str]:
    for index in source.entries:
        yield from (state_key(index, name) for name in source.entries[index])
        yield residual_key(0, index)
    yield "mask"


def test_a_whole_state_and_a_directory_are_read_alike(tmp_path: Path) -> None:
    optimizer = trained()
    shards = shards_of(optimizer, tmp_path / "c")
    whole = WholeState(FORM, optimizer.state_dict(), optimizer.engine.parameters)
    assert list(shards.entries) == list(whole.entries) == [0, 1, 2, 4, 5]
    assert held(shards) == held(whole) == {"exp_avg", "last_step", "exp_avg_sq"}
    assert {name: shards.common[name] for name in whole.common} == whole.common
    for key in keys(shards):
        shape, dtype = whole.find(key).shape, whole.find(key).dtype
        found = shards.find(key)
        assert found is not None
        assert (found.shape, found.dtype) == (shape, dtype)
        assert_equal(shards.tensor(key), whole.tensor(key))
    assert {key for key, _ in FORM.shapes(shards.common) if shards.tensor(key) is not None} == set(keys(shards))


@pytest.mark.parametrize(("offset", "length"), [(0, 35), (0, 10), (10, 10), (30, 5)])
def test_any_part_of_a_tensor_is_read_alone_and_converted(tmp_path: Path, offset: int, length: int) -> None:
    optimizer = trained()
    sources: list[Source] = [
        shards_of(optimizer, tmp_path / "c"),
        WholeState(FORM, optimizer.state_dict(), optimizer.engine.parameters),
    ]
    for source in sources:
        into = torch.full((length,), float("nan"), dtype=torch.float64)
        source.read({"residual.0.0": Chunk(into, offset, 35)})
        assert torch.equal(into, source.tensor("residual.0.0").double()[offset : offset + length])


def test_the_file_made_of_a_directory_loads_with_a_parameter_without_entries(tmp_path: Path) -> None:
    optimizer = trained()
    save(tmp_path / "c", optimizer, {})
    one = consolidate(tmp_path / "c")["optimizer"]
    assert_equal(one, optimizer.state_dict())
    other = build()
    other.load_state_dict(one)
    assert_equal(one, other.state_dict())
    # As such a file was written at first: of what has no entries, the kind was not known.
    for entry in (one["state"][1], one["scape"]["residuals"][0]):
        entry.update({name: value.float() for name, value in entry.items() if isinstance(value, Tensor)})
    other.load_state_dict(one)
    assert_equal(optimizer.state_dict(), other.state_dict())


def test_what_is_saved_holds_no_memory_but_its_own() -> None:
    whole = trained().state_dict()
    entries = [*whole["state"].values(), *whole["scape"]["residuals"], {"mask": whole["scape"]["mask"]}]
    for tensor in (value for entry in entries for value in entry.values() if isinstance(value, Tensor)):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_warning_names_the_line_that_loads_and_comes_before_any_change(tmp_path: Path, sharded: bool) -> None:
    before = trained()
    saved: Any = shards_of(before, tmp_path / "c") if sharded else before.state_dict()
    other = build(ScapeConfig(sparsity=0.8, sparsity_warmup_steps=None, block_size=20, update="adamw"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="other options"):
            other.load_state_dict(saved)
    assert other.steps_taken == 0
    assert (other.schedule.warmup_steps, other.schedule.shape) == (895, "waits")
    assert other.engine.clipping.skipped_total == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_state_dict(saved)
    assert [str(warning.message)[:30] for warning in caught] == [
        "The checkpoint was written wit",
        "The checkpoint's masks are for",
    ]
    assert {warning.filename for warning in caught} == {__file__}
    assert other.steps_taken == 5
    assert (other.schedule.warmup_steps, other.schedule.shape) == (2, "geometric")
    assert other.engine.clipping.skipped_total == 1


def fail_to_read_on_rank_one(rank: int, world_size: int, folder: str) -> tuple[str, int, bool, int]:
    shards = shards_of(trained(), Path(folder) / "c")
    other = build(replace(CONFIG, sparsity_warmup_steps=None))
    if rank == 1:

        def fail(*arguments: Any) -> None:
            raise OSError("no such disk")

        shards.directory.read = fail  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OSError, match="no such disk") as caught:
            other.load_state_dict(shards)
    return (
        str(caught.value),
        other.schedule.warmup_steps,
        other.engine.masks.active is None,
        other.engine.clipping.skipped_total,
    )


def test_where_one_rank_cannot_read_nothing_changes_on_any(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(fail_to_read_on_rank_one, 2, str(tmp_path)) == [("no such disk", 1424, True, 0)] * 2


def spoil(state: dict[str, Any], kind: str) -> dict[str, Any]:
    whole = state["scape"]
    if kind == "no facts":
        state["scape"] = None
    if kind == "no mask":
        del whole["mask"]
    if kind == "an entry":
        state["state"][2] = [1]
    if kind == "residuals":
        whole["residuals"] *= 2
    if kind == "a rank's residual":
        whole["residuals"] = [[]]
    if kind == "one residual":
        del whole["residuals"][0][4]
    if kind == "clock":
        state["state"][4]["last_step"][0, 0] = 9
    if kind == "sparse":
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].to_sparse()
    return state


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("no facts", "`scape` of an optimizer state must be a dict, got NoneType.*damaged"),
        ("no mask", "must hold a `mask` or None for it, got neither.*damaged"),
        ("an entry", r"`state\[2\]` of an optimizer state must be a dict, got list.*damaged"),
        ("residuals", "A state of 1 ranks must hold as many residuals, got 2.*damaged"),
        ("a rank's residual", r"`residuals\[0\]` of an optimizer state must be a dict, got list"),
        ("one residual", r"residual of 'parameter 4' \(number 4\) on rank 0 must be a floating-point tensor, got None"),
        ("clock", r"last_step of 'parameter 4' \(number 4\) must be between 0 and .* \(4\), got 0 to 9.*damaged"),
        ("sparse", r"exp_avg of 'parameter 0' \(number 0\) must be a floating-point tensor, got torch.sparse_coo"),
    ],
)
def test_a_damaged_state_is_refused_by_rule_value_and_remedy(kind: str, words: str) -> None:
    spoiled = spoil(copy.deepcopy(trained().state_dict()), kind)
    other = build()
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(spoiled)
    assert other.engine.state is None


@pytest.mark.parametrize("step", ["3", -1, float("nan"), torch.zeros(2), 2**31])
def test_a_dense_optimizers_step_must_be_a_number(step: Any) -> None:
    twins = [nn.Parameter(torch.ones(5))]
    dense = torch.optim.AdamW(twins)
    twins[0].grad = torch.ones(5)
    dense.step()
    state = dense.state_dict()
    state["state"][0]["step"] = step
    other = ScapeOptimizer([nn.Parameter(torch.ones(5))], config=CONFIG)
    with pytest.raises(ValueError, match="step of 'parameter 0' .* must be a number from 0 to 2\\*\\*31 - 1, got"):
        other.load_state_dict(state)
    assert other.engine.state is None
