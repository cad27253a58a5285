"""Commands whose output nobody reads to its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lightning_scape.tools.console import ends_quietly

COMMANDS = [["lightning_scape.tools.commands", "--help"]]
MORE_COMMANDS = [
    ["lightning_scape.tools.cli", "pretrain", "--help"],
    ["lightning_scape.tools.plan", "--help"],
    ["lightning_scape.tools.doctor", "--help"],
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
