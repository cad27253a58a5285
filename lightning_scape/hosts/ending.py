"""The end of a run: every part of it is tried, and none of them hides the error that the run has ended with."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable

from lightning_scape.core.words import show_error


def run_all(parts: Iterable[Callable[[], object]], quiet: bool) -> None:
    """Calls each part, whatever becomes of the others.

    Args:
        parts: in order.
        quiet: another error is on its way and must be what the user sees: those of the parts become warnings.

    Raises:
        Exception: the first part's, unless ``quiet``; after all were called.
    """
    first: Exception | None = None
    for part in parts:
        try:
            part()
        except Exception as error:
            if quiet or first is not None:
                mention(f"At the end of the run, after another error: {show_error(error)}")
            else:
                first = error
    if first is not None:
        raise first


def mention(text: str) -> None:
    """A warning that stays one where warnings are made errors: another error is on its way."""
    with contextlib.suppress(Warning):
        warnings.warn(text, stacklevel=3)
