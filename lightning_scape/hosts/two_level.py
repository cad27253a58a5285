"""Nodes of several ranks, for a host: which ranks form a node, and a module sharded over them by FSDP2.

All that the package knows of ``torch.distributed.fsdp.fully_shard`` is here; all that it knows of the resulting
DTensors is in :mod:`lightning_scape.core.local_shards`. Knows no host (docs/design.md, 6).
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_scape.comm.collectives import (
    Communicator,
    ProcessGroup,
    broadcast_tensors,
    new_node_groups,
    world_size,
)
from lightning_scape.core.local_shards import local

_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, str], DeviceMesh]] = weakref.WeakKeyDictionary()
"""Of all strategies of a process, by size of a node and kind of device."""
_prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Roots that have this module's hooks."""


class Nodes:
    """The ranks as a mesh of nodes, and what a host does with it. With one rank a node there is nothing to do.

    Args:
        config: of a method.
        wrap: class names of the modules that are gathered as a unit; empty takes the members of the model's outermost
            ModuleLists.
    """

    def __init__(self, config: Any, wrap: Sequence[str] = ()) -> None:
        if isinstance(wrap, str) or not all(isinstance(name, str) for name in wrap):
            raise ValueError(f'`wrap` must be a list of names of module classes, got {wrap!r}. Write wrap=["Block"].')
        self.config = config
        """The options; after :meth:`set_up`, with the size of a node as a number."""
        self._asked, self._wrap = config.local_group_size, tuple(wrap)
        self._replaced: Any = None
        self._forget()

    def _forget(self) -> None:
        self.mesh: DeviceMesh | None = None
        """Nodes times ranks of a node, its dimensions named ``replicate`` and ``shard``."""
        self.process_group: ProcessGroup | None = None
        """The ranks that hold the same rows, one of each node; None with a single node."""

    @property
    def size(self) -> int:
        """Ranks that hold a replica together; known after :meth:`set_up`."""
        return 1 if self.mesh is None else self.mesh["shard"].size()

    @property
    def several(self) -> bool:
        """Whether a node has several ranks; known after :meth:`set_up`."""
        return self.mesh is not None

    def set_up(self, ranks_of_node: int, device: torch.device) -> None:
        """Joins the groups of its node and of its place in all nodes; the first call makes them. Collective.

        Args:
            ranks_of_node: ranks that run on this node.
            device: this rank's.

        Raises:
            ValueError: ``local_group_size`` does not divide the ranks of a node.
        """
        size = ranks_of_node if self._asked == "node" else int(self._asked)
        ranks = world_size()
        # For all ranks: machines may differ, and all or none make the groups.
        for size_there, ranks_there in Communicator().all_gather_object((size, ranks_of_node)):
            if (size_there > 1 and ranks_there % size_there) or ranks % size_there:
                raise ValueError(
                    f"`local_group_size` must divide the ranks of a node, {ranks_there} (of {ranks} in all), got"
                    f' {size_there}. Use "node" for all ranks of a node.'
                )
            if size_there != size:
                raise ValueError(
                    "`local_group_size` must be the same on all ranks, got"
                    f" {min(size, size_there)} and {max(size, size_there)}. Give all nodes the same number of ranks."
                )
        self.config = replace(self.config, local_group_size=size)
        if size == 1:
            self._forget()
            return

        meshes = _meshes.setdefault(cast(ProcessGroup, torch.distributed.group.WORLD), {})
        if (size, device.type) not in meshes:
            inside, across = new_node_groups(size)
            grid = torch.arange(ranks, dtype=torch.int64, device="cpu").view(-1, size)
            names = ("replicate", "shard")
            mesh = DeviceMesh.from_group([across, inside], device.type, mesh=grid, mesh_dim_names=names)
            meshes[size, device.type] = mesh
        self.mesh = meshes[size, device.type]
        self.process_group = self.mesh["replicate"].get_group() if ranks > size else None

    # --------------------------------------------------------------------------------------------- the module

    def shard(self, module: nn.Module, device: torch.device, compute_dtype: torch.dtype | None = None) -> None:
        """Calls ``fully_shard`` on every unit and the root, where the user has not; all ranks begin as rank 0.

        One unit at a time is made (if it is on the meta device), filled with rank 0's values, and sharded. So no rank
        holds more than one whole unit. Collective.

        Args:
            module: the model.
            device: this rank's.
            compute_dtype: the dtype of forward and backward, if it is narrower than the parameters.
        """
        assert self.mesh is not None
        before = dict(module.named_parameters())
        for unit in [*find_units(module, self._wrap), module]:
            if isinstance(unit, FSDPModule):
                continue
            _materialize(unit, device)
            _move(unit, device)
            plain = [t for t in (*unit.parameters(), *unit.buffers()) if not isinstance(t, DTensor)]
            broadcast_tensors(plain)
            narrow = any(t.is_floating_point() and t.itemsize < 4 for t in plain)
            policy = MixedPrecisionPolicy(
                param_dtype=compute_dtype,
                # Sums over a node's ranks lose nothing, whatever the parameters' dtype.
                reduce_dtype=torch.float32 if narrow or compute_dtype is not None else None,
                cast_forward_inputs=False,  # autocast does it where it should: targets keep their precision
            )
            reshard = None if unit is module else self.config.reshard_after_forward  # None: torch knows the root
            fully_shard(unit, mesh=self.mesh["shard"], mp_policy=policy, reshard_after_forward=reshard)
        if self.process_group is not None:  # also what the user has sharded
            broadcast_tensors([local(p.detach()) for p in module.parameters()], self.process_group)
        root = cast(FSDPModule, module)
        if not hasattr(root, "set_reduce_scatter_unused_params"):
            raise RuntimeError(
                f"Nodes of several ranks need torch 2.13 or newer, got {torch.__version__}: FSDP2 before it trains"
                " experts wrong that not all ranks of a node use. Upgrade torch, or leave out `local_group_size`."
            )
        # Else ranks that use different experts of a mixture would reduce different gradients with one another.
        root.set_reduce_scatter_unused_params(True)
        if module not in _prepared:  # else an earlier fit has done it
            _prepared.add(module)
            _take_whole_states(module)
            _AfterEvaluation(module)
        self._note_replaced(before, module)

    def _note_replaced(self, before: Mapping[str, nn.Parameter], module: nn.Module) -> None:
        if self._replaced is None:
            self._replaced = WeakIdKeyDictionary()
        after = dict(module.named_parameters())
        for name, parameter in before.items():
            if after[name] is not parameter:
                self._replaced[parameter] = after[name]

    def follow_replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives an optimizer that was built before its module was sharded the sharded parameters."""
        for group in optimizer.param_groups if self._replaced is not None else ():
            group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles of a strategy: its set-up makes process groups and the mesh anew."""
        left_out = ("_replaced", "mesh", "process_group")
        return {**self.__dict__, **dict.fromkeys(left_out)}


