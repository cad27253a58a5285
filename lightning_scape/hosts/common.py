"""What the strategies of both hosts do alike: options, how ranks are started and meet, where checkpoints go."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, ClassVar, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint.saver import Saver
from lightning_scape.comm.collectives import Communicator, group_beside, is_distributed, world_size
from lightning_scape.core.method import Method, find, method_of
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.hosts import buffers, registration, setup, two_level
from lightning_scape.hosts.checkpoint_io import ScapeCheckpointIO
from lightning_scape.hosts.private_names import Opened, WrappingIO
from lightning_scape.hosts.words import Words

StateDictType = Literal["full", "sharded"]

_HEARD_WITHIN = 8
"""Batches after which a word of all ranks is heard at the latest."""


class CommonStrategy(Opened):
    """A base of a strategy of either host, beside the host's DDPStrategy and before it.

    MethodStrategy and FabricMethodStrategy say what its options are.
    """

    method: ClassVar[str | None] = None
    """Name of the method, if the strategy is for one only."""

    def __init__(
        self,
        config: Any,
        options: Mapping[str, Any],
        *,
        state_dict_type: StateDictType,
        async_save: bool,
        checkpoint_io: CheckpointIO | None,
        timeout: timedelta | float | None,
        **host: Any,
    ) -> None:
        refuse_options_of_ddp(options)
        self.config = setup.resolve_config(self.method, config, options)
        self._method = method_of(self.config)
        self._nodes = two_level.Nodes(self.config)
        if state_dict_type not in ("full", "sharded"):
            raise ValueError(
                '`state_dict_type` must be "full" (one file) or "sharded" (a directory), got'
                f' {state_dict_type!r}. Use "full" if unsure.'
            )
        self._sharded, self._saver = state_dict_type == "sharded", Saver(async_save)
        self._alike: dict[str, Any] = {
            "lightning_scape's version": __version__,
            "method": self._method.name,
            "state_dict_type": state_dict_type,
            "async_save": async_save,
        }
        """By these ranks choose their messages, so they must be the same on all."""
        self._words = Words(None, 1)
        """Of all ranks, once they have met."""
        self._check_saving(checkpoint_io)
        self.patience = as_timeout(timeout)
        super().__init__(checkpoint_io=checkpoint_io, timeout=self.patience, **host)  # type: ignore[call-arg]

    def __repr__(self) -> str:
        """As a call: the first option, and those that differ from their defaults."""
        first, defaults = fields(self.config)[0].name, vars(type(self.config)())
        given = {name: value for name, value in vars(self.config).items() if name == first or value != defaults[name]}
        return f"<{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})>"

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Called by Lightning for each strategy that it knows."""
        if cls.method is not None:
            registration.register_in(strategy_registry, cls.method, cls)

    # -------------------------------------------------------------------------------------------- how ranks meet

    @override
    def before_launch(self, start_method: str) -> None:
        check_start_method(type(self).__name__, self._method.name, start_method)

    def setup_environment(self) -> None:
        """As the host's, after a check of the number of ranks."""
        host: Any = self
        check_ranks(host.num_processes * host.num_nodes)
        super().setup_environment()  # type: ignore[misc]

    def setup_distributed(self) -> None:
        """Starts the process group as the host does, and those beside it."""
        host: Any = self
        super().setup_distributed()  # type: ignore[misc]
        check_same_setup(Communicator(), self._alike)
        self._nodes.set_up(host.num_processes, host.root_device)

    def _new_words(self) -> Words:
        """For a run: those of an earlier one may have been left unheard. Collective."""
        lag = min(self._method.steps_apart(self.config), _HEARD_WITHIN)
        host: Any = self
        # On CUDA the host is a step ahead of the device.
        self._words = Words.beside(max(lag, 2) if host.root_device.type == "cuda" else lag)
        return self._words

    def _put_under_method(self, optimizer: Optimizer, named: Sequence[tuple[str, Tensor]]) -> Method:
        """Attaches one of the user's optimizers."""
        if (former := find(optimizer)) is not None and not isinstance(former, self._method):  # of another fit
            former.close()
        return self._method.attach(optimizer, self._nodes.config, named, self._nodes.process_group)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """With ``local_group_size`` above 1: nodes (``"replicate"``) times ranks of a node (``"shard"``)."""
        return self._nodes.mesh

    # ------------------------------------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes and reads a checkpoint that is one file."""
        io = self.given_io
        if io is None:
            self.given_io = io = ScapeCheckpointIO()
        elif isinstance(io, WrappingIO):  # which keeps the one it was given, if any
            io.checkpoint_io = ScapeCheckpointIO()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._check_saving(io)
        self.given_io = io

    def _check_saving(self, io: CheckpointIO | None) -> None:
        if self._sharded and io is not None:
            raise ValueError(
                f'`checkpoint_io` must be None with state_dict_type="sharded", got {type(io).__name__}: each rank'
                " writes its own part of a directory. To save in the background, set `async_save=True`."
            )
        if self._saver.asynchronous and isinstance(io, AsyncCheckpointIO):
            raise ValueError(
                "`checkpoint_io` must write at once with `async_save=True`, got AsyncCheckpointIO: an error in it is"
                " told too late. Leave it out: `async_save` writes in the background, and collects there, too."
            )

    def before_save(self) -> None:
        """Waits for all ranks to come to a save; raises on all of them if some do not. Collective."""
        self._words.before_save()
        self._make_alike()

    def _make_alike(self) -> None:
        """Before a validation, a save and the end: rank 0's buffers for all, and equal replicas. Collective."""
        modules, methods = self.trained()
        buffers.share(modules)
        for each in methods:
            each.check_replicas()

    @abstractmethod
    def trained(self) -> tuple[list[Module], list[Method]]:
        """The modules in training, and the methods of their optimizers."""

    def wait_for_checkpoint(self) -> None:
        """Returns when what ``async_save`` has begun to write is there; raises what went wrong, on every rank."""
        self._saver.wait()

    def _checkpoint_ranks(self) -> Communicator:
        return Communicator(group_beside(None, "checkpoint"))


