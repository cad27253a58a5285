"""Where the ranks of a job meet before any message: a store, in which each leaves what the others need to know.

Nothing here waits without a limit. Who did not come is named, for the store knows who did.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # torch names them late

from lightning_scape.comm.channel import missing_words
from lightning_scape.comm.restarts import uses_agent_store
from lightning_scape.hosts.rendezvous import explained_rendezvous
from lightning_scape.tools.arguments import of_launcher

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which a launcher tells a process who it is."""
_PREFIX = "lightning_scape/doctor"
_LAST_SECONDS = 5.0


@dataclass(frozen=True)
class Place:
    """Which rank this process is, of which job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks of this host."""
    address: str = ""
    """MASTER_ADDR."""
    port: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        """From what torchrun sets; a process that nothing has launched is alone.

        Raises:
            ValueError: some of the variables are missing, or are not what they should be.
        """
        given = [name for name in LAUNCHERS if environ.get(name)]
        if "RANK" not in given and environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        if missing := [name for name in LAUNCHERS if name not in given]:
            raise ValueError(
                f"A launcher must set {', '.join(LAUNCHERS)}, got no {', '.join(missing)}. Launch all ranks with"
                " torchrun, or unset RANK and WORLD_SIZE to look at this host alone."
            )
        rank, world_size, port = (of_launcher(environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local_rank = of_launcher(environ, "LOCAL_RANK", 0)
        local_size = of_launcher(environ, "LOCAL_WORLD_SIZE", 1)
        if not rank < world_size or not local_rank < local_size or world_size < local_size:
            raise ValueError(
                f"RANK must be below WORLD_SIZE, and LOCAL_RANK below LOCAL_WORLD_SIZE, got rank {rank} of"
                f" {world_size} and local rank {local_rank} of {local_size}. Launch all ranks with torchrun."
            )
        return cls(rank, world_size, local_rank, local_size, environ["MASTER_ADDR"], port)

    @property
    def nodes(self) -> int:
        """Hosts of the job, if all run as many ranks as this one."""
        return -(-self.world_size // self.local_world_size)

    @property
    def name(self) -> str:
        """For a report: ``rank 3 (host)``."""
        return f"rank {self.rank} ({socket.gethostname()})"

    def node_of(self, rank: int) -> int:
        """Which host a rank is on, counted from 0."""
        return rank // self.local_world_size


class Meeting:
    """The store of a job's ranks.

    Args:
        place: this process's.
        seconds: how long it waits for the others, at each point.

    Raises:
        RuntimeError: the store cannot be reached; with what to set.
    """

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        # Where torchrun keeps a store of its own, every rank is a guest; else rank 0 opens one.
        host = place.rank == 0 and not uses_agent_store()
        self.environment = SimpleNamespace(world_size=lambda: place.world_size, global_rank=lambda: place.rank)
        """Of this job, for the errors of :func:`explained_rendezvous`."""
        with explained_rendezvous(self.environment):
            self.root: Store = TCPStore(
                place.address,
                place.port,
                place.world_size,
                is_master=host,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
            )
        # A store may outlive a run (torchrun starts its processes again); what an earlier one left is not ours.
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"{_PREFIX}/{again}", self.root)

    def leave(self, topic: str, value: Any) -> None:
        """Writes this rank's value, which JSON can hold, under a topic."""
        self.store.set(f"{topic}/{self.place.rank}", json.dumps(value))

    def collect(self, topic: str, seconds: float, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """What ranks have left under a topic, by rank, once all have; after so many seconds, what is there by then.

        Args:
            topic: its name.
            seconds: how long to wait.
            ranks: of which ranks; None is all.
        """
        keys = {rank: f"{topic}/{rank}" for rank in (range(self.place.world_size) if ranks is None else ranks)}
        missing = missing_words(self.store, keys.values(), seconds)
        return {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if key not in missing}

    def decide(self, topic: str, value: Any, seconds: float) -> Any:
        """One value for all ranks: rank 0 gives it, the others give None and wait for it.

        Args:
            topic: its name.
            value: rank 0's.
            seconds: how long the others wait.

        Raises:
            TimeoutError: rank 0 has not decided in time.
        """
        if value is not None:
            self.store.set(topic, json.dumps(value))
            return value
        if missing_words(self.store, [topic], seconds):
            raise TimeoutError(f"rank 0 must answer within {seconds:g} s, got no answer. Look at its output.")
        return json.loads(self.store.get(topic))

    def part(self, present: list[int]) -> None:
        """Ends the meeting. Rank 0, which may keep the store, stays until the others have read what they need."""
        self.leave("parted", True)
        if self.place.rank == 0:
            missing_words(self.store, [f"parted/{rank}" for rank in present], _LAST_SECONDS)
