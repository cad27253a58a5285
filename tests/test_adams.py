from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_scape.scape.adams import AdamS

SHAPES = [(7,), (3, 5), (), (2, 3, 4)]


def reference_steps(
    theta: Tensor,
    grads: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> list[Tensor]:
    """The parameter after each step, in float64, written from the equations: one line each."""
    b1, b2 = betas
    theta = theta.detach().double()
    m = torch.zeros_like(theta)
    history = []
    for grad in grads:
        g = grad.double()
        v = b2 * m**2 + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g
        theta = (1 - lr * weight_decay) * theta
        theta = theta - lr * m / (v.sqrt() + eps)
        history.append(theta)
    return history


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def make_gradients(steps: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """``[step][parameter]``, over many orders of magnitude, some zero."""
    return [
        [
            torch.randn(shape, dtype=dtype) * 10.0 ** (index - step % 3) * (step % 4 != 3)
            for index, shape in enumerate(SHAPES)
        ]
        for step in range(steps)
    ]


def train(optimizer: AdamS, params: list[nn.Parameter], gradients: list[list[Tensor]]) -> None:
    for step in gradients:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).abs() / expected.abs().clamp_min(1e-3)).max().item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_every_step_equals_the_equations(dtype, tolerance):
    params, gradients = make_parameters(dtype), make_gradients(12, dtype)
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.8, 0.97), "weight_decay": 0.3}
    expected = [
        reference_steps(param, [step[index] for step in gradients], **options) for index, param in enumerate(params)
    ]
    optimizer = AdamS(params, **options)
    for t, step in enumerate(gradients):
        train(optimizer, params, [step])
        for index, param in enumerate(params):
            assert relative_error(param, expected[index][t]) < tolerance


def test_parameter_without_gradient_stands_still():
    params, gradients = make_parameters(), make_gradients(3)
    options: dict[str, Any] = {"lr": 1e-2}
    # As if the step without a gradient had not been: no decay, no momentum.
    expected = reference_steps(params[1], [gradients[0][1], gradients[2][1]], **options)[-1]
    optimizer = AdamS(params, **options)
    train(optimizer, params, gradients[:1])
    idle, moment = params[1].detach().clone(), optimizer.state[params[1]]["exp_avg"].clone()
    for index, param in enumerate(params):
        param.grad = None if index == 1 else gradients[1][index].clone()
    optimizer.step()
    assert torch.equal(params[1], idle)
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], moment)
    train(optimizer, params, gradients[2:])
    assert relative_error(params[1], expected) < 1e-6
    assert [optimizer.state[param]["step"] for param in params] == [3, 2, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_from_state_dict_is_bitwise(tmp_path, dtype):
    params, gradients = make_parameters(dtype), make_gradients(6, dtype)
    optimizer = AdamS(params, lr=1e-2)
    train(optimizer, params, gradients[:3])
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")

    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    resumed_params = [nn.Parameter(param.detach().clone()) for param in saved["params"]]
    resumed = AdamS(resumed_params, lr=99.0)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["lr"] == 1e-2
    for old, new in zip(params, resumed_params, strict=True):
        assert resumed.state[new]["exp_avg"].dtype == optimizer.state[old]["exp_avg"].dtype
        assert torch.equal(resumed.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])

    train(optimizer, params, gradients[3:])
    train(resumed, resumed_params, gradients[3:])
    for old, new in zip(params, resumed_params, strict=True):
        assert torch.equal(old, new)
        assert torch.equal(resumed.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])
        assert resumed.state[new]["step"] == optimizer.state[old]["step"] == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, r"`lr` must be >= 0, got -0\.001"),
        ({"eps": 0.0}, r"`eps` must be at least 1\.17549e-38, got 0\.0"),
        ({"betas": (1.0, 0.95)}, r"`betas` must be two numbers in \[0, 1\), got \(1\.0, 0\.95\)"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdamS(make_parameters(), **options)
    with pytest.raises(ValueError, match=message):
        AdamS([{"params": make_parameters(), **options}])
