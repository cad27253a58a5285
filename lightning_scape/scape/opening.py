"""A step's first message: the norm, and whether all ranks are at the same step with the same settings.

One all-reduce. Besides the measured norm it carries a digest of what must be the same on all ranks (its facts), and
flags: which parameters have a gradient on this rank. Facts that differ go unseen by a rank once in ``2**60`` steps
(N = 16; docs/design.md, 3.6).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_scape import ops
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.local_shards import has_gradient
from lightning_scape.core.parameters import HYPERPARAMETERS, Parameters, problem_of_groups
from lightning_scape.core.private_names import norms, version
from lightning_scape.core.replicas import Facts, apart, digest, settings
from lightning_scape.ops.naive.masks import chunk
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.state import Groups

_TINY = torch.finfo(torch.float32).tiny

DIGITS = 3
"""Numbers of a digest."""
SKETCH_WIDTHS = (4093, 4091, 4079, 4073, 4057, 4051, 4049, 4027)
"""Buckets of the norm's sketch (docs/design.md, 3.2): the largest primes below 4096, so that no matrix is as wide as
all of them."""
_CHUNK = 1 << 16
"""Entries with the same width of the sketch; the signs take twice as many floats."""


def width(config: ScapeConfig, ranks: int) -> int:
    """Numbers that a rank measures of its gradient, at most."""
    return max(SKETCH_WIDTHS) if config.clip_norm == "sketch" and ranks > 1 else 1


def random_signs(count: int) -> Tensor:
    """The same +1 and -1 on every rank, fp32."""
    generator = torch.Generator("cpu").manual_seed(0x5CA9E)
    return torch.randint(0, 2, (count,), generator=generator, dtype=torch.int64, device="cpu").mul_(2).sub_(1).float()


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """Those of sketches. A GPU reads them beside every gradient, as bytes: a quarter of what it reads there."""
    signs = random_signs(2 * _CHUNK)
    return (signs.to(torch.int8) if device.type == "cuda" else signs).to(device)  # at once: other streams read it, too


def squared_norm(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """fp32 ``[1]``: the sum of squares of all entries; inf or NaN if any entry is, or if the sum overflows."""
    given = [grad for grad in grads if grad is not None and grad.numel()]
    # Sums of few entries: those of many would lose their last ones to rounding.
    parts = [part for grad in given for part in (grad.split(chunk(grad)) if grad.numel() > chunk(grad) else [grad])]
    return norms(parts).square().sum().view(1) if parts else torch.zeros(1, dtype=torch.float32, device=device)


def digest_of(facts: Facts, ranks: int) -> Tensor:
    """fp32 ``[DIGITS]``, on the CPU."""
    bits = 24 - (ranks - 1).bit_length()
    number = digest(facts, 3 * DIGITS)
    digits = [(number >> 24 * place) % (1 << bits) for place in range(DIGITS)]
    return torch.tensor(digits, dtype=torch.float32, device="cpu")


class Answer(NamedTuple):
    """What all ranks know after the first message."""

    norm: Tensor
    """0-dim fp32, of the averaged gradient, as it was measured."""
    present: Tensor | None
    """fp32 ``[parameters]``: 1 for those with a gradient on some rank, else 0. None: the CPU knows that all have."""
    together: Tensor
    """0-dim bool: whether all ranks are at the same step."""
    facts: Facts
    """This rank's."""


