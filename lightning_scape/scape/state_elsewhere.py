"""``optimizer.state`` of a ScapeOptimizer: each rank holds a part of the moments, and torch's dict would be empty."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_scape.core.private_names import host_asks


class StateElsewhere(dict[Any, Any]):
    """Says where the state is to who reads or changes it here. Empty to torch and Lightning, which move what is in it.

    Args:
        begin_anew: drops the whole state, on this rank.
    """

    def __init__(self, begin_anew: Callable[[], None]) -> None:
        super().__init__()
        self._begin_anew = begin_anew

    def refuse(self, *_: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(
            "Under SCAPE the optimizer's `state` must not be read or changed in place, got an attempt to: it is not"
            " there, for each rank holds a part of it. Read it by `optimizer.state_dict()` (of several ranks: on rank"
            " 0, after `optimizer.consolidate_state_dict()` on all), change it by `optimizer.load_state_dict(...)`, or"
            " let it begin anew by `optimizer.state.clear()`, both on all ranks."
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __or__ = __ior__ = refuse
    keys = values = copy = pop = popitem = setdefault = update = refuse  # type: ignore[assignment]

    def get(self, key: Any, default: Any = None, /) -> Any:
        """What is not there, for torch's profiler."""
        return default if host_asks() else self.refuse()

    def items(self) -> Any:
        """None, for torch's state dict and Lightning's moves to a device."""
        return super().items() if host_asks() else self.refuse()

    def clear(self) -> None:
        """Drops moments, residuals and steps, as if the optimizer had just been built. On all ranks."""
        self._begin_anew()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: see optimizer.state_dict()>"

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,)  # in a copy of the optimizer that SCAPE stands in for
