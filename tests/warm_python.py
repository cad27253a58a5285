"""A ``python`` for tests that start processes, without the 7 s of CPU time that importing torch and Lightning takes.

Hand :func:`warm_python` to ``subprocess`` in the place of ``sys.executable``. What it names starts a process forked
from a server that has imported the libraries (see ``warm_server.py``). Processes that this one starts by
``sys.executable``, as Lightning and torchrun do, come from there too. ``pytest --fresh-processes`` takes new
interpreters throughout. Tests of imports, and of how an interpreter begins or ends, take ``sys.executable``, and so
does the tour that the documentation begins with.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent
START_SECONDS = 170
"""The server's imports, and the compiler in a new clone: 30 s of a free core."""
VARIABLE = "SCAPE_TESTS_WARM_PYTHON"
"""Environment variable: where a server is that serves all of pytest-xdist's workers."""

wanted = sys.platform == "linux"
"""Elsewhere, and with ``--fresh-processes``, every process is a new interpreter."""
_kept: list[object] = []


@functools.cache
def warm_python() -> str:
    """The path of a ``python``. The first call waits for the server, and starts one where none is on its way.

    Raises:
        RuntimeError: the server ended or did not answer; what it said stands on standard error.
    """
    if not wanted:
        return sys.executable
    if VARIABLE not in os.environ:
        start()
    program = Path(os.environ[VARIABLE])
    deadline = time.monotonic() + START_SECONDS
    while not program.with_name("socket").exists():
        if program.with_name("failed").exists() or time.monotonic() > deadline:
            raise RuntimeError(
                f"The server of tests/warm_python.py must answer within {START_SECONDS} s, got no answer. Its error is"
                " above; pytest --fresh-processes does without it."
            )
        time.sleep(0.02)
    return str(program)


def start() -> None:
    """Start a server for this process and those that inherit its environment. It ends when this process does."""
    folder = tempfile.TemporaryDirectory(prefix="warm-python-")
    program, server_socket = Path(folder.name, "python"), Path(folder.name, "socket")
    words = [sys.executable, "-IS", str(TESTS / "warm_client.py"), str(server_socket), sys.executable]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    theirs, ours = os.pipe()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(TESTS / "warm_server.py"), str(program), str(server_socket), str(theirs)]
    server = subprocess.Popen(command, env=environ, pass_fds=[theirs], start_new_session=True, stdin=subprocess.DEVNULL)
    os.close(theirs)
    _kept.extend([folder, ours, server])  # until this process ends
    os.environ[VARIABLE] = str(program)
