"""numba's loops are compiled once for all processes of the tests: who needs one that another compiles waits for it.

In a new clone the workers, the server of ``warm_python.py`` and the ranks of a test would all compile the same loops at
the same time: 15 s of CPU time for each of them.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

_compile = Dispatcher.compile
_held: set[Path] = set()


def patch() -> None:
    """From now on this process, and those forked from it, compile nothing that another one is compiling."""
    Dispatcher.compile = _compile_alone


def _compile_alone(self: Dispatcher, signature: Any) -> Any:
    """What numba does, while the loop's file is locked: it looks on disk first, and finds what the others left there.

    A loop's lock is held while those that it calls are compiled, which never call it: nobody waits in a circle.
    """
    folder = self.stats.cache_path
    if folder is None:  # this loop is not kept
        return _compile(self, signature)
    path = Path(folder, f"{self.py_func.__module__}.{self.py_func.__qualname__}.lock")
    with global_compiler_lock:  # threads of this process wait here
        if path in _held:
            return _compile(self, signature)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _held.add(path)
            try:
                return _compile(self, signature)
            finally:
                _held.remove(path)