def compute_dtype(precision: str) -> torch.dtype | None:
    """The dtype of forward and backward under one of Lightning's precisions, if parameters are wider."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded the module."""
    return isinstance(module, FSDPModule)


def find_units(module: nn.Module, wrap: Sequence[str] = ()) -> list[nn.Module]:
    """The modules that are gathered and freed one at a time, inner ones first; without the root, which has the rest.

    A module whose parameter is also used outside of it (tied) is left out: the root holds what both use.

    Args:
        module: the root.
        wrap: names of classes; empty takes the members of the outermost ModuleLists.

    Raises:
        ValueError: no module is of one of the classes.
    """
    if wrap:
        found = [each for each in module.modules() if each is not module and type(each).__name__ in wrap]
        names = {type(each).__name__ for each in found}
        if missing := [name for name in wrap if name not in names]:
            present = ", ".join(sorted({type(each).__name__ for each in module.modules()}))
            raise ValueError(f"`wrap` must name classes of the model's modules, got {missing}. There are {present}.")
    else:
        found = list(_members_of_lists(module))
    units = list({id(each): each for each in found if next(each.parameters(), None) is not None}.values())
    return [unit for unit in reversed(units) if not _shares(unit, module)]


def _members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _members_of_lists(child)
            continue
        for member in child:
            containers = (nn.ModuleList, nn.ModuleDict)  # without a forward of their own
            yield from _members_of_lists(member) if isinstance(member, containers) else (member,)


def _shares(unit: nn.Module, root: nn.Module) -> bool:
    inside = {id(each) for each in unit.modules()}
    own = {id(parameter) for parameter in unit.parameters()}
    outside = (each for each in root.modules() if id(each) not in inside)
    return any(id(parameter) in own for each in outside for parameter in each.parameters(recurse=False))


