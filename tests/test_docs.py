"""The README and the pages of docs/: code runs as it stands, links lead somewhere, commands are there."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from lightning.fabric.strategies import STRATEGY_REGISTRY
from torch import Tensor, nn

import lightning_scape

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
OURS = dict(re.findall(r'^([\w-]+) = "(lightning_scape\.[\w.]+:main)"$', PYPROJECT, re.MULTILINE))
SHORT = {'"nccl"': '"gloo"', '"cuda", (4, 8)': '"cpu", (2, 1)', "devices=8": "devices=2", "(4096": "(128"}
"""What makes a block that trains run on two CPU processes within seconds."""


def blocks(language: str, *, run: bool = True) -> list[Any]:
    """Blocks of a language, without those that say why no test runs them."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[2] == language and not (run and match[1]):
                line = text.count("\n", 0, match.start(3))
                found.append(pytest.param(match[3], id=f"{page.name}:{line}"))
    return found


class Model(nn.Module):
    """What a page calls ``model``: it has blocks, and its forward pass gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch).relu()
        return batch.square().mean()


def execute(rank: int, world_size: int, text: str, folder: str) -> bool:
    """Runs a block where the names that pages take for granted are there; True at its end."""
    os.chdir(folder)
    names = {"model": Model(), "batches": list(torch.randn(3, 4, 16)), "__name__": "__main__"}
    with mock.patch.object(torch.distributed, "init_process_group"):  # the ranks are there already
        exec(compile(text, "block", "exec"), names)
    if hasattr(optimizer := names.get("optimizer"), "drain"):
        optimizer.drain()
    return True


@pytest.mark.parametrize("text", blocks("python"))
def test_a_block_of_python_runs(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    if re.search(r"launch\(\)|process_group|init_device_mesh|\.fit\(|SparseLoCo\(", text):
        for long, short in SHORT.items():
            text = text.replace(long, short)
        assert run_ranks(execute, 2, text, str(tmp_path)) == [True, True]
    else:
        monkeypatch.chdir(tmp_path)
        exec(compile(text, "block", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_block_of_yaml_holds_what_the_strategy_takes(text: str) -> None:
    strategy = yaml.safe_load(text)["trainer"]["strategy"]
    getattr(lightning_scape, strategy["class_path"].partition(".")[2])(**strategy["init_args"])


def commands(text: str) -> Iterator[list[str]]:
    """The single commands of a block, as words, without variables in front and the virtual environment's folder."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*|sudo", words[0]):
                words.pop(0)
            if words:
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


def missing(text: str, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """What the commands of a block name that is not there: files of the repository, extras, options of ours."""
    for words in commands(text):
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        known = " ".join(flags)
        for name in (word for word in words if re.match(r"(examples|configs|tests)/", word)):
            if not (ROOT / name).is_file():
                yield name
            elif words[0] == "python":
                known = (ROOT / name).read_text(encoding="utf-8").replace("_", "-")
        for extra in (extra for word in words for extra in re.findall(r"[\w-]+", word) if word.startswith(".[")):
            if not re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE):
                yield extra
        if words[0] in OURS and words[1:] != ["--version"]:
            with mock.patch.dict(STRATEGY_REGISTRY), mock.patch("sys.argv", [words[0], words[1], "--help"]):
                pytest.raises(SystemExit, pkgutil.resolve_name(OURS[words[0]]))
            known = capsys.readouterr().out
        yield from (flag for flag in flags if not (flag.removeprefix("--") in known or flag.startswith("--data.")))


@pytest.mark.parametrize("text", blocks("bash", run=False))
def test_what_a_command_names_is_there(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(missing(text, capsys)) == []


def headings(page: Path) -> set[str]:
    """As GitHub and mkdocs make anchors of headings: in lower case, words joined by hyphens."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if "://" not in target and not (path.exists() and (not anchor or anchor in headings(path))):
            broken.append(target)
    assert broken == []


def test_the_readme_is_short_and_has_its_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    lines = text.splitlines()
    for mark, end in (("first", "examples/pretrain_python.py"), ("test", "pytest -n 3 --dist loadfile")):
        place = lines.index(f"<!-- {mark}-command -->")
        assert lines[place + 1] == "```bash"
        assert lines[place + 2].endswith(end)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs/results.md"], ids=lambda page: page.name)
def test_every_figure_is_that_of_a_table_that_names_its_code(page: Path) -> None:
    """Of the README its table, of the results the whole page: figures with a decimal point."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    results = ROOT / "examples/benchmarks/results"
    if page.name == "README.md":
        text, tables = "\n".join(re.findall(r"^\|.*\|$", text, re.MULTILINE)), list(results.glob("*.md"))
    else:
        tables = [results / name for name in re.findall(r"results/([\w.-]+\.md)\)", text)]
        text = re.sub(r"\]\(.*?\)", "]", text)
    figures, known = (re.findall(r"\d+\.\d+", each) for each in (text, "".join(map(Path.read_text, tables))))
    assert figures
    assert [figure for figure in figures if figure not in known] == []


def said() -> Iterator[str]:
    """The texts of the package, with ``{}`` for what is put in when they are said."""
    for path in Path(*lightning_scape.__path__).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
            elif isinstance(node, ast.Constant):
                yield str(node.value)


def test_every_message_that_heads_a_remedy_is_one_of_the_package() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `([^`]+)`$", page, re.MULTILINE)
    patterns = [re.compile(" ".join(f"(?:{re.escape(word)}|{{}})" for word in each.split())) for each in headings]
    texts = list(said())
    assert [each.pattern for each in patterns if not any(map(each.search, texts))] == []
    assert len(patterns) > 10
