"""The operations on a CPU, compiled by numba: each the twin of the function of that name in :mod:`..naive`.

Each reads and writes its tensors once, in one loop per core, and makes no temporary of their size
(``quantize_with_error`` does where all is sent, or rows differ in their scale). What is bitwise equal to the twin and
what only rounds:

========================================== ============================================================================
select, compact                            bitwise
pack_mask, unpack_mask                     bitwise
quantize, dequantize                       bitwise
quantize_with_error                        bitwise
gather_params, scatter_params              bitwise
sweep, mean, changes                       bitwise
gather_blocks, scatter_blocks              bitwise
update_adamw                               moments and last steps bitwise for entries updated in the step before, else
                                           within rounding: ``exp``, and torch's ``sqrt``, which is not correctly
                                           rounded
squared_norm, sketch                       another order of summation, the same at every run and number of threads
checksum, pack, fold, update_adams,        the twin: of few steps, or none
accumulate_exp_avg_sq
========================================== ============================================================================

The loops are compiled when they are first called for a dtype, and kept on disk (``__pycache__`` of this package, or the
user's cache folder). They release Python's lock, and share their range among ``torch.get_num_threads()`` threads. A
tensor that is not on the CPU, not contiguous, or of fp64, goes to the twin, a few rows at a time (:mod:`.chunked`).
"""

from lightning_scape.ops.cpu import operations, shard, sweep  # noqa: F401  they register what they have
