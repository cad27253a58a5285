"""How figures are written for people, and what several places say."""

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


def no_option(name: str, received: str, now: str) -> str:
    """The error for an option of earlier versions: ``received`` says what was given, ``now`` what holds for all."""
    return f"`{name}` is no option any more, {received}: {now}. Leave it out."
