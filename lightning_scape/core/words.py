"""How figures are written for people."""

from __future__ import annotations


def show_bytes(size: float) -> str:
    """``1_234_567`` is ``"1.23 MB"``."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """``0.0123`` is ``"12.3 ms"``."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
