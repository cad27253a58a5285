"""What tests of two levels share: a mesh of gloo ranks, parameters sharded over its nodes, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


def make_mesh(nodes: int) -> DeviceMesh:
    """``nodes`` times the ranks of a node, all ranks of the job."""
    return init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("replicate", "shard"))


class Holder(nn.Module):
    """Parameters of these shapes, the same on every rank."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.held = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)

    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Whole gradients, of which a sharded parameter takes this rank's rows."""
        for parameter, grad in zip(self.held, gradients, strict=True):
            if grad is None or not hasattr(parameter, "device_mesh"):
                parameter.grad = None if grad is None else grad.clone()
            else:
                parameter.grad = distribute_tensor(
                    grad, parameter.device_mesh, parameter.placements, src_data_rank=None
                )

    def whole(self) -> list[Tensor]:
        """The whole parameters. Collective over the node where they are sharded."""
        return [whole(parameter) for parameter in self.held]


def whole(parameter: Tensor) -> Tensor:
    """A parameter, gathered over its node if it is sharded."""
    gathered = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return gathered.detach().clone()


def sharded(holder: Holder, mesh: DeviceMesh) -> Holder:
    fully_shard(holder, mesh=mesh["shard"])
    return holder


def gradient(holder: Holder, rank: int, step: int) -> list[Tensor]:
    """The gradients of one of all ranks at a step: any process can compute any rank's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in holder.held]


def mean_gradient(holder: Holder, ranks: Sequence[int], step: int) -> list[Tensor]:
    """The mean over some ranks: what the backward pass of ``fully_shard`` leaves on the ranks of a node."""
    each = [gradient(holder, rank, step) for rank in ranks]
    return [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]


def node_of(rank: int, nodes: int) -> list[int]:
    """All ranks of a rank's node."""
    size = dist.get_world_size() // nodes
    return list(range(rank // size * size, (rank // size + 1) * size))
