"""The documentation holds together: links, anchors, figures, the data behind each table, and the list of errors."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from doc_pages import PAGES, ROOT, prose

import lightning_scape

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+)$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
MEASURED = re.compile(r"\d\.\d|\d,\d{3}|\d+ ms|\d%")
SOURCE = re.compile(r"^Data: (?:\[[^\]]+\]\(([^)]+)\)); command:\s`([^`]+)`\.$", re.MULTILINE)
LINKED = [*PAGES, "CHANGELOG.md", "examples/QUALITY.md", ".github/CONTRIBUTING.md"]


def load(name: str) -> ModuleType:
    """``docs/<name>.py``, which no package holds."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """As GitHub and mkdocs make them of headings: in lower case, words joined by hyphens."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(prose(_name(page)))]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def _name(page: Path) -> str:
    return page.resolve().relative_to(ROOT).as_posix()


def broken(page: str) -> list[str]:
    found = []
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists():
            found.append(f"{target}: there is no such file")
        elif anchor and anchor not in anchors(path):
            found.append(f"{target}: that page has no such heading")
    return found


@pytest.mark.parametrize("page", LINKED)
def test_every_link_leads_somewhere(page: str) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(broken.__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(prose.__globals__, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("# One thing\n[x](#one-thing) [y](#two) [z](b.md) ![p](p.png) [w](https://a.b)\n")
    assert [problem.partition(":")[0] for problem in broken("a.md")] == ["#two", "b.md", "p.png"]


def unsourced(text: str) -> list[str]:
    """Tables of measured numbers without their source: the first row of each.

    Right after the table stands "Data: [file](link); command: `...`.", or a comment that says how the numbers were
    computed, or why they have no data.
    """
    found = []
    for match in TABLE.finditer(text):
        rows = match[0].splitlines()
        cells = [cell for row in rows[2:] for cell in row.split("|")[2:-1]]
        numbers = [cell for cell in cells if MEASURED.search(cell)]
        after = text[match.end() : match.end() + 400]
        sourced = SOURCE.match(after.lstrip("\n")) or re.match(r"\n?<!-- (computed|counted|no data): .+ -->", after)
        sourced = sourced or "<!-- table: first -->" in text[max(0, match.start() - 40) : match.start()]
        if len(numbers) > 2 and not sourced:
            found.append(rows[0])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_table_of_numbers_names_its_data_and_its_command(page: str) -> None:
    assert unsourced(prose(page)) == []


def test_a_table_without_its_data_is_found() -> None:
    table = "| a | b |\n|---|---|\n| x | 1.5 |\n| y | 2.5 |\n| z | 3.5 |\n"
    assert unsourced(table) == ["| a | b |"]
    assert unsourced(f"{table}\nData: [d](d.json); command: `python d.py`.\n") == []
    assert unsourced(f"{table}\n<!-- no data: a reason -->\n") == []


def test_every_script_and_test_that_a_page_names_is_there() -> None:
    named = {
        (page, name)
        for page in PAGES
        for name in re.findall(r"\b(?:tests|examples|configs)/[\w/]+(?:\.\w+)+", (ROOT / page).read_text())
    }
    assert len(named) > 40
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_behind_the_data_are_there(page: str) -> None:
    for _, command in SOURCE.findall(prose(page)):
        script = next(word for word in command.split() if word.endswith(".py"))
        assert (ROOT / script).is_file(), command


def test_the_readme_is_short_and_keeps_its_test_command() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 180
    assert lines[lines.index("<!-- test-command -->") + 1] == "```bash"
    assert text.count("Several GPUs have not been tried") == 1
    assert not re.search("[¹²³⁴⁵]", text)


def test_the_python_api_lists_every_public_name_once() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: lightning_scape\.(\w+)$", text, re.MULTILINE)
    assert sorted([*listed, "__version__"]) == sorted(lightning_scape.__all__)
    assert "`lightning_scape.__version__`" in text


def test_the_site_has_every_page_once() -> None:
    def names(nav: object) -> list[str]:
        if isinstance(nav, str):
            return [nav]
        children = nav.values() if isinstance(nav, dict) else nav
        return [name for child in children for name in names(child)]

    listed = names(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(f"docs/{name}" for name in listed) == [page for page in PAGES if page.startswith("docs/")]


# ------------------------------------------------------------------------------------------------------------- errors


def test_every_heading_of_troubleshooting_is_a_message_of_the_code() -> None:
    texts = [message.text for message in load("hooks").messages()]
    headings = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(headings) > 20
    assert [heading for heading in headings if not any(heading in text for text in texts)] == []


def test_every_entry_of_troubleshooting_has_cause_or_remedy() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    for entry in re.split(r"^##+ ", text, flags=re.MULTILINE):
        if entry.startswith("`") and not entry.startswith("`litgpt-scape`"):
            assert "Remedy: " in entry, entry
            assert "Cause" in entry or "numba" in entry or "Triton" in entry, entry


def test_the_list_of_errors_has_every_raise_with_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '_END = "Do that."\n'
        "def f(x):\n"
        '    """Text must not be listed, got a docstring. It is one."""\n'
        "    if x:\n"
        '        raise ValueError(f"`x` must be 0, got {x!r}. {_END}")\n'
        '    warnings.warn("this is worth a warning", stacklevel=2)\n'
        '    problem = f"`y` must be {x}, got 3. Change it."\n'
        "    raise ValueError(problem)\n"
        '    assert x, "no message"\n'
    )
    found = [(message.kind, message.text) for message in load("hooks").messages(tmp_path)]
    assert ("ValueError", "`x` must be 0, got {x}. Do that.") in found
    assert ("warning", "this is worth a warning") in found
    assert ("Error", "`y` must be {x}, got 3. Change it.") in found
    assert len(found) == 3


def without_remedy(texts: Iterable[str]) -> list[str]:
    """Of those on an option ("`x` must ..., got ..."): after the value, and the reason, comes what to do."""
    on_options = [text for text in texts if re.match(r"`[^`]+`[^,.]* must .*, got ", text, re.DOTALL)]
    return [text for text in on_options if not re.search(r"[.;] \S|{problem}", text.rpartition(", got ")[2])]


def test_errors_on_options_say_what_to_do() -> None:
    listed = load("hooks").messages()
    assert without_remedy(each.text for each in listed if each.module != "reporting.history") == []
    assert without_remedy(["`x` must be 0, got {x}.", "`x` must be 0, got {x}: y.", "`x` must be 0, got {x}. Do."]) == [
        "`x` must be 0, got {x}.",
        "`x` must be 0, got {x}: y.",
    ]


def test_errors_of_the_package_are_in_the_list() -> None:
    hooks = load("hooks")
    listed = hooks.error_list()
    texts = {message.text for message in hooks.messages()}
    assert len(texts) > 150
    assert all(text in listed for text in texts)
    assert "`sparsity` must be a number in [0, 1), got {self.sparsity}" in listed
