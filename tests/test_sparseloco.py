"""SparseLoCo under plain process groups: what it equals, loses (nothing) and sends, and what it says of ranks apart."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from muon_adamw import MuonAdamW
from torch import Tensor, nn

from lightning_scape.ops.naive.wire import add_entries
from lightning_scape.sparseloco import SparseLoCo
from lightning_scape.sparseloco.algorithm import MOST_DROPPED

EXACT: dict[str, Any] = {"density": 1.0, "bits": None, "error_decay": 1.0, "outer_lr": 1.0}
SPARSE: dict[str, Any] = {"density": 1 / 8, "bits": 2, "sync_every": 3}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3)).to(dtype)


def gradient(net: nn.Module, rank: int, step: int) -> None:
    """Of this rank's batch of this step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 8, generator=generator).to(next(net.parameters()).dtype)
    net.zero_grad()
    (net(x) - x[:, :3].sin()).float().square().mean().backward()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


def train(
    rank: int, steps: int, loco: Callable[[torch.optim.Optimizer], SparseLoCo | None],
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, SparseLoCo | None]:  # fmt: skip
    net = model(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    wrapped = loco(optimizer)
    for step in range(steps):
        gradient(net, rank, step)
        optimizer.step()
    return net, wrapped


# ------------------------------------------------------------------------------------------------ what it equals


def _averaging(rank: int, world_size: int, every: int) -> Tensor:
    net, _ = train(rank, 6, lambda optimizer: SparseLoCo(optimizer, **EXACT, sync_every=every))
    return flat(net)


def _reference(ranks: int, every: int) -> Tensor:
    """Plain averaging of the parameters every so many steps."""
    nets = [model() for _ in range(ranks)]
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in nets]
    for step in range(6):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            gradient(net, rank, step)
            optimizer.step()
        if (step + 1) % every == 0:
            mean = torch.stack([flat(net) for net in nets]).mean(dim=0)
            for net in nets:
                nn.utils.vector_to_parameters(mean.clone(), net.parameters())
    return flat(nets[0])


def test_everything_sent_is_plain_averaging_of_the_parameters(run_ranks: Any) -> None:
    ends = run_ranks(_averaging, 2, 3)
    torch.testing.assert_close(ends[0], _reference(2, 3), rtol=1e-5, atol=1e-6)
    assert torch.equal(ends[0], ends[1])


# ------------------------------------------------------------------------------------------------ nothing is lost


