"""What others than the optimizer write into parameters, under SparseLoCo: all ranks go on from it, and end with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from test_sparseloco import SPARSE, flat, gradient, model
from torch import Tensor, nn
from trainer_helpers import MARKS, Regression, loader, make_trainer, weights

from lightning_scape import SparseLoCo, SparseLoCoStrategy

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*running statistics of BatchNorm")]
LR = 1e-3


# --------------------------------------------------------------------------------------------- averages of callbacks


class Recorder(Callback):
    """This rank's weights as other callbacks leave them: at the end, or before the batches without a backward pass.

    After those Lightning steps once more, with the gradient of before (also under DDP): what counts is the batch after.
    """

    def __init__(self) -> None:
        self.written: Tensor | None = None
        self.ended: Tensor | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 2 and batch_idx == 0:
            self.written = weights(module)
        elif trainer.current_epoch == 2 and batch_idx == 1:
            self.ended = weights(module)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.written = weights(module) if self.written is None else self.written


class Stopped(Callback):
    """Ends the fit before its length says so: in an open window."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 9


AVERAGES: dict[str, Callable[[], list[Callback]]] = {
    "swa and BatchNorm": lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)],
    "ema, stopped": lambda: [EMAWeightAveraging(decay=0.9), Stopped()],
}


def _averaged(rank: int, world_size: int, name: str) -> None:
    module, recorder = Regression(batch_norm=name.endswith("BatchNorm")), Recorder()
    trainer = make_trainer(SparseLoCoStrategy(sync_every=8), max_epochs=2, callbacks=[*AVERAGES[name](), recorder])
    before = [*trainer.callbacks]
    trainer.fit(module, loader())
    assert trainer.callbacks == before
    assert recorder.written is not None
    everyone = [torch.empty_like(recorder.written) for _ in range(world_size)]
    dist.all_gather(everyone, recorder.written)
    assert not torch.equal(everyone[0], everyone[1])
    ended = weights(module) if recorder.ended is None else recorder.ended
    torch.testing.assert_close(ended, sum(everyone) / world_size, rtol=0, atol=1e-7)
    dist.all_gather(everyone, weights(module))
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_weights_is_what_all_ranks_end_with(run_ranks: Any, name: str) -> None:
    """It was each rank's own; where a window was open, or with BatchNorm, it was sent as if learned, and lost."""
    run_ranks(_averaged, 2, name)


# ------------------------------------------------------------------------------------------------- in mid-training


def _written(rank: int, world_size: int, write: str, overlap: int) -> tuple[Tensor, Tensor]:
    """13 steps in windows of 3, all weights written anew in between; the same with a state saved and loaded."""
    at = 9 if write == "data" else 7

    def trained(net: nn.Module, optimizer: Any, first: int, stop: int) -> None:
        for step in range(first, stop):
            if step == at:
                for parameter in net.parameters():
                    nn.init.constant_(parameter.data if write == "data" else parameter, 3.0)
            gradient(net, rank, step)
            optimizer.step()

    def wrapped() -> tuple[nn.Module, Any, SparseLoCo]:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), LR)
        return net, optimizer, SparseLoCo(optimizer, **{**SPARSE, "sync_every": 3}, overlap_steps=overlap)

    net, optimizer, loco = wrapped()
    trained(net, optimizer, 0, at + 1)
    loco.consolidate_state_dict()
    states: list[Any] = [loco.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(states)
    trained(net, optimizer, at + 1, 13)
    loco.sync()
    again, second, other = wrapped()
    other.load_state_dict(states[0])
    trained(again, second, at + 1, 13)
    other.sync()
    return flat(net), flat(again)


@pytest.mark.parametrize(("write", "overlap"), [("inside", 0), ("data", 0)])
def test_what_all_ranks_write_is_where_training_goes_on(run_ranks: Any, write: str, overlap: int) -> None:
    """Inside a window and at its beginning, there through ``.data`` too."""
    (first, resumed), (second, _) = run_ranks(_written, 2, write, overlap)
    assert torch.equal(first, second)
    assert torch.equal(first, resumed)
    assert float((first - 3).abs().max()) < 0.05
