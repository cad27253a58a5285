from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    bias_correction: bool = False,
) -> list[Tensor]:
    """The parameter after each step, in float64, written from the equations: one line each."""
    b1, b2 = betas
    theta = theta.detach().double()
    m = torch.zeros_like(theta)
    history = []
    for t, grad in enumerate(grads, start=1):
        g = grad.double()
        c = 1 - b1**t if bias_correction else 1.0
        v = b2 * (m / c) ** 2 + (1 - b2) * g**2
        m = b1 * m + (1 - b1) * g
        theta = (1 - lr * weight_decay) * theta
        theta = theta - lr * (m / c) / (v.sqrt() + eps)
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


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=["float32", "float64"]
)
def test_every_step_equals_the_equations(bias_correction, dtype, tolerance):
    params, gradients = make_parameters(dtype), make_gradients(12, dtype)
    options: dict[str, Any] = {
        "lr": 3e-3,
        "betas": (0.8, 0.97),
        "weight_decay": 0.3,
        "bias_correction": bias_correction,
    }
    expected = [
        reference_steps(param, [step[index] for step in gradients], **options) for index, param in enumerate(params)
    ]
    optimizer = AdamS(params, **options)
    for t, step in enumerate(gradients):
        train(optimizer, params, [step])
        for index, param in enumerate(params):
            assert relative_error(param, expected[index][t]) < tolerance


@given(
    beta1=st.floats(0.0, 0.999),
    beta2=st.floats(0.0, 0.999),
    eps=st.floats(1e-12, 1.0),
    weight_decay=st.floats(0.0, 1.0),
    bias_correction=st.booleans(),
    values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6),
)
def test_any_options_equal_the_equations(beta1, beta2, eps, weight_decay, bias_correction, values):
    options: dict[str, Any] = {
        "lr": 1e-2,
        "betas": (beta1, beta2),
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
    }
    param = nn.Parameter(torch.ones(1, dtype=torch.float64))
    gradients = [[torch.tensor([value], dtype=torch.float64)] for value in values]
    expected = reference_steps(param, [step[0] for step in gradients], **options)[-1]
    train(AdamS([param], **options), [param], gradients)
    assert relative_error(param, expected) < 1e-9


@pytest.mark.parametrize(("bias_correction", "multiple"), [(False, 0.1 / math.sqrt(0.05)), (True, 1 / math.sqrt(0.05))])
def test_first_step_is_045_lr_without_correction_and_447_lr_with_it(bias_correction, multiple):
    param = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    grad = torch.tensor([1e-3, 1.0, -50.0], dtype=torch.float64)
    train(AdamS([param], lr=1e-3, bias_correction=bias_correction), [param], [[grad]])
    torch.testing.assert_close(param.detach(), -1e-3 * multiple * grad.sign(), rtol=1e-4, atol=0.0)
    assert round(multiple, 2) == (4.47 if bias_correction else 0.45)


def test_bias_correction_leaves_the_stored_moment_alone():
    params, gradients = make_parameters(), make_gradients(5)
    moments = []
    for bias_correction in (False, True):
        copies = [nn.Parameter(param.detach().clone()) for param in params]
        optimizer = AdamS(copies, bias_correction=bias_correction)
        train(optimizer, copies, gradients)
        moments.append([optimizer.state[param]["exp_avg"] for param in copies])
    for plain, corrected in zip(*moments, strict=True):
        assert torch.equal(plain, corrected)


def test_entry_without_gradient_keeps_moving_by_the_ratio_of_the_betas():
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = AdamS([param], lr=1e-3, weight_decay=0.0)
    train(optimizer, [param], [[torch.ones(1, dtype=torch.float64)]])
    for _ in range(5):
        before = param.detach().clone()
        train(optimizer, [param], [[torch.zeros(1, dtype=torch.float64)]])
        assert (before - param).item() == pytest.approx(1e-3 * 0.9 / math.sqrt(0.95), rel=1e-6)


