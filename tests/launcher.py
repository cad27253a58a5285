"""Ranks for tests: processes forked from one that has imported what they need, which meet in a file. No port is used.

A rank lives as long as the tests of its module, and each claim gets a process group of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from poison import poisoned_empty
from torch.distributed.device_mesh import DeviceMesh

TESTS = Path(__file__).resolve().parent


class RankError(RuntimeError):
    """A rank died, or its result or exception cannot be pickled."""


class RemoteTraceback(Exception):  # noqa: N818 - not an error of its own: the cause that shows where one came from
    """Where in another process an exception was raised."""

    def __str__(self) -> str:
        return "on rank {}:\n\n{}".format(*self.args)


def start_server() -> Any:
    """The context of processes that come from the preloaded server. On a GPU they start anew: CUDA survives no fork."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    path = os.environ.get("PYTHONPATH")
    # The server is not told our sys.path (Python 3.11).
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *([path] if path else [])])
    multiprocessing.forkserver.ensure_running()
    os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    return context


class World:
    """``size`` ranks. Whoever has one ends it."""

    def __init__(self, size: int, folder: Path) -> None:
        self.folder, self.calls, self.alive = folder, 0, True
        folder.mkdir(parents=True, exist_ok=True)
        context = start_server()
        self.ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(rank, size, folder, theirs), daemon=False)
            process.start()
            theirs.close()
            self.ranks.append((process, ours))
        for _, connection in self.ranks:
            connection.recv_bytes()  # it is there: what it had to import counts in nobody's timeout

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0, expect_errors: bool = False) -> list[Any]:
        """``fn(rank, world_size, *args)`` of every rank, which sees the caller's environment and torchrun's variables.

        ``fn`` is a function of a module's top level; arguments and results can be pickled. ``timeout``, in seconds, is
        for the whole, and for each collective. After an error the ranks are gone.

        Raises:
            BaseException: what the first rank to fail raised. With ``expect_errors`` it stands in its result's place.
            RankError: that rank died, or what it gave cannot be pickled.
            TimeoutError: some rank is still running; the message shows where.
        """
        __tracebackhide__ = True  # pytest then shows the rank's own traceback
        self.calls += 1
        call = pickle.dumps((fn, args, dict(os.environ), self.calls, timeout))
        outcomes: dict[int, tuple[Any, BaseException | None, float]] = {}
        self.alive, deadline = False, time.monotonic() + timeout + 1
        for _, connection in self.ranks:
            connection.send_bytes(call)
        while len(outcomes) < len(self.ranks):
            pending = {self.ranks[rank][1]: rank for rank in range(len(self.ranks)) if rank not in outcomes}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self._describe(timeout, outcomes))
            outcomes.update({pending[connection]: self._receive(pending[connection]) for connection in ready})
            failed = [(at, error) for _, error, at in outcomes.values() if error is not None]
            if failed and not expect_errors:
                raise min(failed, key=lambda each: each[0])[1]
        if not failed:
            # They leave their process group together, only now: none has its connection cut while it still works.
            for _, connection in self.ranks:
                connection.send_bytes(b"")
            self.alive = True
        values = [outcomes[rank][:2] for rank in range(len(self.ranks))]
        return [value if error is None else error for value, error in values]

    def end(self) -> None:
        for process, connection in self.ranks:
            process.kill()
            process.join()
            connection.close()

    def _receive(self, rank: int) -> tuple[Any, BaseException | None, float]:
        process, connection = self.ranks[rank]
        try:
            value, error, text, at = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            process.join(5.0)
            error = RankError(f"rank {rank} died without a result, exit code {process.exitcode}.")
            return None, error, time.monotonic()
        if error is not None:
            error.__cause__ = RemoteTraceback(rank, text)
        return value, error, at

    def _describe(self, timeout: float, outcomes: dict[int, Any]) -> str:
        stuck = [rank for rank in range(len(self.ranks)) if rank not in outcomes]
        lines = [f"rank {', '.join(map(str, stuck))} of {len(self.ranks)} still running after {timeout} s:"]
        lines += [f"\nrank {rank} was here:\n{(self.folder / f'stack-{rank}').read_text()}" for rank in stuck]
        return "\n".join(lines + [f"rank {rank} had ended: {outcomes[rank]}" for rank in outcomes])


