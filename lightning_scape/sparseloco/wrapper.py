"""SparseLoCo: many local steps of any optimizer between sparse, quantized exchanges (arXiv 2508.15706)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint.shards import State, collect, not_collected
from lightning_scape.comm.collectives import Communicator, ProcessGroup, group_beside
from lightning_scape.core import local_shards
from lightning_scape.core.method import Method
from lightning_scape.core.parameters import Parameters
from lightning_scape.core.private_names import entry
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.core.words import show_bytes
from lightning_scape.sparseloco import saved
from lightning_scape.sparseloco.algorithm import Algorithm, ExchangeStats
from lightning_scape.sparseloco.config import OF_THE_MESH, SparseLoCoConfig

_NAME = "_lightning_scape_sparseloco"
"""Attribute of an optimizer, which it neither copies nor pickles: what wraps it."""


class SparseLoCo(Method):
    """Lets every rank train on its own for ``sync_every`` steps, then averages what they have learned, sparsely.

    The loop stays as it is::

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        loco = SparseLoCo(optimizer, sync_every=30)
        for batch in loader:
            loss(model(batch)).backward()
            optimizer.step()                # every 30th one exchanges
            optimizer.zero_grad()
        loco.sync()                         # ends a window that has begun

    The exchange runs in a hook of the optimizer's ``step``: :meth:`~.algorithm.Algorithm.exchange`. After it all ranks
    hold the same parameters, bit for bit; between exchanges they differ. Every rank needs data of its own, clips the
    norm of its own gradient, and must take the same number of steps; the exchange raises an error on all ranks where
    they have not. The optimizer's state stays each rank's own, and is not sent. Its settings (lr, betas, ...) must be
    the same when ranks exchange; else all raise an error, and nothing is folded.

    Constructing is collective, and parameters must be equal on all ranks at the first step.

    Args:
        optimizer: any torch optimizer: dense float parameters (fp32, bf16, fp16) on one device. Those that do not
            require grad are left out for good.
        process_group: the ranks; None is the default group (no group: one rank). For sharded parameters (DTensors of
            ``fully_shard`` over the ranks of a node): those with the same rows, one of each node.
        communicator: sends the messages, in place of one over the groups (simulated ranks, another transport).
        named_parameters: of the module, for error messages and checkpoints.
        **options: of :class:`~lightning_scape.sparseloco.SparseLoCoConfig`.

    Raises:
        TypeError, ValueError: a parameter or an option cannot be kept, or ranks differ; the same on every rank.
        RuntimeError: several ranks were launched, and no process group is up.
    """

    name = "sparseloco"
    title = "SparseLoCo"
    config_class = SparseLoCoConfig
    shown = ("compression", "delta_norm")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        process_group: ProcessGroup | None = None,
        communicator: Communicator | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        **options: Any,
    ) -> None:
        self.config = config = SparseLoCoConfig(**options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"SparseLoCo must wrap a torch.optim.Optimizer, got {type(optimizer).__name__}. Build one over the"
                " parameters first: SparseLoCo(torch.optim.AdamW(model.parameters(), lr=3e-4))."
            )
        self.optimizer = optimizer
        self.parameters = Parameters(optimizer.param_groups, named_parameters)
        node = Communicator.alone()
        if communicator is None:
            communicator, node = local_shards.communicators(Communicator, self.parameters.tensors, process_group)
        self.communicator = comm = communicator
        self.node = node
        """The ranks of a node that hold a replica together; ``communicator`` reaches those with the same rows."""
        self.everyone = local_shards.everyone(comm, node)
        """All ranks whose parts make up a state."""
        self._hosts = Communicator(group_beside(node.process_group, "uses")) if node.world_size > 1 else node
        """``node``, by messages in host memory: a step on a GPU does not wait for the device."""
        numels = [parameter.numel() for parameter in self.parameters.local]
        self.exchange_bytes = config.exchange_bytes(numels, comm.world_size)
        """Bytes that this rank sends in an exchange."""
        setup = {
            "lightning_scape's version": __version__,
            "optimizer": type(optimizer).__name__,
            "options": [f"{name}={value!r}" for name, value in vars(config).items()],
            "parameters (group, shape, strides, dtype)": self.parameters.describe(),
        }
        problem = self._problem(process_group)
        check_same_setup(self.everyone, setup, problem, node.rank)
        self.algorithm = Algorithm(optimizer, config, self.parameters, comm, node)
        self.progress = self.algorithm.progress
        self._consolidated: dict[str, Any] | None = None
        self._stepping = False
        self._loaded: saved.Loaded | None = None
        """What a load by the optimizer itself has read, and not yet taken up."""
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
            # Before the user's hooks, which see an inner state, once.
            optimizer.register_load_state_dict_pre_hook(self._before_load, prepend=True),
            optimizer.register_load_state_dict_post_hook(lambda _: self._take_up(self._loaded), prepend=True),
        ]
        vars(optimizer)[_NAME] = self

    def _problem(self, process_group: ProcessGroup | None) -> str | None:
        """The first rule that is broken, as rule, value and remedy; None if all hold."""
        names, tensors = self.parameters.names, self.parameters.tensors
        if SparseLoCo.of(self.optimizer) is not None:
            return (
                "An optimizer must be wrapped once, got one that a SparseLoCo wraps already. Use that one, or call its"
                " close() first."
            )
        if wide := [name for name, each in zip(names, tensors, strict=True) if each.dtype == torch.float64]:
            return (
                f"Parameters must be fp32, bf16 or fp16, got {wide[0]} in float64: the starting point is kept in fp32."
                " Convert it before building the optimizer."
            )
        if "ZeroRedundancyOptimizer" in {kind.__name__ for kind in type(self.optimizer).__mro__}:
            return (
                f"An optimizer must work on one rank, got a {type(self.optimizer).__name__}, which hands parameters on"
                " itself. Wrap AdamW, or another of torch's."
            )
        # The groups' options are the optimizer's own business. A node's size is what the parameters say.
        return self.parameters.problem([]) or local_shards.problem(names, tensors, process_group)

    @classmethod
    @override
    def from_optimizer(
        cls,
        optimizer: torch.optim.Optimizer,
        config: SparseLoCoConfig,
        process_group: ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> Self:
        if (former := cls.of(optimizer)) is not None:  # of an earlier fit
            former.close()
        options = {name: value for name, value in vars(config).items() if name not in OF_THE_MESH}
        return cls(optimizer, **options, process_group=process_group, named_parameters=named_parameters)

    @classmethod
    @override
    def of(cls, optimizer: object) -> Self | None:
        """The one that wraps an optimizer, None if there is none."""
        if isinstance(optimizer, cls):
            return optimizer
        return vars(optimizer).get(_NAME) if isinstance(optimizer, torch.optim.Optimizer) else None

    # ------------------------------------------------------------------------------------------- the loop

    @entry
    def _before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stepping = True
        self._consolidated = None
        self.algorithm.begin()
        self.parameters.check_groups(self.optimizer.param_groups)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if self.node.world_size == 1:
            return None
        if closure is None:
            self._leave_unused()
            return None

        def then_leave() -> Any:
            loss = closure()
            self._leave_unused()
            return loss

        return args[:1], {**kwargs, "closure": then_leave}

    @entry
    def _leave_unused(self) -> None:
        """Takes the zeros away that FSDP2 gives as a gradient to what no rank of the node has used. Collective."""
        tensors = self.parameters.tensors
        used = torch.tensor([local_shards.has_gradient(each) for each in tensors], dtype=torch.uint8, device="cpu")
        by_any = self._hosts.all_gather_stacked(used).amax(dim=0).tolist()
        for parameter in (each for each, kept in zip(tensors, by_any, strict=True) if not kept):
            parameter.grad = None

    @entry
    def _after_step(self) -> None:
        if self._stepping:  # torch calls the hooks of a ``step`` that calls ``super().step()`` twice
            self._stepping = False
            self.algorithm.after_step()

    @entry
    def sync(self) -> None:
        """Ends the window that has begun, if any: all ranks hold the same parameters afterwards. Collective.

        For the end of training, and wherever ranks have to be equal. The window counts as a whole one. Parameters that
        others than the optimizer have written since the last step, such as an average, stay; where ranks differ, their
        mean does.

        Raises:
            RuntimeError: ranks have taken different numbers of steps, or differ without one (an optimizer may train by
                another method than ``step``); on every rank.
        """
        self._consolidated = None
        self.algorithm.begin()
        self.algorithm.exchange()

    finish = sync

    @override
    def give_back(self) -> None:
        """Takes the hooks off the optimizer, which steps on its own from now on. The state may still be saved."""
        for hook in self._hooks:
            hook.remove()

    @override
    def close(self) -> None:
        """Lets the optimizer go: it may be wrapped anew."""
        self.give_back()
        vars(self.optimizer).pop(_NAME, None)

    # ------------------------------------------------------------------------------------------- what it says

    @property
    @override
    def stats(self) -> ExchangeStats | None:
        """Figures of the last exchange; None before the first, and after a load."""
        return self.algorithm.stats

    @property
    @override
    def steps_taken(self) -> int:
        return self.progress.steps

    @classmethod
    @override
    def steps_apart(cls, config: SparseLoCoConfig) -> int:
        return config.sync_every

    @override
    def summary(self) -> str:
        config, sent, nodes = self.config, self.exchange_bytes, self.node.world_size
        how = f"{config.quota.density:.3g} of the entries" + ("" if config.bits is None else f" in {config.bits} bits")
        where = f" between nodes of {nodes} ranks" if nodes > 1 else ""
        how_much = f"{show_bytes(sent)} per rank{where}" if sent else "which costs nothing with one rank"
        return f"SparseLoCo: {config.sync_every} local steps, then an exchange of {how}, {how_much}."

    # ------------------------------------------------------------------------------------------- checkpoints

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state of all ranks on rank ``to``, where :meth:`state_dict` then returns it. Collective.

        Ranks differ inside a window. So the whole state holds every rank's parameters, error feedback and optimizer
        state: about ``16 N P`` bytes with AdamW. A sharded checkpoint spares one rank from holding all of it.
        """
        self._consolidated = None
        self._consolidated = collect(self.own_state(), self.everyone, self.parameters.device, to)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, the inner optimizers' included: tensors, numbers and strings only.

        ``"state"`` and ``"param_groups"`` are the inner optimizer's on rank 0, so that it loads such a state, too.

        Raises:
            RuntimeError: with several ranks, :meth:`consolidate_state_dict` was not called since the last step.
        """
        if self.everyone.world_size == 1:
            self.consolidate_state_dict()
        if self._consolidated is None:
            raise not_collected(self.everyone.rank, "consolidate_state_dict(to=0)")
        return self._consolidated

    @classmethod
    @override
    def whole_state(cls, state: State) -> dict[str, Any]:
        return saved.whole_state(state)

    @override
    @entry
    def own_state(self) -> State:
        """This rank's part of the state, in views. Sends nothing after the first step."""
        self.algorithm.begin()
        self.parameters.flatten()
        return saved.own_state(self.algorithm)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any] | State) -> None:
        """Takes up a state, parameters and inner optimizer included. Call on every rank, with the same state.

        On the same number of ranks training goes on bit for bit, also in the middle of a window. On another number,
        every rank takes the mean of the saved error feedbacks and of the saved parameters (so that their mean over
        ranks is kept), and the inner state of one of the saved ranks. A state of the inner optimizer alone (trained
        without SparseLoCo) is loaded into it, and a window begins. Each with a warning that says so.

        Load the model first: inside a window its parameters are another rank's.

        Raises:
            ValueError: parameters differ in number, order or shape, or the inner optimizer is of another class. Nothing
                has been changed then.
        """
        loaded = self._read(state_dict)
        self.optimizer.load_state_dict(loaded.inner)
        self._take_up(loaded)

    def _read(self, state_dict: Mapping[str, Any]) -> saved.Loaded:
        """Reads this rank's part of a state; changes nothing. Collective."""
        self.parameters.flatten()
        loaded = self.everyone.raise_on_all_ranks(lambda: saved.load(self.algorithm, state_dict))
        for note in loaded.notes:
            warnings.warn(note, stacklevel=3)  # whoever calls load_state_dict
        return loaded

    def _before_load(self, _: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """A load by the optimizer itself. Under Fabric rank 0 gets a whole state, and the others ``{}``."""
        of_inner = bool(state_dict) and saved.METHOD not in state_dict
        self._loaded = None if of_inner else self._read(state_dict)
        return None if self._loaded is None else self._loaded.inner

    @torch.no_grad()
    def _take_up(self, loaded: saved.Loaded | None) -> None:
        """Takes up all but the inner optimizer's state, which is in its place by now: nothing can fail any more."""
        if loaded is not None:
            self._loaded = None
            self._consolidated = None
            for flat, own in zip(self.parameters.flat, loaded.parameters, strict=False):
                flat.copy_(own)
            self.algorithm.resume(loaded.state, loaded.progress)
