"""Pages in a real browser: charts at desktop and phone width, and the search of the documentation's site.

Each page is a copy that a frame of the wanted width shows, with a script at its end that looks at what the browser has
made of it. Needs Chromium (apt-get install chromium), and for the site mkdocs-material (the extra `docs`).
"""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT

from lightning_scape.reporting import FIGURES, write_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
WIDTHS = {"desktop": 1280, "phone": 390}

LOOK = """
const wide = [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1
    && !e.closest('.wide')).map(e => e.tagName + ': ' + e.textContent.slice(0, 60));
const images = [...document.images].map(e => ({width: e.getBoundingClientRect().width, drawn: e.naturalWidth,
    top: e.getBoundingClientRect().top}));
tell({page: document.documentElement.scrollWidth, inner: innerWidth, wide, images});
"""
SEARCH = """
document.querySelector('#__search').click();
const input = document.querySelector('.md-search__input');
input.focus();
input.value = 'residual';
const again = setInterval(() => {
    input.dispatchEvent(new Event('keyup', {bubbles: true}));
    const found = [...document.querySelectorAll('.md-search-result__item')].map(e => e.textContent);
    if (found.length) { clearInterval(again); tell({found}); }
}, 100);
"""
WIDTH = "tell({page: document.documentElement.scrollWidth, inner: innerWidth});"


def seen(page: Path, width: int, script: str, profile: Path) -> Any:
    """What ``script`` tells of a page that is shown ``width`` pixels wide."""
    text = page.read_text(encoding="utf-8")
    tell = "const tell = found => parent.postMessage(JSON.stringify(found), '*');"
    looking = f"<script>addEventListener('load', () => setTimeout(() => {{{tell}{script}}}, 300));</script></body>"
    copy, frame = page.with_name(f"looked-{page.name}"), page.with_name("frame.html")
    copy.write_text(text.replace("</body>", looking), encoding="utf-8")
    frame.write_text(
        "<script>addEventListener('message', e => document.title = e.data)</script>"
        f'<iframe src="{copy.name}" style="width:{width}px;height:900px;border:0"></iframe>',
        encoding="utf-8",
    )
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={profile}", "--window-size=1400,1000", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run(
        [*command, frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "HOME": str(profile)},
    ).stdout
    title = shown.partition("<title>")[2].partition("</title>")[0]
    assert title, f"the page told nothing:\n{shown[:2000]}"
    return json.loads(html.unescape(title))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page as a long run leaves it: long names, two runs, validations."""
    folder = tmp_path_factory.mktemp("report")
    about = {
        "time": 1.7e9,
        "method": "scape",
        "ranks": 4,
        "strategy": "ScapeStrategy(sparsity=0.99, " + "x" * 150 + ")",
    }
    lines: list[dict[str, Any]] = []
    for start in (0, 40):
        lines.append({"kind": "run", "step": start, **about})
        for step in range(start + 10, start + 61, 10):
            sizes = {"bytes_total": 1e6, "bytes_dense": 1e8, "bytes_run": 1e6 * step, "bytes_run_dense": 1e8 * step}
            rest = {"density": 1 / step, "mask_churn": 0.1, "skipped_total": 0, "seconds/sweep": 0.01, **sizes}
            figures = {f"scape/{name}": value for name, value in rest.items()}
            lines.append(
                {"kind": "point", "step": step, "time": 0.0, "loss": 5 / step, "step_seconds": 0.1}
                | {"metrics": figures}
            )
        lines.append(
            {"kind": "validation", "step": start + 60, "metrics": {"val_loss_of_a_long_name/" + "y" * 80: 1.5}}
        )
    (folder / FIGURES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return write_page(folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_reports_charts_are_drawn_and_fit_the_window(width: int, report: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="reports are drawn with matplotlib")
    found = seen(report, width, LOOK, tmp_path)
    assert found["inner"] == width
    assert found["page"] <= width
    assert found["wide"] == []
    assert len(found["images"]) >= 5
    assert all(image["drawn"] > 0 and 250 < image["width"] <= width for image in found["images"])
    beside = len({round(image["top"]) for image in found["images"]}) < len(found["images"])
    assert beside == (width == WIDTHS["desktop"])  # one below the other on a phone


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation's site: the one that .ci/run builds beside its set-up, or one that is built now."""
    if "SCAPE_TESTS_SITE" in os.environ:
        given, deadline = Path(os.environ["SCAPE_TESTS_SITE"]), time.monotonic() + 150
        while not given.exists():
            assert time.monotonic() < deadline, f"{given} must be there, got none: out/docs.log says why"
            time.sleep(0.1)
        return given
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("needs mkdocs-material and mkdocstrings: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=150, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


def test_the_sites_search_finds_a_word_without_a_server(site: Path, tmp_path: Path) -> None:
    found = seen(site / "index.html", WIDTHS["desktop"], SEARCH, tmp_path)["found"]
    assert all("residual" in each.lower() for each in found)


def test_the_site_loads_nothing_from_other_servers(site: Path) -> None:
    loading = re.compile(r"""<(?:script|img|link)\b[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""")
    found = {page.name: loading.findall(page.read_text(encoding="utf-8")) for page in site.glob("*.html")}
    assert {name: tags for name, tags in found.items() if tags} == {}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["index", "quality", "performance", "methods", "planning", "checkpoints"])
def test_a_page_of_the_site_does_not_scroll_sideways_on_a_phone(name: str, site: Path, tmp_path: Path) -> None:
    """Its tables may, inside."""
    found = seen(site / f"{name}.html", WIDTHS["phone"], WIDTH, tmp_path)
    assert found["inner"] == WIDTHS["phone"]
    assert found["page"] <= WIDTHS["phone"]
