"""What all ranks do together ends on all of them, at once, where it fails on one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_scape.comm.collectives import Communicator, known_to
from lightning_scape.comm.lost_ranks import is_explained


class Together:
    """For a strategy, whose hooks are called inside and outside of :meth:`inside`."""

    def __init__(self) -> None:
        self._ranks: Communicator | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, all ranks do the same; an error of one of them becomes one of all, at the end at the latest.

        Collective. A message of 1 KB or so each time, for what is rare.

        Raises:
            Exception: the first rank's error, on every rank.
        """
        self._ranks = ranks = Communicator()
        try:
            yield
        except Exception as error:
            # A message that failed was the others', too: they have their own error, or are gone.
            if not known_to(error, ranks.world_size) and not is_explained(error):
                ranks.raise_together(error)
            raise
        finally:
            self._ranks = None
        ranks.raise_together(None)

    def agree(self) -> None:
        """Inside, and before a message: raises what has failed on any rank, which else would be waited for.

        Outside it does nothing.
        """
        if self._ranks is not None:
            self._ranks.raise_together(None)
