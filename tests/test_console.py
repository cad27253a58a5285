"""Commands whose output nobody reads to its end."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from lightning_scape.tools import commands
from lightning_scape.tools.console import ends_quietly

COMMANDS = [["lightning_scape.tools.commands", "--help"]]
MORE_COMMANDS = [
    ["lightning_scape.tools.cli", "pretrain", "--help"],
    ["lightning_scape.tools.commands", "plan", "--help"],
    ["lightning_scape.tools.commands", "doctor", "--help"],
]


@pytest.mark.parametrize("commands", [COMMANDS, pytest.param(MORE_COMMANDS, marks=pytest.mark.slow)])
def test_a_command_whose_reader_has_gone_ends_quietly(commands: list[list[str]]) -> None:
    """``lightning-scape --help | head -1`` ended in a BrokenPipeError or in "Exception ignored in ... stdout"."""
    runner, environment = [sys.executable, "-W", "ignore", "-m"], {**os.environ, "PYTHONUNBUFFERED": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([*runner, *command], **pipes) for command in commands]
    for process in processes:
        process.stdout.close()
    for process, command in zip(processes, commands, strict=True):
        said = process.stderr.read()
        process.stderr.close()
        assert "BrokenPipe" not in said, command
        assert "Traceback" not in said, command
        assert "Exception ignored" not in said, command
        assert process.wait() == 141, command


def test_a_connection_that_breaks_is_still_an_error() -> None:
    """To a rank, say: only the standard streams are meant."""

    @ends_quietly
    def talk() -> None:
        raise BrokenPipeError("of a socket")

    with pytest.raises(BrokenPipeError, match="of a socket"):
        talk()


def test_what_breaks_a_pipe_in_the_middle_of_a_command_is_the_reader_too() -> None:
    """``lightning-scape verify ... | head -1`` said "[Errno 32] Broken pipe" with status 1."""
    code = "import sys; from lightning_scape.tools import commands"
    code += "; commands.COMMANDS['plan'] = (lambda _: print(' ' * 10**6), '')"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.exit(commands.main(['plan']))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 141)
    process.stderr.close()


def test_the_commands_print_letters_that_the_terminal_lacks_and_end_at_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound checkpoint with an umlaut in its path did not verify; `doctor --watch` ended in a traceback."""

    def wait(_: list[str]) -> int:
        print("ü\udcff")
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "plan", (wait, ""))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert commands.main(["plan"]) == 130
    assert sys.stdout.buffer.getvalue() == b"\\xfc\\udcff\n"
    monkeypatch.setattr(sys, "stdout", None)
    assert commands.main(["--version"]) == 0
