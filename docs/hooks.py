"""What mkdocs does besides pages: it takes in files outside of docs/.

A page links to ``../examples/loss.png``, which works where the repository is read. The site holds no folder above its
pages: linked files are copied into it, and the links lose their ``../``. A line that is only a link to a table of
results becomes that table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(\]\()\.\./([\w./-]+)")
TABLE = re.compile(r"^\[[^\]]+\]\(\.\./(examples/benchmarks/results/[\w./-]+\.md)\)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside of docs/ to which pages link."""
    from mkdocs.structure.files import File

    texts = [page.read_text(encoding="utf-8") for page in Path(config.docs_dir).glob("*.md")]
    for name in sorted({match[2] for text in texts for match in OUTSIDE.finditer(text)}):
        files.append(File.generated(config, _in_site(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fills in the tables, and turns links that leave docs/ into links inside the site."""
    filled = TABLE.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8"), markdown)
    return OUTSIDE.sub(lambda match: match[1] + _in_site(match[2]), filled)


def _in_site(name: str) -> str:
    """Markdown files would become pages that nothing leads to: they stay text."""
    return f"{name}.txt" if name.endswith(".md") else name
