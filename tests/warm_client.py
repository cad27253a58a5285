"""What ``warm_python`` runs: asks the server for a process, lends it its open files, ends as it ends.

``<python> -IS warm_client.py <socket> <python> <arguments of python>``. Only the standard library, for it starts often.
Signals go on to the process; if this one is killed, so are that and its process group. Arguments that the server does
not know, and environments in which its libraries would have been imported otherwise, get a Python of their own.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
FRESH = -1
"""The server's answer where a new interpreter has to do it. Else: the exit status, or 256 plus the signal's number."""


def inherited_files() -> list[int]:
    """The numbers of all files that a program started here would find open: 0, 1, 2 and what was passed on."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing itself
            if os.get_inheritable(number):
                found.append(number)
    return found


def main() -> None:
    path, python, *arguments = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    server.connect(path)
    files = inherited_files()
    request = marshal.dumps((arguments, dict(os.environ), os.getcwd(), (os.getpid(), os.getppid()), files))
    socket.send_fds(server, [len(request).to_bytes(8, "little")], files)
    server.sendall(request)
    answer = server.recv(8)
    status = int.from_bytes(answer, "little", signed=True) if answer else 256 + signal.SIGKILL
    if status == FRESH:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        os.execv(python, [python, *arguments])
    if status >= 256:
        signal.signal(status - 256, signal.SIG_DFL) if status - 256 != signal.SIGKILL else None
        os.kill(os.getpid(), status - 256)
    os._exit(status)


if __name__ == "__main__":
    main()
