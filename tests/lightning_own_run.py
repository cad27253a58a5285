"""One run of Lightning's own tests, started by ``lightning_own.py``: pytest with other strategies put in.

Processes that a test spawns import this file again, and get the same.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning_own
import pytest
import torch
from lightning.fabric.connector import _Connector
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    MethodStrategy,
    ScapeStrategy,
    SparseLoCoStrategy,
)

RUN = "LIGHTNING_OWN_RUN"
"""Which run a process is part of."""
DENSE: dict[str, Any] = {"sparsity": 0.0, "wire_dtype": "fp32"}
EVERY_STEP: dict[str, Any] = {"sync_every": 1, "density": 1.0, "bits": None}
STRATEGIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "ddp": (DDPStrategy, FabricDDP),
    "scape": (functools.partial(ScapeStrategy, **DENSE), functools.partial(FabricScapeStrategy, **DENSE)),
    "sparseloco": (
        functools.partial(SparseLoCoStrategy, **EVERY_STEP),
        functools.partial(FabricSparseLoCoStrategy, **EVERY_STEP),
    ),
}
"""What a run puts in, for Trainer and for Fabric."""
ranks_of_test = 1
"""The most ranks that a Trainer or Fabric of the current test asked for."""


class SGD(torch.optim.AdamW):
    """AdamW by the name of SGD, and with its arguments."""

    def __init__(self, params: Any, lr: float = 1e-3, *_: Any, weight_decay: float = 0.0, **__: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


SGD.__module__ = "torch.optim"  # where pickle finds it


def install(run: str) -> None:
    """Replaces SGD, and the strategies that Trainer and Fabric would choose, in this process."""
    torch.optim.SGD = SGD  # type: ignore[misc]
    # Lightning's thread that watches started ranks looks every 5 seconds, and its tests wait for its end.
    _ChildProcessObserver.__init__.__defaults__ = (0.05,)
    # Ours explains errors of sharded modules, no more. Where a test mocks `Strategy.backward` around the one that a
    # strategy has, the two would call one another.
    del MethodStrategy.backward
    trainer, fabric = STRATEGIES.get(run, (None, None))
    _AcceleratorConnector._choose_strategy = _choosing(_AcceleratorConnector._choose_strategy, trainer)
    _AcceleratorConnector._init_strategy = _making(_AcceleratorConnector._init_strategy, trainer, DDPStrategy)
    _Connector._choose_strategy = _choosing(_Connector._choose_strategy, fabric)
    _Connector._init_strategy = _making(_Connector._init_strategy, fabric, FabricDDP)


def _choosing(usual: Callable[[Any], Any], strategy: Callable[..., Any] | None) -> Callable[[Any], Any]:
    def choose(connector: Any) -> Any:
        chosen = usual(connector)
        on_one_cpu = type(chosen).__name__ == "SingleDeviceStrategy" and chosen.root_device.type == "cpu"
        return strategy() if strategy is not None and on_one_cpu else chosen

    return choose


def _making(usual: Callable[[Any], None], strategy: Callable[..., Any] | None, ddp: type) -> Callable[[Any], None]:
    def make(connector: Any) -> None:
        global ranks_of_test
        usual(connector)
        devices, given = vars(connector)["_parallel_devices"], connector.strategy
        ranks_of_test = max(ranks_of_test, len(devices))
        # DDP by its name or by a test's hand, on CPUs; the control's own is left.
        if strategy is None or strategy is ddp or type(given) is not ddp or any(d.type != "cpu" for d in devices):
            return
        connector.strategy = strategy(**_options_of(given))

    return make


def _options_of(given: object) -> dict[str, Any]:
    """What a test gave its DDPStrategy, not what its properties make of nothing; DDP's own options left out."""
    state = vars(given)
    names = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "start_method")
    names += ("precision_plugin",) if "_precision_plugin" in state else ("precision",)
    return {name: state.get(f"_{name}", state.get(name)) for name in names}


class Recorder:
    """A plugin of pytest: leaves out what has a result, and writes each test's as soon as it ends."""

    def __init__(self, results: Path, limit: float) -> None:
        self.results, self.limit = results, limit
        self.reports: list[pytest.TestReport] = []

    def note(self, **entry: Any) -> None:
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in lightning_own.read(self.results):
            self.note(test=report.nodeid, outcome="not collected", why=_reason(report), ranks=0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        done = lightning_own.read(self.results)
        items[:] = [item for item in items if item.nodeid not in done]
        self.note(left=len(items))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        global ranks_of_test
        ranks_of_test, self.reports, began = 1, [], time.time()
        self.note(began=item.nodeid, at=began)
        # Not a timeout that raises: what waits for another rank hears no signal.
        faulthandler.dump_traceback_later(self.limit, exit=True, file=sys.__stderr__)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            outcome, why = _outcome(self.reports)
            seconds = round(time.time() - began, 2)
            self.note(test=item.nodeid, outcome=outcome, why=why, ranks=ranks_of_test, seconds=seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)


def _outcome(reports: Sequence[pytest.TestReport]) -> tuple[str, str]:
    for report in reports:
        if report.failed:
            return ("failed" if report.when == "call" else f"error in {report.when}"), _reason(report)
        if report.skipped:
            return ("xfailed" if hasattr(report, "wasxfail") else "skipped"), ""
    return "passed", ""


def _reason(report: Any) -> str:
    """The error, and where it was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return _one_line(str(report.longrepr))
    text, where = crash.message, f"{Path(crash.path).name}:{crash.lineno}"
    if "ProcessRaisedException" in text:  # a rank's, whose traceback is the text
        places = re.findall(r'File ".*?([^/"]+)", line (\d+)', text)
        text = text.strip().splitlines()[-1]
        where = ":".join(places[-1]) if places else where
    return f"{_one_line(text)} ({where})"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]


def main() -> int:
    run, results, limit, *arguments = sys.argv[1:]
    os.environ[RUN] = run
    install(run)
    # Of a user's plugins none that starts threads, ends tests or leaves files.
    without = [word for name in ("cacheprovider", "faulthandler", "timeout", "xdist") for word in ("-p", f"no:{name}")]
    options = ["-c", os.devnull, "-q", "--tb=short", "--continue-on-collection-errors", *without]
    return int(pytest.main([*options, *arguments], plugins=[Recorder(Path(results), float(limit))]))


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "__mp_main__" and RUN in os.environ:
    install(os.environ[RUN])
