"""AdamS (arXiv 2505.16363), the dense optimizer under SCAPE: Adam whose momentum stands in for the second moment.

Symbols: ``g`` gradient, ``m`` first moment, ``v`` denominator's square, ``theta`` parameter, ``t`` step, from 1.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

# Options of torch's Adam family that a group may bring along, and that would change the update if they were obeyed.
_FOREIGN_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable", "fused")
_PARAMETER_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class AdamS(Optimizer):
    """Adam without a second-moment state, with decoupled weight decay.

    One step, entry by entry, with ``m`` starting at zero::

        v     = beta2 * m**2 + (1 - beta2) * g**2       # m of the step before
        m     = beta1 * m + (1 - beta1) * g
        theta = (1 - lr * weight_decay) * theta
        theta = theta - lr * m / (sqrt(v) + eps)

    With ``bias_correction`` both the old and the new ``m`` are divided by ``1 - beta1**t`` where the update reads them;
    the stored ``m`` is never corrected. The paper's text has no correction, its code has one: the first step is
    0.45 ``lr`` without and 4.47 ``lr`` with it, at the default betas.

    An entry whose gradient is zero keeps moving, by ``lr * beta1 / sqrt(beta2)`` a step, for both ``m`` and ``sqrt(v)``
    shrink together. A parameter whose ``.grad`` is None is left alone: neither stepped nor decayed.

    The state of a parameter is ``step`` (int, updates so far) and ``exp_avg`` (``m``; the parameter's shape; float32
    when the parameter is narrower, else its dtype). All arithmetic is done in the dtype of ``exp_avg``. A step needs
    one temporary of the parameters' size, three for parameters narrower than float32.

    Args:
        params: parameters or groups of them (dicts with ``"params"`` and options of their own), of float64, float32,
            bfloat16 or float16.
        lr: learning rate, >= 0.
        betas: decay of the first moment and its weight in the denominator, each in [0, 1).
        eps: added to the denominator, > 0: with 0, an entry that never had a gradient would become 0/0.
        weight_decay: decoupled weight decay, >= 0.
        bias_correction: divide first moments by ``1 - beta1**t`` in the update.

    Raises:
        ValueError: an option or a parameter's dtype is outside its rule (here and in :meth:`add_param_group`), a
            gradient is sparse (in :meth:`step`), or a state is not one of AdamS (in :meth:`load_state_dict`). The
            message gives rule, value and remedy.

    Source: arXiv 2505.16363.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        _check_options(defaults)
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options it does not name are the constructor's.

        Args:
            param_group: ``{"params": ..., "lr": ..., ...}``.

        Raises:
            ValueError: an option or a parameter's dtype is outside its rule.
        """
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            _check_dtypes(self.param_groups[-1]["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients anew; called once, first, with gradients enabled.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch, params in self._batches(group).items():
                self._update(params, batch.step, group)
        return loss

    def _batches(self, group: dict[str, Any]) -> dict[_Batch, list[Tensor]]:
        """The group's parameters with gradients, in sets that one foreach call can take; counts this step."""
        batches: defaultdict[_Batch, list[Tensor]] = defaultdict(list)
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:  # all of them before any state changes
            if param.grad.layout != torch.strided:
                raise ValueError(
                    f"AdamS needs dense gradients, got layout {param.grad.layout} for a parameter of shape"
                    f" {tuple(param.shape)}: entries without a gradient move too. Use sparse=False in the embedding."
                )
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(param, dtype=_state_dtype(param))
            state["step"] += 1
            batches[_Batch(param.device, param.dtype, param.grad.dtype, state["step"])].append(param)
        return batches

    def _update(self, params: list[Tensor], t: int, group: dict[str, Any]) -> None:
        lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
        correction = 1 - beta1**t if group["bias_correction"] else 1.0
        moments: list[Tensor] = [self.state[param]["exp_avg"] for param in params]
        dtype = moments[0].dtype
        # `to` returns the tensor itself where the dtype fits already; gradients are only read.
        thetas = [param.to(dtype) for param in params]
        grads = [param.grad.to(dtype) for param in params if param.grad is not None]

        denominators = torch._foreach_mul(moments, moments)  # m**2, of the step before
        torch._foreach_mul_(denominators, beta2 / correction**2)
        torch._foreach_addcmul_(denominators, grads, grads, 1 - beta2)
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, eps)

        torch._foreach_mul_(moments, beta1)
        torch._foreach_add_(moments, grads, alpha=1 - beta1)

        if group["weight_decay"]:
            torch._foreach_mul_(thetas, 1 - lr * group["weight_decay"])
        torch._foreach_addcdiv_(thetas, moments, denominators, -lr / correction)
        if dtype != params[0].dtype:
            torch._foreach_copy_(params, thetas)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over options and state; the first moments keep the precision they were saved in.

        Args:
            state_dict: what :meth:`state_dict` returned, or what :class:`~lightning_scape.ScapeOptimizer`'s did, whose
                first moments, step and options are taken, with a warning. Its tensors are copied.

        Raises:
            ValueError: the groups differ in number or size, an option is outside its rule, or a state is not one of
                AdamS or has another shape than its parameter. Nothing has been changed then.
        """
        state_dict = _without_scape(state_dict)
        states: dict[Tensor, dict[str, Any]] = {}

        def remember(_: Optimizer, final: dict[str, Any]) -> None:
            for group in final["param_groups"]:
                _check_options({**self.defaults, **group})
            ids = chain.from_iterable(group["params"] for group in final["param_groups"])
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            # Not strict: torch checks that the groups match, with its own message.
            for param_id, param in zip(ids, params, strict=False):
                if param_id in final["state"]:
                    _check_state(final["state"][param_id], param)
                    states[param] = final["state"][param_id]

        def restore(_: Optimizer) -> None:
            # torch has just cast the moments to the parameters' dtype, which for bfloat16 drops 16 of their bits.
            for param, state in states.items():
                self.state[param] = {
                    "step": int(state["step"]),
                    # A copy: else two optimizers would update one tensor.
                    "exp_avg": state["exp_avg"].to(device=param.device, dtype=_state_dtype(param), copy=True),
                }
            for group in self.param_groups:
                group.setdefault("bias_correction", self.defaults["bias_correction"])

        # As the last of the pre-hooks and the first of the post-hooks, so that hooks of others see the same as with any
        # other optimizer.
        with (
            self.register_load_state_dict_pre_hook(remember),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ):
            super().load_state_dict(state_dict)


def _without_scape(saved: dict[str, Any]) -> dict[str, Any]:
    """A state of AdamS out of one of SCAPE; any other as it is."""
    if "scape" not in saved:
        return saved
    warnings.warn(
        "The checkpoint was written by SCAPE: first moments, step and options carry over to AdamS; residuals (what was"
        " computed and not yet sent), last steps and masks do not.",
        stacklevel=4,
    )
    state = {index: {name: entry[name] for name in ("step", "exp_avg")} for index, entry in saved["state"].items()}
    return {"state": state, "param_groups": saved["param_groups"]}


class _Batch(NamedTuple):
    """What tensors must share to be updated by one foreach call."""

    device: torch.device
    dtype: torch.dtype
    grad_dtype: torch.dtype
    step: int


def _state_dtype(param: Tensor) -> torch.dtype:
    return torch.promote_types(param.dtype, torch.float32)


def _check_state(state: dict[str, Any], param: Tensor) -> None:
    if set(state) != {"step", "exp_avg"}:
        raise ValueError(
            f"The state of a parameter must hold 'step' and 'exp_avg', got {', '.join(map(repr, state))}: it was saved"
            " by another optimizer than AdamS. Load the model's weights only and let AdamS start anew."
        )
    if state["exp_avg"].shape != param.shape:
        raise ValueError(
            f"The first moment of a parameter must have its shape {tuple(param.shape)}, got"
            f" {tuple(state['exp_avg'].shape)}. Load the state into the model it was saved from."
        )


def _check_options(options: dict[str, Any]) -> None:
    betas = options["betas"]
    if not isinstance(betas, Iterable) or len(betas := tuple(betas)) != 2:
        raise ValueError(f"`betas` must be two numbers, got {options['betas']!r}. Use for example (0.9, 0.95).")
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        if not _is_number(beta) or not 0.0 <= beta < 1.0:
            raise ValueError(f"`{name}` must be a number in [0, 1), got {beta!r}. Use for example betas=(0.9, 0.95).")
    for name in ("lr", "weight_decay"):
        if not _is_number(options[name]) or options[name] < 0.0:
            raise ValueError(
                f"`{name}` must be a finite number >= 0, got {options[name]!r}. A tensor must be given as its float."
            )
    if not _is_number(options["eps"]) or options["eps"] <= 0.0:
        raise ValueError(
            f"`eps` must be a finite number > 0, got {options['eps']!r}: without it an entry that never had a gradient"
            " becomes 0/0. Use for example 1e-8."
        )
    if not isinstance(options["bias_correction"], bool):
        raise ValueError(
            f"`bias_correction` must be True or False, got {options['bias_correction']!r}. Pass a bool; False if"
            " unsure."
        )
    for name in _FOREIGN_OPTIONS:
        if options.get(name):
            raise ValueError(
                f"AdamS has no `{name}`, got {name}={options[name]!r} in a parameter group. Remove it from the group"
                + ("; to maximize, minimize the negated loss." if name == "maximize" else ".")
            )


def _check_dtypes(params: list[Tensor]) -> None:
    for param in params:
        if param.dtype not in _PARAMETER_DTYPES:
            raise ValueError(
                f"AdamS needs parameters of {', '.join(str(dtype) for dtype in _PARAMETER_DTYPES)}, got {param.dtype}"
                f" for one of shape {tuple(param.shape)}. "
                + ("Train torch.view_as_real of it." if param.is_complex() else "Convert it or leave it out.")
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
