"""SparseLoCo under plain process groups: what it equals, what it loses (nothing) and what it sends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from muon_adamw import MuonAdamW
from torch import Tensor, nn

from lightning_scape.sparseloco import SparseLoCo, SparseLoCoConfig

EXACT: dict[str, Any] = {"density": 1.0, "bits": None, "error_decay": 1.0, "outer_lr": 1.0}
SPARSE: dict[str, Any] = {"density": 1 / 8, "bits": 2, "sync_every": 3, "reduction": "sharded"}


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
    rank: int, steps: int, loco: Callable[[torch.optim.Optimizer], SparseLoCo | None], sgd: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, SparseLoCo | None]:  # fmt: skip
    net = model(dtype)
    optimizer = torch.optim.SGD(net.parameters(), 0.1) if sgd else torch.optim.AdamW(net.parameters(), 1e-2)
    wrapped = loco(optimizer)
    for step in range(steps):
        gradient(net, rank, step)
        optimizer.step()
    return net, wrapped


# ------------------------------------------------------------------------------------------------ what it equals


def _averaging(rank: int, world_size: int, every: int, sgd: bool, reduction: str) -> Tensor:
    options = {**EXACT, "sync_every": every, "reduction": reduction}
    net, _ = train(rank, 6, lambda optimizer: SparseLoCo(optimizer, **options), sgd)
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


@pytest.mark.parametrize("reduction", ["sharded", "gathered"])
def test_everything_sent_is_plain_averaging_of_the_parameters(run_ranks: Any, reduction: str) -> None:
    ends = run_ranks(_averaging, 2, 3, False, reduction)
    torch.testing.assert_close(ends[0], _reference(2, 3), rtol=1e-5, atol=1e-6)
    assert torch.equal(ends[0], ends[1])


def test_with_sgd_and_one_step_it_is_data_parallel_sgd(run_ranks: Any) -> None:
    ends = run_ranks(_averaging, 2, 1, True, "sharded")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(6):
        parts = []
        for rank in range(2):
            gradient(net, rank, step)
            parts.append([parameter.grad.clone() for parameter in net.parameters()])
        for parameter, *grads in zip(net.parameters(), *parts, strict=True):
            parameter.grad = torch.stack(grads).mean(dim=0)
        optimizer.step()
    torch.testing.assert_close(ends[0], flat(net), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ nothing is lost


def _conservation(rank: int, world_size: int, bits: int | None, average: str) -> dict[str, Any]:
    """Two windows, looked at from outside: the errors before and after the second, and the starting points."""
    seen: dict[str, Any] = {}
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    options = {**SPARSE, "bits": bits, "average": average}
    loco = SparseLoCo(optimizer, **options, error_decay=1.0)
    exchange = loco.exchange
    for step in range(6):
        gradient(net, rank, step)
        if step == 5:
            read: list[Any] = []

            def watched(blocks: Tensor, take: Any = exchange.wire.take, read: list[Any] = read) -> Tensor:
                there = blocks.clone()
                message = take(blocks)
                read.append((there, message, blocks.clone()))
                return message

            object.__setattr__(exchange.wire, "take", watched)  # for both ways
        optimizer.step()
    seen["taken"] = read
    total = 0.0
    for there, message, left in read:
        entries = exchange.wire.read(message)
        sent = torch.zeros_like(there, dtype=torch.float64)
        entries._replace(values=entries.values.double()).add_to(sent)
        total += float((sent + left.double() - there.double()).abs().max())
    seen["lost"] = total
    return seen


@pytest.mark.parametrize(("bits", "average"), [(2, "all"), (None, "senders")])
def test_what_was_sent_plus_the_error_is_what_was_computed_on_both_ways(
    run_ranks: Any, bits: int | None, average: str
) -> None:
    for seen in run_ranks(_conservation, 2, bits, average):
        assert len(seen["taken"]) == 2  # to the owners, and back
        assert seen["lost"] == 0.0
        for there, _, left in seen["taken"]:
            assert not torch.equal(there, left)


def _gathered(rank: int, world_size: int, average: str) -> tuple[Tensor, Tensor, list[Tensor], float, int, int]:
    """One window: where it began, ended, every rank's message as blocks, entries of owners, and the bytes."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loco = SparseLoCo(optimizer, sync_every=1, density=1 / 8, reduction="gathered", average=average)  # type: ignore[arg-type]
    message = []
    take = loco.exchange.wire.take

    def watched(blocks: Tensor) -> Tensor:
        message.append(take(blocks))
        return message[0]

    object.__setattr__(loco.exchange.wire, "take", watched)
    gradient(net, rank, 0)
    before = flat(net)
    optimizer.step()
    assert loco.state is not None
    assert loco.stats is not None
    sent = torch.zeros_like(loco.state.error)
    loco.exchange.wire.read(message[0]).add_to(sent)
    pieces = loco.layout.everything().pieces
    said = torch.cat([sent.view(-1)[piece.of_blocks(loco.layout.block_size)] for piece in pieces])
    owed = float(loco.state.owner_error.numel())
    return before, flat(net), [said], owed, loco.stats.bytes_total - loco.stats.bytes_norm, loco.bytes_per_exchange()


