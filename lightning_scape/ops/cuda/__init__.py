"""Triton kernels: each the twin of the function of the same name and signature in :mod:`..naive`.

What is bitwise equal to the twin and what only rounds:

==================================== ==================================================================================
select, unpack_mask                  bitwise
quantize, dequantize, pack           bitwise
gather_params, scatter_params        bitwise
sweep                                bitwise: ``scale * grad`` is rounded before it is added or squared
squared_norm, sketch                 another order of summation, the same at every run: no atomic additions of floats
update_adamw                         ``exp`` rounds differently (2 units in the last place)
checksum, fold, compact, update_adams  the twin, in larger parts: of few steps, or none
accumulate_exp_avg_sq
pack_mask                            the twin, in larger parts: of the own shard
gather_blocks, scatter_blocks,       the twin itself: a few calls of torch, of the size of what is sent
mean, changes
quantize_with_error                  bitwise: the twin, with this module's quantize
adams_step, adamw_step               the twin itself: not called on a device
==================================== ==================================================================================

Products and sums are never contracted (``enable_fp_fusion=False``): the twin's are not. bf16 is rounded and widened
as integers, which is the same instruction count, and exact in Triton's interpreter too. Lists of parameters are worked
off in one launch per dtype: tables on the device say where each tensor lies and which of its entries a program takes.
No function here makes the CPU wait for the device, or asks it for a size. How many entries a block sends is a constant
of no kernel: a warm-up of the sparsity goes through hundreds of numbers, and each would be compiled anew.

Offsets are 64-bit wherever a tensor may hold 2**31 entries or more. Run with ``TRITON_INTERPRET=1`` on CPU tensors to
test without a GPU.

The kernels stand by theme in :mod:`.gradients`, :mod:`.masks`, :mod:`.sweep`, :mod:`.update` and
:mod:`.wire`; :mod:`.numbers` and :mod:`.launch` serve them all.
"""

from lightning_scape.ops.cuda import gradients, masks, sweep, update, wire  # noqa: F401  they register what they have
