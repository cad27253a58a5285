"""What mkdocs does besides pages: files outside of docs/ that pages link to, and the list of all errors.

A page links to ``../examples/results/loss.png``, which works where the repository is read. The site holds no folder
above its pages. So the linked files are copied into it, and the links lose their ``../``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(\]\()\.\./([\w./-]+)")
ERRORS = "<!-- errors -->"


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside of docs/ to which pages link; of a folder, all that is in it."""
    from mkdocs.structure.files import File

    targets = set()
    for page in Path(config.docs_dir).glob("*.md"):
        for match in OUTSIDE.finditer(page.read_text(encoding="utf-8")):
            path = ROOT / match[2]
            targets |= {path} if path.is_file() else set(path.rglob("*.*"))
    for path in sorted(target for target in targets if target.is_file() and "__pycache__" not in target.parts):
        name = _name_in_site(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turns links that leave docs/ into links inside the site, and fills in the list of errors."""
    text = OUTSIDE.sub(lambda match: f"{match[1]}{_linked(match[2])}", markdown)
    return text.replace(ERRORS, error_list()) if ERRORS in text else text


def _name_in_site(name: str) -> str:
    """Markdown files would become pages that nothing leads to: they stay text."""
    return f"{name}.txt" if name.endswith(".md") else name


def _linked(name: str) -> str:
    """A folder has no page. The link goes to the first file in it."""
    path = ROOT / name
    if path.is_dir():
        name = min(each for each in path.rglob("*.*") if each.is_file()).relative_to(ROOT).as_posix()
    return _name_in_site(name)


# ------------------------------------------------------------------------------------------------------------- errors


class Message(NamedTuple):
    """What the package can say: an error or a warning."""

    kind: str
    """The exception's class, or ``warning``."""
    text: str
    """With names in braces where a value comes in."""
    module: str


def messages(package: Path = ROOT / "lightning_scape") -> Iterator[Message]:
    """Every error that the package raises and every warning that it gives, in source order.

    That is each text given to an exception or a warning, and each other text that reads as one ("must ..., got ...").
    """
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = path.relative_to(package).with_suffix("").as_posix().replace("/", ".")
        constants = _constants(tree)
        known = {text for node in ast.walk(tree) if (text := _docstring(node))}
        for node in ast.walk(tree):
            kind = _kind(node)
            if isinstance(node, ast.Call) and kind:
                text = max((_text(argument, constants) for argument in node.args), key=len, default="")
                if len(text.split()) > 3:
                    known.add(text)
                    yield Message(kind, text, module)
        for node in ast.walk(tree):
            text = _text(node, constants)
            if re.search(r" (must|should) .*, got ", text, re.DOTALL) and not any(text in other for other in known):
                known.add(text)
                yield Message("Error", text, module)


def _constants(tree: ast.Module) -> dict[str, str]:
    """The module's own texts, by name: sentences that several messages end with."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (text := _text(node.value, {})):
            found[node.targets[0].id] = text
    return found


def _docstring(node: ast.AST) -> str | None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return ast.get_docstring(node, clean=False) if isinstance(node, documented) else None


def _kind(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    if name in ("warn", "rank_zero_warn"):
        return "warning"
    return name if name.endswith(("Error", "Exception")) and name != "AssertionError" else None


def _text(node: ast.AST, constants: dict[str, str]) -> str:
    """A string as it stands in the source: of an f-string, the values' names in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            constants.get(ast.unparse(part.value), f"{{{ast.unparse(part.value)}}}")
            if isinstance(part, ast.FormattedValue)
            else _text(part, constants)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, constants) + _text(node.right, constants)
    return ""


def error_list() -> str:
    """All messages by module, as Markdown."""
    found: dict[str, list[Message]] = {}
    for message in messages():
        found.setdefault(message.module, []).append(message)
    lines = []
    for module, here in found.items():
        lines += [f"### `lightning_scape.{module}`", ""]
        for kind, text, _ in dict.fromkeys(here):
            lines += [f"**{kind}**", "", "```text", text, "```", ""]
    return "\n".join(lines)
