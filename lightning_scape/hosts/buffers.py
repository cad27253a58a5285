"""Buffers that a module updates from its own batch (BatchNorm's statistics): all ranks take rank 0's now and then.

DDP hands them on before each forward pass. Here each rank trains on with its own; before a validation, a save and the
end all take rank 0's, so that what is validated and saved is one model.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_scape.comm.collectives import Communicator, broadcast_tensors
from lightning_scape.core.private_names import IGNORED_BY_DDP
from lightning_scape.core.replicas import check_same_setup
from lightning_scape.core.tensors import can_be_sent


def share(modules: Iterable[nn.Module]) -> None:
    """Overwrites the modules' buffers with rank 0's, but for those that DDP was told to leave alone. Collective.

    Raises:
        ValueError: ranks have different buffers by now; on every rank.
    """
    ranks = Communicator()
    if ranks.world_size == 1:
        return
    buffers = {
        name: buffer
        for module in modules
        for name, buffer in module.named_buffers()
        if can_be_sent(buffer) and not isinstance(buffer, DTensor) and name not in getattr(module, IGNORED_BY_DDP, ())
    }
    described = [(name, tuple(each.shape), str(each.dtype)) for name, each in buffers.items()]
    check_same_setup(ranks, {"buffers": described})
    broadcast_tensors(buffers.values())
