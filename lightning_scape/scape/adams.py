"""AdamS (arXiv 2505.16363): Adam whose momentum stands in for v. Other packages use the name for other rules."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from lightning_scape.core.parameters import problem_of_groups


class AdamS(Optimizer):
    """Adam without a second-moment state, with decoupled weight decay.

    One step, entry by entry, with ``m`` starting at zero::

        v     = beta2 * m**2 + (1 - beta2) * g**2       # m of the step before
        m     = beta1 * m + (1 - beta1) * g
        theta = (1 - lr * weight_decay) * theta - lr * m / (sqrt(v) + eps)

    An entry whose gradient is zero keeps moving, for both ``m`` and ``sqrt(v)`` shrink together. A parameter whose
    ``.grad`` is None is left alone. ``m`` is ``exp_avg`` in the state, float32 at least.

    Args:
        params: parameters or groups of them.
        lr: learning rate, >= 0.
        betas: decay of the first moment and its weight in the denominator, each in [0, 1).
        eps: added to the denominator, > 0: with 0, an entry that never had a gradient would become 0/0.
        weight_decay: decoupled weight decay, >= 0.

    Raises:
        ValueError: an option is outside its rule.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if (problem := problem_of_groups(self.param_groups)) is not None:
            raise ValueError(problem)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient; returns what the closure, called first, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, eps, (beta1, beta2) = group["lr"], group["eps"], group["betas"]
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    dtype = torch.promote_types(param.dtype, torch.float32)
                    state |= {"step": 0, "exp_avg": torch.zeros_like(param, dtype=dtype)}
                m = state["exp_avg"]
                grad, theta = param.grad.to(m.dtype), param.to(m.dtype)
                denominator = m.square().mul_(beta2).addcmul_(grad, grad, value=1 - beta2).sqrt_().add_(eps)
                m.mul_(beta1).add_(grad, alpha=1 - beta1)
                param.copy_(theta.mul(1 - lr * group["weight_decay"]).addcdiv_(m, denominator, value=-lr))
                state["step"] += 1
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over options and state. First moments keep their precision: torch would round them."""
        super().load_state_dict(state_dict)
        ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params: chain[Tensor] = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(ids, params, strict=True):
            if number in state_dict["state"] and param in self.state:  # not under SCAPE
                moment, dtype = state_dict["state"][number]["exp_avg"], torch.promote_types(param.dtype, torch.float32)
                self.state[param]["exp_avg"] = moment.to(param.device, dtype, copy=True)
