"""What a look at the machine has found, and the report of it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "note", "slow", "broken"]
TOPICS = ("Installed", "This host", "Network", "Ranks", "This run")
"""Headings of the report, in order."""
MARKS: dict[Verdict, str] = {"ok": "ok", "note": "-", "slow": "SLOW", "broken": "FAILS"}
WIDTH = 100
"""Columns of the report."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    """One of :data:`TOPICS`."""
    verdict: Verdict
    """``ok``; ``note``, to know; ``slow``, it works, yet slowly; ``broken``, it does not work."""
    text: str
    remedy: str = ""
    """What to do about it; empty where nothing is to be done."""


def exit_status(findings: Iterable[Finding]) -> int:
    """1 if something does not work, else 0."""
    return int(any(finding.verdict == "broken" for finding in findings))


def report(findings: Sequence[Finding]) -> str:
    """All findings by topic, and a last line that counts what is wrong."""
    lines: list[str] = []
    for topic in TOPICS:
        about = [finding for finding in findings if finding.topic == topic]
        lines += [topic, *map(_line, about), ""] if about else []
    return "\n".join([*lines, summary(findings)])


def _line(finding: Finding) -> str:
    text = f"{finding.text} {finding.remedy}".strip()
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=f"  {MARKS[finding.verdict]:<7}",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )


def summary(findings: Iterable[Finding]) -> str:
    """One line: how many things do not work, and how many are slow."""
    verdicts = [finding.verdict for finding in findings]
    broken, slow = verdicts.count("broken"), verdicts.count("slow")
    if not broken and not slow:
        return "All is well."
    parts = [f"{broken} {'thing does' if broken == 1 else 'things do'} not work (FAILS)"] if broken else []
    parts += [f"{slow} {'thing is' if slow == 1 else 'things are'} slow (SLOW)"] if slow else []
    return f"{' and '.join(parts)}: see above."
