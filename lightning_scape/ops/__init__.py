"""The arithmetic of a step; one name each, whatever runs it.

The functions of :mod:`.naive` define what is computed. Tensors on CUDA go through the Triton kernels of :mod:`.cuda`,
those on a CPU through the loops of :mod:`.cpu`, compiled by numba, where these have a function of that name
(:mod:`.dispatch`). To compare them, or to rule one out, set the environment variable ``LIGHTNING_SCAPE_OPS`` to one of
:data:`CHOICES`, or use :func:`using`.
"""

from lightning_scape.ops.dispatch import CHOICES as CHOICES
from lightning_scape.ops.dispatch import VARIABLE as VARIABLE
from lightning_scape.ops.dispatch import using as using
from lightning_scape.ops.naive import *  # noqa: F403