def test_groups_have_options_of_their_own():
    params, gradients = make_parameters(), make_gradients(6)
    options: list[dict[str, Any]] = [
        {"lr": 1e-2, "weight_decay": 0.0},
        {"lr": 1e-3, "betas": (0.5, 0.9), "eps": 1e-3, "bias_correction": True},
    ]
    expected = [
        reference_steps(param, [step[index] for step in gradients], **options[index // 2])[-1]
        for index, param in enumerate(params)
    ]
    groups = [{"params": params[:2], **options[0]}, {"params": params[2:], **options[1]}]
    train(AdamS(groups), params, gradients)
    for param, wanted in zip(params, expected, strict=True):
        assert relative_error(param, wanted) < 1e-6


def test_group_added_later_starts_its_own_clock():
    params, gradients = make_parameters(), make_gradients(6)
    options: dict[str, Any] = {"lr": 1e-2, "bias_correction": True}
    expected = reference_steps(params[1], [step[1] for step in gradients[3:]], **options)[-1]
    optimizer = AdamS(params[:1], **options)
    train(optimizer, params[:1], [step[:1] for step in gradients[:3]])
    optimizer.add_param_group({"params": params[1:2]})
    train(optimizer, params[:2], [step[:2] for step in gradients[3:]])
    assert relative_error(params[1], expected) < 1e-6
    assert [optimizer.state[param]["step"] for param in params[:2]] == [6, 3]


def test_parameter_without_gradient_stands_still():
    params, gradients = make_parameters(), make_gradients(3)
    options: dict[str, Any] = {"lr": 1e-2, "bias_correction": True}
    # As if the step without a gradient had not been: no decay, no momentum, and bias correction by its own count.
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


def test_step_before_any_gradient_does_nothing():
    params = make_parameters()
    before = [param.detach().clone() for param in params]
    optimizer = AdamS(params)
    assert optimizer.step() is None
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert not optimizer.state


def test_gradients_are_only_read():
    params, gradients = make_parameters(), make_gradients(1)
    train(AdamS(params, bias_correction=True), params, gradients)
    for param, grad in zip(params, gradients[0], strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_updated_in_float32_with_a_float32_moment(dtype):
    params, gradients = make_parameters(dtype), make_gradients(1, dtype)
    expected = [reference_steps(param, [grad], lr=1e-2)[-1] for param, grad in zip(params, gradients[0], strict=True)]
    optimizer = AdamS(params, lr=1e-2)
    train(optimizer, params, gradients)
    for param, wanted, grad in zip(params, expected, gradients[0], strict=True):
        moment = optimizer.state[param]["exp_avg"]
        assert moment.dtype == torch.float32
        assert relative_error(moment, 0.1 * grad.double()) < 1e-6  # not rounded to the parameter's dtype
        error = (param.double() - wanted).abs() / wanted.abs()
        assert error.max() <= torch.finfo(dtype).eps * 0.51  # rounded once, at the end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_resume_from_state_dict_is_bitwise(tmp_path, dtype, bias_correction):
    params, gradients = make_parameters(dtype), make_gradients(6, dtype)
    optimizer = AdamS(params, lr=1e-2, bias_correction=bias_correction)
    train(optimizer, params, gradients[:3])
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")

    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    resumed_params = [nn.Parameter(param.detach().clone()) for param in saved["params"]]
    resumed = AdamS(resumed_params, lr=99.0, bias_correction=not bias_correction)
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


def test_state_of_a_wider_model_is_narrowed_to_float32_at_most():
    wide = make_parameters(torch.float64)
    first = AdamS(wide)
    train(first, wide, make_gradients(1, torch.float64))
    for dtype in (torch.float32, torch.bfloat16):
        narrow = make_parameters(dtype)
        second = AdamS(narrow)
        second.load_state_dict(first.state_dict())
        for old, new in zip(wide, narrow, strict=True):
            assert torch.equal(second.state[new]["exp_avg"], first.state[old]["exp_avg"].float())


def test_loaded_state_shares_no_memory_with_its_source():
    params, gradients = make_parameters(), make_gradients(2)
    first = AdamS(params)
    train(first, params, gradients)
    kept = [first.state[param]["exp_avg"].clone() for param in params]
    others = make_parameters()
    second = AdamS(others)
    second.load_state_dict(first.state_dict())
    train(second, others, gradients)
    assert all(torch.equal(first.state[param]["exp_avg"], old) for param, old in zip(params, kept, strict=True))


def test_hooks_of_others_see_and_change_what_is_loaded():
    params, gradients = make_parameters(torch.bfloat16), make_gradients(1, torch.bfloat16)
    optimizer = AdamS(params)
    train(optimizer, params, gradients)
    seen = []

    def negate(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {key: {**state, "exp_avg": -state["exp_avg"]} for key, state in state_dict["state"].items()}
        return {**state_dict, "state": states}

    others = make_parameters(torch.bfloat16)
    loaded = AdamS(others)
    loaded.register_load_state_dict_pre_hook(negate)
    loaded.register_load_state_dict_post_hook(lambda self: seen.append(self.state[others[0]]["exp_avg"].dtype))
    loaded.load_state_dict(optimizer.state_dict())
    assert torch.equal(loaded.state[others[0]]["exp_avg"], -optimizer.state[params[0]]["exp_avg"])
    assert seen == [torch.float32]
    loaded.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2  # the hooks of the first load are gone, those of others still there


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copy_goes_on_by_itself(duplicate: Callable[[AdamS], AdamS]):
    params, gradients = make_parameters(), make_gradients(4)
    optimizer = AdamS(params)
    train(optimizer, params, gradients[:2])
    other = duplicate(optimizer)
    other_params = other.param_groups[0]["params"]
    train(optimizer, params, gradients[2:])
    train(other, other_params, gradients[2:])
    assert all(torch.equal(param, copied) for param, copied in zip(params, other_params, strict=True))


def test_closure_is_called_once_with_gradients_enabled():
    param = nn.Parameter(torch.tensor([2.0]))
    optimizer = AdamS([param])
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 4.0
    assert calls == [True]
    assert param.item() < 2.0


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6),
    ],
    ids=["lambda", "cosine", "one_cycle"],
)
@pytest.mark.filterwarnings("error")  # schedulers warn when they think that the optimizer does not call them
def test_schedulers_set_the_options_of_the_next_step(make):
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = AdamS([param], lr=1e-2, weight_decay=0.0)
    scheduler = make(optimizer)
    rates, sizes = [], []
    for _ in range(5):
        group = optimizer.param_groups[0]
        before, rate, (b1, b2) = param.item(), group["lr"], group["betas"]
        m = optimizer.state[param]["exp_avg"].item() if optimizer.state else 0.0
        train(optimizer, [param], [[torch.tensor([1.0])]])
        scheduler.step()
        rates.append(rate)
        sizes.append((before - param.item()) / rate)
        assert sizes[-1] == pytest.approx((b1 * m + 1 - b1) / math.sqrt(b2 * m**2 + 1 - b2), rel=1e-3)
    assert all(later != earlier for earlier, later in pairwise(rates))


def test_grad_scaler_unscales_and_skips():
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = AdamS([param])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[param]["exp_avg"].item() == pytest.approx(0.1)
    param.grad = torch.tensor([math.inf])
    before = param.item()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert param.item() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, r"`lr` must be a finite number >= 0, got -0\.001"),
        ({"lr": math.nan}, "`lr` must be a finite number >= 0, got nan"),
        ({"lr": torch.tensor(1e-3)}, "`lr` must be .* A tensor must be given as its float"),
        ({"weight_decay": -0.1}, r"`weight_decay` must be a finite number >= 0, got -0\.1"),
        ({"eps": 0.0}, r"`eps` must be a finite number > 0, got 0\.0: .* Use for example 1e-8"),
        ({"betas": (1.0, 0.95)}, r"`betas\[0\]` must be a number in \[0, 1\), got 1\.0"),
        ({"betas": (0.9, -0.1)}, r"`betas\[1\]` must be a number in \[0, 1\), got -0\.1"),
        ({"betas": (0.9,)}, r"`betas` must be two numbers, got \(0\.9,\)"),
        ({"betas": 0.9}, r"`betas` must be two numbers, got 0\.9"),
        ({"bias_correction": 1}, "`bias_correction` must be True or False, got 1"),
    ],
)
def test_bad_options_are_refused_in_the_constructor_and_in_a_group(options, message):
    with pytest.raises(ValueError, match=message):
        AdamS(make_parameters(), **options)
    params = make_parameters()
    optimizer = AdamS(params[:1])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["maximize", "amsgrad", "capturable", "differentiable", "fused"])
