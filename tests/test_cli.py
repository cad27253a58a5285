"""``lightning-scape COMMAND``: it answers at once, and its exit status says what happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_scape import ScapeConfig, ScapeOptimizer
from lightning_scape.__about__ import __version__
from lightning_scape.checkpoint.files import save_file
from lightning_scape.checkpoint.saver import Saver
from lightning_scape.tools.cli import COMMANDS, main

HEAVY = {"torch", "lightning", "litgpt", "numba"}
ASKED = f"""
import sys
sys.argv = ["lightning-scape"]
from lightning_scape.tools import cli, litgpt
for main, arguments in ((cli.main, ["--version"]), (cli.main, ["--help"]), (cli.main, ["plan", "--help"]),
                        (cli.main, ["pln"]), (litgpt.main, ["--version"]), (litgpt.main, ["--help"])):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit:
        pass
assert not {HEAVY} & set(sys.modules)
"""


def test_help_version_and_a_mistyped_command_import_nothing_that_takes_seconds() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(__version__) == 2
    assert all(f"    {name} " in done.stdout for name in COMMANDS)
    assert "--bandwidth" in done.stdout
    assert "invalid choice: 'pln'" in done.stderr


@pytest.mark.parametrize("arguments", [["pln"], ["plan", "--rank", "8"], ["plan", "--ranks", "x"], ["verify"]])
def test_a_wrong_command_line_ends_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def _save(path: Path) -> None:
    optimizer = ScapeOptimizer([torch.nn.Parameter(torch.ones(1000))], config=ScapeConfig(sparsity=0.5))
    save_file({"optimizer": optimizer.state_dict(), "step": 3}, path)


def test_verify_says_of_each_checkpoint_whether_it_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    _save(whole)
    cut.write_bytes(whole.read_bytes()[:-100])
    assert main(["verify", str(whole)]) == 0
    assert main(["verify", str(whole), str(cut), str(tmp_path / "none")]) == 1
    said = capsys.readouterr()
    assert said.out.count("complete and undamaged") == 2
    assert said.err.count("lightning-scape: ") == 2


def test_consolidate_writes_one_file_and_replaces_another_only_if_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = ScapeOptimizer([torch.nn.Parameter(torch.ones(1000))], config=ScapeConfig(sparsity=0.5))
    content = {"optimizer": optimizer.own_state(), "step": 3}
    Saver("sharded").save(content, str(tmp_path / "a.pt"), torch.save)
    command = ["consolidate", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    assert main(command) == 0
    assert torch.load(tmp_path / "b.pt", weights_only=True)["step"] == 3
    assert main(command) == 1
    assert "FILE must be a free name" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert main(["consolidate", str(tmp_path / "a.pt"), str(tmp_path / "a.pt"), "--force"]) == 1
