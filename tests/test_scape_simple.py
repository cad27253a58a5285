"""examples/scape_simple.py is the method on one page: held equal to the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_scape import ScapeConfig

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from scape_simple import Scape  # noqa: E402 - examples are scripts
from simulated_ranks import SimulatedRanks  # noqa: E402

SHAPES = [(30, 20), (7,), (13, 60), (501,)]
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Both:
    """The page and the package, from the same state in every step: else one rounding would change a later mask."""

    def __init__(self, sparsity: float, ranks: int) -> None:
        torch.manual_seed(3)
        self.theirs = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES)
        self.mine = [parameter.detach().clone() for parameter in self.theirs]
        self.page = Scape(self.mine, ranks, sparsity, **SETTINGS)
        self.others = 0
        """Changes that were rounded to another multiple, of all steps; 64 where a group has another unit."""
        self.package = SimulatedRanks(self.theirs, ranks, ScapeConfig(sparsity=sparsity, update="adamw"), SETTINGS)

    def step(self, gradients: list[list[Tensor]]) -> None:
        self.page.step(gradients)
        for handles, own in zip(self.package.handles, gradients, strict=True):
            for handle, gradient in zip(handles, own, strict=True):
                handle.grad = gradient
        self.package.step(SETTINGS["lr"], 1e9)

    def state(self) -> dict[str, Tensor]:
        """The package's, as the page has it."""
        states = [optimizer.engine.state for optimizer in self.package.optimizers]
        assert all(state is not None for state in states)
        return {
            "residual": torch.stack([state.residual for state in states]),
            "m": torch.cat([state.exp_avg for state in states]),
            "v": torch.cat([state.exp_avg_sq for state in states]),
            "last": torch.cat([state.last_step for state in states]).long(),
            "error": torch.cat([state.change_error for state in states]),
        }

    def compare(self, before: list[Tensor]) -> None:
        state, page = self.state(), vars(self.page)
        assert torch.equal(state["last"], page["last"])
        assert torch.equal(state["residual"], page["residual"])
        for name in ("m", "v"):
            torch.testing.assert_close(page[name], state[name], rtol=2e-5, atol=1e-8)
        # A change that lies between two multiples of its group's unit goes up or down; what is left says which way.
        blocks = self.page.blocks(self.mine), self.page.blocks(self.theirs)
        torch.testing.assert_close(blocks[0] + page["error"], blocks[1] + state["error"], rtol=2**-20, atol=1e-7)
        for mine, theirs, old in zip(self.mine, self.theirs, before, strict=True):
            assert ((mine - theirs).abs() <= 0.15 * (theirs - old).abs().max() + 2**-21 * theirs.abs()).all()
            self.others += int(((mine - theirs).abs() > 1e-6).sum())
        pending = self.package.optimizers[0].engine.masks
        pending.wait()
        if self.page.mask is not None:
            assert torch.equal(pending.active.long(), self.page.mask)

    def skip(self, steps: int) -> None:
        """Goes on as if so many steps had been taken, in which nothing was computed."""
        self.page.t += steps
        self.page.last += steps
        self.page.mask = self.page.new_mask(self.page.sent(self.page.t))
        for optimizer in self.package.optimizers:
            optimizer.engine.masks.wait()
            state = optimizer.engine.state
            state.calls += steps
            state.sparse = True
            state.step += steps
            state.last_step += steps

    def go_on_alike(self) -> None:
        for name, tensor in self.state().items():
            setattr(self.page, name, tensor.clone())
        for mine, theirs in zip(self.mine, self.theirs, strict=True):
            mine.copy_(theirs.detach())


@pytest.mark.parametrize(("sparsity", "ranks", "steps"), [(0.9, 2, 400)])
def test_one_page_is_the_package_in_every_step(sparsity: float, ranks: int, steps: int) -> None:
    """Through dense steps, and the steps of the default warm-up in which the density falls most."""
    both, generator = Both(sparsity, ranks), torch.Generator().manual_seed(5)
    sent = set()
    for step in range(steps):
        before = [parameter.clone() for parameter in both.mine]
        noise = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(ranks)]
        both.step([[0.3 * n + p - 1 for n, p in zip(own, before, strict=True)] for own in noise])
        both.compare(before)
        both.go_on_alike()
        sent.add(both.page.sent(step))
    assert len(sent) > 50
    assert both.others < 1e-3 * steps * sum(mine.numel() for mine in both.mine)
    assert (torch.cat([mine.flatten() for mine in both.mine]) - 1).abs().mean() < 0.2  # trained


@pytest.mark.parametrize(("sparsity", "ranks"), [(0.99, 3)])
def test_so_it_is_after_the_warm_up(sparsity: float, ranks: int) -> None:
    """Where few entries are sent, waits are long, and a mask travels as positions."""
    both, generator = Both(sparsity, ranks), torch.Generator().manual_seed(6)
    for step in range(160):
        if step == 10:
            both.skip(5000)
        before = [parameter.clone() for parameter in both.mine]
        noise = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(ranks)]
        both.step([[0.3 * n + p - 1 for n, p in zip(own, before, strict=True)] for own in noise])
        both.compare(before)
        both.go_on_alike()
    assert both.page.sent(both.page.t) == both.page.quota
    assert int((both.page.t - both.page.last).max()) > 25


@pytest.mark.parametrize("sparsity", [0.9, 0.99])
def test_the_page_goes_by_the_packages_schedule(sparsity: float) -> None:
    both = Both(sparsity, 2)
    config = both.package.config
    assert [both.page.sent(step) for step in range(5200)] == [config.sent(step) for step in range(5200)]


def test_one_page_is_one_page() -> None:
    assert len((EXAMPLES / "scape_simple.py").read_text(encoding="utf-8").splitlines()) <= 200
