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
        """What the bar would have given, and that; the methods' figures by short names, for a bar has little room."""
        given = self._own(*args, **kwargs)
        methods = list(with_prefixes(find_all(self._strategy.optimizers)))
        for prefix, method in methods:
            given |= {f"{prefix}/{name}": value for name, value in method.progress().shown.items()}
        places = {prefix: "" if len(methods) == 1 else prefix.rpartition("-")[2] + "/" for prefix, _ in methods}
        short: dict[str, Any] = {}
        for name, value in given.items():
            prefix, _, own = name.rpartition("/")
            brief = places[prefix] + own if prefix in places else name
            short[name if brief in given else brief] = value
        return short

    def take_off(self) -> None:
        """The bar is as it was."""
        vars(self._bar).pop("get_metrics", None)
