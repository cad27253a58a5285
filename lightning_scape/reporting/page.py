"""The page of a report: one HTML file that holds all it needs, and opens without a server and without a network."""

from __future__ import annotations

import base64
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from lightning_scape.checkpoint.temporaries import replacing
from lightning_scape.core.words import show_bytes, show_bytes_beside, show_seconds
from lightning_scape.reporting.history import FIGURES, History, Run, last_values, total
from lightning_scape.reporting.plots import MOST_POINTS, Plot, plots
from lightning_scape.reporting.words import plain

PAGE = "report.html"
"""Name of the file in the report's folder."""
MOST_ODD, MOST_METRICS, MOST_RUNS = 3, 30, 100
"""Of what a page tells: lines that were passed over, validation metrics, and runs, the newest."""

_STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: #fff; color: #1a1a1a;
       font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem .9rem .2rem 0; vertical-align: top;
        border-bottom: 1px solid #e4e4e4; font-weight: normal; overflow-wrap: anywhere; }
th { color: #555; min-width: 7rem; }
.wide { overflow-x: auto; } .wide td, .wide th { white-space: nowrap; min-width: 0; }
.wide td.text { white-space: normal; min-width: 14rem; } p, figcaption { overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem 1.5rem; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; }
figcaption, .small { color: #555; font-size: .85rem; } figcaption b { color: #1a1a1a; font-size: 1rem; }
.bad { color: #a40000; }
"""


def write_page(folder: Path) -> Path:
    """Makes the page of all runs in a folder, from its figures; the old page stays until the new one is whole.

    Returns:
        The page.

    Raises:
        ValueError: the folder has no figures.
        OSError: the figures cannot be read, or the page not be written.
    """
    history = History.read(folder)
    if not history.runs:
        why = f" ({history.passed_over[0]})" if history.passed_over else ""
        raise ValueError(
            f"A report is made of {FIGURES}, got no figures in {str(folder)!r}{why}. Name the folder that was given as"
            " `report=...`, after a run."
        )
    path = folder / PAGE
    with replacing(path) as file:
        file.write(page(history).encode())
    return path


def page(history: History) -> str:
    """The page's text."""
    newest = history.runs[-1]
    line = history.line()
    points = [point for run in line for point in run.points]
    title = f"{newest.title}: {newest.last_step:,} steps"
    drawn = "".join(_figure(plot) for plot in plots(history))
    notes = [] if points else ["No figures yet: the run has not come to its first point."]
    if odd := history.passed_over:
        what = "A line was" if len(odd) == 1 else f"{len(odd)} lines were"
        notes.append(f"{what} passed over. {' '.join(map(plain, odd[:MOST_ODD]))}{' ...' if odd[MOST_ODD:] else ''}")
    if len(points) > MOST_POINTS:
        notes.append(f"Plots show at most {MOST_POINTS:,} of {len(points):,} points; {FIGURES} has all of them.")
    if len(history.runs) > MOST_RUNS:
        notes.append(f"The list at the end has the newest {MOST_RUNS} of {len(history.runs):,} runs.")
    if (metrics := len(last_values(each for run in line for each in run.validations))) > MOST_METRICS:
        notes.append(f"The table has {MOST_METRICS} of {metrics:,} validation metrics; {FIGURES} has all of them.")
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="small">All figures are rank 0's. They stand in {FIGURES}, beside this page.</p>{said}
<table>{"".join(_row(name, value) for name, value in facts(line, points))}</table>
<h2>Plots</h2><div class="plots">{drawn}</div>
<h2>Runs in this folder</h2><div class="wide">{_runs(history)}</div>
</body></html>
"""


def facts(line: list[Run], points: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What stands in the table at the top: names and values.

    Args:
        line: the newest run and those that it goes on from.
        points: theirs.
    """
    newest = line[-1]
    found = [("ended", _ended(newest)), ("ranks", plain(newest.about.get("ranks")))]
    found.append(("strategy", plain(newest.about.get("strategy"), 2000)))
    losses = [point["loss"] for point in points if point.get("loss") is not None]
    found += [("training loss, last point", f"{losses[-1]:.6g}")] if losses else []
    validated = last_values(each for run in line for each in run.validations)
    found += [(plain(name), f"{value:.6g}") for name, value in [*validated.items()][:MOST_METRICS]]
    if not points:
        return found
    last = points[-1]
    unit = "exchange" if newest.exchanges else "step"
    sent, dense = total(last, "bytes_total"), total(last, "bytes_dense")
    if sent:
        ratio = f"{dense / sent:.1f}x less than a dense all-reduce, {show_bytes(dense)}"
        found.append((f"sent per rank and {unit}, last point", f"{show_bytes(sent)} ({ratio})"))
    elif newest.about.get("ranks") == 1:
        found.append(("sent", "nothing: there is one rank"))
    found += _whole_run(line)
    times = [point["step_seconds"] for point in points if point.get("step_seconds")]
    times = [seconds for seconds in times if 0 < seconds < 1e9]
    found += [("time of a step, median", show_seconds(median(times)))] if times else []
    skipped = total(last, "skipped_total")
    return [*found, ("skipped windows" if unit == "exchange" else "skipped steps", f"{skipped:,.0f}")]


def _whole_run(line: list[Run]) -> list[tuple[str, str]]:
    """What rank 0 has sent since the first of the runs began, and what DDP would have; nothing of older figures."""
    last = [(run, _sums(run)) for run in line if run.points and run.about]  # else its first steps are not known
    sent, dense, saved = (
        sum(total(at, name) for _, at in last) for name in ("bytes_run", "bytes_run_dense", "bytes_checkpoints")
    )
    steps = sum(at["step"] - run.start for run, at in last)
    if not sent or not steps:
        return []
    dense_one = plain(line[-1].about.get("beside", "DDP"), 20)
    beside = f"; {dense_one} would have sent {show_bytes_beside(dense, sent)}" if dense else ""
    found = [
        (
            "sent per rank in the whole run",
            f"{show_bytes(sent)} in {steps:,} steps, {show_bytes(sent / steps)} per step on average{beside}",
        )
    ]
    newest = line[-1]
    planned, left = newest.about.get("steps"), newest.about.get("bytes_expected")
    if isinstance(planned, int) and isinstance(left, int) and planned > newest.last_step:
        before = sum(total(at, "bytes_run") for run, at in last if run is not newest)
        found.append(("expected of the whole run", f"{show_bytes(before + left)} in {planned:,} steps"))
    if saved:
        found.append(("for checkpoints", f"{show_bytes(saved)} sent by a rank"))
    return found


def _sums(run: Run) -> dict[str, Any]:
    """The last line of a run that has its sums; checkpoints may have been saved after the last point."""
    point, end = run.points[-1], run.end
    return end if end is not None and end.get("metrics") and end["step"] == point["step"] else point


def _ended(run: Run) -> str:
    return "not yet, or it was killed" if run.end is None else plain(run.end.get("how", "finished"), 600)


def _row(name: str, value: str) -> str:
    bad = ' class="bad"' if name == "ended" and value != "finished" else ""
    return f"<tr><th>{escape(name)}</th><td{bad}>{escape(value)}</td></tr>"


def _figure(plot: Plot) -> str:
    # As an image, not in the text: names of parts of several drawings would meet there.
    data = base64.b64encode(plot.svg.encode()).decode()
    return (
        f'<figure><img src="data:image/svg+xml;base64,{data}" alt="{escape(plot.title)}. {escape(plot.caption)}">'
        f"<figcaption><b>{escape(plot.title)}.</b> {escape(plot.caption)}</figcaption></figure>"
    )


def _runs(history: History) -> str:
    names = ("run", "began (UTC)", "from step", "to step", "ranks", "drawn", "ended")
    others = {id(run.about) for run in history.others()}
    rows = ["".join(f"<th>{name}</th>" for name in names)]
    for index, run in [*enumerate(history.runs, 1)][-MOST_RUNS:]:
        began = run.about.get("time")
        when = "not known" if began is None else f"{datetime.fromtimestamp(began, timezone.utc):%Y-%m-%d %H:%M:%S}"
        how = "grey" if id(run.about) in others else "in colour"
        cells = [index, when, f"{run.start:,}", f"{run.last_step:,}", plain(run.about.get("ranks"), 20), how]
        ended = f'<td class="text">{escape(_ended(run))}</td>'
        rows.append("".join(f"<td>{escape(str(cell))}</td>" for cell in cells) + ended)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
