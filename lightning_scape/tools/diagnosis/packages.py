"""What is installed, and whether its version is one that this package works with."""

from __future__ import annotations

import importlib
import importlib.metadata as metadata
import platform
from collections.abc import Iterable, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from lightning_scape.__about__ import __version__
from lightning_scape.tools.diagnosis.findings import Finding, Verdict

DISTRIBUTION = "lightning-scape"
REQUIRED = ("torch", "lightning", "torchmetrics", "numpy")
OPTIONAL = {
    "numba": ("cpu", "SCAPE on CPUs: without it a step takes four to seven times as long"),
    "triton": ("gpu", "SCAPE on NVIDIA GPUs: without it a step takes several times as many passes over memory"),
    "litgpt": ("litgpt", "`litgpt-scape` and `lightning-scape plan`"),
    "matplotlib": ("plots", "`ScapeMonitor(report=...)` and `lightning-scape plan --plot`"),
}
"""By name: the extra that brings it, and what needs it."""
BESIDE_LITGPT = ("requests", "tensorboard")
"""What LitGPT's pretraining imports and LitGPT does not ask for: of all extras only ``litgpt`` brings both."""
TOPIC = "Installed"


def check_packages(on_cuda: bool) -> list[Finding]:
    """Versions of what this package builds on: found, in range, and importable.

    Args:
        on_cuda: whether training would run on CUDA devices; then Triton matters, else numba.
    """
    ranges = required_ranges()
    here = f"lightning_scape {__version__}, Python {platform.python_version()}, {platform.system()}"
    found = [Finding(TOPIC, "ok", here)]
    if ranges is None:
        found.append(
            Finding(
                TOPIC,
                "note",
                "This copy of lightning_scape is not installed, so which versions it needs is not known.",
                "Install it: pip install -e .",
            )
        )
    matters = "triton" if on_cuda else "numba"
    for name in (*REQUIRED, *OPTIONAL):
        found.append(_check(name, installed_version(name), ranges or {}, slow_without=name == matters))
    if installed_version("litgpt") is not None:
        found += _check_beside_litgpt()
    return found


def installed_version(name: str) -> str | None:
    """The version of a distribution; None is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def required_ranges() -> dict[str, SpecifierSet] | None:
    """Which versions this package declares to need, extras included; None where it is not installed."""
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    return ranges_of(declared)


def ranges_of(declared: Iterable[str]) -> dict[str, SpecifierSet]:
    """By name, in small letters: all ranges of versions that the requirements give, together."""
    found: dict[str, SpecifierSet] = {}
    for line in declared:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # of a tool that writes what pip cannot read
            continue
        name = requirement.name.lower()
        found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def _check(name: str, version: str | None, ranges: Mapping[str, SpecifierSet], *, slow_without: bool) -> Finding:
    extra, used_for = OPTIONAL.get(name, ("", ""))
    wanted = ranges.get(name, SpecifierSet())
    target = f"'{DISTRIBUTION}[{extra}]'" if extra else f"'{name}{wanted}'"
    if version is None:
        verdict: Verdict = "slow" if slow_without else ("note" if extra else "broken")
        why = f", which is for {used_for}" if used_for else ", without which nothing works"
        return Finding(TOPIC, verdict, f"{name} is not installed{why}.", f"Install it: pip install {target}")
    if not wanted.contains(version, prereleases=True):
        text = f"{name} must be {wanted}{f' for {used_for}' if used_for else ''}, got {version}."
        # What no extra has promised fails nobody who does not use it; whether a step runs is tried.
        return Finding(TOPIC, "note" if extra else "broken", text, f"Install another: pip install '{name}{wanted}'")
    try:
        importlib.import_module(name)
    except Exception as error:  # whatever it does when it is imported
        text = f"{name} {version} is installed, and cannot be imported: {type(error).__name__}: {error}."
        # Needed by everything, or by the step itself: else only by what is named.
        verdict = "broken" if not extra or slow_without or name == "litgpt" else "note"
        return Finding(TOPIC, verdict, text, f"Install it again: pip install --force-reinstall {target}")
    return Finding(TOPIC, "ok", f"{name} {version}{f' (needs {wanted})' if wanted else ''}")


def _check_beside_litgpt() -> list[Finding]:
    missing = [name for name in BESIDE_LITGPT if installed_version(name) is None]
    if not missing:
        return []
    text = f"`litgpt-scape pretrain` needs {' and '.join(missing)} too, which litgpt does not bring."
    return [Finding(TOPIC, "note", text, f"To use it: pip install '{DISTRIBUTION}[litgpt]'")]
