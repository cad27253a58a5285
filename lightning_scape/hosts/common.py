"""What both hosts' strategies hold, and do at set-up and when they clip. Knows neither host."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal, NoReturn

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint.saver import Saver, StateDictType
from lightning_scape.comm.collectives import Communicator, broadcast_tensors, group_beside, world_size
from lightning_scape.core.method import Method, find, method_of, unwrapped
from lightning_scape.core.private_names import IGNORED_BY_DDP
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.hosts import two_level
from lightning_scape.hosts.checkpoints import ScapeCheckpointIO
from lightning_scape.hosts.words import Words

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]

_HEARD_WITHIN = 8
"""Batches after which a word of all ranks is heard at the latest."""


class Common:
    """Its arguments are those of MethodStrategy and FabricMethodStrategy."""

    def __init__(
        self,
        config: Any,
        state_dict_type: StateDictType,
        async_save: bool,
        timeout: timedelta | float | None,
    ) -> None:
        self._arguments = config, state_dict_type, async_save, timeout
        self.config, self.method = config, method_of(config)
        self.nodes = two_level.Nodes(self.config)
        self.saver = Saver(state_dict_type, async_save)
        self.timeout = timedelta(seconds=timeout) if isinstance(timeout, (int, float)) else timeout
        self.words = Words(None, 1)
        """Of all ranks, once they have met."""

    def __reduce__(self) -> tuple[type[Common], tuple[Any, ...]]:
        """For copies and pickles of a strategy, or of a Trainer after a fit: they set up anew."""
        return Common, self._arguments

    def meet(self, strategy: Any) -> None:
        """When the process group is up: makes those beside it. What ranks choose messages by must agree. Collective."""
        if self.saver.sharded and not isinstance(strategy.checkpoint_io, ScapeCheckpointIO):
            raise ValueError(
                '`checkpoint_io` must be None with state_dict_type="sharded", got'
                f" {type(strategy.checkpoint_io).__name__}: each rank writes its own part of a directory. To save in"
                " the background, set `async_save=True`."
            )
        alike = {
            "lightning_scape's version": __version__,
            "method": self.method.name,
            "state_dict_type": "sharded" if self.saver.sharded else "full",
            "async_save": self.saver.asynchronous,
        }
        check_same_setup(Communicator(), alike)
        self.nodes.set_up(strategy.num_processes, strategy.root_device)
        lag = min(self.method.steps_apart(self.config), _HEARD_WITHIN)
        # On CUDA the host is a step ahead of the device. Words of an earlier fit may have been left unheard.
        self.words = Words(group_beside(None, "words"), max(lag, 2) if strategy.root_device.type == "cuda" else lag)

    def attach(self, optimizer: Optimizer, names: Sequence[tuple[str, Tensor]]) -> Method:
        """Puts one of the user's optimizers under the method, and says so. Collective."""
        if (former := find(optimizer)) is not None and not isinstance(former, self.method):  # of another fit
            former.close()
        nodes = self.nodes
        method = self.method.from_optimizer(optimizer, nodes.config, nodes.process_group, named_parameters=names)
        rank_zero_info(method.summary())
        return method

    def attach_all(self, optimizers: Sequence[Optimizer], module: Module, former: Iterable[Method]) -> list[Method]:
        """Puts all of a module's optimizers under the method, in place of those it had before. Collective."""
        check_same_setup(Communicator(), {"optimizers": [type(unwrapped(each)).__name__ for each in optimizers]})
        trained = [i for each in optimizers for i in {id(p) for group in each.param_groups for p in group["params"]}]
        if not self.method.exchanges_every_step and len({*trained}) < len(trained):
            raise ValueError(
                "With local steps each parameter must have one optimizer, got one that two train: at an exchange each"
                " would undo what the other has done. Give it to one of them, or take ScapeStrategy."
            )
        before = {id(each.optimizer): each for each in former}
        for gone in [before[place] for place in before if place not in map(id, optimizers)]:
            gone.finish()
            gone.close()
        names = list(module.named_parameters())
        return [before.get(id(each)) or self.attach(each, names) for each in optimizers]


