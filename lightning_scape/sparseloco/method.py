"""SparseLoCo as a :class:`~lightning_scape.core.method.Method`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Self, override

from lightning_scape.checkpoint.shards import OwnState, SavedState
from lightning_scape.comm.collectives import ProcessGroup, all_reduce_bytes
from lightning_scape.core.method import Method
from lightning_scape.core.words import show_bytes
from lightning_scape.sparseloco import saved
from lightning_scape.sparseloco.config import OF_THE_MESH, SparseLoCoConfig
from lightning_scape.sparseloco.wrapper import SparseLoCo


class SparseLoCoMethod(Method):
    """The user's optimizer stays what the host steps; a :class:`SparseLoCo` around it exchanges in its hooks."""

    name = "sparseloco"
    title = "SparseLoCo"
    config_class = SparseLoCoConfig
    shown = ("compression", "delta_norm")

    def __init__(self, loco: SparseLoCo) -> None:
        self.loco = loco
        self.optimizer = loco.optimizer
        self.communicator = loco.communicator

    @classmethod
    @override
    def attach(
        cls,
        optimizer: Optimizer,
        config: SparseLoCoConfig,
        named_parameters: Sequence[tuple[str, Tensor]] = (),
        process_group: ProcessGroup | None = None,
    ) -> Self:
        kinds = {kind.__name__ for kind in type(optimizer).__mro__}
        if getattr(optimizer, "communicator", None) is not None or "ZeroRedundancyOptimizer" in kinds:
            raise TypeError(
                "SparseLoCo must wrap an optimizer that works on one rank, got a"
                f" {type(optimizer).__name__}, which exchanges gradients itself. Use AdamW, or any other optimizer of"
                " torch's."
            )
        if (former := SparseLoCo.of(optimizer)) is not None:  # of an earlier fit
            former.close()
        options = {name: value for name, value in vars(config).items() if name not in OF_THE_MESH}
        return cls(SparseLoCo(optimizer, **options, process_group=process_group, named_parameters=named_parameters))

    @classmethod
    @override
    def of(cls, optimizer: object) -> Self | None:
        loco = optimizer if isinstance(optimizer, SparseLoCo) else SparseLoCo.of(optimizer)
        return None if loco is None else cls(loco)

    @override
    def finish(self) -> None:
        self.loco.sync()

    @override
    def give_back(self) -> None:
        self.loco.take_off()

    @override
    def close(self) -> None:
        self.loco.close()

    @classmethod
    @override
    def steps_apart(cls, config: SparseLoCoConfig) -> int:
        return config.sync_every

    @property
    @override
    def steps(self) -> int:
        return self.loco.progress.steps

    @override
    def stats(self) -> dict[str, float]:
        return {} if self.loco.stats is None else self.loco.stats.as_dict("")

    @override
    def summary(self) -> str:
        loco, nodes = self.loco, self.loco.node.world_size
        config, sent = loco.config, loco.exchange_bytes
        how = f"{config.quota.density:.3g} of the entries" + ("" if config.bits is None else f" in {config.bits} bits")
        where = f" between nodes of {nodes} ranks" if nodes > 1 else ""
        how_much = f"{show_bytes(sent)} per rank{where}" if sent else "which costs nothing with one rank"
        return f"SparseLoCo: {config.sync_every} local steps, then an exchange of {how}, {how_much}."

    @override
    def bytes_of_steps(self, first: int, last: int) -> int:
        """A run ends with an exchange, however short its last window is."""
        every = self.loco.config.sync_every
        began = self.loco.progress.steps - self.loco.progress.in_window  # a fit before it has ended its own last window
        exchanges = -(-(last - began) // every) - (first - began) // every
        return exchanges * self.loco.exchange_bytes

    @property
    @override
    def dense_bytes(self) -> int:
        return all_reduce_bytes(self.loco.parameters.local, self.communicator.world_size)

    @override
    def own_state(self) -> OwnState:
        return self.loco.own_state()

    @classmethod
    @override
    def whole_state(cls, state: SavedState) -> dict[str, Any]:
        return saved.whole_state(state)

    @override
    def load_state_dict(self, state_dict: Any) -> None:
        self.loco.load_state_dict(state_dict)