def _sent(rank: int, world_size: int, bits: int | None, average: Any) -> dict[str, Any]:
    """Two windows, looked at from outside: what was there, was sent and is left in the second, and where it led."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **{**SPARSE, "bits": bits, "average": average}, error_decay=1.0)
    wire, seen = loco.algorithm.wire, {}

    def watched(blocks: Tensor, take: Any = wire.take) -> Tensor:
        there = blocks.clone()
        message = take(blocks)
        sent = torch.zeros_like(there, dtype=torch.float64)
        positions, values = wire.read(message)
        add_entries(sent, positions, values.double())
        seen.update(there=there.double(), sent=sent, left=blocks.double())
        return message

    object.__setattr__(wire, "take", watched)
    for step in range(6):
        gradient(net, rank, step)
        if step == 3:
            seen["start"] = loco.algorithm.state.start.double()  # type: ignore[union-attr]
        optimizer.step()
    seen["end"] = loco.algorithm.state.start.double()  # type: ignore[union-attr]
    return seen


@pytest.mark.parametrize(("bits", "average"), [(2, "geometric"), (4, "senders"), (None, "all")])
def test_what_is_sent_leaves_the_error_and_its_mean_moves_all_ranks(
    run_ranks: Any, bits: int | None, average: str
) -> None:
    ranks = run_ranks(_sent, 3, bits, average)
    sent = torch.stack([seen["sent"] for seen in ranks])
    senders = (sent != 0).sum(dim=0).clamp(min=1)
    count = {"all": 3, "geometric": (3 * senders).sqrt(), "senders": senders}[average]
    for seen in ranks:
        assert torch.equal(seen["sent"] + seen["left"], seen["there"])
        assert not torch.equal(seen["left"], seen["there"])
        torch.testing.assert_close(seen["start"] - seen["end"], sent.sum(dim=0) / count, rtol=1e-4, atol=1e-6)
        assert torch.equal(seen["end"], ranks[0]["end"])


def _settled(rank: int, world_size: int, entries: int, options: dict[str, Any]) -> float:
    """How far a few entries are from what all ranks look for, at most, in the last of many windows."""
    torch.manual_seed(0)
    weights = nn.Parameter(torch.full((entries,), 2.0))
    optimizer = torch.optim.SGD([weights], 0.2)
    loco = SparseLoCo(optimizer, sync_every=10, **options)
    farthest = 0.0
    for step in range(300):
        weights.grad = weights.detach().clone()  # of a parabola around 0
        optimizer.step()
        if step >= 200 and not loco.progress.in_window:
            farthest = max(farthest, float(weights.detach().abs().max()))
    return farthest


@pytest.mark.parametrize(("entries", "options"), [(4, {}), (600, {"density": 0.5})])
def test_entries_on_which_all_ranks_agree_settle(run_ranks: Any, entries: int, options: dict[str, Any]) -> None:
    """Divided by the root of the ranks alone, they overshot by it: one scalar never settled on 4 ranks."""
    assert max(run_ranks(_settled, 4, entries, options)) < 0.02


def test_one_rank_trains_as_without_sparseloco_and_sends_nothing() -> None:
    """It has nobody to send to, and needs no process group."""
    alone, loco = train(0, 12, lambda optimizer: SparseLoCo(optimizer, sync_every=3))
    plain, _ = train(0, 12, lambda optimizer: None)
    torch.testing.assert_close(flat(alone), flat(plain), rtol=1e-5, atol=1e-6)
    assert loco is not None
    assert loco.stats is not None
    assert (loco.stats.exchange, loco.stats.bytes_total) == (4, 0)


# ------------------------------------------------------------------------------------------------ what it sends


def _sends(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loco = SparseLoCo(optimizer, sync_every=2)
    sums = []
    for step in range(5):
        net.zero_grad()
        torch.manual_seed(10 * step + rank)
        net(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        assert loco.algorithm.state is not None
        sums.append(loco.algorithm.state.start.double().sum().item())
    assert loco.stats is not None
    return {"stats": loco.stats, "planned": loco.exchange_bytes, "starts": sums}


def test_an_exchange_sends_140_times_less_than_fp32_and_what_was_planned(run_ranks: Any) -> None:
    ranks = run_ranks(_sends, 3)
    for seen in ranks:
        stats = seen["stats"]
        assert stats.exchange == 2
        assert stats.bytes_total == seen["planned"]
        assert stats.bytes_sent["norm"] == 2 * 24
        assert stats.bytes_sent["parameters"] == 2 * 256 * 256 // 64 * 14 // 8  # to each other rank
        assert stats.compression >= 140 * 2 / 3  # an all-reduce sends 2 (N - 1) / N times the gradient
        assert stats.density == 1 / 64
    assert all(seen["starts"] == ranks[0]["starts"] for seen in ranks)


# ------------------------------------------------------------------------------------------------ alone, narrow, odd


def test_small_outer_steps_add_up_where_parameters_are_bf16() -> None:
    """The starting point is fp32: an outer step of less than half a bf16 spacing is not lost."""
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), 2.0**-8)
    loco = SparseLoCo(optimizer, sync_every=1, **{**EXACT, "outer_lr": 0.25})
    for _ in range(3):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    assert loco.algorithm.state is not None
    assert loco.algorithm.state.start[0, 0] == 1 - 3 * 2.0**-10


def _bf16(rank: int, world_size: int) -> Tensor:
    net, _ = train(rank, 6, lambda optimizer: SparseLoCo(optimizer, **SPARSE), dtype=torch.bfloat16)
    return flat(net)


def test_bf16_parameters_are_equal_after_an_exchange(run_ranks: Any) -> None:
    first, second = run_ranks(_bf16, 2)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, second)


def _muon(rank: int, world_size: int) -> tuple[Tensor, Tensor, float, float]:
    """Two runs of 12 steps, the second one resumed in a window; and the loss before and after."""
    ends, saved = [], None
    for first in (0, 7):
        net = model()
        optimizer = MuonAdamW(net.named_parameters(), 1e-2)
        loco = SparseLoCo(optimizer, sync_every=3, density=1 / 4)
        if saved is not None:
            net.load_state_dict(saved[0])
            loco.load_state_dict(saved[1])
        for step in range(first, 12):
            if step == 7 and saved is None:
                loco.consolidate_state_dict()
                states = [(net.state_dict(), loco.state_dict()) if rank == 0 else None]
                torch.distributed.broadcast_object_list(states)
                saved = states[0]
            gradient(net, rank, step)
            optimizer.step()
        ends.append(flat(net))
        loco.close()
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(9))
    before, after = (float((each(x) - x[:, :3].sin()).square().mean()) for each in (model(), net))
    return ends[0], ends[1], before, after


def test_muon_beside_adamw_trains_and_resumes_bit_for_bit(run_ranks: Any) -> None:
    ranks = run_ranks(_muon, 2)
    for straight, resumed, before, after in ranks:
        assert torch.equal(straight, resumed)
        assert torch.equal(straight, ranks[0][0])
        assert after < before


def test_any_optimizer_with_a_closure_is_served() -> None:
    net = model()
    optimizer = torch.optim.LBFGS(net.parameters(), 0.1, max_iter=2)
    loco = SparseLoCo(optimizer, sync_every=2)

    def closure() -> Tensor:
        gradient(net, 0, 0)
        return flat(net).square().sum()

    for _ in range(3):
        optimizer.step(closure)
    assert loco.progress.exchanges == 1
    loco.sync()
    assert loco.progress.exchanges == 2
    loco.close()
    assert SparseLoCo.of(optimizer) is None
    optimizer.step(closure)
    assert loco.progress.steps == 3


def _dropped(rank: int, world_size: int) -> dict[str, Any]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, sync_every=2, density=1 / 4)
    ends = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(6):
            gradient(net, rank, step)
            if step == 2 and rank == 1:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.grad.fill_(float("nan"))
            optimizer.step()
            ends.append(flat(net))
    moments = torch.cat([state["exp_avg"].reshape(-1) for state in optimizer.state.values()])
    return {
        "ends": ends,
        "said": [str(warning.message) for warning in caught if "window is dropped" in str(warning.message)],
        "total": loco.progress.dropped,
        "moments": bool(moments.isfinite().all()),
    }


def test_a_window_that_is_not_finite_is_dropped_on_all_ranks_and_training_goes_on(run_ranks: Any) -> None:
    first, second = run_ranks(_dropped, 2)
    assert first["total"] == second["total"] == 1
    assert len(first["said"]) == 1
    assert second["said"] == []
    for seen in (first, second):
        assert seen["moments"]
        assert torch.equal(seen["ends"][3], first["ends"][1])  # where the window began
        assert bool(seen["ends"][5].isfinite().all())
    assert torch.equal(first["ends"][5], second["ends"][5])
    assert not torch.equal(first["ends"][5], first["ends"][3])


def _always_nan(rank: int, world_size: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    SparseLoCo(optimizer, sync_every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(MOST_DROPPED):
            gradient(net, rank, step)
            if rank:
                net[0].weight.grad.fill_(math.nan)
            optimizer.step()


def test_too_many_dropped_windows_raise_on_every_rank(run_ranks: Any) -> None:
    for error in run_ranks(_always_nan, 2, expect_errors=True):
        assert isinstance(error, FloatingPointError)
        assert "in 10 windows in a row" in str(error)


def _differ(rank: int, world_size: int, what: str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, sync_every=5 - rank if what == "options" else 2)
    if what == "by hand":
        net[0].weight.detach().add_(rank)
        loco.sync()
        return
    gradient(net, rank, 0)
    if what == "start":
        optimizer.step()
        assert loco.algorithm.state is not None
        loco.algorithm.state.start[0, 0] += rank
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "kind", "complaint"),
    [
        ("options", ValueError, "sync_every=4"),
        ("start", RuntimeError, "All ranks must hold bitwise equal parameters"),
        ("by hand", RuntimeError, "All ranks must hold bitwise equal parameters"),
    ],
)
def test_ranks_that_differ_are_told_on_every_rank(
    run_ranks: Any, what: str, kind: type[Exception], complaint: str
) -> None:
    for error in run_ranks(_differ, 2, what, expect_errors=True):
        assert isinstance(error, kind)
        assert complaint in str(error)


def test_what_cannot_be_wrapped_is_refused() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    kept = SparseLoCo(optimizer, sync_every=1)
    with pytest.raises(ValueError, match="wrapped once"):
        SparseLoCo(optimizer)
    with pytest.raises(ValueError, match="float64"):
        SparseLoCo(torch.optim.SGD(model().double().parameters(), 0.1))
    with pytest.raises(ValueError, match="must work on one rank, got a ZeroRedundancyOptimizer"):
        SparseLoCo(type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})(model().parameters(), 0.1))
    for other in (net.parameters(), net, None):
        with pytest.raises(TypeError, match=r"must wrap a torch.optim.Optimizer, got \w+. Build one"):
            SparseLoCo(other)  # type: ignore[arg-type]
    net[0].weight.requires_grad_(False)
    gradient(net, 0, 0)
    with pytest.raises(ValueError, match="Build a new optimizer after the change"):
        optimizer.step()
    kept.close()


# ------------------------------------------------------------------------------------------------ ranks that are apart


def _skips(rank: int, world_size: int, batches: int, early: bool) -> str:
    """Rank 1 leaves one batch out, as GradScaler does with an overflow; what it is told."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE)
    try:
        for step in range(batches):
            gradient(net, rank, step)
            if (rank, step) != (1, 1):
                optimizer.step()
            if early and step == 3:
                loco.sync()
        loco.sync()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("batches", "early", "told"),
    [
        (6, False, "3 on ranks 0, 2 and 2 on rank 1"),
        (9, True, "1 on ranks 0, 2 and 0 on rank 1"),
    ],
)
def test_ranks_that_have_taken_different_numbers_of_steps_are_told_on_every_rank(
    run_ranks: Any, batches: int, early: bool, told: str
) -> None:
    """Windows ended a batch apart, and the last sync() waited until the timeout."""
    for said in run_ranks(_skips, 3, batches, early, timeout=60):
        assert f"the number of steps since the last exchange is {told}." in said
        assert "ShardedGradScaler" in said


