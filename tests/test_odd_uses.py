"""Uses that DDP takes, each of which was an error here or went unseen: at sparsity 0 the Trainer's result is DDP's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from trainer_helpers import MARKS, WIDTH, Regression, loader, make_trainer, weights

from lightning_scape import ScapeConfig, ScapeOptimizer, ScapeStrategy, SparseLoCoStrategy
from lightning_scape.core.method import Surroundings
from lightning_scape.scape import stand_in
from lightning_scape.scape.method import ScapeMethod

pytestmark = MARKS


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, 3))
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), 1e-2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


class UnevenMicroBatches(Manual):
    """Ranks cut their batch into different numbers of pieces, all but the last inside ``no_sync``."""

    def on_after_backward(self) -> None:  # for which backward passes of all ranks share whether gradients are finite
        pass

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer, pieces = self.optimizers(), 2 + dist.get_rank()
        optimizer.zero_grad()
        for _ in range(pieces - 1):
            with self.trainer.model.no_sync():
                self.manual_backward(self.loss(batch) / pieces)
        self.manual_backward(self.loss(batch) / pieces)
        optimizer.step()


class TermOfOneRank(Manual):
    """A generator whose loss has the critic's judgment on one rank alone; gradients are cleared before and between."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(3, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), 1e-2) for part in (self.net, self.critic)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        generator.zero_grad()
        critic.zero_grad()
        loss = self.loss(batch)
        if dist.get_rank() == 1:
            loss = loss - 0.1 * self.critic(self.net(batch[0])).mean()
        self.manual_backward(loss)
        generator.step()
        critic.zero_grad()
        self.manual_backward(self.critic(self.net(batch[0]).detach()).square().mean())
        critic.step()


class LeftAlone(Regression):
    """A buffer of each rank's own, which DDP was told to leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mine", torch.full((3,), float(dist.get_rank())))
        self._ddp_params_and_buffers_to_ignore = ["mine"]

    def on_train_end(self) -> None:
        assert self.mine.tolist() == [dist.get_rank()] * 3


class HalvedInInference(Regression):
    @torch.inference_mode()
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad * 0.5


class ClippedAndDropped(Manual):
    """Every other batch is clipped and then left out, by the module's ``zero_grad``."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=1e3, gradient_clip_algorithm="norm")
        if batch_idx % 2:
            optimizer.step()
        self.zero_grad()


class Cleared(Manual):
    """Lets its optimizer begin anew in the middle, by the one that it has kept, then by the one that it is given."""

    def configure_optimizers(self) -> Any:
        self.mine = super().configure_optimizers()
        return self.mine

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        if batch_idx in (2, 4):
            (self.mine if batch_idx == 2 else optimizer).state.clear()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()


class TiedByMemory(Regression):
    """Two parameters in one memory, each with gradients and moments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Linear(3, 3))
        self.net[2].bias = nn.Parameter(self.net[3].bias)


MODULES = {
    each.__name__: each
    for each in (
        UnevenMicroBatches,
        TermOfOneRank,
        LeftAlone,
        HalvedInInference,
        ClippedAndDropped,
        Cleared,
        TiedByMemory,
    )
}


def _trained(rank: int, world_size: int, name: str, dense: bool) -> Tensor:
    torch.manual_seed(rank)
    strategy = DDPStrategy(find_unused_parameters=True) if dense else ScapeStrategy(sparsity=0, wire_dtype="fp32")
    module = MODULES[name]()
    make_trainer(strategy, max_epochs=2).fit(module, loader())
    return weights(module)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODULES)
def test_it_trains_as_under_ddp(run_ranks: Any, name: str) -> None:
    first, second = run_ranks(_trained, 2, name, False)
    if name == "LeftAlone":
        first, second = first[3:], second[3:]
    assert torch.equal(first, second)
    expected = run_ranks(_trained, 2, name, True)[0][-len(first) :]
    torch.testing.assert_close(first, expected, rtol=0, atol=2e-5)


def _in_one_memory(rank: int, world_size: int) -> Tensor:
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(1000, dtype=torch.bfloat16))
    both = [first, nn.Parameter(first.data)]
    config = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0, update="adamw")
    optimizer = ScapeOptimizer(both, lr=1e-2, config=config)
    torch.manual_seed(1 + rank)
    for _ in range(20):
        for parameter in both:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    optimizer.drain()
    return first.detach()


def test_parameters_in_one_memory_stay_equal_on_all_ranks(run_ranks: Any) -> None:
    """Their changes are rounded one after the other: that was in another order on each rank."""
    first, *others = run_ranks(_in_one_memory, 3)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_parameters_in_one_memory_are_both_stepped_on_one_rank_too(dtype: torch.dtype, atol: float) -> None:
    ends = []
    for dense in (True, False):
        torch.manual_seed(3)
        tied = nn.Sequential(nn.Linear(5, 5, dtype=dtype), nn.Linear(5, 5, dtype=dtype))
        tied[1].weight = nn.Parameter(tied[0].weight)
        optimizer: Any = torch.optim.AdamW(tied.parameters(), 1e-2)
        if not dense:
            optimizer = ScapeOptimizer.from_optimizer(optimizer, ScapeConfig(sparsity=0, wire_dtype="fp32"))
        for _ in range(6):
            optimizer.zero_grad()
            tied(torch.randn(4, 5, dtype=dtype)).square().mean().backward()
            optimizer.step()
        ends.append(tied[0].weight.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=atol)


# ------------------------------------------------------------------------------------------------ errors that say what


class Pops(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.change(self.optimizers().optimizer.param_groups)

    def change(self, groups: list[dict[str, Any]]) -> None:
        del groups[0]["params"][-1]


class Empties(Pops):
    def change(self, groups: list[dict[str, Any]]) -> None:
        groups.pop()


class ClearedOnOne(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and dist.get_rank() == 1:
            self.optimizers().state.clear()


class StopsAlone(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trainer.should_stop = batch_idx == 2 and dist.get_rank() == 1


class Sparse(pl.LightningModule):
    """A hook that looks at gradients, which are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def on_after_backward(self) -> None:
        pass

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.table(batch[1].long().abs() % 10).square().mean()


