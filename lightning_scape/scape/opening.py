"""Between two steps: gradients come, are clipped, are dropped; then a message tells that all ranks did the same."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape.core.parameters import Parameters, problem_of_groups
from lightning_scape.core.private_names import version
from lightning_scape.scape.clipping import Sketch, squared_norm
from lightning_scape.scape.first_message import Answer, FirstMessage, Standing, settings
from lightning_scape.scape.state import Groups

_TINY = torch.finfo(torch.float32).tiny


class Opening:
    """Opens a step by its first message, and keeps what was decided until the step that uses it.

    The first to ask for the norm sends it: clipping, or the step itself. Nothing here touches a gradient or a residual:
    the factor is applied when the step folds gradients into the residual.

    Args:
        parameters: those trained.
        first_message: of a step.
        sketches: whether the norm is measured by sketches.
    """

    def __init__(self, parameters: Parameters, first_message: FirstMessage, sketches: bool) -> None:
        self._parameters, self._message = parameters, first_message
        self._sketch = Sketch() if sketches else None
        self.batch: int | None = None
        """Batches of the epoch so far, where the Trainer says it."""
        self.compared = False
        """Whether parameters were compared with the other ranks' since they were loaded."""
        self._left_out = 0
        """Gradients that were dropped before a step used them."""
        self.forget()

    def forget(self) -> None:
        """Drops what was recorded: its gradients are used, or gone."""
        self._used = True
        """Whether all ranks have used their gradients since they were cleared, or had none."""
        self.answer: Answer | None = None
        """To the first message, with the gradients at hand; None before it."""
        self._factor: Tensor | None = None
        self._measured: list[tuple[Tensor | None, int | None]] = []
        """Gradients whose norm was asked for before the step, and their versions then."""

    # ------------------------------------------------------------------------------------------- the message

    def gradients(self, groups: Groups, calls: int, max_norm: float | None = None) -> list[Tensor | None]:
        """Returns flat gradients. Sends the step's first message if it was not sent yet; with ``max_norm`` again.

        If something is wrong with this rank's gradients or groups, the message tells all ranks. Then this rank raises
        its own error, and the others raise what they were told.

        Args:
            groups: the optimizer's parameter groups.
            calls: steps before this one.
            max_norm: bound of the norm; None: no clipping is asked for.
        """
        grads: list[Tensor | None] = [None for _ in self._parameters.tensors]
        device, error, ranks = self._parameters.device, None, self._message.communicator.world_size
        try:
            if (problem := problem_of_groups(groups)) is not None:
                raise ValueError(problem)
            self._parameters.check_groups(groups)
            grads = self._parameters.flat_gradients()
        except Exception as found:
            error = found
        if error is not None and (ranks == 1 or device.type == "cuda"):
            raise error
        if self.answer is None or max_norm is not None:
            measure = squared_norm if max_norm is None or self._sketch is None else self._sketch
            given = [grad is not None for grad in grads]
            try:
                standing = self._standing(groups, calls, max_norm, error)
                self.answer = self._message.exchange(measure(grads, device), given, standing)
            except RuntimeError as told:
                raise (error or told) from told.__cause__
        if error is not None:
            raise error
        return grads

    def _standing(self, groups: Groups, calls: int, max_norm: float | None, error: Exception | None) -> Standing:
        """What must be the same on all ranks in this step."""
        # Which gradients a rank drops may differ by its batch, and where the batch is known it says enough.
        left_out = self._left_out if self.batch is None else 0
        facts = self._message.communicator.number, calls, left_out, self.batch, self.compared
        problem = None if error is None else f"{type(error).__name__}: {error}"
        return Standing(*facts, settings(groups), max_norm, problem)

    def scale(self) -> Tensor:
        """What the step's gradient is multiplied with: the recorded factor, 1 without one, 0 if it is not finite.

        0-dim fp32, the same on all ranks: a NaN or inf on any of them makes the norm not finite on every one. 0, too,
        where ranks are apart: then nothing is folded.
        """
        assert self.answer is not None
        norm = self.answer.norm
        usable = torch.isfinite(norm)
        if norm.is_cuda:
            usable = usable & (self.answer.together != 0)
        return torch.where(usable, 1.0 if self._factor is None else self._factor, 0.0)

    # ------------------------------------------------------------------------------------------- before the step

    def clip(self, groups: Groups, calls: int, max_norm: float, strict: bool) -> Tensor:
        """Records the factor ``min(1, max_norm / norm)``, times that of an earlier call for the same gradients.

        Returns:
            The norm that was measured, times the earlier factor: 0-dim fp32.

        Raises:
            RuntimeError: ``strict``, and it is not finite; or gradients have changed since an earlier call.
        """
        if not max_norm > 0:
            raise ValueError(
                f"`max_norm` must be > 0, got {max_norm!r}. To train without clipping, don't call clip_grad_norm"
                " (Trainer: gradient_clip_val=None)."
            )
        self.check_measured()
        self.gradients(groups, calls, max_norm)
        assert self.answer is not None
        norm = self.answer.norm if self._factor is None else self.answer.norm * self._factor
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # clamp: a factor that underflows to 0 would read as "skip".
        self._factor = (factor if self._factor is None else factor * self._factor).clamp(min=_TINY)
        if strict and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"The norm of the averaged gradient must be finite, got {float(norm)} (on every rank). Pass"
                " `error_if_nonfinite=False` to let the optimizer skip such a step on all ranks."
            )
        self._remember()
        return norm

    def all_finite(self, groups: Groups, calls: int) -> bool:
        """Whether the gradients of all ranks are finite. They are measured again unless they were clipped."""
        if self._factor is None:
            self.forget()
        self.check_measured()
        self.gradients(groups, calls)
        assert self.answer is not None
        finite = bool(torch.isfinite(self.answer.norm))
        self._remember()
        return finite

    def _remember(self) -> None:
        """Notes the gradients whose norm is known before the step: it takes the same ones."""
        self._measured = [(grad, None if grad is None else version(grad)) for grad in self._parameters.raw_gradients()]
        self._used = True  # also by ranks without gradients: what follows is decided by the same norm

    def check_measured(self) -> None:
        """Forgets what was recorded if its gradients are gone, all of them, as after a step that was left out.

        Raises:
            RuntimeError: one has changed since it was clipped. It may no longer be finite, and the recorded factor
                would also scale what was added since.
        """
        pairs = list(zip(self._parameters.raw_gradients(), self._measured, strict=False))
        changed = any(grad is not known for grad, (known, _) in pairs)
        if changed and not any(grad is not None and grad is known for grad, (known, _) in pairs):
            self.forget()
            return
        for place, (grad, (known, known_version)) in enumerate(pairs):
            if grad is not known or (grad is not None and version(grad) != known_version):
                raise RuntimeError(
                    "Gradients must stay as they are once they are clipped, until the step, got another one for"
                    f" parameter {place}. Clip last, and where several backward passes make a step after the last of"
                    " them."
                )

    def drop(self) -> None:
        """Before gradients are cleared: counts those that no step used, forgets what was recorded about them."""
        unused = not self._used and any(p.grad is not None for p in self._parameters.tensors)
        self.forget()
        self._left_out += unused
        self._used = False
