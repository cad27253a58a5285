"""The schedule of densities and a mask's whole way, without an optimizer: masks here are just numbered tensors."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_scape import ScapeConfig, ops
from lightning_scape.comm.collectives import Work
from lightning_scape.core.layout import Layout
from lightning_scape.scape.communicator import ScapeCommunicator
from lightning_scape.scape.mask import Masks
from lightning_scape.scape.state import Scale, ScapeState, Step, StepStats

CPU = torch.device("cpu")
SECONDS = 0.02
"""That a mask takes to come."""


class Numbered(ScapeCommunicator):
    """Brings masks that carry the number of their exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.waits = 0

    def gather_mask(self, make: Callable[[], Tensor], full: Tensor) -> Work:
        self.made += 1
        return Work(full.fill_(self.made), self.wait)

    def wait(self) -> None:
        self.waits += 1
        time.sleep(SECONDS)


def build(config: ScapeConfig) -> tuple[Numbered, Masks, ScapeState]:
    comm, layout = Numbered(), Layout([3 * config.quota.block_size], [0], config.quota.block_size, 1)
    masks = Masks(layout, comm, config)
    return comm, masks, ScapeState.allocate(layout, torch.float32, CPU)


def begun(masks: Masks, state: ScapeState, number: int) -> Step:
    state.calls, one, sent = number, torch.ones(()), masks.config.sent(number)
    step = Step(state, [], [], StepStats(), Scale(one, one, one), sent, (one, None, {}))
    step.folded = sent < state.residual.shape[1] and not state.sparse
    return step


def take(masks: Masks, state: ScapeState, number: int) -> tuple[Tensor | None, float]:
    """The mask that a step uses, and the seconds that it waits, as the engine does."""
    step = begun(masks, state, number)
    step.stats.exchange_wait = masks.wait()
    return masks.of(step), step.stats.exchange_wait


def send(masks: Masks, state: ScapeState, number: int) -> None:
    """The end of a step: it launches the exchange of the next mask."""
    state.calls, state.sparse = number + 1, masks.config.sent(number) < state.residual.shape[1]
    if state.sparse:
        masks.launch(state, state.calls)


def run(config: ScapeConfig, steps: int) -> list[int | None]:
    """Which mask, by number, each step used."""
    _, masks, state = build(config)
    used = []
    for step in range(steps):
        mask, _ = take(masks, state, step)
        used.append(None if mask is None else int(mask[0, 0]))
        assert mask is None or mask.shape == (3, masks.config.sent(step))
        send(masks, state, step)
    return used


def test_each_step_uses_the_mask_made_in_the_step_before() -> None:
    assert run(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), 5) == [1, 2, 3, 4, 5]


def test_first_step_makes_its_own_mask_and_only_it_waits_for_two() -> None:
    comm, masks, state = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    assert take(masks, state, 0)[1] >= SECONDS
    assert (comm.made, comm.waits) == (1, 1)
    send(masks, state, 0)
    assert (comm.made, comm.waits) == (2, 1)  # under way, not waited for
    assert masks.pending is not None
    assert take(masks, state, 1)[1] >= SECONDS
    assert (comm.made, comm.waits) == (2, 2)
    assert masks.pending is None


def test_a_mask_that_fails_to_come_is_waited_for_once() -> None:
    _, masks, state = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    take(masks, state, 0)
    send(masks, state, 0)

    def fail() -> None:
        raise RuntimeError("of a message")

    assert masks.pending is not None
    masks.pending.arrived = fail
    with pytest.raises(RuntimeError, match="of a message"):
        masks.wait()
    assert masks.wait() == 0.0


def test_after_a_load_the_mask_comes_from_what_the_step_before_has_left() -> None:
    """Not from the gradient of the step that uses it, as the first one: so it is the one that was there."""
    comm, masks, state = build(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    state.sparse = True
    assert take(masks, state, 5)[0] is not None
    assert (comm.made, comm.waits) == (1, 1)
    assert masks._pending_turn == 5


def test_no_mask_is_made_for_or_from_a_dense_step() -> None:
    assert run(ScapeConfig(sparsity=0.0), 3) == [None, None, None]
    # Everything is sent by the first steps of a warm-up. The first sparse step makes a mask from its own gradient.
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=134)
    dense = config.sent_by_step(100)[250]
    assert dense == 14  # while the density is above 1/2
    assert run(config, dense + 3) == [None] * dense + [1, 2, 3]


def test_each_step_of_a_warm_up_has_a_mask_of_its_density() -> None:
    assert run(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=2), 6) == [1, 2, 3, 4, 5, 6]


def test_a_step_that_makes_its_own_mask_ranks_the_residual_as_it_is() -> None:
    config = ScapeConfig(sparsity=0.999, sparsity_warmup_steps=0)
    layout = Layout([4000], [0], 1000, 1)
    masks = Masks(layout, ScapeCommunicator.alone(), config)
    state = ScapeState.allocate(layout, torch.float32, CPU)
    state.residual[torch.arange(4), torch.tensor([3, 0, 9, 5])] = -1.0
    mask, _ = take(masks, state, 0)
    assert mask is not None
    assert mask.view(-1).tolist() == [3, 0, 9, 5]


class Others(ScapeCommunicator):
    """One of several ranks; the masks of the others are what they would have made of their own residuals."""

    def __init__(self, rank: int, residuals: list[Tensor], layout: Layout) -> None:
        super().__init__()
        self.rank, self.world_size = rank, len(residuals)
        self.residuals, self.layout, self.calls, self.made = residuals, layout, 0, 0

    def gather_mask(self, make: Callable[[], Tensor], full: Tensor) -> Work:
        """Rank r makes the mask of shard (r - t) mod N."""
        own, ranks, sent = make(), self.world_size, 2
        for rank, residual in enumerate(self.residuals):
            shard = (rank - self.calls - 1) % ranks
            chosen = ops.select(residual[self.layout.rows_of(shard)], sent)
            full[self.layout.rows_of(rank)] = own if rank == self.rank else chosen
        return Work(full)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_take_turns_and_every_shard_has_the_choice_of_its_maker(ranks: int) -> None:
    """By the count of steps, so on from a checkpoint, and mod N on another number of ranks."""
    config = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0)
    layout = Layout([200 * (2 * ranks - 1)], [0], 200, ranks)  # the last rank's second block holds pads only
    residuals = [torch.randn(layout.blocks, 200) for _ in range(ranks)]
    for rank in range(ranks):
        comm = Others(rank, residuals, layout)
        masks = Masks(layout, comm, config)
        state = ScapeState.allocate(layout, torch.float32, CPU)
        state.residual.copy_(residuals[rank])
        for calls in (0, 1, 2, 7, 1000):
            comm.calls = calls
            send(masks, state, calls)
            masks.wait()
            for shard in range(ranks):
                rows, maker = layout.rows_of(shard), (shard + calls + 1) % ranks
                assert masks.active is not None
                assert torch.equal(masks.active[rows], ops.select(residuals[maker][rows], 2))


def test_steps_are_counted_by_what_they_send() -> None:
    schedule = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=20)
    for steps in (0, 2, 10, 23, 100):
        assert schedule.sent_by_step(steps) == Counter(map(schedule.sent, range(steps)))