@pytest.mark.parametrize("average", ["geometric", "senders"])
def test_gathered_messages_are_averaged_on_every_rank(run_ranks: Any, average: str) -> None:
    ranks = run_ranks(_gathered, 3, average)
    said = torch.stack([messages[0] for _, _, messages, *_ in ranks])
    senders = (said != 0).sum(dim=0).clamp(min=1)
    count = {"all": 3, "geometric": (3 * senders).sqrt(), "senders": senders}[average]
    for before, after, _, owed, sent, planned in ranks:
        torch.testing.assert_close(before - after, said.sum(dim=0) / count, rtol=1e-5, atol=1e-7)
        assert torch.equal(after, ranks[0][1])
        assert owed == 0  # nobody owns
        assert sent == planned


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


def test_one_rank_trains_as_without_sparseloco() -> None:
    """It has nobody to send to. Still it sent itself 2 bits of 1 entry in 64, and trained worse."""
    alone, _ = train(0, 12, lambda optimizer: SparseLoCo(optimizer, sync_every=3))
    plain, _ = train(0, 12, lambda optimizer: None)
    torch.testing.assert_close(flat(alone), flat(plain), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ what it sends


def test_few_ranks_gather_unless_something_speaks_for_owners() -> None:
    assert [SparseLoCoConfig().gathers(ranks) for ranks in (2, 3, 4, 5, 64)] == [True, True, True, False, False]
    assert [SparseLoCoConfig(density=1.0).gathers(ranks) for ranks in (2, 3)] == [True, False]
    assert not SparseLoCoConfig(reduction="sharded").gathers(2)
    assert SparseLoCoConfig(reduction="gathered").gathers(64)


def _sends(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    loco = SparseLoCo(optimizer, sync_every=2, reduction="sharded")
    sums = []
    for step in range(5):
        net.zero_grad()
        torch.manual_seed(10 * step + rank)
        net(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
        assert loco.state is not None
        sums.append(loco.state.start.double().sum().item())
    assert loco.stats is not None
    return {"stats": loco.stats, "planned": loco.bytes_per_exchange(), "starts": sums}


def test_an_exchange_sends_140_times_less_than_fp32_and_what_was_planned(run_ranks: Any) -> None:
    ranks = run_ranks(_sends, 4)
    for seen in ranks:
        stats = seen["stats"]
        assert stats.exchange == 2
        assert stats.bytes_total - stats.bytes_norm == seen["planned"]
        assert stats.bytes_values == stats.bytes_parameters  # k each way, whatever the number of ranks
        assert stats.bytes_values == 3 * 256 * 256 // 64 * 14 // 8 // 4
        assert stats.compression >= 140
        assert stats.density == 1 / 64
    assert all(seen["starts"] == ranks[0]["starts"] for seen in ranks)


# ------------------------------------------------------------------------------------------------ alone, narrow, odd


def test_one_rank_needs_no_process_group_and_sends_nothing() -> None:
    net, loco = train(0, 6, lambda optimizer: SparseLoCo(optimizer, **SPARSE))
    assert loco is not None
    assert loco.stats is not None
    assert loco.stats.bytes_total == 0
    assert loco.stats.exchange == 2


def test_small_outer_steps_add_up_where_parameters_are_bf16() -> None:
    """The starting point is fp32: an outer step of less than half a bf16 spacing is not lost."""
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), 2.0**-8)
    loco = SparseLoCo(
        optimizer, sync_every=1, outer_lr=0.25, **{k: EXACT[k] for k in ("density", "bits", "error_decay")}
    )
    for _ in range(3):
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step()
    assert loco.state is not None
    assert loco.state.start[0, 0] == 1 - 3 * 2.0**-10


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
    with SparseLoCo(optimizer, sync_every=2) as loco:

        def closure() -> Tensor:
            gradient(net, 0, 0)
            return flat(net).square().sum()

        for _ in range(3):
            optimizer.step(closure)
        assert loco.progress.exchanges == 1
    assert loco.progress.exchanges == 2  # the last window was ended
    assert SparseLoCo.of(optimizer) is None
    optimizer.step(closure)
    assert loco.progress.steps == 3


def _dropped(rank: int, world_size: int, most: int) -> dict[str, Any]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, sync_every=2, density=1 / 4, max_skipped=most)
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
        "total": loco.dropped.total,
        "moments": bool(moments.isfinite().all()),
    }


