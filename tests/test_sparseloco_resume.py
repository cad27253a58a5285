"""Checkpoints of SparseLoCo: bit for bit, also inside a window; other numbers of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sparseloco import SPARSE, flat, gradient, model
from torch import Tensor

from lightning_scape.sparseloco import SparseLoCo

STEPS, AFTER = 14, 5
"""Steps in all, and those before the checkpoint: in the middle of the second window of three."""


def build(**options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, SparseLoCo]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    return net, optimizer, SparseLoCo(optimizer, **{**SPARSE, **options})


def go_on(net: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int, stop: int) -> None:
    for step in range(first, stop):
        gradient(net, rank, step)
        optimizer.step()


def _resume(rank: int, world_size: int, folder: str, writer: int) -> tuple[Tensor, Tensor]:
    net, optimizer, loco = build()
    go_on(net, optimizer, rank, 0, AFTER)
    if rank == writer:  # all ranks know of it at the next exchange, the resumed ones too
        with torch.no_grad():
            net[2].bias.fill_(3.0)
    path = Path(folder) / "saved"
    loco.consolidate_state_dict()
    if rank == 0:
        torch.save({"model": net.state_dict(), "loco": loco.state_dict()}, path)
    go_on(net, optimizer, rank, AFTER, STEPS)
    torch.distributed.barrier()
    other, second, again = build()
    saved = torch.load(path, weights_only=True)
    other.load_state_dict(saved["model"])  # rank 0's: inside a window the others differ
    again.load_state_dict(saved["loco"])
    go_on(other, second, rank, AFTER, STEPS)
    assert again.progress == loco.progress
    return flat(net), flat(other)


@pytest.mark.parametrize("writer", [-1, 1])
def test_training_goes_on_bit_for_bit(run_ranks: Any, tmp_path: Path, writer: int) -> None:
    ends = run_ranks(_resume, 2, str(tmp_path), writer)
    for straight, resumed in ends:
        assert torch.equal(straight, resumed)
    assert not torch.equal(ends[0][0], ends[1][0])  # the run ends inside a window


def _save(rank: int, world_size: int, path: str) -> tuple[Tensor, Tensor]:
    net, optimizer, loco = build()
    go_on(net, optimizer, rank, 0, AFTER)
    loco.consolidate_state_dict()
    if rank == 0:
        torch.save(loco.state_dict(), path)
    assert loco.algorithm.state is not None
    return flat(net), loco.algorithm.state.error.view(-1)[: 8 * 40].clone()


def _load(rank: int, world_size: int, path: str, options: dict[str, Any]) -> dict[str, Any]:
    net, optimizer, loco = build(**options)
    with pytest.warns(UserWarning, match="checkpoint") as caught:
        loco.load_state_dict(torch.load(path, weights_only=True))
    assert loco.algorithm.state is not None
    error = loco.algorithm.state.error.view(-1)[: 8 * 40].clone()
    start, here = loco.algorithm.state.start.view(-1)[: 8 * 40].clone(), flat(net)
    go_on(net, optimizer, rank, AFTER, 6)  # the window that was begun ends
    loco.sync()
    notes = [str(warning.message) for warning in caught]
    return {"error": error, "start": start, "here": here, "end": flat(net), "notes": notes}


@pytest.mark.parametrize(("before", "now"), [(2, 3), (3, 1)])
def test_on_another_number_of_ranks_the_mean_error_and_place_are_kept(
    run_ranks: Any, tmp_path: Path, before: int, now: int
) -> None:
    path = str(tmp_path / "saved")
    saved = run_ranks(_save, before, path)
    loaded = run_ranks(_load, now, path, {})
    mean_error = torch.stack([error for _, error in saved]).mean(dim=0)
    mean_place = torch.stack([place for place, _ in saved]).mean(dim=0)
    for seen in loaded:
        torch.testing.assert_close(seen["error"], mean_error, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(seen["here"], mean_place, rtol=1e-5, atol=1e-7)
        assert any(f"written by {before} ranks, this run has {now}" in note for note in seen["notes"])
        assert torch.equal(seen["end"], loaded[0]["end"])
        assert torch.equal(seen["start"], loaded[0]["start"])


def test_other_options_may_go_on_from_a_checkpoint(run_ranks: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    saved = run_ranks(_save, 2, path)
    loaded = run_ranks(_load, 2, path, {"density": 1 / 64, "bits": 4, "sync_every": 2})
    for seen, (place, error) in zip(loaded, saved, strict=True):
        assert any("other options" in note and "bits=2 (now 4)" in note for note in seen["notes"])
        assert torch.equal(seen["here"], place)
        assert torch.equal(seen["error"], error)  # in blocks of another length


def test_a_state_of_the_inner_optimizer_alone_begins_a_window() -> None:
    net = model()
    plain = torch.optim.AdamW(net.parameters(), 1e-2)
    go_on(net, plain, 0, 0, 2)
    _, optimizer, loco = build()
    with pytest.warns(UserWarning, match="trained without SparseLoCo"):
        loco.load_state_dict(plain.state_dict())
    kept = [state["exp_avg"] for state in optimizer.state.values()]
    assert all(torch.equal(a, state["exp_avg"]) for a, state in zip(kept, plain.state.values(), strict=True))
    # And back: the inner optimizer loads what SparseLoCo saved.
    plain.load_state_dict(loco.state_dict())


def test_a_state_saved_in_inference_mode_before_the_first_step_can_be_trained() -> None:
    """Under the Trainer callbacks save inside a validation."""
    net, optimizer, loco = build()
    with torch.inference_mode():
        loco.state_dict()
    go_on(net, optimizer, 0, 0, 3)
    assert loco.progress.exchanges == 1


def test_a_state_of_something_else_is_refused_and_changes_nothing() -> None:
    net, optimizer, loco = build()
    go_on(net, optimizer, 0, 0, 4)
    state, place = loco.algorithm.state, flat(net)
    good = loco.state_dict()
    whole = good["sparseloco"]
    smaller = {**good, "sparseloco": {**whole, "facts": {**whole["facts"], "shapes": {0: [3]}}}}
    torn = {**good, "sparseloco": {**whole, "tensors": {}}}
    for saved, complaint in (
        ({"scape": {}, "state": {}, "param_groups": []}, "different number of parameter groups"),
        (torn, "all 320 entries of 'start.0', got 0"),
        ({"what": 1}, r"must have `state` and `param_groups`, got \['what'\]"),
        (None, "must have `state` and `param_groups`, got NoneType"),
        (smaller, r"shapes must be .* got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=complaint):
            loco.load_state_dict(saved)
    optimizer.register_load_state_dict_pre_hook(lambda *_: {}["mine"])
    for load in (loco.load_state_dict, optimizer.load_state_dict):
        with pytest.raises(KeyError, match="mine"):  # a hook of the user's
            load(good)
    assert loco.algorithm.state is state
    assert torch.equal(flat(net), place)


def _of(shapes: list[tuple[int, ...]], names: str, kind: type[torch.optim.Optimizer]) -> SparseLoCo:
    torch.manual_seed(0)
    held = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in zip(names, shapes, strict=True)}
    optimizer = kind(held.values(), lr=0.01)  # type: ignore[call-arg]
    loco = SparseLoCo(optimizer, **SPARSE, named_parameters=held.items())
    for parameter in held.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return loco


@pytest.mark.parametrize(
    ("shapes", "names", "kind", "complaint"),
    [
        ([(3, 4), (6,), (6,)], "abc", torch.optim.AdamW, r"shapes must be \(3, 4\) for 'a', got \(4, 3\)"),
        ([(4, 3), (6,), (6,)], "acb", torch.optim.AdamW, "got 'c' as number 1, which was 'b' there"),
        ([(4, 3), (6,), (6,)], "abc", torch.optim.SGD, "got one of AdamW, and SparseLoCo wraps SGD"),
    ],
)
def test_a_state_of_other_shapes_order_or_optimizer_is_refused_and_changes_nothing(
    shapes: list[tuple[int, ...]], names: str, kind: Any, complaint: str
) -> None:
    saved: Any = _of([(4, 3), (6,), (6,)], "abc", torch.optim.AdamW)
    saved = saved.state_dict()
    loco = _of(shapes, names, kind)
    before, place = copy.deepcopy(loco.optimizer.state_dict()), [flat.clone() for flat in loco.parameters.flat]
    state = loco.algorithm.state
    with pytest.raises(ValueError, match=complaint):
        loco.load_state_dict(saved)
    assert loco.algorithm.state is state
    assert str(loco.optimizer.state_dict()) == str(before)
    assert all(torch.equal(*pair) for pair in zip(loco.parameters.flat, place, strict=True))


def test_state_dict_of_several_ranks_must_be_collected_first(run_ranks: Any) -> None:
    for error in run_ranks(_uncollected, 2, expect_errors=True):
        assert "must be collected" in str(error)


def _uncollected(rank: int, world_size: int) -> None:
    build()[2].state_dict()


def _change(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Loads inside a window, loads weights, and looks at the end of the window."""
    net, optimizer, loco = build()
    go_on(net, optimizer, rank, 0, AFTER)
    loco.consolidate_state_dict()
    states = [loco.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(states)
    other, second, again = build()
    again.load_state_dict(states[0])
    with torch.no_grad():
        other[2].bias.fill_(3.0)
    again.consolidate_state_dict()
    saved = [again.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(saved)
    weights = other.state_dict()
    other, second, again = build()
    other.load_state_dict(weights)
    again.load_state_dict(saved[0])  # a save, too, knows of them
    second.param_groups[0]["lr"] = 0.0
    go_on(other, second, rank, AFTER, 6)
    return other[2].bias.detach(), flat(other)


def test_weights_loaded_after_the_state_are_where_training_goes_on(run_ranks: Any) -> None:
    """The next exchange took them for a pseudo-gradient, and undid all but its largest entries."""
    results = run_ranks(_change, 2)
    for bias, end in results:
        assert bool((bias == 3.0).all())
        assert torch.equal(end, results[0][1])
