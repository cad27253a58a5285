"""The step's scale: one clipping factor for all ranks; 0 if a gradient is not finite (docs/design.md, 3.2)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.core.private_names import version
from lightning_scape.core.tensors import OnItsWay
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.first_message import Answer, FirstMessage, Standing

SKETCH_WIDTHS = (4093, 4091, 4079, 4073, 4057, 4051, 4049, 4027)
"""Buckets of the norm sketch: the largest primes below 4096, so that no matrix is as wide as all of them."""
_CHUNK = 1 << 16
"""Entries with the same width of the sketch; the signs take twice as many floats."""
_TINY = torch.finfo(torch.float32).tiny


class GradientClipping:
    """Measures the averaged gradient's norm and keeps what was decided until the step that uses it.

    Nothing here touches a gradient or a residual: :func:`ops.fold` applies what is recorded.

    Args:
        config: ``clip_norm`` and ``max_skipped`` are used.
        first_message: carries what is measured.
    """

    def __init__(self, config: ScapeConfig, first_message: FirstMessage) -> None:
        self.rule, self.max_skipped = config.clip_norm, config.max_skipped
        self.first_message = first_message
        self.skipped_in_row = 0
        self.skipped_total = 0
        self.last_skipped = False
        self.answer: Answer | None = None
        """The answer to the first message for the current gradient, None before."""
        self._factor: Tensor | None = None
        self._measured: list[tuple[Tensor | None, int]] = []
        """The gradients of the recorded norm, and their versions then."""
        self._flat: list[Tensor | None] = []
        """The same, flat."""
        self._signs: Tensor | None = None
        self._strict = False
        self._standing: Standing | None = None
        self.found_inf: tuple[OnItsWay, bool, Standing | None] | None = None
        """On CUDA, about the step before: its scale, and whether ranks were together, on their way to host memory;
        whether its norm must be finite; its standing."""

    def forget(self) -> None:
        """Drops what was recorded: its gradient is gone."""
        self.answer = self._factor = self._standing = None
        self._measured, self._flat = [], []
        self._strict = False

    def measure(self, grads: Sequence[Tensor | None], device: torch.device, standing: Standing) -> Answer:
        """Measures the norm, and sends the step's first message: a sketch if there is a norm to clip by.

        Raises:
            RuntimeError, ValueError: as :meth:`FirstMessage.exchange`.
        """
        sketch = standing.max_norm is not None and self.rule == "sketch"
        if sketch and self.first_message.communicator.world_size > 1:
            if self._signs is None or self._signs.device != device:
                signs = random_signs(2 * _CHUNK)
                # A GPU reads them beside every gradient: as bytes, they are a quarter of what it reads there.
                self._signs = ops.to_device(signs.to(torch.int8) if device.type == "cuda" else signs, device)
            measured = ops.sketch(grads, self._signs, SKETCH_WIDTHS)
        else:
            measured = squared_norm(grads, device)
        self.answer = self.first_message.exchange(measured, [grad is not None for grad in grads], standing)
        self._standing = standing
        return self.answer

    def clip(self, max_norm: float, *, strict: bool = False) -> Tensor:
        """Records the factor ``min(1, max_norm / norm)``, times that of an earlier call for the same gradients.

        Returns:
            The norm that was measured, times the earlier factor: 0-dim fp32.

        Raises:
            RuntimeError: ``strict``, and it is not finite: at once on the CPU, on CUDA by :meth:`wait_found_inf`.
        """
        assert self.answer is not None
        norm = self.answer.norm if self._factor is None else self.answer.norm * self._factor
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        # clamp: a factor that underflows to 0 would read as "skip".
        self._factor = (factor if self._factor is None else factor * self._factor).clamp(min=_TINY)
        self._strict = self._strict or strict
        if strict and not norm.is_cuda and not bool(torch.isfinite(norm)):
            _refuse(f"got {float(norm)}")
        return norm

    def scale(self) -> Tensor:
        """What the step's gradient is multiplied with: the recorded factor, 1 without one, 0 if it is not finite.

        0-dim fp32, the same on all ranks: a NaN or inf on any of them makes the norm not finite on every one. 0, too,
        where ranks are apart: then nothing is folded.
        """
        assert self.answer is not None
        norm = self.answer.norm
        factor = torch.ones_like(norm) if self._factor is None else self._factor
        usable = torch.isfinite(norm)
        if norm.is_cuda:
            usable = usable & (self.answer.together != 0)
        return torch.where(usable, factor, torch.zeros_like(factor))

    def remember(self, grads: Sequence[Tensor | None], flat: list[Tensor | None]) -> None:
        """Notes the gradients of the recorded norm; :meth:`check_unchanged` compares with them.

        Args:
            grads: as the backward pass left them.
            flat: the same, flat; empty if not known.
        """
        self._measured, self._flat = [(grad, 0 if grad is None else version(grad)) for grad in grads], flat

    def flat_of(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The measured gradients, flat, if they still lie in that memory; else an empty list.

        A flat copy (of another memory order) misses what is written past autograd, as a loss scaler does.
        """
        if len(self._flat) != len(grads):
            return []
        together = zip(grads, self._flat, self._measured, strict=True)
        same = all(
            g is known and (g is None or f is None or f.data_ptr() == g.data_ptr()) for g, f, (known, _) in together
        )
        return self._flat if same else []

    def are_gone(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether none of the gradients that were clipped is left."""
        return not any(
            grad is not None and grad is known for grad, (known, _) in zip(grads, self._measured, strict=False)
        )

    def check_unchanged(self, grads: Sequence[Tensor | None]) -> None:
        """Raises ``RuntimeError`` if a gradient has changed since :meth:`remember`.

        It may no longer be finite, and the recorded factor would also scale what was added since.
        """
        for place, (grad, (known, known_version)) in enumerate(zip(grads, self._measured, strict=False)):
            if grad is not known or (grad is not None and version(grad) != known_version):
                raise RuntimeError(
                    "Gradients must stay as they are once they are clipped, until the step, got another one for"
                    f" parameter {place}. Clip last, and where several backward passes make a step after the last of"
                    " them; or call the optimizer's zero_grad() to drop what was clipped."
                )

    @property
    def recorded(self) -> bool:
        """Whether the step will clip."""
        return self._factor is not None

    # ------------------------------------------------------------------------------------- skipped steps

    def record_found_inf(self, scale: Tensor) -> None:
        """Notes whether the step with this scale was skipped, and forgets what was recorded for it.

        On the CPU at once; on CUDA when :meth:`wait_found_inf` is called, for reading it now would make the CPU wait.

        Raises:
            FloatingPointError: ``max_skipped`` steps in a row were skipped (on every rank in the same step).
        """
        strict, standing, answer = self._strict, self._standing, self.answer
        self.forget()
        if scale.device.type != "cuda":
            self._count(scale)
            return
        assert answer is not None
        found = torch.stack([scale, answer.together.to(scale.dtype)])
        self.found_inf = (OnItsWay(found), strict, standing)

    def wait_found_inf(self) -> None:
        """Reads whether the last step was skipped, if that is still on the device; the step is long over by now.

        Raises:
            FloatingPointError: as :meth:`record_found_inf`.
            RuntimeError: the step was skipped, and its norm was recorded as one that must be finite; or ranks were
                apart in it.
        """
        if self.found_inf is not None:
            found, strict, standing = self.found_inf
            self.found_inf = None
            scale, together = found.read().unbind()
            if not together:
                assert standing is not None
                self.first_message.raise_apart(standing)
            if strict and float(scale) == 0.0:
                self.last_skipped = True
                _refuse("got NaN or inf in the step before, which was skipped")
            self._count(scale)

    def _count(self, scale_on_host: Tensor) -> None:
        self.last_skipped = float(scale_on_host) == 0.0
        if not self.last_skipped:
            self.skipped_in_row = 0
            return
        self.skipped_total += 1
        self.skipped_in_row += 1
        if self.skipped_in_row >= self.max_skipped:
            raise FloatingPointError(
                f"The gradient norm must be finite, got NaN or inf in {self.skipped_in_row} steps in a row"
                f" (max_skipped={self.max_skipped}); parameters and residuals are as before the first of them. Lower"
                " the learning rate, clip gradients, or look for a bad batch; raise `max_skipped` to wait longer."
            )
        if self.first_message.communicator.rank == 0 and self.first_message.node.rank == 0:
            warnings.warn(
                f"The gradient norm was not finite on at least one rank: step skipped on all ranks, nothing lost"
                f" ({self.skipped_in_row} in a row, {self.skipped_total} in total; an error at"
                f" {self.max_skipped} in a row).",
                stacklevel=4,
            )


def check_max_norm(max_norm: float) -> None:
    """Raises ``ValueError`` unless gradients can be clipped to this norm."""
    if not max_norm > 0:
        raise ValueError(
            f"`max_norm` must be > 0, got {max_norm!r}. To train without clipping, don't call clip_grad_norm"
            " (Trainer: gradient_clip_val=None)."
        )


def squared_norm(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """fp32 ``[1]``, of all gradients together."""
    given = [grad for grad in grads if grad is not None and grad.numel()]
    return ops.squared_norm(given).view(1) if given else torch.zeros(1, dtype=torch.float32, device=device)


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"The norm of the averaged gradient must be finite, {what} (on every rank). Pass `error_if_nonfinite=False` to"
        " let the optimizer skip such a step on all ranks."
    )


def random_signs(count: int) -> Tensor:
    """The same +1 and -1 on every rank, fp32."""
    generator = torch.Generator("cpu").manual_seed(0x5CA9E)
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.int64, device="cpu").mul_(2).sub_(1).float()