def _own(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _materialize(unit: nn.Module, device: torch.device) -> None:
    """Gives memory and first values to what is on the meta device; tied parameters stay tied."""
    empty = [each for each in unit.modules() if any(tensor.is_meta for tensor in _own(each))]
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for each in empty:
        for name, parameter in each.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                raise ValueError(
                    f"A module on the meta device must be sharded by the strategy, got {name!r} of a"
                    f" {type(each).__name__} that you have sharded. Leave out your fully_shard, or make the module on"
                    " a real device."
                )
            places.setdefault(id(parameter), []).append((each, name))
    for each in empty:
        each.to_empty(device=device, recurse=False)
    for (first, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(first, name))
    without = set()
    for each in empty:
        reset = getattr(each, "reset_parameters", None)
        if callable(reset):
            with torch.no_grad():
                reset()
        else:
            without.add(type(each).__name__)
    if without:
        warnings.warn(
            f"Modules on the meta device must have a method `reset_parameters`, got {', '.join(sorted(without))}"
            " without one: their values are undefined until a checkpoint is loaded. Write that method, or load one.",
            stacklevel=4,
        )


def _move(unit: nn.Module, device: torch.device) -> None:
    """Moves what is not yet sharded to the device."""
    for each in unit.modules():
        own = _own(each)
        if any(not isinstance(tensor, DTensor) and tensor.device != device for tensor in own):
            for name, parameter in each.named_parameters(recurse=False):
                if not isinstance(parameter, DTensor):
                    getattr(each, name).data = parameter.data.to(device)
            for name, buffer in each.named_buffers(recurse=False):
                setattr(each, name, buffer.to(device))


@contextlib.contextmanager
def on_meta(precision: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, modules are made without memory, in the dtype of a host's precision."""
    with torch.device("meta"), precision:
        yield


@contextlib.contextmanager
def without_gradient_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backward passes add gradients up and send none."""
    root = cast(FSDPModule, module)
    root.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        root.set_requires_gradient_sync(True)


def check_gradients_arrived(module: nn.Module) -> None:
    """Checks gradients before a step that the module takes inside its forward pass, as with manual optimization.

    FSDP2 averages a unit's gradients when a backward pass reaches the outputs of the unit's forward. The root's forward
    has not ended yet: if no other unit is reached, the root's gradients stay with its gathered parameters.

    Raises:
        RuntimeError: some have stayed there; the optimizer would never see them.
    """
    lost = [name for name, each in module.named_parameters() if each.grad is not None and not isinstance(each, DTensor)]
    if lost:
        inside = dict(module.named_modules())
        kinds = sorted({type(inside[name.rpartition(".")[0]]).__name__ for name in lost} - {type(module).__name__})
        named = f"Name the classes of such modules: wrap={kinds}, or a larger one's around them."
        raise RuntimeError(
            "With `local_group_size` and manual optimization parameters must lie in modules that are gathered as a"
            f" unit, got a gradient of {lost[0]!r} that only the root holds: FSDP2 has not averaged it, and the step"
            f" would leave it out. {named if kinds else 'Put it into a module, and name its class in `wrap`.'}"
        )


class _AfterEvaluation:
    """Frees gathered parameters after a forward pass without gradients, which no backward pass follows.

    FSDP2 would keep the root's. Then ``module.parameters()`` would give the gathered copies, also to the next optimizer
    that is built.
    """

    def __init__(self, root: nn.Module) -> None:
        self._depth = 0  # a module may call itself: only the outermost call ends the pass
        root.register_forward_pre_hook(self._enter)
        root.register_forward_hook(self._leave, always_call=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._depth += 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth and not torch.is_grad_enabled():
            for each in module.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()


class ThroughForward(nn.Module):
    """Calls a sharded module through its ``forward``, because it gathers its parameters there.

    Lightning calls a module's ``training_step`` directly, unless the strategy's model is another one.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """As DDP's: inside, backward passes add gradients up and send none."""
        return without_gradient_sync(self.module)


# --------------------------------------------------------------------------------------------- state dicts


def whole(content: Any, keep: bool) -> Any:
    """A checkpoint with whole tensors in host memory, one gathered after another. Collective over each node.

    Args:
        content: dicts in it, as modules' states, may hold sharded tensors.
        keep: whether this rank needs the result; else they are None.
    """
    if type(content) in (dict, OrderedDict):  # an optimizer's own state is none of these
        return {name: whole(value, keep) for name, value in content.items()}
    if not isinstance(content, DTensor):
        return content
    tensor = content.full_tensor()
    return tensor.detach().cpu() if keep else None


def _take_whole_states(module: nn.Module) -> None:
    """Makes ``load_state_dict`` take whole tensors, of which each rank keeps its rows."""
    for each in module.modules():
        if any(isinstance(tensor, DTensor) for tensor in _own(each)):
            each.register_load_state_dict_pre_hook(_cut_to_rows)


def _cut_to_rows(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    own_parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    own_buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    for name, parameter in itertools.chain(own_parameters, own_buffers):
        given = state_dict.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(given, Tensor) or isinstance(given, DTensor):
            continue
        if given.shape == parameter.shape:  # else load_state_dict says what is wrong
            whole = given.to(parameter.device)
            state_dict[prefix + name] = distribute_tensor(
                whole, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