def _synced(rank: int, world_size: int) -> tuple[list[Tensor], list[int], int, int]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE)
    loco.sync()  # before the first step
    ends, exchanges = [], []
    for step in range(7):
        gradient(net, rank, step)
        optimizer.step()
        if step in (2, 4, 6):
            for _ in range(2):  # the second has nothing to do
                loco.sync()
                ends.append(flat(net))
                exchanges.append(loco.progress.exchanges)
    assert loco.stats is not None
    return ends, exchanges, loco.stats.bytes_sent["norm"], loco.stats.bytes_total


def test_sync_exchanges_only_what_has_begun_and_counts_its_bytes(run_ranks: Any) -> None:
    first, second = run_ranks(_synced, 2)
    assert first[1] == second[1] == [1, 1, 2, 2, 3, 3]
    assert first[2] == second[2] == 24  # to one other rank
    for mine, theirs in zip(first[0], second[0], strict=True):
        assert torch.equal(mine, theirs)


def _changes(rank: int, world_size: int, change: str) -> list[Tensor]:
    """Changes the parameters after 4 steps of windows of 3, and wraps the optimizer anew."""
    net, extra = model(), nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco, ends = SparseLoCo(optimizer, **SPARSE), []
    for step in range(4):
        gradient(net, rank, step)
        optimizer.step()
    if change == "freeze":
        net[0].weight.requires_grad_(False)
    else:
        optimizer.add_param_group({"params": [extra]})
    with pytest.raises(ValueError, match="Build a new optimizer after the change"):
        optimizer.step()
    loco.sync()
    ends.append(flat(net))
    loco.close()
    again = SparseLoCo(optimizer, **SPARSE)
    for step in range(9, 12):
        gradient(net, rank, step)
        optimizer.step()
    assert again.progress.exchanges == 1
    return [*ends, flat(net)]


