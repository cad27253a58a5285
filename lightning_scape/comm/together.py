"""What all ranks do together ends on all of them, at once, where it fails on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from lightning_scape.comm.collectives import Communicator, known_to
from lightning_scape.comm.lost_ranks import is_explained


@contextlib.contextmanager
def together(ranks: Communicator) -> Iterator[Callable[[], None]]:
    """Inside, all ranks do the same; an error of one of them becomes one of all. Collective.

    It gives a function to call before each message inside: there ranks learn of an error that another one has met on
    its way, in place of waiting for it. They learn of the last ones at the end. A message of 1 KB or so each time, for
    what is rare.

    Args:
        ranks: all that take part.

    Raises:
        Exception: the first rank's error, on every rank.
    """
    try:
        yield lambda: ranks.raise_together(None)
    except Exception as error:
        # A message that failed was the others', too: they have their own error, or are gone.
        if not known_to(error, ranks.world_size) and not is_explained(error):
            ranks.raise_together(error)
        raise
    ranks.raise_together(None)


class Together:
    """:func:`together` over all ranks for a strategy, whose hooks are called inside and outside of it."""

    def __init__(self) -> None:
        self._agree: Callable[[], None] | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, :meth:`agree` is heard. Collective."""
        with together(Communicator()) as self._agree:
            try:
                yield
            finally:
                self._agree = None

    def agree(self) -> None:
        """Inside, and before a message: raises what has failed on any rank. Outside it does nothing."""
        if self._agree is not None:
            self._agree()
