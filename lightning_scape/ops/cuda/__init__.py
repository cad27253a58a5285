"""The operations on CUDA that pay, as Triton kernels: each computes that of its name in :mod:`..naive`.

All are bitwise equal to the definition, but for two that round otherwise: ``sketch`` sums in another order, the same at
every run (no atomic additions of floats); ``update_shard`` takes another ``exp``.

Products and sums are never contracted (``enable_fp_fusion=False``): the twin's are not. bf16 is rounded and widened
as integers, which is the same instruction count, and exact in Triton's interpreter too. Lists of parameters are worked
off in one launch per dtype: tables on the device say where each tensor lies and which of its entries a program takes.
No function here makes the CPU wait for the device, or asks it for a size. How many entries a block sends is a constant
of no kernel: a warm-up of the sparsity goes through hundreds of numbers, and each would be compiled anew.

Offsets are 64-bit wherever a tensor may hold 2**31 entries or more. Run with ``TRITON_INTERPRET=1`` on CPU tensors to
test without a GPU.

The kernels stand by theme in :mod:`.gradients`, :mod:`.residual`, :mod:`.update` and :mod:`.wire`; :mod:`.launch`
serves them all.
"""

from lightning_scape.ops.cuda.gradients import sketch  # noqa: F401
from lightning_scape.ops.cuda.residual import select, sweep, unpack_mask  # noqa: F401
from lightning_scape.ops.cuda.update import gather_params, scatter_params, update_shard  # noqa: F401
from lightning_scape.ops.cuda.wire import dequantize, pack_values  # noqa: F401
