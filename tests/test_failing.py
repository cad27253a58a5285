"""An error on one rank, or on all: what callbacks that save on an exception then save, and that no rank waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from trainer_helpers import MARKS, Regression, make_trainer

from lightning_scape import ScapeStrategy, SparseLoCoStrategy

pytestmark = MARKS


class Fails(Regression):
    """In its fourth step, on one rank or on all, a little later on each."""

    failing: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3 and self.failing in (None, self.global_rank):
            time.sleep(0.2 * self.global_rank)
            raise KeyError("mine")
        return super().training_step(batch, batch_idx)


def make_saver(kind: str, folder: str) -> Callback:
    if kind == "OnExceptionCheckpoint":
        return OnExceptionCheckpoint(folder, "failed")
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=1, save_on_exception=True)


def fails(
    rank: int, world_size: int, folder: str, kind: str, method: str, options: dict[str, Any], failing: int | None
) -> tuple[str, str, list[str], bool]:
    strategy = (
        ScapeStrategy(sparsity=0.9, **options) if method == "scape" else SparseLoCoStrategy(sync_every=2, **options)
    )
    saver = make_saver(kind, folder)
    trainer = make_trainer(strategy, callbacks=[saver], enable_checkpointing=True, max_steps=6)
    module = Fails()
    module.failing = failing
    with pytest.raises((KeyError, RuntimeError)) as caught:
        trainer.fit(module)
    saved = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    return type(caught.value).__name__, str(caught.value), saved, "on_exception" in vars(saver)


@pytest.mark.few(1)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("kind", "method", "options"),
    [
        ("ModelCheckpoint", "scape", {}),
        ("OnExceptionCheckpoint", "scape", {"state_dict_type": "sharded", "async_save": True}),
        ("ModelCheckpoint", "sparseloco", {"async_save": True}),
        ("OnExceptionCheckpoint", "sparseloco", {}),
    ],
)
def test_an_error_on_one_rank_saves_nothing_and_reaches_all(
    run_ranks: Any, tmp_path: Path, kind: str, method: str, options: dict[str, Any], failing: int
) -> None:
    """The rank saved alone, and waited for the others, who waited for it, until the timeout of half an hour."""
    ends = run_ranks(fails, 2, str(tmp_path), kind, method, options, failing, timeout=60)
    assert ends[failing][:2] == ("KeyError", "'mine'")
    assert ends[1 - failing][0] == "RuntimeError"
    assert "KeyError" in ends[1 - failing][1]
    for end in ends:
        assert end[2] == ([] if kind == "OnExceptionCheckpoint" else ["step=2.ckpt"])  # which an error does not replace
        assert not end[3]  # the callbacks are as they were


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["scape", "sparseloco"])
@pytest.mark.parametrize("kind", ["ModelCheckpoint", "OnExceptionCheckpoint"])
def test_where_all_ranks_fail_at_the_same_step_all_save(run_ranks: Any, tmp_path: Path, kind: str, method: str) -> None:
    names = {"ModelCheckpoint": ["step=2.ckpt", "step=3.ckpt"], "OnExceptionCheckpoint": ["failed.ckpt"]}[kind]
    for end in run_ranks(fails, 2, str(tmp_path), kind, method, {}, None, timeout=60):
        assert end == ("KeyError", "'mine'", names, False)
