"""Runs a function in several processes that share a gloo process group: what every multi-process test goes through.

Processes are forked from one server that has imported torch and the package already, and is a warm Python itself (see
``warm_python.py``). Measured on two cores: the first launch in a session takes 4 s (the server's imports), each further
one of two or three ranks 0.1 s. A fresh interpreter ("spawn") would need 3.4 s of imports for every rank of a launch.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import io
import itertools
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.spawn
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors
from warm_python import warm_python

import lightning_scape

TESTS = Path(__file__).resolve().parent
PRELOADED = ["torch", "torch.distributed", "pytest", "hypothesis"]
PRELOADED += sorted({f"lightning_scape.{home}" for home in lightning_scape.HOMES.values()})
STACK_DUMP_SIGNAL = signal.SIGUSR1
STACK_DUMP_SECONDS = 0.3


class RankError(RuntimeError):
    """A rank ended without a result that could be brought back: it died, or raised what cannot be pickled."""


class RemoteTraceback(Exception):  # noqa: N818 - not an error of its own: the cause that shows where one came from
    """The traceback of an exception raised in another process."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return f"on rank {self.rank}:\n\n{self.text}"


@dataclass(frozen=True)
class _Task:
    """What a rank needs to know. The function travels pickled, so that tensors in it need no shared memory."""

    rank: int
    world_size: int
    call: bytes
    store: str
    stacks: str
    timeout: float
    environ: dict[str, str]


@dataclass(frozen=True)
class _Outcome:
    """What became of a rank. ``at`` is the system-wide monotonic clock: it tells which rank failed first."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    at: float = 0.0


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    workdir: Path,
    timeout: float = 120.0,
    expect_errors: bool = False,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every rank of a gloo process group and return the results in rank order.

    Tests use it as the fixture ``run_ranks``, which fills in ``workdir``.

    Args:
        fn: a function of a module's top level. It runs in a process of its own, with the caller's environment variables
            and those of torchrun (RANK, WORLD_SIZE, ...), one torch thread, and uninitialised memory poisoned.
        world_size: number of ranks.
        args: passed on; they and the results must be picklable (tensors are).
        workdir: directory for the ranks' meeting point; no ports are used.
        timeout: seconds for the whole call, and for each collective in it.
        expect_errors: return the exception of a rank that failed in the place of its result, once all have ended.

    Raises:
        BaseException: what the first rank to fail raised, its traceback in the ``__cause__``; the others are killed.
        RankError: that rank died, or its result or exception cannot be pickled.
        TimeoutError: some rank is still running; the message shows where. All are killed.
    """
    __tracebackhide__ = True  # pytest then shows the rank's own traceback, not ours
    try:
        call = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks needs a function of a module's top level and picklable arguments, got {fn!r}: {error}. Move it"
            " out of the test, and pass what it used as arguments."
        ) from error
    context = start_server()
    store = _fresh_file(workdir, "store")
    deadline = time.monotonic() + timeout
    ranks: list[_Rank] = []
    try:
        for rank in range(world_size):
            stacks = str(_fresh_file(workdir, f"stacks-{rank}"))
            task = _Task(rank, world_size, call, str(store), stacks, timeout, dict(os.environ))
            ranks.append(_Rank(context, task))
        outcomes = _collect(ranks, deadline, timeout, keep_going=expect_errors)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed and not expect_errors:
            first = min(failed, key=lambda outcome: outcome.at).error
            assert first is not None
            raise first
        # The ranks leave their process group together, only now: none has its connection cut while it still works.
        for rank in ranks:
            rank.release()
        for rank in ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        return [outcome.value if outcome.error is None else outcome.error for outcome in outcomes]
    finally:
        for rank in ranks:
            rank.kill()


def start_server() -> Any:
    """The multiprocessing context whose processes come from the preloaded server, started at the first call.

    Where there is a GPU they start anew: the server has asked for it, and what is forked from it has none.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    saved = dict(os.environ)
    try:
        # Python up to 3.12 (at least) does not give the server our sys.path: it would preload nothing of ours.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS), saved.get("PYTHONPATH", "")])
        # A thread pool would not survive the fork.
        os.environ["OMP_NUM_THREADS"] = "1"
        multiprocessing.spawn.set_executable(warm_python())
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.spawn.set_executable(sys.executable)
        os.environ.clear()
        os.environ.update(saved)
    return context


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, context: Any, task: _Task) -> None:
        self.task = task
        self.outcome: _Outcome | None = None
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_main, args=(task, theirs), name=f"rank-{task.rank}", daemon=False)
        self.process.start()
        theirs.close()

    def receive(self) -> None:
        """Take the outcome; to be called when the connection has something or has broken."""
        rank = self.task.rank
        try:
            value, error, text, at = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(5.0)
            error = RankError(f"rank {rank} died without a result, exit code {self.process.exitcode}.")
            self.outcome = _Outcome(rank, error=error, at=time.monotonic())
            return
        if error is not None:
            error.__cause__ = RemoteTraceback(rank, text)
        self.outcome = _Outcome(rank, value, error, at)

    def release(self) -> None:
        with contextlib.suppress(OSError):  # it has ended already
            self.connection.send_bytes(b"")

    def stack(self) -> str:
        return Path(self.task.stacks).read_text() or "(no stack: the process had not started its work)\n"

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def _collect(ranks: list[_Rank], deadline: float, timeout: float, *, keep_going: bool) -> list[_Outcome]:
    """Wait for the ranks' outcomes; without ``keep_going`` only until one of them is a failure."""
    while pending := [rank for rank in ranks if rank.outcome is None]:
        ready = wait([rank.connection for rank in pending], max(0.0, deadline - time.monotonic()))
        for rank in pending:
            if rank.connection in ready:
                rank.receive()
        if not keep_going and any(rank.outcome is not None and rank.outcome.error is not None for rank in ranks):
            break
        if not ready:
            raise TimeoutError(_describe_timeout(ranks, timeout))
    return [rank.outcome for rank in ranks if rank.outcome is not None]