class Shared(Manual):
    """Actor and critic with one encoder, which both optimizers have."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net[places].parameters(), 1e-2) for places in (slice(0, 1), slice(0, 3))]


class Zero(Regression):
    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-2)


def _refused(
    rank: int, world_size: int, make: Callable[[], pl.LightningModule], strategy: Callable[[], Any] | None = None
) -> None:
    make_trainer(strategy and strategy()).fit(make(), loader())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Pops, "An optimizer's groups must keep the"),
        (Empties, "An optimizer's groups must keep the"),
        (ClearedOnOne, "All ranks must take the same steps, got step 3"),
        (Sparse, "Gradients must be dense"),
    ],
)
def test_what_cannot_be_trained_is_an_error_on_all_ranks(run_ranks: Any, make: Any, words: str) -> None:
    for error in run_ranks(_refused, 2, make, expect_errors=True):
        assert words in str(error), error


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Shared, "With local steps each parameter must have one optimizer, got one of shape (11, 7) in optimizers 0"),
        (Zero, "SparseLoCo must wrap an optimizer that works on one rank, got a ZeroRedundancyOptimizer"),
    ],
)
def test_what_local_steps_cannot_train_is_an_error_on_all_ranks(run_ranks: Any, make: Any, words: str) -> None:
    for error in run_ranks(_refused, 2, make, SparseLoCoStrategy, expect_errors=True):
        assert words in str(error), error


@pytest.mark.parametrize("strategy", [None, partial(SparseLoCoStrategy, sync_every=2)])
def test_a_rank_that_stops_alone_is_an_error_on_all_ranks(run_ranks: Any, strategy: Any) -> None:
    for error in run_ranks(_refused, 2, StopsAlone, strategy, expect_errors=True):
        assert "the end of an epoch after step 3" in str(error), error


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer, kept: optimizer.state[model.weight]["exp_avg"],
        lambda model, optimizer, kept: kept.state[model.weight],
        lambda model, optimizer, kept: optimizer.state.update({}),
        lambda model, optimizer, kept: setattr(optimizer, "state", {}),
        lambda model, optimizer, kept: get_optimizer_state_dict(model, optimizer),  # takes a step where it is empty
    ],
)
def test_state_is_not_read_or_changed_where_it_is_not(use: Callable[..., Any]) -> None:
    model = nn.Linear(3, 3)
    kept = torch.optim.AdamW(model.parameters())
    optimizer = ScapeMethod.attach(kept, ScapeConfig(sparsity=0.5), Surroundings()).optimizer
    with pytest.raises(RuntimeError, match="`state` cannot be read or changed in place"):
        use(model, optimizer, kept)
    assert optimizer.steps_taken == 0
    stand_in.give_back(kept)
    assert kept.state[model.weight] == {}


def test_a_loop_over_state_meets_nothing_and_the_user_is_told() -> None:
    optimizer = ScapeOptimizer(nn.Linear(3, 3).parameters(), config=ScapeConfig(sparsity=0.5))
    state = optimizer.state
    for look in (
        state.items,
        state.values,
        state.keys,
        lambda: next(iter(state), None),
        lambda: 3 in state,
        lambda: state.get(3),
    ):
        with pytest.warns(UserWarning, match="`state` is empty: each rank holds a part of it"):
            assert not look()
