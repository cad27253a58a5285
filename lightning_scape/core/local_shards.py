"""Parameters that FSDP2 has sharded (``torch.distributed.fsdp.fully_shard``): all that the optimizer knows of DTensors.

In a mesh of ``G`` nodes times ``L`` ranks, ``fully_shard`` over the L ranks of a node gives each of them rows of every
parameter, as a DTensor. The step of SCAPE works on these rows and exchanges them with the ranks of the other nodes that
hold the same rows (docs/design.md, 6). A parameter's rows are consecutive entries in its memory order, which is what a
checkpoint needs to know.

Example: a parameter of 5 rows on L = 2 ranks. Rank 0 holds rows 0 to 2, rank 1 rows 3 and 4. If the parameter
has one row, rank 0 holds it, and the local shard of rank 1 is empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_scape.comm.collectives import Communicator, ProcessGroup, check_joined, world_size

C = TypeVar("C", bound=Communicator)


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds, in their own memory; what is not sharded, itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    # With gradients enabled each call would give another object. A step asks some hundred times, and switching them
    # off takes three times as long as the call itself.
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        shard: Tensor = tensor.to_local()
    return shard


def first_row(tensor: Tensor) -> int:
    """The first row that this rank holds: FSDP2 gives ranks what ``torch.chunk`` does."""
    if not isinstance(tensor, DTensor):
        return 0
    rows, mesh = tensor.shape[0], tensor.device_mesh
    return min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))


# ------------------------------------------------------------------------------------------- what a rank has used

_USED = "_lightning_scape_used"
"""Attribute of a gradient: whether this rank's backward passes have given something to it."""


def note_uses(sharded: Tensor, gathered: Tensor) -> None:
    """Lets :func:`has_gradient` tell a gradient from the zeros that FSDP2 gives what a rank has not used.

    Args:
        sharded: a parameter; FSDP2 calls its hooks on all ranks of a node, when its gradient has come.
        gathered: it in the forward pass; autograd calls its hooks on a rank that has used it.
    """
    used = False

    def use(_: Tensor) -> None:
        nonlocal used
        used = True

    def come(parameter: Tensor) -> None:
        nonlocal used
        setattr(parameter.grad, _USED, used or getattr(parameter.grad, _USED, False))
        used = False

    for tensor, hook in ((gathered, use), (sharded, come)):
        trained = tensor.requires_grad
        tensor.requires_grad_(True).register_post_accumulate_grad_hook(hook)  # what is frozen may be trained later
        tensor.requires_grad_(trained)


def has_gradient(parameter: Tensor) -> bool:
    """Whether this rank's backward passes have given the parameter a gradient."""
    return parameter.grad is not None and bool(getattr(parameter.grad, _USED, True))


# ------------------------------------------------------------------------------------------- the two groups


def mesh_of(parameters: Sequence[Tensor]) -> DeviceMesh | None:
    """The mesh of the ranks of a node, which hold each other's rows; None for plain parameters."""
    return next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)


def communicators(
    kind: type[C], parameters: Sequence[Tensor], process_group: ProcessGroup | None
) -> tuple[C, Communicator]:
    """An optimizer's messages to the ranks with the same rows, and to those that hold the other rows. Collective.

    Args:
        kind: of the method.
        parameters: frozen ones may be among them. For plain ones nobody has other rows.
        process_group: the ranks with the same rows. None is all ranks, or, where all together hold one replica, this
            one alone.

    Raises:
        RuntimeError: several ranks were launched, and no process group is up.
    """
    check_joined()
    mesh = mesh_of(parameters)
    if mesh is None or mesh.ndim != 1:
        return kind.of_optimizer(process_group), Communicator.alone()
    whole = process_group is None and mesh.size() == world_size()
    across = kind.alone() if whole else kind.of_optimizer(process_group)
    return across, Communicator.alone() if mesh.size() == 1 else Communicator(mesh.get_group())


def everyone(communicator: Communicator, node: Communicator) -> Communicator:
    """All ranks whose parts make up a state: those with the same rows, and those of their nodes."""
    return communicator if node.world_size == 1 else Communicator()


def problem(names: Sequence[str], parameters: Sequence[Tensor], process_group: ProcessGroup | None) -> str | None:
    """The first rule of two levels that is broken, as rule, value and remedy; None if all hold.

    Args:
        names: of the parameters.
        parameters: plain ones, or DTensors.
        process_group: the ranks with the same rows, as the user gave them.
    """
    if (mesh := mesh_of(parameters)) is None:
        return None
    for name, parameter in zip(names, parameters, strict=True):
        placed = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        if placed != (mesh, (Shard(0),)) or mesh.ndim != 1:
            how = "not sharded" if placed is None else f"on the mesh {placed[0]} with {placed[1]}"
            return (
                "All parameters must be sharded by rows, Shard(0), over one dimension of ranks, a node's, or none, got"
                f" {name} of shape {tuple(parameter.shape)}, {how}. Call fully_shard(module, mesh=mesh['shard']) with"
                " the same mesh each time, on the whole model too, or freeze the parameter. A dimension of tensor"
                " parallelism is not supported, and the nodes' is SCAPE's."
            )
    if process_group is None and mesh.size() < world_size():
        return (
            "`process_group` must be the ranks with the same rows, one of each node, for sharded parameters, got None"
            f" and nodes of {mesh.size()} in {world_size()} ranks. Pass process_group=mesh['replicate'].get_group()."
        )
    return None


def check_sharding(size: object, reshard_after_forward: object) -> None:
    """Raises ``ValueError`` if the first is no number of ranks, or the second no bool."""
    if size != "node" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(
            f'`local_group_size` must be a whole number >= 1 or "node", got {size!r}. Use "node" for all ranks of a'
            " node, 1 to train without sharding."
        )
    if not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"`reshard_after_forward` must be True or False, got {reshard_after_forward!r}. Leave it out if unsure."
        )
