"""Between two steps: gradients come, are clipped, are dropped; then a message tells that all ranks did the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.parameters import Parameters, problem_of_group
from lightning_scape.core.private_names import version
from lightning_scape.scape.clipping import GradientClipping
from lightning_scape.scape.first_message import Standing, settings

Groups = Sequence[dict[str, Any]]
"""An optimizer's parameter groups: schedulers change them from step to step."""


class Opening:
    """Opens a step by its first message, with what this rank has done since the last one.

    The first to ask for the norm sends it: clipping, or the step itself.

    Args:
        parameters: those trained.
        comm: the ranks whose gradients are averaged.
        clipping: measures, and keeps what was decided.
    """

    def __init__(self, parameters: Parameters, comm: Communicator, clipping: GradientClipping) -> None:
        self._parameters, self._comm, self._clipping = parameters, comm, clipping
        self.message = clipping.first_message
        self.batch: int | None = None
        """Batches of the epoch so far, where the Trainer says it."""
        self.compared = False
        """Whether parameters were compared with the other ranks' since they were loaded."""
        self._left_out = 0
        """Gradients that were dropped before a step used them."""
        self._used = True
        self._cleared: list[int | None] = []
        """:meth:`_versions` after gradients were cleared."""

    def gradients(self, groups: Groups, calls: int, max_norm: float | None = None) -> list[Tensor | None]:
        """Returns flat gradients. Sends the step's first message if it was not sent yet; with ``max_norm`` again.

        If something is wrong with this rank's gradients or groups, the message tells all ranks. Then this rank raises
        its own error, and the others raise what they were told.

        Args:
            groups: the optimizer's parameter groups.
            calls: steps before this one.
            max_norm: bound of the norm; None: no clipping is asked for.
        """
        if max_norm is not None:
            self._check_clipped()
        grads: list[Tensor | None] = [None for _ in self._parameters.tensors]
        device, error = self._parameters.device, None
        try:
            if problems := [found for group in groups if (found := problem_of_group(group)) is not None]:
                raise ValueError(problems[0])
            self._parameters.check_groups(groups)
            raw = self._parameters.raw_gradients()
            grads = self._clipping.flat_of(raw) or self._parameters.flat_gradients(raw)
        except Exception as found:
            error = found
        if error is not None and (self._comm.world_size == 1 or device.type == "cuda"):
            raise error
        if self._clipping.answer is None or max_norm is not None:
            try:
                self._clipping.measure(grads, device, self._standing(groups, calls, max_norm, error))
            except RuntimeError as told:
                raise (error or told) from told.__cause__
        if error is not None:
            raise error
        return grads

    def _check_clipped(self) -> None:
        """Checks that clipped gradients are unchanged; forgets them if the module's ``zero_grad()`` has removed all."""
        if not self._clipping.recorded:
            return
        grads = self._parameters.raw_gradients()
        if self._clipping.are_gone(grads):
            self._clipping.forget()
        else:
            self._clipping.check_unchanged(grads)

    def _standing(self, groups: Groups, calls: int, max_norm: float | None, error: Exception | None) -> Standing:
        """What must be the same on all ranks in this step."""
        # Which gradients a rank drops may differ by its batch, and where the batch is known it says enough.
        left_out = self._left_out if self.batch is None else 0
        facts = self._comm.number, calls, left_out, self.batch, self.compared
        problem = None if error is None else f"{type(error).__name__}: {error}"
        return Standing(*facts, settings(groups), max_norm, problem)

    # ------------------------------------------------------------------------------------- what became of gradients

    def ask_anew(self) -> None:
        """Has the norm measured again, unless gradients were clipped: they may have changed, or be new ones."""
        if not self._clipping.recorded:
            self._clipping.forget()

    def measured(self, flat: list[Tensor | None]) -> None:
        """Notes that the norm of the gradients, ``flat``, is known before the step, which takes the same ones."""
        self._clipping.remember(self._parameters.raw_gradients(), flat)
        self.used()  # by all ranks, also those without gradients; what follows is decided by the same norm

    def used(self) -> None:
        """Notes that all ranks have used their gradients, or had none."""
        self._used = True

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """A context around the clearing of gradients: counts those that no step used, forgets what was recorded."""
        changed = self._versions() != self._cleared
        if not self._used and changed and any(p.grad is not None for p in self._parameters.tensors):
            self._left_out += 1
        self._used = False
        self._clipping.forget()
        yield
        self._cleared = self._versions()

    def _versions(self) -> list[int | None]:
        """How often each gradient was written."""
        return [None if p.grad is None else version(p.grad) for p in self._parameters.tensors]
