"""What a method shows in a Trainer's progress bar in every step: SCAPE's density of the moment."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from lightning_scape.core.method import find_all
from lightning_scape.hosts.advice import with_prefixes


class DensityBar:
    """Takes the place of a bar's ``get_metrics``: adds what the methods show (``Progress.shown``).

    Logged with ``prog_bar=True`` it would be a tensor on the device, for which the bar waits.

    Args:
        bar: the Trainer's.
        strategy: whose optimizers it looks at.
    """

    def __init__(self, bar: ProgressBar, strategy: Any) -> None:
        self._bar, self._own, self._strategy = bar, bar.get_metrics, strategy
        bar.get_metrics = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the bar would have given, and that."""
        methods = with_prefixes(find_all(self._strategy.optimizers))
        added = {f"{prefix}/{name}": value for prefix, each in methods for name, value in each.progress().shown.items()}
        return {**self._own(*args, **kwargs), **added}

    def take_off(self) -> None:
        """The bar is as it was."""
        vars(self._bar).pop("get_metrics", None)
