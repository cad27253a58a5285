"""How numbers are written: for people, and into files."""

from __future__ import annotations

from typing import Any

import numpy as np


def show_bytes(size: float) -> str:
    """``1_234_567`` is ``"1.23 MB"``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{show_times(size / unit)} {name}"
    return f"{size:.0f} B"


def show_times(ratio: float) -> str:
    """``6.678`` is ``"6.68"``, ``1382.4`` is ``"1,380"``; no large number has an exponent."""
    short = f"{ratio:.3g}"
    return short if "e+" not in short else f"{float(short):,.0f}"


def show_seconds(seconds: float) -> str:
    """``0.0123`` is ``"12.3 ms"``, ``5000`` is ``"83.3 min"``."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{show_times(seconds / unit)} {name}"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{show_times(seconds * 1e3)} ms"


def with_plain_numbers(value: Any) -> Any:
    """NumPy's numbers in dicts, lists and tuples as Python's, which are equal, and which ``weights_only`` reads.

    A schedule that uses ``np.cos`` makes the learning rate one of them. Dicts, lists and tuples are new.
    """
    if type(value) is dict:
        return {key: with_plain_numbers(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_plain_numbers(each) for each in value)
    return value.item() if isinstance(value, (np.number, np.bool_)) else value
