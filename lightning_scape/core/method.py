"""Method: what a host, a checkpoint and a monitor may ask of a method of training, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Self

if TYPE_CHECKING:  # the package knows its methods by name before torch is imported
    from torch import Tensor
    from torch.optim import Optimizer

    from lightning_scape.comm.collectives import Communicator, ProcessGroup
    from lightning_scape.core.stats import Stats

METHODS = {
    "scape": "lightning_scape.scape.optimizer:ScapeOptimizer",
    "sparseloco": "lightning_scape.sparseloco.wrapper:SparseLoCo",
}
"""By name; a module is imported when it is first asked for."""


class Method(ABC):
    """One of the user's optimizers under a method of training. Several such objects may stand for the same one.

    Between steps it may be asked anything. What is collective says so: all ranks call it, in the same order.
    """

    # ------------------------------------------------------------------------- what holds for all of its objects

    name: ClassVar[str]
    """Name of its strategies, and of its section in YAML; prefix of its metrics."""
    title: ClassVar[str]
    """Its name in sentences."""
    config_class: ClassVar[type[Any]]
    """Its options: a frozen dataclass, all with defaults, checked when it is made. The first is its main one."""
    shown: ClassVar[tuple[str, ...]] = ("compression",)
    """Which of its :attr:`stats` a progress bar shows."""
    exchanges_every_step: ClassVar[bool] = False
    """Whether all ranks hold the same parameters after every step, and it has :meth:`clip_grad_norm`. Else they do
    after :meth:`finish`, and the host clips each rank's own gradient."""

    # --------------------------------------------------------------------------- an optimizer comes, and goes

    optimizer: Optimizer
    """The user's, which the host steps."""
    communicator: Communicator
    """Sends its messages."""

    @classmethod
    @abstractmethod
    def from_optimizer(
        cls,
        optimizer: Optimizer,
        config: Any,
        process_group: ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> Self:
        """Puts one of the user's optimizers under the method. Collective.

        The same optimizer may come again after an earlier fit.

        Args:
            optimizer: as the user has built it, not wrapped.
            config: of ``config_class``.
            process_group: the ranks that exchange: those that hold the same rows, one of each node, where nodes have
                several ranks. None is all ranks, or, where every parameter is sharded over all of them, this one alone.
            named_parameters: the module's, for error messages and checkpoints.

        Raises:
            TypeError, ValueError: the method cannot train it, or ranks differ; on every rank.
        """

    @classmethod
    @abstractmethod
    def of(cls, optimizer: object) -> Self | None:
        """An optimizer's object; None: it is not under this method.

        Args:
            optimizer: anything but a host's wrapper.
        """

    @abstractmethod
    def finish(self) -> None:
        """Ends what has begun: nothing is on its way, and all ranks hold the same parameters. Collective.

        At the end of a fit, and before an optimizer is replaced in mid-training.
        """

    @abstractmethod
    def give_back(self) -> None:
        """After a fit: the user's optimizer is torch's again. Sends nothing; the state may still be saved."""

    @abstractmethod
    def close(self) -> None:
        """Lets the optimizer go for good, after :meth:`finish`; the training goes on without it."""

    @classmethod
    def steps_apart(cls, config: Any) -> int:
        """Steps from one exchange to the next."""
        return 1

    # ------------------------------------------------------------------------------------------- around a step

    def announce_batch(self, batches: int) -> None:
        """Before a step: how many batches of the epoch this rank has had."""
        return

    def clip_grad_norm(self, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
        """Bounds the norm of the gradient averaged over ranks, which none holds, in the coming step. Collective.

        Returns:
            The norm before, 0-dim; not finite if any rank's gradient is not.
        """
        raise NotImplementedError

    def check_replicas(self) -> None:
        """Raises on every rank where parameters differ that should be equal now. Collective."""
        return

    # --------------------------------------------------------------------------------------- what it says of itself

    @property
    @abstractmethod
    def steps_taken(self) -> int:
        """Steps of the optimizer, those before a loaded checkpoint included."""

    @property
    @abstractmethod
    def stats(self) -> Stats | None:
        """Figures of the last exchange; None before the first."""

    @abstractmethod
    def summary(self) -> str:
        """A line for the start of a run: what is sent, how often."""

    # ------------------------------------------------------------------------------------------------ checkpoints

    @abstractmethod
    def own_state(self) -> Any:
        """What this rank holds of the state: a ``checkpoint.shards.State``, views."""

    @classmethod
    @abstractmethod
    def whole_state(cls, state: Any) -> dict[str, Any]:
        """A ``checkpoint.shards.State`` of this method as a file has it; torch's optimizers take that, too."""

    @abstractmethod
    def load_state_dict(self, state_dict: Any) -> None:
        """Takes up a state, whole or ``checkpoint.shards.State``, of any number of ranks. All ranks call it.

        The model has been loaded before: where ranks have parameters of their own, this puts them in its place.
        """


@cache  # hosts look for the method of an optimizer in each step
def named(name: str) -> type[Method]:
    """The method of a name."""
    found: type[Method] = resolve_name(METHODS[name])
    return found


def method_of(config: object) -> type[Method]:
    """The method that a configuration belongs to.

    Raises:
        TypeError: it belongs to none.
    """
    known = {method.config_class: method for method in map(named, METHODS)}
    if type(config) not in known:
        kinds = ", ".join(kind.__name__ for kind in known)
        raise TypeError(f"`config` must be one of {kinds}, got {config!r}. Give the options of a method.")
    return known[type(config)]


def unwrapped(optimizer: object) -> object:
    """The optimizer inside a host's wrappers."""
    from lightning_scape.core.private_names import IN_WRAPPER

    while IN_WRAPPER in getattr(optimizer, "__dict__", {}):
        optimizer = optimizer.__dict__[IN_WRAPPER]
    return optimizer


def find(optimizer: object) -> Method | None:
    """The method that an optimizer is under, also inside a host's wrappers; None if it is under none."""
    inner = unwrapped(optimizer)
    return next((found for method in map(named, METHODS) if (found := method.of(inner)) is not None), None)


def find_all(optimizers: Iterable[object]) -> list[Method]:
    """The methods of all optimizers that are under one, in order."""
    return [found for each in optimizers if (found := find(each)) is not None]