# ------------------------------------------------------------------------------------- how ranks are started, options


def check_start_method(strategy: str, method: str, start_method: str) -> None:
    """Raises ``ValueError`` where the session is interactive, a notebook or ``python -i``, and ranks are not forked.

    Lightning would refuse it as well, and name ``ddp_notebook`` as the remedy.

    Args:
        strategy: name of the class.
        method: name of its method.
        start_method: its option.
    """
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # there is no script that a process could run
    if interactive and start_method != "fork":
        raise ValueError(
            f"{strategy}'s `start_method` must be 'fork' in an interactive session (a notebook, python -i), got"
            f" {start_method!r}: other ways start processes by running the script again, and there is none. Use"
            f" `strategy=\"{registration.notebook(method)}\"` or `{strategy}(start_method='fork')`, or run a script."
        )


def check_ranks(asked: int) -> None:
    """Raises ``ValueError`` where the process group of an earlier Trainer or Fabric has another number of ranks.

    Its processes run the rest of the script as well, whatever number the next one asks for.

    Args:
        asked: ``devices`` times ``num_nodes``.
    """
    if is_distributed() and world_size() != asked:
        raise ValueError(
            "All Trainers (Fabrics) of one script must have the same number of ranks, `devices` times `num_nodes`, got"
            f" {asked} after {world_size()}: the processes that the first one started run the whole script. Use the"
            ' same numbers, two scripts, or `start_method="fork"`, with which processes end when the fit does.'
        )


def as_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """A strategy's ``timeout``; a number counts seconds.

    Raises:
        ValueError: it is not above 0, or no time at all.
    """
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 < timeout < math.inf:
        timeout = timedelta(seconds=timeout)
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise ValueError(
            f"`timeout` must be a timedelta or a number of seconds, above 0, got {timeout!r}. Write `timeout=20` or"
            " `timeout=timedelta(minutes=5)`."
        )
    return timeout


_OF_DDP = {
    "find_unused_parameters": "the backward pass waits for no parameter's gradient",
    "static_graph": "the backward pass sends nothing",
    "gradient_as_bucket_view": "there are no buckets",
    "bucket_cap_mb": "there are no buckets",
    "ddp_comm_hook": "the strategy's own options say what is sent",
    "ddp_comm_state": "the strategy's own options say what is sent",
    "ddp_comm_wrapper": "the strategy's own options say what is sent",
    "model_averaging_period": "the strategy sees to it that ranks' parameters are equal",
    "init_sync": "parameters and buffers are always made equal at the start",
    "check_reduction": "the strategy checks its own messages",
    "mixed_precision": "the Trainer's `precision` says it",
    "skip_all_reduce_unused_params": "parameters without a gradient cost nothing",
    "delay_all_reduce_named_params": "the backward pass sends nothing",
    "param_to_hook_all_reduce": "the backward pass sends nothing",
}
"""DDP's options, and why they are not needed."""


def refuse_options_of_ddp(options: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` where options of DDP are given that have no meaning here."""
    for name in options.keys() & _OF_DDP.keys():
        raise TypeError(
            f"`{name}` is an option of DDP's and must be left out, got {options[name]!r}. It is not needed here:"
            f" {_OF_DDP[name]}."
        )
