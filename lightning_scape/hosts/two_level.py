"""Nodes of several ranks: which ranks form a node, and a module sharded over them by FSDP2. Knows no strategy.

A module that the user has sharded over ``strategy.device_mesh["shard"]`` (``LightningModule.configure_model``, as with
Lightning's ModelParallelStrategy) stays as it is. Of any other the members of its ModuleLists are gathered and freed
one at a time; the root has the rest. What the package knows of the resulting DTensors is in
:mod:`lightning_scape.core.local_shards` (docs/design.md, 6).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_scape.comm.collectives import ProcessGroup, broadcast_tensors, world_size
from lightning_scape.core.local_shards import local, note_uses
from lightning_scape.core.private_names import IGNORED_BY_DDP
from lightning_scape.hosts.private_names import materialize

_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[tuple[int, str], DeviceMesh]] = weakref.WeakKeyDictionary()
"""Of all strategies of a process, by size of a node and kind of device."""
_COMPUTE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""The dtype of forward and backward under Lightning's precisions, if parameters are wider."""


class Nodes:
    """The ranks as a mesh of nodes, and what a host does with it. With one rank a node there is nothing to do.

    Args:
        config: of a method.
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        """The options; after :meth:`set_up`, with the size of a node as a number."""
        self.mesh: DeviceMesh | None = None
        """Nodes times ranks of a node, its dimensions named ``replicate`` and ``shard``."""
        self._replaced: Any = None

    @property
    def several(self) -> bool:
        """Whether a node has several ranks; known after :meth:`set_up`."""
        return self.mesh is not None

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks that hold the same rows, one of each node; None with a single node, or one rank a node."""
        return None if self.mesh is None or self.mesh["replicate"].size() == 1 else self.mesh["replicate"].get_group()

    def set_up(self, ranks_of_node: int, device: torch.device) -> None:
        """Joins the groups of its node and of its place in all nodes; the first call makes them. Collective.

        Args:
            ranks_of_node: ranks that run on each node.
            device: this rank's.

        Raises:
            ValueError: ``local_group_size`` does not divide the ranks of a node.
        """
        asked, ranks = self.config.local_group_size, world_size()
        size = ranks_of_node if asked == "node" else int(asked)
        if ranks_of_node % size or ranks % size:
            raise ValueError(
                f"`local_group_size` must divide the ranks of a node, {ranks_of_node} (of {ranks} in all), got {size}."
                ' Use "node" for all ranks of a node.'
            )
        self.config, self.mesh = replace(self.config, local_group_size=size), None
        if size == 1:
            return
        meshes = _meshes.setdefault(cast(ProcessGroup, torch.distributed.group.WORLD), {})
        if (size, device.type) not in meshes:
            grid, names = (ranks // size, size), ("replicate", "shard")
            meshes[size, device.type] = init_device_mesh(device.type, grid, mesh_dim_names=names)
        self.mesh = meshes[size, device.type]

    def shard(self, module: nn.Module, device: torch.device, precision: str) -> None:
        """Shards what the user has not; all ranks begin as rank 0. Collective.

        Args:
            module: the model, perhaps on the meta device.
            device: this rank's.
            precision: as Lightning names it.
        """
        assert self.mesh is not None
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise RuntimeError(
                f"Nodes of several ranks need torch 2.13 or newer, got {torch.__version__}: FSDP2 before it trains"
                " experts wrong that not all ranks of a node use. Upgrade torch, or leave out `local_group_size`."
            )
        reshard(module)  # an evaluation has gathered it
        _materialize(module, device)
        before = dict(module.named_parameters())
        module.to(device)
        broadcast_tensors(each for each in (*module.parameters(), *module.buffers()) if not isinstance(each, DTensor))
        narrow = any(each.is_floating_point() and each.itemsize < 4 for each in before.values())
        compute = _COMPUTE.get(precision)
        policy = MixedPrecisionPolicy(
            param_dtype=compute,
            # Sums over a node's ranks lose nothing, whatever the parameters' dtype.
            reduce_dtype=torch.float32 if narrow or compute is not None else None,
            cast_forward_inputs=False,  # autocast does it where it should: targets keep their precision
        )
        for unit in [*_units(module), module]:
            if not isinstance(unit, FSDPModule):
                often = None if unit is module else self.config.reshard_after_forward  # None: torch knows the root
                fully_shard(unit, mesh=self.mesh["shard"], mp_policy=policy, reshard_after_forward=often)
        if self.process_group is not None:  # also what the user has sharded
            broadcast_tensors([local(each.detach()) for each in module.parameters()], self.process_group)
        # Else ranks that use different experts of a mixture would reduce different gradients with one another.
        cast(FSDPModule, module).set_reduce_scatter_unused_params(True)
        _note_uses(module)
        self._replaced = WeakIdKeyDictionary() if self._replaced is None else self._replaced
        after = dict(module.named_parameters())
        self._replaced.update({before[name]: after[name] for name in before if before[name] is not after[name]})

    def whole(self, content: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with whole tensors in rank 0's memory, one gathered after another. Collective over each node."""
        found: dict[str, Any] = _whole(content) if self.several else content
        return found

    def follow_replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives an optimizer that was built before its module was sharded the sharded parameters."""
        for group in optimizer.param_groups if self._replaced is not None else ():
            group["params"] = [self._replaced.get(parameter, parameter) for parameter in group["params"]]

    def rows(self, module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Of a module's whole state dict what this rank holds."""
        if not self.several:
            return state_dict
        found = dict(state_dict)
        for name, own in module.state_dict().items():
            given = found.get(name)
            if not isinstance(own, DTensor) or not isinstance(given, Tensor) or isinstance(given, DTensor):
                continue
            if given.shape == own.shape:  # else load_state_dict says what is wrong
                there = given.to(own.device)
                found[name] = distribute_tensor(there, own.device_mesh, own.placements, src_data_rank=None)
        return found


def _note_uses(module: nn.Module) -> None:
    """Parameters that no rank uses in a step shall be left alone. Gathers a unit at a time; may come again."""
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        sharded = dict(unit.named_parameters())
        unit.unshard()
        for name, gathered in unit.named_parameters():
            own = isinstance(sharded[name], DTensor) and not isinstance(gathered, DTensor)  # not of a unit inside
            if own and gathered.is_floating_point():
                note_uses(sharded[name], gathered)
        unit.reshard()


def reshard(module: nn.Module) -> None:
    """Frees gathered parameters after a forward pass without gradients: FSDP2 keeps the root's for a backward pass."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def _units(module: nn.Module) -> list[nn.Module]:
    """What is gathered at a time. A unit whose parameter is also used outside of it (tied) is left out."""
    uses = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    inside = {
        unit: Counter(id(each) for _, each in unit.named_parameters(remove_duplicate=False))
        for unit in _members_of_lists(module)
    }
    return [unit for unit, own in inside.items() if own and all(uses[each] == count for each, count in own.items())]


def _members_of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _members_of_lists(child)
            continue
        for member in child:
            containers = (nn.ModuleList, nn.ModuleDict)  # without a forward of their own
            yield from _members_of_lists(member) if isinstance(member, containers) else (member,)


def _materialize(module: nn.Module, device: torch.device) -> None:
    """Gives memory and first values to what is on the meta device; tied parameters stay tied."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((each, name))
    materialize(module, device)
    for (first, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(first, name))


@contextlib.contextmanager
def on_meta(precision: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    """Inside, modules are made without memory, in the dtype of a host's precision."""
    with torch.device("meta"), precision:
        yield


@contextlib.contextmanager
def without_gradient_sync(module: nn.Module) -> Iterator[None]:
    """Inside, backward passes of a sharded module add gradients up and send none; others never send any."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def check_gradients_arrived(module: nn.Module) -> None:
    """Checks gradients before a step that the module takes inside its forward pass, as with manual optimization.

    FSDP2 averages the root's gradients when a backward pass reaches another unit, for the root's forward has not ended.

    Raises:
        RuntimeError: some are with its gathered parameters; the optimizer would never see them.
    """
    for name, each in module.named_parameters():
        if each.grad is not None and not isinstance(each, DTensor):
            raise RuntimeError(
                "With `local_group_size` and manual optimization parameters must lie in modules that are gathered as a"
                f" unit, got a gradient of {name!r} that only the root holds: FSDP2 has not averaged it, and the step"
                " would leave it out. Shard its module in `configure_model`, or put it into a ModuleList."
            )


class ThroughForward(nn.Module):
    """Calls a module through its ``forward``: a sharded one gathers its parameters there.

    Lightning calls a module's ``training_step`` directly, and Fabric without the precision's context, unless the
    strategy's model is another one.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Ranks are equal. Before an evaluation Lightning would broadcast what they hold, as after DDP's wrapper.
        setattr(self, IGNORED_BY_DDP, [name for name, _ in (*self.named_parameters(), *self.named_buffers())])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        result = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            reshard(self.module)
        return result


def within(module: nn.Module) -> nn.Module:
    """The user's module."""
    return module.module if isinstance(module, ThroughForward) else module


# --------------------------------------------------------------------------------------------- state dicts


def gather(_: nn.Module, state: dict[str, Any], *__: Any) -> None:
    """A hook on a module's state dicts: whole tensors, on every rank. Collective over each node."""
    state.update({name: each.full_tensor().cpu() for name, each in state.items() if isinstance(each, DTensor)})


def _whole(content: Any) -> Any:
    """With None for sharded tensors, which dicts as a module's state may hold, on ranks other than 0."""
    if type(content) in (dict, OrderedDict):  # an optimizer's own state is none of these
        return {name: _whole(value) for name, value in content.items()}
    if not isinstance(content, DTensor):
        return content
    tensor = content.full_tensor()
    return tensor.detach().cpu() if torch.distributed.get_rank() == 0 else None
