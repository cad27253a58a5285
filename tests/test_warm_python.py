"""A process by `warm_python` is what one by `sys.executable` is, but for the time that it takes to begin."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python as module
from warm_python import warm_python

pytestmark = pytest.mark.skipif(
    not module.wanted, reason="every process is a fresh one (--fresh-processes, or no Linux)"
)
IS_WARM = "import sys; print('torch' in sys.modules)"
RUNNING = """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell starts with it ignored
print(os.getpid(), flush=True)
time.sleep(600)
"""


def run(*arguments: str, python: str | None = None, **options: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [python or warm_python(), *arguments], capture_output=True, text=True, timeout=100, check=False, **options
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "words",
    [
        ("-c", "import sys, os; print(sys.argv, __name__, sys.path[0], os.getcwd(), __builtins__)", "a", "-m"),
        ("-c", "import sys; print(sys.stdin.read()); sys.exit(3)"),
        ("-c", "raise SystemExit('a last word')"),
        ("-c", "def f():\n  1 / 0\nf()"),
        ("-c", "import atexit; atexit.register(print, 'at exit'); print('first')"),
        ("-c", "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('joined'))).start()"),
        ("-c", f"import os; print(os.getppid() == {os.getpid()})"),
        ("-c", "import os; os.write(1, b'raw'); os._exit(7)"),
        ("-W", "error", "-c", "import warnings; warnings.warn('an error')"),
        ("script.py", "--option", "x y"),
        ("-m", "package.inner", "--option"),
        ("missing.py",),
        ("-m", "missing"),
        ("-c", "raise KeyboardInterrupt"),
        ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
    ],
    ids=lambda words: words[1][:30] if words[0] == "-c" else words[0],
)
def test_it_says_and_returns_what_a_fresh_one_does(tmp_path: Path, words: tuple[str, ...]) -> None:
    program = "import os, sys; print(sys.argv, __name__, __file__, __spec__ and __spec__.name, sys.path[0])\n"
    (tmp_path / "script.py").write_text(program)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text(program)
    options = {"cwd": tmp_path, "input": "what it reads", "env": {**os.environ, "A_NAME": "a value"}}
    status, out, error = run(*words, **options)
    fresh_status, fresh_out, fresh_error = run(*words, python=sys.executable, **options)
    assert (status, out) == (fresh_status, fresh_out)
    assert error.replace(warm_python(), sys.executable).splitlines()[-1:] == fresh_error.splitlines()[-1:]


def test_it_has_imported_the_libraries_and_so_have_those_it_starts() -> None:
    assert run("-c", IS_WARM) == (0, "True\n", "")
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IS_WARM!r}])"
    assert run("-c", nested) == (0, "True\n", "")
    spawned = "import multiprocessing as m; print(m.get_context('spawn').Pool(1).map(abs, [-1]))"
    assert run("-c", spawned) == (0, "[1]\n", "")


@pytest.mark.parametrize(
    "variable", ["PYTHONHASHSEED", "NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS"]
)
def test_where_libraries_would_be_imported_otherwise_it_is_fresh(variable: str) -> None:
    assert run("-c", IS_WARM, env={**os.environ, variable: "3"}) == (0, "False\n", "")


def test_arguments_that_it_does_not_know_make_a_fresh_one() -> None:
    assert run("-I", "-c", IS_WARM) == (0, "False\n", "")


def test_random_numbers_differ_between_processes() -> None:
    draw = "import random, numpy; print(random.random(), numpy.random.rand())"
    assert len({run("-c", draw)[1] for _ in range(2)}) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_process(number: signal.Signals) -> None:
    with subprocess.Popen(
        [warm_python(), "-c", RUNNING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == -number
        process.stdout.read()  # until the process itself has closed it
    assert pid != process.pid