def start_method_of(given: StartMethod | None) -> StartMethod:
    """The option, or what serves here: in a notebook or ``python -i`` there is no script that a process could run."""
    return given or ("fork" if hasattr(sys, "ps1") or sys.flags.interactive else "popen")


def clip_gradients(optimizer: object, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
    """Clip the averaged gradient of the coming step by its norm; the gradients themselves are left alone.

    No rank has the averaged gradient. So only the factor is determined here (one small message), and the step applies
    it. Has the signature of a precision plugin's ``clip_gradients`` and takes its place.

    Args:
        optimizer: one under a method that exchanges in every step, wrapped or not.
        clip_val: the bound; 0 or less means no clipping, as everywhere in Lightning.
        gradient_clip_algorithm: ``"norm"``.

    Raises:
        ValueError: another algorithm.
        RuntimeError: the optimizer is under no method.
    """
    if clip_val <= 0:
        return
    algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
    if algorithm != "norm":
        refuse_to_clip_by_value(f"gradient_clip_algorithm={algorithm!r}")
    attached(optimizer).clip_grad_norm(clip_val)


def refuse_to_clip_by_value(got: str) -> NoReturn:
    """Raises ``ValueError``."""
    raise ValueError(
        f"Gradients must be clipped by norm, got {got}: no rank ever has the averaged gradient of a step, so its"
        ' entries cannot be bounded. Set gradient_clip_algorithm="norm" (Fabric: `max_norm`).'
    )


def attached(optimizer: object) -> Method:
    """The method of an optimizer that the host steps.

    Raises:
        RuntimeError: it is under none: ranks would train apart.
    """
    found = find(optimizer)
    if found is None:
        raise RuntimeError(
            "Every optimizer that is stepped must be under the strategy's method, got"
            f" {type(unwrapped(optimizer)).__name__}, which is not: it would take this rank's own gradient."
            " Return it from configure_optimizers, or put it into `trainer.optimizers` (Fabric: give it to"
            " fabric.setup), on all ranks."
        )
    return found


def sharded_scaler(scaler: GradScaler, device: str) -> GradScaler:
    """A scaler by which all ranks skip a step if one of them met an inf; a plain one decides alone.

    With a plain GradScaler the rank that met the inf would leave out the step's collectives, and the others would wait
    for it. The scale and how it grows are those of ``scaler``. With one rank nothing changes.
    """
    if not scaler.is_enabled() or world_size() == 1:
        return scaler
    sharded = ShardedGradScaler(device=device, process_group=None)
    sharded.load_state_dict(scaler.state_dict())
    return sharded


def start_equal(module: Module) -> None:
    """Gives all ranks the parameters and buffers of rank 0, as DDP's constructor does. Collective.

    Untrained ones that DDP was told to leave alone are left out: they are each rank's own.

    Raises:
        ValueError: ranks have built different modules; on every rank.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    ignored = getattr(module, IGNORED_BY_DDP, ())
    state = [tensor for name, tensor in named if tensor.requires_grad or name not in ignored]
    described = [(tuple(each.shape), str(each.dtype)) for each in state]
    check_same_setup(Communicator(), {"parameters and buffers": described})
    broadcast_tensors(state)


def make_alike(modules: Iterable[Module], methods: Iterable[Method]) -> None:
    """Gives all ranks rank 0's buffers, but for those that DDP was told to leave alone; compares replicas. Collective.

    Those that a module updates from its own batch (BatchNorm's statistics) DDP hands on before each forward pass. Here
    each rank trains on with its own. Before a validation, a save and the end all take rank 0's, so that what is
    validated and saved is one model.
    """
    broadcast_tensors(
        buffer
        for module in modules
        for name, buffer in module.named_buffers()
        if not isinstance(buffer, DTensor) and name not in getattr(module, IGNORED_BY_DDP, ())
    )
    for each in methods:
        each.check_replicas()