@pytest.mark.parametrize("change", ["freeze", "add"])
def test_other_parameters_are_an_error_at_the_next_step_and_the_optimizer_can_be_wrapped_anew(
    run_ranks: Any, change: str
) -> None:
    first, second = run_ranks(_changes, 2, change)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def _set(rank: int, world_size: int, values: tuple[float, float]) -> str:
    """The learning rate changes in the second window, to each rank's own value."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, **SPARSE)
    for step in range(5):
        gradient(net, rank, step)
        optimizer.param_groups[0]["lr"] = values[rank] if step == 4 else 1e-2
        optimizer.step()
    assert loco.algorithm.state is not None
    before, start = flat(net), loco.algorithm.state.start.clone()
    with pytest.raises(RuntimeError, match="same settings") as error:
        loco.sync()
    assert torch.equal(start, loco.algorithm.state.start)
    assert torch.equal(before, flat(net))
    return str(error.value)


def test_settings_that_differ_are_an_error_on_every_rank_and_nothing_is_folded(run_ranks: Any) -> None:
    for said in run_ranks(_set, 2, (0.01, 0.02), timeout=60):
        assert ": lr of group 0 is 0.01 on rank 0 and 0.02 on rank 1. " in said


def _two(rank: int, world_size: int) -> str:
    nets = [model(), model()]
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in nets]
    locos = [SparseLoCo(optimizer, **{**SPARSE, "sync_every": 2}) for optimizer in optimizers]
    try:
        for step in range(4):
            order = (0, 1) if step < 3 or rank == 0 else (1, 0)
            for which in order:
                gradient(nets[which], rank, step)
                optimizers[which].step()
    except RuntimeError as error:
        assert len(locos) == 2
        return str(error)
    return ""


def test_optimizers_stepped_in_another_order_are_told_apart(run_ranks: Any) -> None:
    """Of the same shape: each took the other's message for its own, without a word."""
    for said in run_ranks(_two, 2, timeout=60):
        assert "the optimizer's number is 0 on rank 0 and 1 on rank 1. " in said


