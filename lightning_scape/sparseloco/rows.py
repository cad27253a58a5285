"""Nodes of several ranks: who exchanges with whom.

Inside a node ``torch.distributed.fsdp.fully_shard`` gives each of ``L`` ranks rows of every parameter (DTensors).
SparseLoCo works on these rows, between the ranks of all nodes that hold the same (docs/design.md, 7).
"""

from __future__ import annotations

from lightning_scape.comm.collectives import Communicator, ProcessGroup, new_group_like, world_size
from lightning_scape.core import local_shards
from lightning_scape.core.parameters import Parameters


def communicators(
    parameters: Parameters, process_group: ProcessGroup | None, overlaps: bool, exchange_group: ProcessGroup | None
) -> tuple[Communicator, Communicator]:
    """Those of the ranks that hold the same rows, and of the ranks of a node; each alone where there is nobody else.

    Collective.

    Args:
        parameters: plain ones, or DTensors.
        process_group: the ranks with the same rows, as the user gave them.
        overlaps: whether exchanges run beside inner steps. They run in a thread of its own: nothing else may be sent on
            the same groups, neither of these nor of FSDP2.
        exchange_group: a group over the same ranks as ``process_group``, for that.
    """
    tensors = parameters.tensors
    shards = local_shards.shard_communicator(tensors)
    if shards.world_size > 1 and overlaps:
        shards = Communicator(new_group_like(shards.process_group, device=parameters.device_of_first_messages), None)
    if process_group is None and local_shards.holds_everything(tensors):
        return Communicator.alone(), shards
    own = None
    if overlaps and world_size(process_group) > 1:
        own = exchange_group or new_group_like(process_group, device=parameters.device_of_first_messages)
    return Communicator.of_optimizer(process_group, own_group=own), shards
