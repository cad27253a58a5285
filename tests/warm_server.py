"""Forks interpreters that have imported torch, Lightning, LitGPT and numba: the other end of ``warm_client.py``.

``<python> warm_server.py <program> <socket> <file descriptor>``; it ends when the descriptor's other end is closed. A
process that it forks looks like ``python <arguments>``: environment, directory, sys.argv, sys.path, ``__main__``,
namespaces and cores are those of the client. Two things differ. The libraries' import is behind it, and numba has
loaded the package's loops. And once threads are joined and exit handlers have run, it ends without freeing every
object, which takes 1.8 s of CPU time.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import itertools
import marshal
import os
import random
import re
import runpy
import select
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from example_modules import load_example
from warm_client import FRESH

PRELOADED = ("torch", "torch.distributed", "lightning.pytorch", "lightning_scape", "litgpt")
PRELOADED += ("torch.distributed.optim",)  # 0.4 s, for Lightning's DDPStrategy when it saves
PRELOADED += ("lightning_scape.scape.method", "lightning_scape.sparseloco.method")
# What libraries look at when they are imported; where it differs the client has to import them itself.
READ_AT_IMPORT = re.compile("NUMBA|TORCH|TRITON|PYTORCH|OMP_|MKL_|OPENBLAS|CUDA|LD_|PYTHON[A-Z]")
# These are looked at later, or set by hand below.
READ_LATER = re.compile("TORCHELASTIC|TORCH_NCCL|TORCHDYNAMO_DISABLE$|PYTHONPATH$|PYTHONUNBUFFERED$")
MOST_FILES = 250
"""What one message may carry."""
HIGH = 400
"""Numbers of files from here on are free, before they are given those that the client knows them by."""


def serve(path: str, lifeline: int, started_with: dict[str, str]) -> NoReturn:
    """Take requests until the tests end."""
    own_path = _path_without_pythonpath()
    added = {name: value for name, value in os.environ.items() if name not in started_with}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)  # who sees it may connect
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the minders
    gc.freeze()
    while True:
        ready, _, _ = select.select([listener, lifeline], [], [])
        if lifeline in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        os.close(lifeline)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _mind(connection, started_with, added, own_path)


def _mind(
    connection: socket.socket, started_with: dict[str, str], added: dict[str, str], own_path: list[str]
) -> NoReturn:
    """Fork the process that was asked for, and pass on signals to it and its status."""
    head, fds, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    request = connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)  # and not the signals behind it
    arguments, environ, directory, client, files = marshal.loads(request)
    program = parse(arguments)
    if program is not None and not program[1] and not Path(directory, program[2][0]).is_file():
        program = None  # Python's own words, then
    environ = {**added, **environ}  # as if the libraries had just been imported
    if program is None or import_settings(environ) != import_settings({**started_with, **added}):
        _end(connection, FRESH)
    child = os.fork()
    if child == 0:
        connection.close()
        _live(
            lambda: _become(*client, dict(zip(files, fds, strict=True)), environ, directory),
            lambda: run(*program, own_path),
        )
    for fd in fds:
        os.close(fd)
    with contextlib.suppress(OSError):  # it has done so itself
        os.setpgid(child, child)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([connection, ended], [], [])[0]):
        assert ready
        try:
            said = connection.recv(1)
        except ConnectionError:
            said = b""
        with contextlib.suppress(ProcessLookupError):
            if said:
                os.kill(child, said[0])
            else:  # the client was killed
                os.killpg(child, signal.SIGKILL)
                break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _end(connection, code if code >= 0 else 256 - code)


def _end(connection: socket.socket, answer: int) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody listens any more
        connection.sendall(answer.to_bytes(8, "little", signed=True))
    os._exit(0)


def _live(*parts: Callable[[], None]) -> NoReturn:
    """Run the parts one after the other, and end as Python does."""
    status, interrupted = 0, False
    try:
        for part in parts:
            part()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined] - what the interpreter calls at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def import_settings(environ: dict[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are imported."""
    return {k: v for k, v in environ.items() if READ_AT_IMPORT.match(k) and not READ_LATER.match(k)}


def parse(arguments: list[str]) -> tuple[list[str], str, list[str]] | None:
    """Values of ``-W``; ``-c``, ``-m`` or "" for a script; the program and its arguments. None: not known here."""
    filters, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "-W" and rest:
            filters.append(rest.pop(0))
        elif word in ("-c", "-m") and rest:
            return filters, word, rest
        elif word.startswith("-W") and len(word) > 2:
            filters.append(word[2:])
        elif not word.startswith("-"):
            return filters, "", [word, *rest]
        elif word not in ("-u", "-B"):
            return None
    return None