_meshes: list[int] = []
"""One for each device mesh. DTensor remembers meshes, and finds them again in later calls: ranks that have made one
keep their process group."""


def _live(rank: int, size: int, folder: Path, connection: Connection) -> None:
    """The life of a rank: one call after the other, until its parent hangs up."""
    torch.set_num_threads(1)
    init = DeviceMesh.__init__
    DeviceMesh.__init__ = lambda mesh, *args, **options: _meshes.append(1) or init(mesh, *args, **options)
    stack = open(folder / f"stack-{rank}", "w")  # noqa: SIM115 - open until the process ends
    connection.send_bytes(b"")
    while True:
        call = connection.recv_bytes()
        value, error, text = None, None, ""
        try:
            fn, args, environ, number, timeout = pickle.loads(call)
            faulthandler.dump_traceback_later(timeout, file=stack)
            begin_anew(rank, {**environ, **torchrun_variables(rank, size)})
            if not dist.is_initialized():
                store = dist.FileStore(str(folder / f"store-{number}"), size)
                seconds = datetime.timedelta(seconds=timeout)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=seconds)
            dist.barrier()  # a rank that leaves while another still connects would make that one fail
            with poisoned_empty():
                value = fn(rank, size, *args)
        except BaseException as raised:  # also SystemExit and what pytest.fail raises: the parent decides
            error, text = raised, traceback.format_exc()
        connection.send_bytes(_pack(rank, value, error, text))
        if error is not None:
            # Leave at once, as a crashed process would: that is what lets the other ranks' collectives fail.
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(1)
        connection.recv_bytes()
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized() and not _meshes:
            dist.destroy_process_group()


def torchrun_variables(rank: int, size: int) -> dict[str, str]:
    """What torchrun tells a rank; and where gloo would else look up the host's name, which may lead nowhere."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "NODE_RANK": 0, "WORLD_SIZE": size}
    return {name: str(value) for name, value in own.items()} | {
        "LOCAL_WORLD_SIZE": str(size),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def begin_anew(rank: int, environ: dict[str, str]) -> None:
    """Set what earlier calls may have left behind."""
    os.environ.clear()
    os.environ.update(environ)
    reset_rank_zero(rank)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():  # asking is free, telling imports the compiler
        torch.use_deterministic_algorithms(False)


def reset_rank_zero(rank: int = 0) -> None:
    """Set the rank that Lightning's ``rank_zero_only`` goes by, where that is imported: a Trainer sets it for good."""
    for name in ("lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        if name in sys.modules:
            sys.modules[name].rank_zero_only.rank = rank


def _pack(rank: int, value: Any, error: BaseException | None, text: str) -> bytes:
    """By plain pickle: torch's own reducers would pass file descriptors. The clock is the whole machine's."""
    try:
        packed = pickle.dumps((value, error, text, time.monotonic()))
        pickle.loads(packed)  # an exception with arguments of its own may pickle and yet not come back
    except Exception as failure:
        said = f"raised {type(error).__qualname__}: {error}" if error else f"gave what cannot be pickled: {failure}"
        text = text or traceback.format_exc()
        return pickle.dumps((None, RankError(f"rank {rank} {said}"), text, time.monotonic()))
    return packed


def run_script(rank: int, world_size: int, *words: str) -> str:
    """For ``run_ranks``: what ``python <words>`` says, with a script or ``-m`` and a module, and their arguments.

    Raises:
        RuntimeError: it ended with another status than 0; with what it said.
    """
    sys.argv = list(words[1:] if words[0] == "-m" else words)
    sys.path.insert(0, str(Path(words[0]).parent.resolve()))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"{' '.join(words)} ended with {ended.code}, and said: {said.getvalue()}") from None
    return said.getvalue()
