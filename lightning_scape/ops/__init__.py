"""The arithmetic of a step; one name each, whatever runs it."""

from lightning_scape.ops.reference import (
    Hyper,
    TauStep,
    accumulate_first_moment,
    checksum,
    compact,
    fold,
    gather,
    position_dtype,
    put,
    scatter,
    select,
    sketch,
    squared_norm,
    take,
    tau_step,
    update,
)

__all__ = [
    "Hyper",
    "TauStep",
    "accumulate_first_moment",
    "checksum",
    "compact",
    "fold",
    "gather",
    "position_dtype",
    "put",
    "scatter",
    "select",
    "sketch",
    "squared_norm",
    "take",
    "tau_step",
    "update",
]
