"""The README and the pages of docs/, taken apart: what the tests of the documentation read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (.+) -->\n$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None
    """Why no test runs it, from the comment right above it."""

    @property
    def name(self) -> str:
        """``docs/index.md:12``."""
        return f"{self.page}:{self.line}"


def blocks(language: str) -> list[Block]:
    """All blocks of a language."""
    return [block for page in PAGES for block in _blocks_of(page) if block.language == language]


def _blocks_of(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        reason = _NOT_RUN.search(before)
        yield Block(page, before.count("\n") + 1, match[1], match[2], reason[1] if reason else None)


def prose(page: str) -> str:
    """The page without what stands in its fenced blocks."""
    return _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
