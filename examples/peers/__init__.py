"""Other methods, each in as few lines as its paper's algorithm needs, over the simulated ranks of one process."""

from collections.abc import Callable

from simulated_ranks import Ranks

from .averaging import Averaging
from .demo import DeMo
from .diloco import DiLoCo
from .powersgd import PowerSGD
from .signsgd import SignSGD
from .sparseloco import SparseLoCoRanks
from .topk import TopK

METHODS: dict[str, Callable[..., Ranks]] = {
    "averaging": Averaging,
    "diloco": DiLoCo,
    "demo": DeMo,
    "powersgd": PowerSGD,
    "signsgd": SignSGD,
    "topk": TopK,
    "sparseloco": SparseLoCoRanks,
}
"""By the name that a run gives."""