def test_option_of_adam_that_adams_lacks_is_refused_when_set(name):
    with pytest.raises(ValueError, match=f"AdamS has no `{name}`, got {name}=True"):
        AdamS([{"params": make_parameters(), name: True}])
    AdamS([{"params": make_parameters(), name: False}])


@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [(torch.complex64, "view_as_real"), (torch.int64, "leave it out"), (torch.bool, "leave it out")],
)
def test_parameters_of_other_dtypes_are_refused(dtype, remedy):
    param = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=dtype.is_complex)
    with pytest.raises(ValueError, match=f"AdamS needs parameters of .*, got {dtype} .*{remedy}"):
        AdamS([param])


def test_sparse_gradient_is_refused_before_anything_changes():
    embedding, weight = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(2))
    embedding(torch.tensor([1])).sum().backward()
    weight.grad = torch.ones(2)
    optimizer = AdamS([weight, embedding.weight])
    with pytest.raises(ValueError, match=r"dense gradients, got layout torch\.sparse_coo .* sparse=False"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(2))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved["state"][0].pop("exp_avg"), "must hold 'step' and 'exp_avg', got 'step'"),
        (lambda saved: saved["state"][0].update(exp_avg_sq=torch.ones(7)), "another optimizer than AdamS"),
        (lambda saved: saved["state"][0].update(exp_avg=torch.ones(8)), r"shape \(7,\), got \(8,\)"),
        (lambda saved: saved["param_groups"][0].update(eps=0.0), "`eps` must be"),
        (lambda saved: saved["param_groups"].append(saved["param_groups"][0]), "different number of parameter groups"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(spoil, message):
    params, gradients = make_parameters(), make_gradients(1)
    optimizer = AdamS(params)
    train(optimizer, params, gradients)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert torch.equal(after["state"][key]["exp_avg"], state["exp_avg"])


def test_state_of_adamw_is_refused_by_name():
    params, gradients = make_parameters(), make_gradients(1)
    adamw = torch.optim.AdamW(params)
    for param, grad in zip(params, gradients[0], strict=True):
        param.grad = grad
    adamw.step()
    with pytest.raises(ValueError, match="another optimizer than AdamS"):
        AdamS(params).load_state_dict(adamw.state_dict())
