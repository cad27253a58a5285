"""Triton kernels: each the twin of the function of the same name and signature in :mod:`..naive`.

What is bitwise equal to the twin and what only rounds:

==================================== ==================================================================================
select, merge, compact               bitwise
quantize, dequantize                 bitwise
gather_params, scatter_params,       bitwise
renew_masters
propose                              bitwise: the twin's, with this module's select
fold, accumulate_exp_avg,            bitwise: ``scale * grad`` is rounded before it is added or squared
accumulate_exp_avg_sq, sweep
squared_norm, sketch                 another order of summation, the same at every run: no atomic additions of floats
update_adams, update_adamw           ``exp`` rounds differently (2 units in the last place)
checksum                             the twin, in larger parts: not part of every step
gather_blocks, scatter_blocks,       the twin itself: a few calls of torch, of the size of what is sent
mean, changes
quantize_with_error                  bitwise: the twin, with this module's quantize
adams_step, adamw_step               the twin itself: not called on a device
==================================== ==================================================================================

Products and sums are never contracted (``enable_fp_fusion=False``): the twin's are not. bf16 is rounded and widened
as integers, which is the same instruction count, and exact in Triton's interpreter too. Lists of parameters are worked
off in one launch per dtype: tables on the device say where each tensor lies and which of its entries a program takes.
No function here makes the host wait for the device, or asks it for a size. How many entries a block sends is a constant
of no kernel: a warm-up of the sparsity goes through hundreds of numbers, and each would be compiled anew.

Offsets are 64-bit wherever a tensor may hold 2**31 entries or more. Run with ``TRITON_INTERPRET=1`` on CPU tensors to
test without a GPU.

The kernels stand by theme in :mod:`.gradients`, :mod:`.masks`, :mod:`.sweep`, :mod:`.update` and
:mod:`.wire`; :mod:`.numbers` and :mod:`.launch` serve them all.
"""

from lightning_scape.ops.cuda.gradients import (
    accumulate_exp_avg,
    accumulate_exp_avg_sq,
    fold,
    sketch,
    squared_norm,
)
from lightning_scape.ops.cuda.gradients import sketch_plan as _sketch_plan
from lightning_scape.ops.cuda.launch import cached_chunks as _cached_chunks
from lightning_scape.ops.cuda.launch import cached_shares as _cached_shares
from lightning_scape.ops.cuda.launch import cached_table as _cached_table
from lightning_scape.ops.cuda.masks import compact, merge, propose, select
from lightning_scape.ops.cuda.sweep import sweep
from lightning_scape.ops.cuda.update import (
    checksum,
    gather_params,
    renew_masters,
    scatter_params,
    update_adams,
    update_adamw,
)
from lightning_scape.ops.cuda.wire import dequantize, quantize, quantize_with_error
from lightning_scape.ops.naive import (
    AdamWStep,
    Hyper,
    RowNumbers,
    SecondMoment,
    ShardState,
    TauStep,
    adams_step,
    adamw_step,
    changes,
    gather_blocks,
    mean,
    position_dtype,
    proposal_bytes,
    scatter_blocks,
    to_device,
    votes_in,
)

__all__ = [
    "AdamWStep",
    "Hyper",
    "RowNumbers",
    "SecondMoment",
    "ShardState",
    "TauStep",
    "accumulate_exp_avg",
    "accumulate_exp_avg_sq",
    "adams_step",
    "adamw_step",
    "changes",
    "checksum",
    "compact",
    "dequantize",
    "fold",
    "gather_blocks",
    "gather_params",
    "mean",
    "merge",
    "position_dtype",
    "proposal_bytes",
    "propose",
    "quantize",
    "quantize_with_error",
    "renew_masters",
    "scatter_blocks",
    "scatter_params",
    "select",
    "sketch",
    "squared_norm",
    "sweep",
    "to_device",
    "update_adams",
    "update_adamw",
    "votes_in",
]

_CACHES = (_cached_table, _cached_chunks, _cached_shares, _sketch_plan)
"""Tables that are kept, by what they were made from."""
