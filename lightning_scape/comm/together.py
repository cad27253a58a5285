"""If what all ranks do together fails on one of them, it ends on all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_scape.comm.collectives import Communicator, known_to


class Together:
    """For a strategy, whose hooks are called inside and outside of :meth:`inside`."""

    def __init__(self) -> None:
        self._ranks: Communicator | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, all ranks do the same. An error on one of them is raised on all, at the end at the latest.

        Collective. Each use sends a message of about 1 KB: for what is rare.

        Raises:
            Exception: the first rank's error, on every rank.
        """
        self._ranks = ranks = Communicator()
        try:
            yield
        except Exception as error:
            if not known_to(error, ranks.world_size):
                ranks.raise_together(error)
            raise
        finally:
            self._ranks = None
        ranks.raise_together(None)

    def agree(self) -> None:
        """Inside, before a message: raises what has failed on any rank, for which the others would wait.

        Outside it does nothing.
        """
        if self._ranks is not None:
            self._ranks.raise_together(None)
