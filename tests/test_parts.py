"""Parts of a state: how they travel to one rank, lie in a directory, and come to another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_scape.checkpoint.inner import inner_for, inner_part
from lightning_scape.checkpoint.parts import OwnParts, Part, Place, of_blocks, of_flats, read_flats
from lightning_scape.checkpoint.saver import Content, SavedContent, Saver
from lightning_scape.checkpoint.source import Form, WholeState
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core import method
from lightning_scape.core.layout import Layout
from lightning_scape.core.parameters import Parameters

RunRanks = Callable[..., list[Any]]
SHAPES = ((5, 3), (0, 2), (7,), ())


class Tiny(method.Method):  # type: ignore[misc]
    """Enough of one for its states to be found by their name, in the processes of the ranks."""

    name, title, form = "tiny", "Tiny", Form("tiny")


def build(rank: int, ranks: int) -> tuple[Parameters, torch.optim.Optimizer, dict[str, list[Tensor]], Layout]:
    """Parameters, and values that say whose they are: of all ranks alike, and of each rank."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = torch.optim.SGD(parameters, lr=0.1 * (1 + rank), momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float(rank + 1))
    optimizer.step()
    known = Parameters.of(optimizer.param_groups)
    alike = [torch.arange(p.numel(), dtype=torch.float32) + 100 * i for i, p in enumerate(known.tensors)]
    values = {"alike": alike, "own": [each + 1000 * rank for each in alike]}
    return known, optimizer, values, Layout([p.numel() for p in known.tensors], known.groups, 4, ranks)


def state_of(rank: int, ranks: int) -> OwnParts:
    parameters, optimizer, values, layout = build(rank, ranks)
    blocks = torch.zeros(layout.blocks, 4)
    for piece in layout.everything().pieces:
        blocks.view(-1)[piece.of_blocks(4)] = values["alike"][piece.segment.index]
    mine = blocks[layout.rows_of(rank)]
    parts = [
        Part("alike", "owned", "cut", of_blocks(parameters, layout, mine, layout.local(rank).pieces)),
        Part("own", "each_rank", "mean", of_flats(parameters, values["own"])),
        inner_part(optimizer),
    ]
    common = Tiny.form.common({"count": 3}, parts, parameters, ranks, 1)
    return OwnParts(common, parts, parameters, Communicator())


def save(rank: int, world_size: int, folder: str) -> dict[str, Any] | None:
    method.register(Tiny)
    own = state_of(rank, world_size)
    Saver(asynchronous=False).save(Path(folder), Content(optimizers={"tiny": own}), Communicator())
    return Tiny.form.collected(own, 0)  # type: ignore[no-any-return]


def load(rank: int, world_size: int, whole: dict[str, Any], folder: str) -> list[Any]:
    method.register(Tiny)
    parameters, _, _, _ = build(rank, world_size)
    found = []
    sources = WholeState(Tiny.form, whole, parameters), SavedContent(Path(folder), Communicator())
    for source in (sources[0], sources[1].optimizers["tiny"]):
        place = Place(rank)
        flats = [read_flats(source, part, parameters, world_size, place) for part in Tiny.form.parts(source.common)[:2]]
        found.append((*flats, inner_for(source, place)["param_groups"][0]["lr"], source.facts["count"]))
    return found


def made_whole(rank: int, world_size: int, folder: str) -> str:
    method.register(Tiny)
    saved = SavedContent(Path(folder)).optimizers["tiny"]
    return said(saved.form.whole_of(saved))


def said(whole: dict[str, Any]) -> str:
    """All of it, in an order of its own."""
    tensors = sorted(whole["tiny"]["tensors"].items())
    return str({**whole, "tiny": {**whole["tiny"], "tensors": tensors}})


@pytest.mark.few(2)
@pytest.mark.parametrize(("before", "now"), [(2, 2), (2, 3), (3, 2), (2, 1)])
def test_each_part_comes_to_other_ranks_as_it_says(run_ranks: RunRanks, tmp_path: Path, before: int, now: int) -> None:
    whole = run_ranks(save, before, str(tmp_path / "c"))[0]
    _, _, values, _ = build(0, 1)
    for rank, (from_whole, from_directory) in enumerate(run_ranks(load, now, whole, str(tmp_path / "c"))):
        assert str(from_whole) == str(from_directory)
        alike, own, lr, count = from_whole
        shift = 1000 * (rank if before == now else (before - 1) / 2)
        assert all(map(torch.equal, alike, values["alike"]))
        torch.testing.assert_close(own, [each + shift for each in values["alike"]])
        assert lr == pytest.approx(0.1 * (1 + rank % before))
        assert count == 3


def test_a_whole_state_is_what_another_optimizer_loads_and_what_the_directory_gives(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    whole = run_ranks(save, 2, str(tmp_path / "c"))[0]
    torch.optim.SGD([nn.Parameter(torch.zeros(shape)) for shape in SHAPES], momentum=0.9).load_state_dict(whole)
    assert run_ranks(made_whole, 1, str(tmp_path / "c")) == [said(whole)]
    assert [tuple(whole["tiny"]["tensors"][f"own.1.{i}"].shape) for i in range(len(SHAPES))] == list(SHAPES)


def test_a_part_that_each_rank_has_travels_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter had a message of its own: on a link of 100 ms, as many round trips as there are parameters."""
    sent: list[int] = []
    gather = Communicator.gather

    def counted(self: Communicator, flat: Tensor, *options: Any) -> Any:
        sent.append(len(flat))
        return gather(self, flat, *options)

    monkeypatch.setattr(Communicator, "gather", counted)
    own = state_of(0, 1)
    assert dict(own.collect(0)).keys() == own.tensors.keys()
    assert sent[:2] == [4 * 23, 4 * 23]
    assert len(sent) == 3
