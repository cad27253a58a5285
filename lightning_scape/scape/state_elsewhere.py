"""``optimizer.state`` of a ScapeOptimizer: each rank holds a part of the moments, and torch's dict would be empty."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NoReturn

from lightning_scape.core.private_names import host_asks

_ELSEWHERE = (
    "each rank holds a part of it. Read it by `optimizer.state_dict()` (of several ranks: on rank 0, after"
    " `optimizer.consolidate_state_dict()` on all), change it by `optimizer.load_state_dict(...)`, or let it begin anew"
    " by `optimizer.state.clear()`, both on all ranks."
)


class StateElsewhere(dict[Any, Any]):
    """Says where the state is if somebody reads or changes it. Empty for torch and Lightning, which move its contents.

    Args:
        begin_anew: drops the whole state, on this rank.
    """

    def __init__(self, begin_anew: Callable[[], None]) -> None:
        super().__init__()
        self._begin_anew = begin_anew

    def refuse(self, *_: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(f"Under SCAPE the optimizer's `state` cannot be read or changed in place: {_ELSEWHERE}")

    # Its length may not be asked, either: torch's `get_optimizer_state_dict` takes a step where it is 0.
    __getitem__ = __setitem__ = __delitem__ = __len__ = __or__ = __ior__ = refuse
    copy = pop = popitem = setdefault = update = refuse  # type: ignore[assignment]

    def _look(self) -> dict[Any, Any]:
        """An empty dict, for a loop that moves all to a device. Warns every caller but the hosts."""
        if not host_asks():
            warnings.warn(f"Under SCAPE the optimizer's `state` is empty: {_ELSEWHERE}", stacklevel=3)
        return {}

    def __iter__(self) -> Any:
        return iter(self._look())

    def __contains__(self, key: object) -> bool:
        return key in self._look()

    def keys(self) -> Any:
        """No keys."""
        return self._look().keys()

    def values(self) -> Any:
        """No values."""
        return self._look().values()

    def items(self) -> Any:
        """No items."""
        return self._look().items()

    def get(self, key: Any, default: Any = None, /) -> Any:
        """The default."""
        return self._look().get(key, default)

    def clear(self) -> None:
        """Drops moments, residuals and steps, as if the optimizer had just been built. On all ranks."""
        self._begin_anew()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: see optimizer.state_dict()>"

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,)  # in a copy of the optimizer that SCAPE stands in for
