"""Mask votes, and the measured second moment: what one rank alone cannot know of the averaged gradient."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizer_helpers import gathered, parameters, set_gradients
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm import collectives, pairs
from lightning_scape.core.tensors import OnItsWay
from lightning_scape.scape.shard import SAMPLE_INTERVAL, SAMPLE_WEIGHT

RunRanks = Callable[..., list[Any]]


def read(proposal: Tensor, votes: int, length: int) -> Tensor:
    """The proposal as a statistic of its own, ``[R, length]``."""
    rows = torch.zeros(proposal.shape[0], length)
    width = proposal.shape[1] - votes - 1
    positions = proposal[:, :width].contiguous().view(ops.position_dtype(length)).long()
    unit = torch.pow(2.0, proposal[:, -1:].float() - 127) / 127
    return rows.scatter(1, positions, proposal[:, width:-1].contiguous().view(torch.int8).float() * unit)


def test_vote_example_of_the_docstring() -> None:
    proposal = ops.propose(torch.tensor([[3.0, -5.0, 0.0, 0.0]]), 2)
    assert proposal.dtype == torch.uint8
    assert proposal.view(torch.int8).tolist() == [[1, 0, -79, 48, -126]]
    assert int(proposal[0, -1]) == 130


@pytest.mark.parametrize(("length", "votes"), [(200, 2), (250, 25), (1000, 3), (7, 7)])
def test_proposals_hold_the_largest_entries_to_one_part_in_127(length: int, votes: int) -> None:
    residual = torch.randn(9, length, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 9)[:, None]
    proposal = ops.propose(residual, votes)
    assert proposal.shape == (9, votes * (1 if length <= 256 else 2) + votes + 1)
    cast = read(proposal, votes, length)
    chosen = ops.select(residual, votes).long()
    largest = residual.abs().amax(1, keepdim=True)
    assert ((cast.gather(1, chosen) - residual.gather(1, chosen)).abs() <= largest / 127).all()
    assert (cast.scatter(1, chosen, 0.0) == 0).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, torch.finfo(torch.float32).max])
def test_proposals_of_zeros_denormals_or_the_largest_numbers_are_finite(value: float) -> None:
    cast = read(ops.propose(torch.full((1, 4), value), 2), 2, 4)
    assert cast.isfinite().all()
    assert (cast <= value * 1.01).all()


@given(st.integers(0, 2**31), st.sampled_from([(20, 3, 2), (300, 4, 1)]), st.integers(1, 4))
def test_the_elected_are_the_largest_of_the_sum(seed: int, shape: tuple[int, int, int], ranks: int) -> None:
    length, votes, sent = shape
    residuals = torch.randn(ranks, 5, length, generator=torch.Generator().manual_seed(seed))
    proposals = torch.stack([ops.propose(residual, votes) for residual in residuals])
    for own in range(ranks):
        total = residuals[own].clone()
        for rank in range(ranks):
            if rank != own:
                total += read(proposals[rank], votes, length)
        elected = ops.merge(residuals[own], proposals, own, votes, sent)
        least = total.abs().gather(1, elected.long()).amin(1)
        others = total.abs().scatter(1, elected.long(), 0.0).amax(1)
        assert (least >= others * (1 - 2**-12)).all()  # select compares 31 bits less those of a position


def test_one_block_is_elected_as_any_other() -> None:
    """Positions of two bytes in a row of odd length: one row alone begins at an odd place in memory."""
    residuals = torch.randn(2, 2, 5000, generator=torch.Generator().manual_seed(0))
    proposals = torch.stack([ops.propose(residual, 2) for residual in residuals])
    assert proposals.shape == (2, 2, 7)
    both = ops.merge(residuals[0], proposals, 0, 2, 6)
    for row in range(2):
        alone = ops.merge(residuals[0][row : row + 1], proposals[:, row : row + 1].contiguous(), 0, 2, 6)
        assert torch.equal(alone[0], both[row])


def test_an_entry_that_only_the_others_see_is_elected() -> None:
    mine, theirs = torch.zeros(1, 10), torch.zeros(1, 10)
    mine[0, 2], theirs[0, 7] = 1.0, 3.0
    proposals = torch.stack([ops.propose(mine, 1), ops.propose(theirs, 1)])
    assert ops.merge(mine, proposals, 0, 1, 1).tolist() == [[7]]
    assert ops.merge(mine, proposals[:1], 0, 1, 1).tolist() == [[2]]


def train_watching_votes(rank: int, world_size: int, votes: int) -> None:
    params = parameters()
    # In 4 bits the ranking sees zeros where entries were taken, and not the rounding errors that are left in the end.
    options: dict[str, Any] = {"mask_votes": votes, "sparsity_warmup_steps": 0, "wire_dtype": "bf16"}
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, **options))
    for step in range(5):
        set_gradients(params, rank, step)
        optimizer.step()
        optimizer.drain()
        state, masks, layout = optimizer.engine.state, optimizer.engine.masks, optimizer.engine.layout
        assert state is not None
        proposals = torch.stack(gathered(ops.propose(state.residual, votes)))
        rows = layout.rows_of(rank)
        elected = ops.merge(state.residual[rows], proposals[:, rows], rank, votes, optimizer.config.quota.sent)
        assert masks.active is not None
        assert torch.equal(masks.active, torch.cat(gathered(elected)))


@pytest.mark.parametrize("world_size", [2])
def test_owners_elect_from_the_votes_of_all_ranks(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(train_watching_votes, world_size, 3)


def count_votes(rank: int, world_size: int, options: dict[str, Any]) -> None:
    params = parameters()
    config = ScapeConfig(sparsity_warmup_steps=0, **options)
    optimizer = ScapeOptimizer(params, config=config)
    for step in range(3):
        set_gradients(params, rank, step)
        optimizer.step()
    calls: list[tuple[str, int]] = []
    real = pairs.all_to_all_into

    def spy(output: Tensor, tensor: Tensor, group: Any, **how: Any) -> Any:
        calls.append((str(tensor.dtype), tensor.numel() * tensor.element_size()))
        return real(output, tensor, group, **how)

    pairs.all_to_all_into = spy
    set_gradients(params, rank, 3)
    optimizer.step()
    stats = optimizer.stats
    optimizer.drain()
    pairs.all_to_all_into = real
    assert stats is not None
    blocks = optimizer.engine.layout.blocks
    width = config.proposed * (1 if config.quota.block_size <= 256 else 2) + config.proposed + 1
    assert calls[-1] == ("torch.uint8", blocks * width), calls
    assert stats.bytes_votes == blocks * width * (world_size - 1) // world_size
    assert stats.bytes_total - stats.bytes_votes == sum(
        (stats.bytes_norm, stats.bytes_values, stats.bytes_parameters, stats.bytes_mask)
    )
    assert optimizer.bytes_per_step() == stats.bytes_total - stats.bytes_norm


@pytest.mark.parametrize("options", [{"sparsity": 0.99, "mask_votes": 2, "update": "adamw"}])
def test_votes_are_one_message_more_and_counted(run_ranks: RunRanks, options: dict[str, Any]) -> None:
    run_ranks(count_votes, 2, options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask_votes": -1}, "`mask_votes` must be None or a whole number >= 0"),
        ({"mask_votes": 201}, "at most the block length 200, got 201"),
        ({"mask_votes": 1, "mask_statistic": "first_moment"}, "ranks propose by their residuals"),
        ({"second_moment": "ema"}, "`second_moment` must be one of 'measured', 'reconstructed'"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScapeConfig(**options)


# ------------------------------------------------------------------------------- the measured second moment


def test_noise_is_a_running_mean_of_scaled_clamped_squares() -> None:
    noise, grad = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([3.0, -1.0, 0.5])
    ops.accumulate_exp_avg_sq([noise], [grad], [0.25], 2, torch.tensor(0.5), 2.0)
    assert noise.tolist() == [0.75 + 0.125 * 1.0, 3.0 + 0.125 * 0.25, 6.75 + 0.125 * 0.0625]
    ops.accumulate_exp_avg_sq([noise], [torch.full((3,), float("nan"))], [0.25], 2, torch.tensor(0.0), None)
    assert noise.isfinite().all()
    ops.accumulate_exp_avg_sq([noise], [torch.full((3,), 1e30)], [0.5], 2, torch.tensor(1.0), None)
    assert noise.isfinite().all()  # though the square is not
    ops.accumulate_exp_avg_sq([noise], [None], [1.0], 2, torch.tensor(1.0), 2.0)
    assert noise.tolist() == [0.0, 0.0, 0.0]


def test_the_owner_samples_its_own_gradient_every_eight_steps() -> None:
    parameter = nn.Parameter(torch.zeros(30))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0))
    for step in range(2 * SAMPLE_INTERVAL + 1):
        parameter.grad = torch.full((30,), float(step))
        optimizer.step()
    state = optimizer.engine.state
    assert state is not None
    assert state.local_exp_avg_sq is not None
    mean = 0.0
    for sample in range(3):
        weight = max(SAMPLE_WEIGHT, 1 / (sample + 1))
        mean += weight * ((sample * SAMPLE_INTERVAL) ** 2 - mean)
    assert state.local_exp_avg_sq.view(-1)[0].item() == pytest.approx(mean, rel=1e-6)


def test_a_skipped_step_is_no_sample() -> None:
    """Loss scalers overflow in their first steps: the mean began with a zero that counted."""
    parameter = nn.Parameter(torch.zeros(30))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0))
    for value in (float("nan"), float("inf"), 2.0, 3.0):
        parameter.grad = torch.full((30,), value)
        with contextlib.nullcontext() if value < 9 else pytest.warns(UserWarning, match="not finite"):
            optimizer.step()
    assert_one_sample(optimizer, 4.0)


@pytest.mark.parametrize("update", ["adams", "adamw"])
def test_a_parameter_without_a_gradient_keeps_its_mean_square(update: str) -> None:
    """Skipped steps, and steps in which no rank has a gradient of it, are no gradients of zero."""
    parameters = [nn.Parameter(torch.zeros(30)) for _ in range(2)]
    config = ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0, update=update)
    optimizer = ScapeOptimizer(parameters, config=config)
    squares = []
    for value, here in ((2.0, True), (3.0, False), (float("nan"), True), (4.0, True), *[(5.0, False)] * 8):
        parameters[0].grad = torch.full((30,), value) if here else None
        parameters[1].grad = torch.full((30,), value)
        with contextlib.nullcontext() if value == value else pytest.warns(UserWarning, match="not finite"):
            optimizer.step()
        state = optimizer.engine.state
        assert state is not None
        measured = state.exp_avg_sq if state.local_exp_avg_sq is None else state.local_exp_avg_sq
        assert measured is not None
        squares.append(measured.view(-1)[0].item())
    assert squares[0] == squares[1] == squares[2] > 0
    assert (squares[3] > squares[0]) == (update == "adamw")  # AdamS samples every eighth step
    assert set(squares[4:]) == {squares[3]}


def assert_one_sample(optimizer: ScapeOptimizer, square: float) -> None:
    """That the noise is one gradient's, whose 30 entries have this square."""
    state = optimizer.engine.state
    assert state is not None
    assert state.local_exp_avg_sq is not None
    assert state.local_samples == 1
    assert state.local_exp_avg_sq.view(-1).tolist() == [square] * 30


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_state_loaded_after_a_skipped_step_knows_nothing_of_it(strict: bool | None) -> None:
    """The first thing that people try after a NaN; on CUDA what became of it is told late, and is set by hand here."""
    parameter = nn.Parameter(torch.zeros(30))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0))
    dense = torch.optim.AdamW([parameter])
    parameter.grad = torch.full((30,), 2.0)
    dense.step()
    parameter.grad = torch.full((30,), float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    if strict is not None:
        optimizer.engine.clipping.found_inf = OnItsWay(torch.zeros(3)), strict, None
    with pytest.warns(UserWarning, match="not written by SCAPE"):
        optimizer.load_state_dict(dense.state_dict())
    parameter.grad = torch.full((30,), 3.0)
    optimizer.step()
    assert_one_sample(optimizer, 9.0)
    assert optimizer.engine.clipping.skipped_total == 1


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_noise_floors_the_denominator_of_old_entries_only(share: float) -> None:
    one = torch.ones((), dtype=torch.float64)
    hyper = ops.Hyper.of(torch.float64, one, one * 0.9, one * 0.95, one * 0.0, one * 0.0)
    total, tau = torch.tensor([1.0, 1.0, 30.0], dtype=torch.float64), torch.tensor([1.0, 9.0, 9.0]).double()
    still = torch.zeros(3, dtype=torch.float64)
    noise = torch.full((3,), 4.0 / share, dtype=torch.float64)
    with_noise = ops.adams_step(still, still, tau, total, hyper, 1.0, noise, share).theta
    without = ops.adams_step(still, still, tau, total, hyper, 1.0).theta
    assert with_noise[0] == without[0]  # tau = 1: AdamS, term for term
    moved = without * (0.05 * total.square() / tau).sqrt()
    floor = 0.95 * 4.0 * (0.1 / 1.9)
    assert with_noise[1].item() == pytest.approx(float(moved[1] / (floor + 0.05 * 4.0) ** 0.5))
    assert with_noise[2].item() == pytest.approx(float(moved[2] / (floor + 0.05 * 900 / 9) ** 0.5))


@pytest.mark.parametrize(("sparsity", "share"), [(0.9, 0.5), (0.99, 1.0)])
def test_the_share_of_the_noise_grows_with_the_interval_between_visits(
    sparsity: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    plain = ops.update_adams

    def note(*args: Any) -> Any:
        shares.append(inspect.signature(plain).bind(*args).arguments["floor"])
        return plain(*args)

    monkeypatch.setattr(ops, "update_adams", note)
    parameter = nn.Parameter(torch.zeros(3000))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
    for _ in range(2):
        parameter.grad = torch.ones(3000)
        optimizer.step()
    assert shares == pytest.approx([share] * 2)


def test_dense_runs_and_adamws_update_keep_no_noise() -> None:
    assert not ScapeConfig(sparsity=0.0).measures_noise
    assert not ScapeConfig(update="adamw").measures_noise  # which has a second moment of its own
    assert not ScapeConfig(second_moment="reconstructed", sparsity_warmup_steps=0).measures_noise
    assert ScapeConfig(sparsity_warmup_steps=0).measures_noise


@pytest.mark.parametrize(
    ("options", "votes"),
    [
        ({"sparsity": 0.99}, 2),
        ({"sparsity": 0.999}, 1),
        ({"sparsity": 0.98}, 5),
        ({"sparsity": 0.9}, 0),
        ({"sparsity": 0.0}, 0),
        ({"mask_statistic": "first_moment"}, 0),
        ({"mask_votes": 7}, 7),
    ],
)
def test_as_many_votes_as_are_sent_where_these_are_few(options: dict[str, Any], votes: int) -> None:
    assert ScapeConfig(**options).proposed == votes


# --------------------------------------------------------------------------------- several optimizers, one mask group


def train_two(rank: int, world_size: int, votes: tuple[int, int]) -> None:
    group = collectives.new_group_like()
    models = [parameters(((6000,),)), parameters(((900,),))]
    optimizers = [
        ScapeOptimizer(
            params,
            config=ScapeConfig(mask_votes=count, check_replicas_every=1, sparsity_warmup_steps=0),
            mask_group=group,
        )
        for params, count in zip(models, votes, strict=True)
    ]
    for step in range(60):
        for params, optimizer in zip(models, optimizers, strict=True):
            set_gradients(params, rank, step)
            optimizer.step()


@pytest.mark.parametrize("votes", [(2, 0)])
def test_optimizers_that_share_a_mask_group_keep_their_messages_apart(
    run_ranks: RunRanks, votes: tuple[int, int]
) -> None:
    run_ranks(train_two, 2, votes)
