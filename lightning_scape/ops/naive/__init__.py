"""The operations of a step in plain PyTorch: the definition that every faster implementation is tested against.

Symbols: ``B`` block length, ``q`` entries sent per block, ``R`` rows (blocks) of the tensor at hand, ``P`` parameters.
A *mask* is an integer tensor ``[R, q]`` of positions in ``0 .. B-1``, no position twice in a row; ``mask=None`` stands
for all of them (``q = B``), which costs no index. A *scale* is a 0-dim fp32 tensor: the clipping factor of the step,
and 0 for a step that must be skipped; every function here then leaves its state untouched.

They serve where no faster implementation does. What is given a whole residual or gradient works on a part at a time.
"""

from lightning_scape.ops.naive.gradients import *  # noqa: F403
from lightning_scape.ops.naive.masks import *  # noqa: F403
from lightning_scape.ops.naive.update import *  # noqa: F403
from lightning_scape.ops.naive.wire import *  # noqa: F403
