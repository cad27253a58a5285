"""What must hold of every implementation: of numba's, and of Triton's in its interpreter and on a GPU."""

from kernel_checks.examples import ExampleChecks
from kernel_checks.gradients import GradientChecks
from kernel_checks.inputs import (
    FAR,
    FarAway,
    assert_same_bits,
    awkward,
    bits,
    far_piece,
    flattened,
    groups_of_all_kinds,
    hyper,
)
from kernel_checks.masks import MaskChecks
from kernel_checks.messages import MessageChecks
from kernel_checks.parameters import ParameterChecks
from kernel_checks.sweeps import SWEPT, SweepChecks, SweepJob
from kernel_checks.trainings import TrainingChecks
from kernel_checks.updates import UpdateChecks

__all__ = [
    "FAR",
    "SWEPT",
    "FarAway",
    "KernelChecks",
    "SweepJob",
    "assert_same_bits",
    "awkward",
    "bits",
    "far_piece",
    "flattened",
    "groups_of_all_kinds",
    "hyper",
]


class KernelChecks(
    ExampleChecks,
    MessageChecks,
    MaskChecks,
    GradientChecks,
    UpdateChecks,
    SweepChecks,
    ParameterChecks,
    TrainingChecks,
):
    """Inherit, and say what is checked, and on which device."""
