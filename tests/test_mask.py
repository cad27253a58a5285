"""The schedule of densities and the delay, without an optimizer: masks here are just numbered tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_scape import ScapeConfig
from lightning_scape.comm.collectives import Arriving, PendingMask
from lightning_scape.engine.mask import DelayedMask, SparsitySchedule


class Maker:
    """Makes masks that carry the number of the call in which they were made."""

    def __init__(self) -> None:
        self.made = 0
        self.waits = 0

    def start(self, sent: int) -> PendingMask:
        self.made += 1
        maker, made = self, self.made

        class Counting(PendingMask):
            def wait(self) -> tuple[Tensor, float]:
                maker.waits += 1
                return super().wait()[0], 0.25

        return Counting(send=lambda: Arriving(torch.full((3, sent), made)))


def run(config: ScapeConfig, steps: int) -> list[int | None]:
    """Which mask, by number, each step used."""
    maker, masks = Maker(), DelayedMask(SparsitySchedule.of(config), config.mask_interval)
    used = []
    for step in range(steps):
        mask, _ = masks.take(step, maker.start)
        used.append(None if mask is None else int(mask[0, 0]))
        masks.prepare(step, maker.start)
        masks.depart()
    return used


def test_each_step_uses_the_mask_made_in_the_step_before() -> None:
    assert run(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), 5) == [1, 2, 3, 4, 5]


def test_first_step_makes_its_own_mask_and_only_it_waits_for_two() -> None:
    maker = Maker()
    masks = DelayedMask(SparsitySchedule.of(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)), 1)
    assert masks.take(0, maker.start)[1] == 0.25
    assert (maker.made, maker.waits) == (1, 1)
    masks.prepare(0, maker.start)
    masks.depart()
    assert (maker.made, maker.waits) == (2, 1)  # under way, not waited for
    assert masks.take(1, maker.start)[1] == 0.25
    assert (maker.made, maker.waits) == (2, 2)


def test_a_mask_whose_step_failed_before_it_departed_is_dropped() -> None:
    maker = Maker()
    masks = DelayedMask(SparsitySchedule.of(ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)), 1)
    first, _ = masks.take(0, maker.start)
    masks.prepare(0, maker.start)
    assert masks.arrive() == 0.0  # nobody may be sending it: waiting would be for ever
    assert maker.waits == 1
    assert masks.active is first
    masks.depart()
    assert masks.take(1, maker.start)[0] is first


def test_interval_reuses_a_mask() -> None:
    assert run(ScapeConfig(sparsity=0.9, mask_interval=3, sparsity_warmup_steps=0), 8) == [1, 1, 1, 2, 2, 2, 3, 3]


def test_no_mask_is_made_for_or_from_a_dense_step() -> None:
    # Step 2 is the first sparse one: its mask comes from its own statistics, made within the step.
    assert run(ScapeConfig(sparsity=0.9, dense_steps=2, sparsity_warmup_steps=0), 5) == [None, None, 1, 2, 3]
    assert run(ScapeConfig(sparsity=0.0), 3) == [None, None, None]


def test_a_change_of_density_makes_a_new_mask_before_the_interval_is_over() -> None:
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=2, mask_interval=10)
    assert run(config, 6) == [1, 2, 3, 3, 3, 3]


def test_density_decays_geometrically() -> None:
    schedule = SparsitySchedule.of(ScapeConfig(sparsity=0.99, dense_steps=3, sparsity_warmup_steps=99))
    assert [schedule.sent(step) for step in (0, 2, 52, 102, 10**6)] == [200, 200, 20, 2, 2]
    densities = [schedule.sent(step) / 200 for step in range(3, 102)]
    assert densities == sorted(densities, reverse=True)
    assert densities[32] == pytest.approx(0.01**0.33, rel=0.03)


def test_updates_are_the_densities_of_all_steps() -> None:
    schedule = SparsitySchedule.of(ScapeConfig(sparsity=0.99, dense_steps=3, sparsity_warmup_steps=20))
    for steps in (0, 2, 10, 23, 100):
        densities = [schedule.sent(step) / schedule.quota.block_size for step in range(steps)]
        assert schedule.updates(steps) == pytest.approx(sum(densities))