def test_what_an_optimizer_works_out_for_itself_is_no_setting() -> None:
    """Prodigy and its like keep a step size of each rank's own in their groups."""

    class Adapts(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 1.0) -> None:
            super().__init__(params, lr)
            self.param_groups[0]["d"] = 1e-6

    optimizer = Adapts(nn.Linear(2, 2).parameters())
    algorithm = SparseLoCo(optimizer).algorithm
    facts = algorithm.facts()
    assert facts == {
        "the optimizer's number": 0,
        "the number of steps since the last exchange": 0,
        "lr of group 0": 1.0,
        "weight_decay of group 0": 0.0,
        "momentum of group 0": 0.0,
    }
    optimizer.param_groups[0]["d"] = 0.5
    assert algorithm.facts() == facts
    optimizer.param_groups[0]["lr"] = torch.tensor(2.0)
    assert algorithm.facts()["lr of group 0"] == 2.0


# ------------------------------------------------------------------------------------------------ what others write


def _written(rank: int, world_size: int, at: int, through_data: bool, only: bool) -> Any:
    """Weights are replaced, alike on all ranks, after some steps; where the next exchange leads."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loco, written = SparseLoCo(optimizer, **SPARSE), [*net.parameters()][: 1 if only else None]
    for step in range(6):
        if step == at:
            for parameter in written:
                with torch.no_grad():
                    (parameter.data if through_data else parameter).fill_(3.0)
            optimizer.param_groups[0]["lr"] = 0.0
        gradient(net, rank, step)
        optimizer.step()
    assert loco.stats is not None
    return [parameter.detach() for parameter in written], flat(net), loco.stats.bytes_total / loco.exchange_bytes


@pytest.mark.parametrize(
    ("at", "through_data", "only"), [(4, False, False), (4, False, True), (3, True, False), (3, False, True)]
)
def test_weights_written_alike_on_all_ranks_are_where_training_goes_on(
    run_ranks: Any, at: int, through_data: bool, only: bool
) -> None:
    """An exchange took them for something learned, and undid all but its largest entries."""
    results = run_ranks(_written, 3, at, through_data, only)
    for written, end, sent in results:
        assert all(bool((parameter == 3.0).all()) for parameter in written)
        assert torch.equal(end, results[0][1])
        assert sent > 1  # they travel whole


@pytest.mark.parametrize("at", [2, 3])
def test_one_rank_goes_on_from_what_was_written_whatever_its_outer_step(at: int) -> None:
    net = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    SparseLoCo(optimizer, sync_every=2, outer_lr=0.5)
    for step in range(4):
        if step == at:
            nn.init.constant_(net.weight, 3.0)
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    assert (net.weight == 3.0).all()


def _average_at_the_end(rank: int, world_size: int, in_window: bool) -> tuple[Tensor, Tensor]:
    """Each rank's own average of its steps is written after the last one."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco, places = SparseLoCo(optimizer, **SPARSE), []
    for step in range(7 if in_window else 6):
        gradient(net, rank, step)
        optimizer.step()
        places.append(flat(net))
    mean = torch.stack(places).mean(dim=0)
    with torch.no_grad():
        nn.utils.vector_to_parameters(mean + 0.0, net.parameters())
        for parameter in net.parameters():  # the line before writes through `.data`
            parameter.mul_(1.0)
    loco.sync()
    return mean, flat(net)


@pytest.mark.parametrize("in_window", [True, False])
def test_a_run_ends_with_the_mean_of_what_was_written_after_its_last_step(run_ranks: Any, in_window: bool) -> None:
    results = run_ranks(_average_at_the_end, 2, in_window)
    for _, end in results:
        torch.testing.assert_close(end, torch.stack([mean for mean, _ in results]).mean(dim=0))
        assert torch.equal(end, results[0][1])
