"""The density of the moment in a Trainer's progress bar."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import ProgressBar

from lightning_scape.hosts import advice


class DensityBar:
    """Takes the place of a bar's ``get_metrics``: adds the density, as long as the warm-up lasts.

    Logged with ``prog_bar=True`` it would be a tensor on the device, for which the bar waits.

    Args:
        bar: the Trainer's.
        strategy: whose optimizers it looks at.
    """

    def __init__(self, bar: ProgressBar, strategy: Any) -> None:
        self._bar, self._own, self._strategy = bar, bar.get_metrics, strategy
        bar.get_metrics = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the bar would have given, and the density."""
        return {**self._own(*args, **kwargs), **advice.densities(self._strategy.optimizers)}

    def take_off(self) -> None:
        """The bar is as it was."""
        vars(self._bar).pop("get_metrics", None)
