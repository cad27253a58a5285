"""Checkpoints that older versions wrote load, and training goes on from them as it did there, bit for bit.

tests/data/README.md says how they were made.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import older_runs
import pytest
import torch
from torch import Tensor
from trainer_helpers import MARKS

from lightning_scape.checkpoint.inspection import verify

pytestmark = MARKS
DATA = Path(__file__).parent / "data"
EXPECTED = {
    (version.name, case): tensors
    for version in sorted(DATA.glob("checkpoints_*"))
    for case, tensors in torch.load(version / "expected.pt").items()
}
"""By version, and by kind, ranks, nodes and form."""
CASES = [case for case in EXPECTED if case[1] != "trainer"]


def rounds_as_written() -> bool:
    """Whether torch rounds as where the values were taken down.

    Its own loops do with AVX2 and with AVX512. MKL, which it asks for square roots and products of matrices, goes by
    the processor's maker and model.
    """
    numbers = torch.arange(1.0, 1025.0, dtype=torch.float32, device="cpu").view(32, 32)
    probe = torch.cat([numbers.sqrt(), numbers @ numbers.sqrt().T])
    of_mkl = hashlib.sha256(probe.numpy().tobytes()).hexdigest()[:16]
    return torch.backends.cpu.get_cpu_capability().startswith("AVX") and of_mkl == "8accd78021be7034"


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit, or within rounding where torch's own operations round differently."""
    if rounds_as_written():
        assert all(torch.equal(here, there) for here, there in zip(found, expected, strict=True))
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.few(6)
@pytest.mark.parametrize(("version", "case"), CASES)
def test_training_goes_on_as_in_the_version_that_wrote_it(run_ranks: Any, version: str, case: str) -> None:
    kind, ranks, nodes, form = case.split(" ")
    ends = run_ranks(older_runs.go_on, int(ranks), kind, int(nodes), str(DATA / version / kind), form)
    for end in ends:
        check_same(end, EXPECTED[version, case])


def test_the_trainer_goes_on_as_in_the_version_that_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "trainer.ckpt"
    shutil.copy(DATA / "checkpoints_0_2_0" / path.name, path)
    check_same(older_runs.fit(older_runs.LAST, resume=path), EXPECTED["checkpoints_0_2_0", "trainer"])


@pytest.mark.parametrize("path", sorted(DATA.glob("checkpoints_*/*/full.pt")) + sorted(DATA.glob("*/*/sharded")))
def test_they_are_undamaged(path: Path) -> None:
    verify(path)


def test_every_kind_is_there_and_loads_on_other_numbers_of_ranks() -> None:
    written = {case.rsplit(" ", 1)[0] for _, case in CASES}
    assert written == {f"{kind} {ranks} {nodes}" for kind, ranks, nodes in older_runs.READERS}