def _become(client: int, parent: int, files: dict[int, int], environ: dict[str, str], directory: str) -> None:
    """Take over the client's parent, files, environment, directory, cores and namespaces."""
    os.setpgid(0, 0)
    this, getppid = os.getpid(), os.getppid
    os.getppid = lambda: parent if os.getpid() == this else getppid()  # who started the client; litgpt-scape asks
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH) for number, fd in files.items()}
    for fd in files.values():
        os.close(fd)
    for number, fd in high.items():
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    os.sched_setaffinity(0, os.sched_getaffinity(client))
    theirs = [f"/proc/{client}/ns/{kind}" for kind in ("net", "mnt")]
    opened = [os.open(path, os.O_RDONLY) for path in theirs if not _is_ours(path)]
    for fd in opened:
        if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
            raise OSError(ctypes.get_errno(), "A process for a test must enter its host's namespace")
        os.close(fd)
    os.chdir(directory)


def _is_ours(path: str) -> bool:
    return os.stat(path).st_ino == os.stat(f"/proc/self/ns/{Path(path).name}").st_ino


def run(filters: list[str], kind: str, words: list[str], own_path: list[str]) -> None:
    """What ``python -W <filters> <kind> <words>`` does, in this process."""
    random.seed()
    _like_freshly_imported()
    for value in filters:
        warnings._setoption(value)  # type: ignore[attr-defined] - what the interpreter calls for -W
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    name, sys.argv = words[0], list(words)
    first = {"": str(Path(name).resolve().parent), "-c": "", "-m": os.getcwd()}[kind]
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *added, *own_path]
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    if kind == "-m":
        sys.argv[0] = "-m"
        runpy._run_module_as_main(name)  # type: ignore[attr-defined] - what `python -m` calls
    elif kind == "-c":
        sys.argv[0] = "-c"
        exec(compile(name, "<string>", "exec"), main.__dict__)
    else:
        main.__file__ = str(Path(name).absolute())
        main.__spec__ = None
        with io.open_code(name) as script:
            code = compile(script.read(), name, "exec")
        exec(code, main.__dict__)


def _like_freshly_imported() -> None:
    """What the preloaded libraries took from the environment when they were imported."""
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    numpy.random.seed()
    torch.set_num_threads(1)
    from lightning.fabric.utilities import rank_zero

    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0


def load_loops() -> None:
    """A few steps of two simulated ranks: numba gets ready, and compiles the usual loops or reads them from disk."""
    torch, ops = sys.modules["torch"], sys.modules["lightning_scape.ops"]
    scape, simulated = sys.modules["lightning_scape"], load_example("simulated_ranks")
    torch.set_num_threads(1)
    kinds = itertools.product(("adamw", "adams"), (torch.float32, torch.bfloat16), (0.9, 0.99))
    for update, dtype, sparsity in kinds:
        model = torch.nn.Linear(64, 32, dtype=dtype)
        config = scape.ScapeConfig(sparsity=sparsity, dense_steps=1, sparsity_warmup_steps=4, update=update)
        ranks = simulated.SimulatedRanks(model, 2, config, {"lr": 1e-3})
        for _ in range(6):
            ranks.backward([torch.ones(1, 64, dtype=dtype)] * 2, lambda batch, model=model: model(batch).sum(), None)
            ranks.step(1e-3, max_norm=1.0)
    del ranks
    gc.collect()
    for thread in set(threading.enumerate()) - {threading.main_thread()}:  # of the ranks, which are gone
        thread.join(10)
    del sys.modules["simulated_ranks"]
    ops._cpu.cache_clear()  # each process says it for itself, where it has to compile
    assert threading.active_count() == 1, f"A server that forks must have one thread, got {threading.enumerate()}"


def _path_without_pythonpath() -> list[str]:
    given = {entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    return [entry for entry in sys.path[1:] if entry not in given]


if __name__ == "__main__":
    sys.executable, _socket, _lifeline = sys.argv[1:]
    _started_with = dict(os.environ)  # libraries add to it
    try:
        for module in PRELOADED:
            importlib.import_module(module)
        importlib.import_module("compile_once").patch()
        load_loops()
    except BaseException:
        Path(_socket).with_name("failed").touch()
        raise
    serve(_socket, int(_lifeline), _started_with)
