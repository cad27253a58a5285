"""Windows that are dropped because some rank's parameters were not finite: how many, and what the CPU makes of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_scape.core.local_shards import local
from lightning_scape.core.tensors import OnItsWay


class DroppedWindows:
    """Counts dropped windows. On CUDA the CPU learns of one a step late, and never waits for the device.

    Args:
        most: so many in a row raise an error.
        speaks: whether this rank warns.
    """

    def __init__(self, most: int, speaks: bool) -> None:
        self.most, self.speaks = most, speaks
        self.in_row = 0
        self.total = 0
        self._norm: OnItsWay | None = None
        """Of an exchange whose outcome nobody has looked at."""

    def note(self, norm: Tensor) -> None:
        """Takes the norm of an exchange, 0-dim, on its way to the CPU."""
        self._norm = OnItsWay(norm)

    def judge(self) -> bool:
        """Whether the last window was dropped, asked once for each exchange; later calls say False.

        Raises:
            FloatingPointError: too many in a row; on every rank.
        """
        norm, self._norm = self._norm, None
        if norm is None:
            return False
        if math.isfinite(float(norm.read())):
            self.in_row = 0
            return False
        self.in_row += 1
        self.total += 1
        if self.in_row >= self.most:
            raise FloatingPointError(
                f"Parameters must be finite at the end of a window, got NaN or inf in {self.in_row} windows in a row"
                f" (max_skipped={self.most}) on at least one rank; all ranks are back at the starting point of the"
                " first of them. Lower the learning rate, clip gradients, or look for a bad batch; raise `max_skipped`"
                " to wait longer."
            )
        if self.speaks:
            warnings.warn(
                "Parameters were not finite on at least one rank: the window is dropped, all ranks are back at its"
                f" starting point ({self.in_row} in a row, {self.total} in total; an error at {self.most} in a row).",
                stacklevel=5,
            )
        return True

    def forget(self) -> None:
        """Drops a norm that has not been looked at: another state is loaded."""
        self._norm = None


def clear_nonfinite(optimizer: torch.optim.Optimizer) -> None:
    """Sets entries of the optimizer's state that are inf or NaN to zero: else they would spoil every later window."""
    for state in optimizer.state.values():
        # An entry of its own is no parameter's: a count, a tensor.
        for value in state.values() if isinstance(state, Mapping) else [state]:
            if isinstance(value, Tensor) and value.is_floating_point():
                local(value).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
