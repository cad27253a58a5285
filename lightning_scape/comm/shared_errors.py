"""An error on its way from one rank to all."""

from __future__ import annotations

import contextlib
import pickle

_RAISED_ON = "_lightning_scape_raised_on"


def portable(error: Exception | None) -> Exception | None:
    """The error as it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def note_ranks(error: Exception, ranks: int) -> None:
    """Notes in an error that so many ranks raise it together."""
    with contextlib.suppress(AttributeError):  # a class with slots
        setattr(error, _RAISED_ON, ranks)


def known_to(error: Exception, ranks: int) -> bool:
    """Whether as many ranks have raised it together: it need not be told again."""
    return bool(getattr(error, _RAISED_ON, 0) >= ranks)