class Opening:
    """Opens a step by its first message, and keeps what was decided until the step that uses it.

    The first to ask for the norm sends it: clipping, or the step itself. Nothing here touches a gradient or a residual:
    the factor is applied when the step folds gradients into the residual. Before the step gradients come, are clipped
    or are dropped; the message tells whether all ranks did the same.

    Args:
        width: numbers of what is measured, at most; above 1 it is a sketch. The message has room for them in every
            step: whether ranks clip may differ by mistake, and messages of two lengths would not meet.
    """

    def __init__(self, parameters: Parameters, communicator: Communicator, node: Communicator, width: int) -> None:
        self._parameters, self.communicator, self.node, self._width = parameters, communicator, node, width
        communicator.make_room(width + len(parameters.tensors) + DIGITS)
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
        self._measured: list[tuple[Tensor | None, int]] = []
        """Gradients whose norm was asked for before the step, and their versions then."""

    # ------------------------------------------------------------------------------------------- the message

    def gradients(
        self, groups: Groups, calls: int, max_norm: float | None = None
    ) -> tuple[list[Tensor | None], Answer]:
        """Returns flat gradients, and what all ranks know of them. ``calls`` counts the steps before this one.

        Sends the step's first message if it was not sent yet; with ``max_norm``, which asks for clipping, again.

        Raises:
            ValueError: a number of the groups breaks a rule; on every rank. Or a gradient is sparse, or groups train
                other parameters than before; on this rank alone, before it sends anything.
        """
        self._parameters.check_groups(groups)
        grads = self._parameters.flat_gradients()
        if self.answer is None or max_norm is not None:
            sketched, device = max_norm is not None and self._width > 1, self._parameters.device
            measured = ops.sketch(grads, _signs(device), SKETCH_WIDTHS) if sketched else squared_norm(grads, device)
            facts = {
                "the optimizer's number": self.communicator.number,
                "the step": calls + 1,
                "the batch": self.batch,
                # Which gradients a rank drops may differ by its batch, and where the batch is known it says enough.
                "the number of gradients that no step used": self._left_out if self.batch is None else 0,
                "whether parameters were compared since they were loaded": self.compared,
                "max_norm": max_norm,
                **settings(groups, HYPERPARAMETERS),
            }
            self.answer = self.exchange(measured, [*map(has_gradient, self._parameters.tensors)], facts)
        if (problem := problem_of_groups(groups)) is not None:  # on all ranks, for they have the same
            raise ValueError(problem)
        return grads, self.answer

    def exchange(self, measured: Tensor, flags: Sequence[bool], facts: Facts) -> Answer:
        """Sends the message, and returns what all ranks know then. Collective.

        Args:
            measured: fp32, of this rank's gradients, to be summed: a sketch, or the squared norm ``[1]``.
            flags: which parameters have a gradient on this rank.
            facts: of this rank.

        Raises:
            RuntimeError: ranks are at different steps, or with different settings; on every rank, naming them. On CUDA
                the step changes nothing, and the CPU learns of it later.
        """
        ranks, device = self.communicator.world_size, measured.device
        digest, sketched = digest_of(facts, ranks), len(measured) > 1
        own = torch.tensor(flags, dtype=torch.float32, device="cpu")
        carried = ops.to_device(torch.cat([own, digest]), device)
        room = measured.new_zeros(self._width - len(measured))
        sums = self.communicator.all_reduce_sum(torch.cat([measured, room, carried]))
        measured, having, digests = sums.split([self._width, len(flags), DIGITS])
        present = (having != 0).float()
        mean = measured / ranks
        norm = torch.linalg.vector_norm(mean) if sketched else mean.sum().sqrt()
        together = (digests == ops.to_device(digest, device) * ranks).all()
        if self.node.world_size > 1:  # the norm of all rows; and what the ranks of some rows know, all learn
            everyone = self.node.all_gather_stacked(torch.cat([norm.view(1), together.view(1), present]))
            norm, together = torch.linalg.vector_norm(everyone[:, 0]), everyone[:, 1].all()
            present = everyone[:, 2:].amax(dim=0)
        if device.type == "cpu" and not together:
            raise apart(self.communicator, self.node, facts)
        alone = ranks == self.node.world_size == 1
        all_have = all(flags) if alone else device.type == "cpu" and bool(present.all())
        return Answer(norm, None if all_have else present, together, facts)

    def scale(self, answer: Answer) -> Tensor:
        """What the step's gradient is multiplied with: the recorded factor, 1 without one, 0 if it is not finite.

        0-dim fp32, the same on all ranks: a NaN or inf on any of them makes the norm not finite on every one. 0, too,
        where ranks are apart: then nothing is folded.
        """
        usable = torch.isfinite(answer.norm) & answer.together
        return torch.where(usable, 1.0 if self._factor is None else self._factor, 0.0)

    # ------------------------------------------------------------------------------------------- before the step

    def clip(self, groups: Groups, calls: int, max_norm: float, strict: bool) -> Tensor:
        """Records the factor ``min(1, max_norm / norm)``, times that of an earlier call for the same gradients.

        Returns the norm that was measured, times the earlier factor: 0-dim fp32. ``strict``: it must be finite.
        """
        if not max_norm > 0:
            raise ValueError(
                f"`max_norm` must be > 0, got {max_norm!r}. To train without clipping, don't call clip_grad_norm"
                " (Trainer: gradient_clip_val=None)."
            )
        self.check_measured()
        _, answer = self.gradients(groups, calls, max_norm)
        before = 1.0 if self._factor is None else self._factor
        norm = answer.norm * before
        # clamp: a factor that underflows to 0 would read as "skip".
        self._factor = ((max_norm / (norm + 1e-6)).clamp(max=1.0) * before).clamp(min=_TINY)
        self._measured = list(self._at_hand())
        self._used = True  # also by ranks without gradients: what follows is decided by the same norm
        if strict and not bool(torch.isfinite(norm)):
            raise RuntimeError(
                f"The norm of the averaged gradient must be finite, got {float(norm)} (on every rank). Pass"
                " `error_if_nonfinite=False` to let the optimizer skip such a step on all ranks."
            )
        return norm

    def _at_hand(self) -> Iterator[tuple[Tensor | None, int]]:
        return ((grad, 0 if grad is None else version(grad)) for grad in self._parameters.raw_gradients())

    def check_measured(self) -> None:
        """Forgets what was recorded if its gradients are gone, all of them, as after a step that was left out.

        Raises:
            RuntimeError: one has changed since it was clipped. It may no longer be finite, and the recorded factor
                would also scale what was added since.
        """
        pairs = list(zip(self._measured, self._at_hand(), strict=False))
        changed = [place for place, (then, now) in enumerate(pairs) if now[0] is not then[0] or now[1] != then[1]]
        if changed and not any(now is not None and now is then for (then, _), (now, _) in pairs):
            self.forget()
        elif changed:
            raise RuntimeError(
                "Gradients must stay as they are once they are clipped, until the step, got another one for parameter"
                f" {changed[0]}. Clip last, and where several backward passes make a step after the last of them."
            )

    def drop(self) -> None:
        """Before gradients are cleared: counts those that no step used, forgets what was recorded about them."""
        unused = not self._used and any(p.grad is not None for p in self._parameters.tensors)
        self.forget()
        self._left_out += unused
        self._used = False