def _describe_timeout(ranks: list[_Rank], timeout: float) -> str:
    stuck = [rank for rank in ranks if rank.outcome is None]
    for rank in stuck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, STACK_DUMP_SIGNAL)
    time.sleep(STACK_DUMP_SECONDS)
    names = ", ".join(str(rank.task.rank) for rank in stuck)
    lines = [f"rank {names} of {len(ranks)} still running after {timeout} s:"]
    lines += [f"\nrank {rank.task.rank} was here:\n{rank.stack()}" for rank in stuck]
    for rank in ranks:
        if rank.outcome is not None:
            error = rank.outcome.error
            lines.append(f"rank {rank.task.rank} " + ("had returned" if error is None else f"had raised {error!r}"))
    return "\n".join(lines)


def _main(task: _Task, connection: Connection) -> None:
    """The life of a rank."""
    stacks = open(task.stacks, "w")  # noqa: SIM115 - open until the process ends, for the signal handler
    faulthandler.register(STACK_DUMP_SIGNAL, file=stacks)
    _adopt_environment(task)
    torch.set_num_threads(1)
    reset_rank_zero(task.rank)
    value = error = store = None
    text = ""
    try:
        fn, args = pickle.loads(task.call)
        store = dist.FileStore(task.store, task.world_size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=task.rank,
            world_size=task.world_size,
            timeout=datetime.timedelta(seconds=task.timeout),
        )
        store.add(_CONNECTED, 1)
        with poisoned_empty():
            value = fn(task.rank, task.world_size, *args)
    except BaseException as raised:  # also SystemExit and what pytest.fail raises: the parent decides
        error, text = raised, traceback.format_exc()
    connection.send_bytes(_pack(task.rank, value, error, text, time.monotonic()))
    if error is not None:
        if store is not None and dist.is_initialized():
            _wait_until_all_are_connected(store, task.world_size)
        # Leave at once, as a crashed process would: that is what lets the other ranks' collectives fail.
        _flush()
        os._exit(1)
    with contextlib.suppress(EOFError):
        connection.recv_bytes()
    if dist.is_initialized():
        dist.destroy_process_group()


_CONNECTED = "connected"


def _wait_until_all_are_connected(store: dist.Store, world_size: int, seconds: float = 5.0) -> None:
    """A rank that leaves while another still connects would make that one fail, and not for what it was told to do."""
    deadline = time.monotonic() + seconds
    while store.add(_CONNECTED, 0) < world_size and time.monotonic() < deadline:
        time.sleep(0.005)


def _adopt_environment(task: _Task) -> None:
    os.environ.clear()  # it is the server's, from when that was started
    os.environ.update(task.environ)
    os.environ.update(RANK=str(task.rank), LOCAL_RANK=str(task.rank), GROUP_RANK="0", NODE_RANK="0")
    os.environ.update(WORLD_SIZE=str(task.world_size), LOCAL_WORLD_SIZE=str(task.world_size))
    if sys.platform == "linux":
        # Else gloo looks up the host's name, which in a sandbox may lead nowhere.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _pack(rank: int, value: Any, error: BaseException | None, text: str, at: float) -> bytes:
    """Pickle what can be pickled, by plain pickle: torch's own reducers would pass file descriptors."""
    try:
        packed = pickle.dumps((value, error, text, at))
        pickle.loads(packed)  # an exception with arguments of its own may pickle and yet not come back
    except Exception as failure:
        if error is None:
            text = traceback.format_exc()
            error = RankError(f"the result of rank {rank} cannot be pickled: {failure}")
        else:
            error = RankError(f"rank {rank} raised {type(error).__qualname__}: {error}")
        return pickle.dumps((None, error, text, at))
    return packed


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, io.UnsupportedOperation):
            stream.flush()


_fresh_numbers = itertools.count()


def _fresh_file(workdir: Path, name: str) -> Path:
    path = workdir / f"{name}-{next(_fresh_numbers)}"
    path.touch()
    return path


def reset_rank_zero(rank: int = 0) -> None:
    """Set the rank that Lightning's ``rank_zero_only`` goes by, where that is imported: a Trainer sets it for good."""
    for name in ("lightning.fabric.utilities.rank_zero", "lightning.pytorch.utilities.rank_zero"):
        if name in sys.modules:
            importlib.import_module(name).rank_zero_only.rank = rank


needs_compiler = pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++")), reason="torch.compile on a CPU needs a C++ compiler (g++, or CXX)"
)


_EMPTY = {"empty": torch, "empty_like": torch, "empty_strided": torch, "new_empty": torch.Tensor}
# Which functions obey `with torch.device(...)` is looked up once and kept: let it find the originals.
_device_constructors()


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Fill what ``torch.empty`` and its like return with NaN (integers: their largest value, booleans: True).

    Fresh memory is mostly zeros, so code that forgets to write some of it passes until it runs for longer. Left alone
    are tensors without memory (meta), subclasses, and code that is being compiled.
    """
    originals = {name: getattr(owner, name) for name, owner in _EMPTY.items()}
    for name, owner in _EMPTY.items():
        setattr(owner, name, _poisoning(originals[name]))
    try:
        yield
    finally:
        for name, owner in _EMPTY.items():
            setattr(owner, name, originals[name])


def _poisoning(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and type(tensor) is torch.Tensor and not tensor.is_meta:
            _poison(tensor)
        return tensor

    poisoned.__name__ = poisoned.__qualname__ = original.__name__
    return poisoned


def _poison(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        return
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
