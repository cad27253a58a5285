"""What the SparseLoCo strategies of Lightning Trainer and Lightning Fabric share; knows neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_scape.comm.collectives import Communicator, ProcessGroup
from lightning_scape.hosts import registration, swap
from lightning_scape.planning import show_bytes
from lightning_scape.scape.optimizer import ScapeOptimizer
from lightning_scape.sparseloco import SparseLoCo, SparseLoCoConfig
from lightning_scape.sparseloco.config import OF_THE_MESH

OPTIONS = tuple(field.name for field in dataclasses.fields(SparseLoCoConfig))
"""Names of all options, in order."""
_LET_GO = "_lightning_scape_let_go"
"""Attribute of the user's optimizer, which it neither copies nor pickles: what has wrapped it in a fit."""


register = registration.register_sparseloco


def config_of(given: Mapping[str, Any]) -> SparseLoCoConfig:
    """The configuration among a strategy's arguments.

    Raises:
        ValueError: an option is outside its rule.
    """
    return SparseLoCoConfig(**{name: given[name] for name in OPTIONS})


def wrap(
    optimizer: Optimizer,
    config: SparseLoCoConfig,
    named_parameters: Iterable[tuple[str, Tensor]],
    exchange_group: ProcessGroup | None,
    process_group: ProcessGroup | None = None,
) -> SparseLoCo:
    """Wraps the user's optimizer, which stays what the host steps. Collective.

    Raises:
        TypeError: the optimizer exchanges gradients itself.
        ValueError: a parameter cannot be kept, or ranks differ.
    """
    if (former := SparseLoCo.of(optimizer)) is not None:  # of an earlier fit
        former.close()
        vars(former.optimizer).pop(_LET_GO, None)
    if isinstance(optimizer, ScapeOptimizer):
        raise TypeError(
            "SparseLoCo must wrap an optimizer that works on one rank, got a ScapeOptimizer, which exchanges gradients"
            " itself. Use AdamW, or any other optimizer of torch's."
        )
    options = {name: value for name, value in vars(config).items() if name not in OF_THE_MESH}
    loco = SparseLoCo(optimizer, **options, process_group=process_group, exchange_group=exchange_group)
    loco.name_parameters(named_parameters)
    return loco


def let_go(loco: SparseLoCo) -> None:
    """After a fit: the user's optimizer steps on its own, as after one with DDP. The state can still be saved."""
    for hook in loco._hooks:
        hook.remove()
    vars(loco.optimizer)[_LET_GO] = loco  # its hooks have kept it alive


def wrappers(optimizers: Iterable[object]) -> list[SparseLoCo]:
    """Those around the optimizers, which may themselves be inside a host's wrappers; in order."""
    found = (SparseLoCo.of(swap.unwrap_optimizer(optimizer)) for optimizer in optimizers)
    return [loco for loco in found if loco is not None]


def alive_everywhere(locos: Iterable[SparseLoCo]) -> list[SparseLoCo]:
    """Those that live on all ranks, as they were built. Collective: each rank frees what is dropped in its own time."""
    by_number = {loco.number: loco for loco in locos}
    everywhere = set.intersection(*map(set, Communicator(None, None).all_gather_object([*by_number])))
    return [by_number[number] for number in sorted(everywhere)]


def stoppables(optimizers: Iterable[object]) -> list[ScapeOptimizer | SparseLoCo]:
    """What brings the word to all ranks that one was told to stop, of a host's optimizers, wrapped or not."""
    given = list(optimizers)
    return [*swap.scape_optimizers(given), *wrappers(given)]


def state_of(loco: SparseLoCo) -> dict[str, Any]:
    """The whole state on rank 0, nothing on the others. Collective."""
    loco.consolidate_state_dict()
    return loco.state_dict() if loco.everyone.rank == 0 else {}


def what_holds(loco: SparseLoCo) -> str:
    """One line for the user: how often ranks exchange, and how much."""
    config, ranks = loco.config, loco.communicator.world_size
    dense = 8 * loco.layout.numel * (ranks - 1) // ranks
    nodes = f" between nodes of {loco.shards.world_size} ranks" if loco.shards.world_size > 1 else ""
    sent = loco.bytes_per_exchange()
    how = f"{config.quota.density:.3g} of the entries" + ("" if config.bits is None else f" in {config.bits} bits")
    if not sent:
        alone = "one rank" if not nodes else f"one node of {loco.shards.world_size} ranks"
        return f"SparseLoCo: {alone}, nothing is sent; a window ends every {config.sync_every} steps."
    return (
        f"SparseLoCo: {config.sync_every} local steps, then an exchange of {how}, {show_bytes(sent)} per rank{nodes}"
        f" ({dense / sent:.0f}x fewer bytes than an all-reduce in fp32, {dense / sent * config.sync_every:.0f}x fewer"
        " over a window)."
    )