def test_a_window_that_is_not_finite_is_dropped_on_all_ranks_and_training_goes_on(run_ranks: Any) -> None:
    first, second = run_ranks(_dropped, 2, 10)
    assert first["total"] == second["total"] == 1
    assert len(first["said"]) == 1
    assert second["said"] == []
    for seen in (first, second):
        assert seen["moments"]
        assert torch.equal(seen["ends"][3], first["ends"][3])
        assert bool(seen["ends"][5].isfinite().all())
    assert torch.equal(first["ends"][5], second["ends"][5])
    assert not torch.equal(first["ends"][5], first["ends"][3])


def test_too_many_dropped_windows_raise_on_every_rank(run_ranks: Any) -> None:
    errors = run_ranks(_dropped, 2, 1, expect_errors=True)
    assert all(isinstance(error, FloatingPointError) and "max_skipped=1" in str(error) for error in errors)


def _differ(rank: int, world_size: int, what: str) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    loco = SparseLoCo(optimizer, sync_every=5 - rank if what == "options" else 1)
    gradient(net, rank, 0)
    if what == "start":
        optimizer.step()
        assert loco.state is not None
        loco.state.start[0, 0] += rank
    optimizer.step()


@pytest.mark.parametrize(
    ("what", "kind", "complaint"),
    [
        ("options", ValueError, "sync_every=4"),
        ("start", RuntimeError, "All ranks must hold bitwise equal parameters"),
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
    for other in (net.parameters(), net, None):
        with pytest.raises(TypeError, match=r"must wrap a torch.optim.Optimizer, got \w+. Build one"):
            SparseLoCo(other)  # type: ignore[arg-type]
    net[0].weight.requires_grad_(False)
    gradient(net, 0, 0)
    with pytest.raises(ValueError, match="frozen, unfrozen and added before"):
        optimizer.step()
    kept.close()


def _dies(rank: int, world_size: int) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    SparseLoCo(optimizer, sync_every=2)
    for step in range(4):
        gradient(net, rank, step)
        if rank == 1 and step == 3:
            raise KeyError("this rank's own mistake")
        optimizer.step()


def test_a_rank_that_dies_is_told_of_by_the_others(run_ranks: Any) -> None:
    survivor, dead = run_ranks(_dies, 2, expect_errors=True, timeout=60)
    assert isinstance(dead, KeyError)
    assert isinstance(survivor, RuntimeError)
