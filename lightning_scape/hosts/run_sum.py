"""What a whole run sends, warm-up included, compared with DDP: told when a fit begins and ends, and followed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning_scape.core.method import Method
from lightning_scape.core.words import show_bytes, show_bytes_beside
from lightning_scape.planning.cost_model import RunBytes

if TYPE_CHECKING:  # Fabric has none
    from lightning.pytorch import Trainer


def with_prefixes(methods: Sequence[Method]) -> Iterator[tuple[str, Method]]:
    """Each method with its metrics' prefix: ``scape``, or ``scape-0``, ``scape-1``, ... with several optimizers."""
    for index, method in enumerate(methods):
        yield method.name if len(methods) == 1 else f"{method.name}-{index}", method


def expected(
    methods: Sequence[Method], first: int, steps: float | None, clips: bool, looks: bool = False
) -> RunBytes | None:
    """What a rank sends for all optimizers, from one step up to another; None if that is not known, or nothing.

    Args:
        methods: of all optimizers.
        first: steps that were taken before.
        steps: those of the whole run; None: not known.
        clips: whether the norm of the gradient is clipped.
        looks: whether gradients are looked at before a step, once in each.
    """
    if steps is None or steps <= first:
        return None
    found = [_of(each, first, int(steps), clips) for each in methods]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found) or not sum(each.sent for each in known):
        return None
    whole = RunBytes(*map(sum, zip(*known, strict=True)))
    clipping = methods[0].clipping
    if not looks or clipping is None:
        return whole
    more = clipping.bytes_after_backward(clips)
    return whole._replace(sent=whole.sent + more * (int(steps) - first), last=whole.last + more)


def _of(method: Method, first: int, steps: int, clips: bool) -> RunBytes | None:
    return None if method.step_cost is None else method.step_cost.run_bytes(method, first, steps, clips)


def said_before(
    methods: Sequence[Method], steps: float | None, clipped: bool, strategy: Any, looks: bool = False
) -> str | None:
    """The line at the start of a run, or of its rest after a checkpoint; None if :func:`expected` is None.

    Args:
        methods: of all optimizers.
        steps: of the whole run; None: not known.
        clipped: whether the norm of the gradient is clipped.
        strategy: the host's.
        looks: as :func:`expected` has it.
    """
    first = methods[0].progress().steps
    found = expected(methods, first, steps, clipped, looks)
    if found is None or steps is None:
        return None
    which = f"this run of {steps:,.0f} steps" if not first else f"the {steps - first:,.0f} steps that are left"
    unit = "step" if methods[0].exchanges_every_step else "exchange"
    dense, where = _between(strategy)
    left_out = "checkpoints and clipping" if methods[0].clips and not clipped else "checkpoints"  # by the module itself
    return (
        f"{methods[0].title}: {which} will send {_sum(found.sent, steps - first)}, {show_bytes(found.last)} in the last"
        f" {unit}, from each rank{where}, {left_out} left out. {dense} would send"
        f" {show_bytes_beside(found.dense, found.sent)}."
    )


def _between(strategy: Any) -> tuple[str, str]:
    """The dense strategy to compare with, and where its messages go: if nodes hold replicas, HSDP, to other nodes."""
    nodes = getattr(strategy, "device_mesh", None) is not None
    return ("HSDP", " to other nodes") if nodes else ("DDP", "")


def clips(trainer: Trainer) -> bool:
    """Whether the Trainer clips the norm of the gradient."""
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm in (None, "norm")


def _sum(sent: float, steps: float) -> str:
    return f"{show_bytes(sent)}, {show_bytes(sent / max(1, steps))} per step on average"


class RunSum:
    """Follows what this rank sends in a fit, from its first step on.

    Args:
        methods: of all optimizers.
        steps: of the whole run; None: not known.
        trainer: the one whose fit is followed.
        looks: as :func:`expected` has it.
    """

    def __init__(self, methods: Sequence[Method], steps: float | None, trainer: Trainer, looks: bool = False) -> None:
        self._methods, self._strategy = list(methods), trainer.strategy
        self._beside, self._where = _between(trainer.strategy)
        clipped, self._first = clips(trainer), [each.progress().steps for each in methods]
        self._before = [each.communicator.traffic.total for each in methods]
        self._saved_before = self._of_checkpoints()
        steps_of_one = [_of(each, first, first + 1, clipped) for each, first in zip(methods, self._first, strict=True)]
        self._dense = [None if found is None else found.dense for found in steps_of_one]
        """What DDP would send in a step for each optimizer: the same in every step. None: not known."""
        self.steps, self.expected = steps, expected(methods, self._first[0], steps, clipped, looks)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Becomes None in a copy of its holder (a callback): it belongs to the fit that it follows."""
        return type(None), ()

    def about(self) -> dict[str, Any]:
        """For a report: steps, and what is expected of the fit."""
        known: dict[str, Any] = {"beside": self._beside}
        known |= {} if self.steps is None else {"steps": int(self.steps)}
        return known if self.expected is None else {**known, "bytes_expected": self.expected.sent}

    def metrics(self) -> dict[str, float]:
        """By their names in the logger, in bytes since the fit began.

        ``bytes_run`` is what this rank has sent for the optimizer, ``bytes_run_dense`` what DDP would have sent in as
        many steps; with ``local_group_size`` they are those between nodes, and HSDP's. ``bytes_checkpoints`` is what
        checkpoints have sent, all optimizers together: rank 0 to the others, or another rank to rank 0, whichever is
        more.
        """
        found: dict[str, float] = {}
        for index, (prefix, each) in enumerate(with_prefixes(self._methods)):
            found[f"{prefix}/bytes_run"] = float(each.communicator.traffic.total - self._before[index])
            if (dense := self._dense[index]) is not None:
                found[f"{prefix}/bytes_run_dense"] = float(dense * (each.progress().steps - self._first[index]))
            if not index:
                found[f"{prefix}/bytes_checkpoints"] = float(self._of_checkpoints() - self._saved_before)
        return found

    def _of_checkpoints(self) -> int:
        moved = getattr(self._strategy, "checkpoint_bytes", None)
        others = max(1, getattr(self._strategy, "world_size", 1) - 1)
        return 0 if moved is None else max(moved.sent, moved.received // others)

    def said(self) -> str | None:
        """The line at the end of a fit; None where nothing was sent."""
        sent, dense, saved = (
            sum(value for name, value in self.metrics().items() if name.endswith(f"/{kind}"))
            for kind in ("bytes_run", "bytes_run_dense", "bytes_checkpoints")
        )
        steps = self._methods[0].progress().steps - self._first[0]
        if not sent or not steps:
            return None
        at_last = sum(each.stats().get("bytes_total", 0.0) for each in self._methods)
        unit = "step" if self._methods[0].exchanges_every_step else "exchange"
        last = f", {show_bytes(at_last)} in the last {unit}" if at_last else ""
        beside = f" {self._beside} would have sent {show_bytes_beside(dense, sent)}." if dense else ""
        collected = f" For checkpoints a rank has sent {show_bytes(saved)}." if saved else ""
        return (
            f"{self._methods[0].title}: rank 0 has sent{self._where} {_sum(sent, steps)}{last}, in {steps:,} steps."
            f"{beside}{collected}"
        )
