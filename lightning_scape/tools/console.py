"""What all commands of this package do at their end."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def ends_quietly(command: Callable[P, R]) -> Callable[P, R]:
    """Ends a command without a traceback where whoever reads its output has gone: ``... --help | head``.

    The exit status is then 141, as of a process that SIGPIPE ended. That signal itself is left alone: it would also end
    a process whose connection to another rank breaks.

    What the output's encoding lacks, such as a letter of a path on an ASCII terminal, is printed as an escape.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            try:
                return command(*args, **kwargs)
            finally:  # now, not when the interpreter ends
                if sys.stdout is not None:  # it may have been closed: `>&-`
                    sys.stdout.flush()
        except BrokenPipeError:
            if not _reader_is_gone():
                raise
            raise SystemExit(141) from None

    return run


def _reader_is_gone() -> bool:
    """Whether a standard stream is what broke; its output then goes nowhere, or the interpreter's end would fail."""
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stream, or one without a file
            watch = select.poll()
            watch.register(stream.fileno(), 0)
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0)):
                gone = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return gone
