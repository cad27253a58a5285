"""ScapeOptimizer on 1 to 3 ranks: the claims of the method, each checked on what the ranks really hold and send."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm import collectives
from lightning_scape.comm.collectives import Work
from lightning_scape.engine.clipping import GradientClipping
from lightning_scape.engine.participation import pack_flags
from lightning_scape.engine.state import piece_views

RunRanks = Callable[..., list[Any]]
SIZES = ((37, 11), (5,), (1,), (300, 7), (3, 3, 3), (641,))
FP32 = {"wire_dtype": "fp32"}


def parameters(sizes: tuple[tuple[int, ...], ...] = SIZES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def gradients(params: list[nn.Parameter], rank: int, step: int, whole: bool = False) -> list[Tensor]:
    """The gradients of a rank at a step: any process can compute any rank's. ``whole``: small whole numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if whole:
        return [torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype) for p in params]
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def set_gradients(params: list[nn.Parameter], rank: int, step: int, whole: bool = False) -> None:
    for parameter, grad in zip(params, gradients(params, rank, step, whole), strict=True):
        parameter.grad = grad


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def gathered(tensor: Tensor) -> list[Tensor]:
    if not dist.is_initialized():
        return [tensor]
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


def assert_replicas_equal(params: list[nn.Parameter]) -> None:
    for parameter in params:
        for other in gathered(parameter.detach()):
            assert torch.equal(other, parameter)


# ------------------------------------------------------------------------- 1. density 1 is dense AdamS


def train_dense(rank: int, world_size: int, bias_correction: bool, betas: tuple[float, float]) -> float:
    params, reference = parameters(), parameters()
    groups = [{"params": params[:2], "lr": 3e-2, "weight_decay": 0.3}, {"params": params[2:]}]
    twins = [{"params": reference[:2], "lr": 3e-2, "weight_decay": 0.3}, {"params": reference[2:]}]
    config = ScapeConfig(sparsity=0.0, bias_correction=bias_correction, **FP32)
    scape = ScapeOptimizer(groups, lr=1e-2, betas=betas, config=config)
    dense = AdamS(twins, lr=1e-2, betas=betas, bias_correction=bias_correction)
    worst = 0.0
    # A parameter of one entry may pass through zero: relative to the largest it has been.
    scales = [float(p.detach().norm()) for p in params]
    for step in range(25):
        set_gradients(params, rank, step)
        everyone = [gradients(params, other, step) for other in range(world_size)]
        for twin, grads in zip(reference, zip(*everyone, strict=True), strict=True):
            twin.grad = torch.stack(grads).mean(0)
        scape.step()
        dense.step()
        scales = [max(scale, float(twin.detach().norm())) for scale, twin in zip(scales, reference, strict=True)]
        for mine, twin, scale in zip(params, reference, scales, strict=True):
            worst = max(worst, float((mine - twin).detach().norm()) / scale)
    return worst


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.99, 0.9999), (0.0, 0.0)])
@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_density_equals_dense_adams(
    run_ranks: RunRanks, world_size: int, bias_correction: bool, betas: tuple[float, float]
) -> None:
    assert max(run_ranks(train_dense, world_size, bias_correction, betas)) <= 1e-6


# ----------------------------------------------------------------------------- 2. replicas stay equal


class Odd(nn.Module):
    """Tied weights, a frozen parameter, one that few use or none, sizes that nothing divides."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(53, 17)
        self.hidden = nn.Linear(17, 17)
        self.frozen = nn.Linear(17, 17)
        self.sometimes = nn.Linear(17, 17, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(17, 53, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.to(dtype)

    def forward(self, tokens: Tensor, use_all: bool) -> Tensor:
        x = torch.tanh(self.hidden(self.embed(tokens))) * self.gain + self.frozen(self.embed(tokens))
        return self.head(self.sometimes(x) if use_all else x)


def train_odd(rank: int, world_size: int, sparsity: float, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    model = Odd(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = ScapeOptimizer(
        [{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": rest, "lr": 3e-2, "weight_decay": 0.0}],
        config=ScapeConfig(**{"sparsity": sparsity, "check_replicas_every": 5, "sparsity_warmup_steps": 0, **options}),
    )
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(12):
        tokens = torch.randint(0, 53, (16,))
        logits = model(tokens, use_all=(rank == 0 or step % 3 == 0) and step not in (4, 9))
        loss = nn.functional.cross_entropy(logits.float(), (tokens * 7 + 1) % 53)
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        assert_replicas_equal(list(model.parameters()))
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    stats, state, record = optimizer.stats, optimizer.engine.state, optimizer.engine.record
    assert stats is not None
    assert stats.residual_norm < float("inf")
    assert record is not None
    assert record.sent == optimizer.config.quota.sent
    assert state is not None
    assert state.missed is not None
    trained = {id(p): name for name, p in model.named_parameters()}
    missed = zip((trained[id(p)] for p in optimizer.engine.parameters.tensors), state.missed.tolist(), strict=True)
    assert {name: count for name, count in missed if count} == {"sometimes.weight": 2}
    return dict(zip(names, changed, strict=True)), losses


@pytest.mark.parametrize("sparsity", [0.9, 0.99, 0.999])
@pytest.mark.parametrize(("world_size", "update"), [(2, "adams"), (2, "adamw"), (3, "adamw")])
def test_replicas_are_bitwise_equal_after_every_step(
    run_ranks: RunRanks, world_size: int, update: str, sparsity: float
) -> None:
    for changed, _ in run_ranks(train_odd, world_size, sparsity, torch.float32, {"update": update}):
        assert changed == {name: not name.startswith("frozen") for name in changed}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {}),
        (torch.float16, {"wire_dtype": "fp32", "update": "adamw"}),
        (torch.float64, {"residual_dtype": torch.float64, "update": "adamw"}),
        (torch.float32, {"mask_statistic": "first_moment"}),
        (torch.float32, {"mask_statistic": "first_moment", "update": "adamw", "catch_up": "summed"}),
        (torch.float32, {"second_moment": "reconstructed"}),
        (torch.float32, {"catch_up": "summed"}),
        (torch.bfloat16, {"mask_votes": 2, "update": "adamw"}),
        (torch.float32, {"mask_votes": 250, "mask_interval": 2}),
        (torch.float32, {"mask_interval": 3, "update": "adamw"}),
        (torch.float32, {"dense_steps": 2, "sparsity_warmup_steps": 4, "update": "adamw"}),
        (torch.float32, {"clip_norm": "local", "bias_correction": True, "residual_device": "cpu"}),
        (torch.bfloat16, {"clip_norm": "local", "residual_device": "cpu", "update": "adamw"}),
    ],
)
def test_replicas_are_bitwise_equal_under_every_option(
    run_ranks: RunRanks, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    for changed, _ in run_ranks(train_odd, 2, 0.9, dtype, options):
        assert changed == {name: not name.startswith("frozen") for name in changed}


def train_with_flags(rank: int, world_size: int, on_device: bool, options: dict[str, Any]) -> list[Tensor]:
    real = GradientClipping.measure

    def measure(self: GradientClipping, grads: Any, device: torch.device, *, sketch: bool) -> Tensor:
        norm = real(self, grads, device, sketch=sketch)
        if on_device and self.present is None:
            self.present = torch.ones(len(grads))
        return norm

    GradientClipping.measure = measure  # type: ignore[method-assign]
    params = parameters()
    groups = [{"params": params[:2], "lr": 3e-2}, {"params": params[2:], "betas": (0.8, 0.99)}]
    config = ScapeConfig(**{"sparsity": 0.9, "dense_steps": 1, "sparsity_warmup_steps": 2, **options})
    optimizer = ScapeOptimizer(groups, config=config)
    for step in range(8):
        set_gradients(params, rank, step)
        optimizer.clip_grad_norm(20.0)
        optimizer.step()
    optimizer.drain()
    state = optimizer.engine.state
    assert state is not None
    assert (state.missed is not None) == on_device
    kept = [t for t in kept_by_a_skipped_step(state)[:-1] if t is not None]
    return values(params) + kept


@pytest.mark.parametrize(
    "options", [{"update": "adamw"}, {"mask_statistic": "first_moment", "bias_correction": True}], ids=str
)
def test_ranks_on_devices_that_do_not_know_whether_all_have_gradients_train_alike(
    run_ranks: RunRanks, options: dict[str, Any]
) -> None:
    """On CUDA the flags stay on the device, and every step goes by rows."""
    known = run_ranks(train_with_flags, 2, False, options)
    for mine, theirs in zip(run_ranks(train_with_flags, 2, True, options), known, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)


# ----------------------------------------------------------------------------- 3. nothing is ever lost


class Ledger:
    """Adds up, entry by entry, what this rank hands to the owners of the shards: to the wire, or to itself."""

    def __init__(self, optimizer: ScapeOptimizer) -> None:
        self.optimizer = optimizer
        self.sent: Tensor | None = None
        self._all_to_all, self._sweep = optimizer.communicator.all_to_all, optimizer.engine.local.sweep
        optimizer.communicator.all_to_all = self.all_to_all  # type: ignore[method-assign]
        optimizer.engine.local.sweep = self.sweep  # type: ignore[method-assign]

    def all_to_all(self, sent: Tensor) -> Work:
        for rows in self.optimizer.engine.remote.rows:
            self._enter(rows, sent[rows])
        return self._all_to_all(sent)

    def sweep(self, *args: Any) -> Tensor:
        own = self._sweep(*args)
        self._enter(self.optimizer.engine.local.rows, own)
        return own

    def _enter(self, rows: slice, values: Tensor) -> None:
        state, mask = self.optimizer.engine.state, self.optimizer.engine.masks.active
        assert state is not None
        if self.sent is None:
            self.sent = torch.zeros(state.residual.shape, dtype=torch.float64)
        once = torch.zeros_like(self.sent[rows])
        ops.scatter_blocks(once, None if mask is None else mask[rows], values.double())
        self.sent[rows] += once

    def totals(self) -> list[Tensor]:
        """Sent plus residual, by parameter."""
        engine = self.optimizer.engine
        assert engine.state is not None
        assert self.sent is not None
        return piece_views(self.sent + engine.state.residual.double(), engine.layout.everything().pieces)


def train_with_ledger(rank: int, world_size: int, wire_dtype: str, whole: bool, update: str) -> float:
    params = parameters()
    config = ScapeConfig(sparsity=0.9, dense_steps=1, sparsity_warmup_steps=2, wire_dtype=wire_dtype, update=update)
    optimizer = ScapeOptimizer(params, config=config)
    ledger = Ledger(optimizer)
    folded = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
    for step in range(15):
        set_gradients(params, rank, step, whole)
        if step % 4 == 2 or rank == 0:  # no rank has a gradient of it, or rank 1 alone
            params[3].grad = None
        if not whole:
            optimizer.clip_grad_norm(3.0)
        optimizer.step()
        assert optimizer.stats is not None
        factor = optimizer.stats.clip_factor
        for total, parameter in zip(folded, params, strict=True):
            if parameter.grad is not None:
                total += factor * parameter.grad.double()
    return max(float((total.view(-1) - seen).abs().max()) for total, seen in zip(folded, ledger.totals(), strict=True))


@pytest.mark.parametrize(("wire_dtype", "update"), [("fp32", "adams"), ("bf16", "adams"), ("bf16", "adamw")])
def test_sent_plus_residual_equals_all_gradients_exactly(run_ranks: RunRanks, wire_dtype: str, update: str) -> None:
    # Whole numbers: fp32 adds them without rounding, so that equality can be exact, with a bf16 wire too.
    assert run_ranks(train_with_ledger, 2, wire_dtype, True, update) == [0.0, 0.0]


@pytest.mark.parametrize("update", ["adams", "adamw"])
def test_sent_plus_residual_equals_clipped_gradients_to_fp32_rounding(run_ranks: RunRanks, update: str) -> None:
    assert max(run_ranks(train_with_ledger, 2, "bf16", False, update)) < 2e-6


# ------------------------------------------------------------- 4. the mask: whose, when, how many, what it costs


def train_watching_masks(rank: int, world_size: int, interval: int) -> dict[str, Any]:
    params = parameters()
    config = ScapeConfig(sparsity=0.9, mask_interval=interval, sparsity_warmup_steps=0)
    quota = config.quota
    optimizer = ScapeOptimizer(params, config=config)
    expected: Tensor | None = None
    seen: list[Tensor] = []
    for step in range(6):
        before = values(params)
        state = optimizer.engine.state
        set_gradients(params, rank, step)
        optimizer.step()
        state = optimizer.engine.state
        assert state is not None
        mask = optimizer.engine.masks.active
        assert mask is not None
        assert mask.shape == (optimizer.engine.layout.blocks, quota.sent)
        assert all(row.unique().numel() == quota.sent for row in mask)
        if expected is not None and step % interval == 0:
            assert torch.equal(mask, expected), f"step {step} did not use the mask made in step {step - 1}"
        if step % interval:
            assert torch.equal(mask, seen[-1])
        seen.append(mask.clone())
        # Each owner's choice, from its own residual after this step: the mask of the next.
        own = ops.select(state.residual[optimizer.engine.local.rows], quota.sent)
        expected = torch.cat(gathered(own))
        inside = torch.zeros(optimizer.engine.layout.blocks, quota.block_size, dtype=torch.bool)
        inside.scatter_(1, mask.long(), True)
        for part, old, parameter in zip(
            piece_views(inside, optimizer.engine.layout.everything().pieces), before, params, strict=True
        ):
            assert torch.equal(parameter.detach().view(-1)[~part], old.view(-1)[~part])
    assert optimizer.stats is not None
    return {"seen": len(seen)}


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_mask_of_a_step_was_made_by_its_owners_one_step_before(
    run_ranks: RunRanks, world_size: int, interval: int
) -> None:
    run_ranks(train_watching_masks, world_size, interval)


def count_messages(rank: int, world_size: int, config: ScapeConfig, dtype: torch.dtype, clip: bool) -> dict[str, Any]:
    params = parameters(dtype=dtype)
    optimizer = ScapeOptimizer(params, config=config)
    sizes: list[tuple[str, int]] = []

    def spy(name: str) -> None:
        home = collectives if name.endswith("_into") else dist
        real = getattr(home, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sizes.append((name, args[0].numel() * args[0].element_size()))
            return real(*args, **kwargs)

        setattr(home, name, call)

    for step in range(3):
        set_gradients(params, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    for name in ("all_reduce", "all_to_all_into", "all_gather_into", "broadcast", "all_gather", "reduce_scatter_tensor"):
        spy(name)
    set_gradients(params, rank, 3)
    if clip:
        optimizer.clip_grad_norm(1.0)
    optimizer.step()
    stats = optimizer.stats
    assert stats is not None
    layout, quota = optimizer.engine.layout, config.quota
    entries = layout.blocks * quota.sent
    share = (world_size - 1) / world_size
    itemsize = {torch.bfloat16: 2, torch.float32: 4}
    flags = pack_flags([True] * len(params), world_size).numel()
    norm = ((4093 if clip else 1) + flags) * 4
    values_bytes = entries * itemsize[config.values_dtype]
    parameter_bytes = entries * min(itemsize[dtype], itemsize[config.values_dtype])
    mask_bytes = entries * (1 if quota.block_size <= 256 else 2)
    assert sizes == [
        ("all_reduce", norm),
        ("all_to_all_into", values_bytes),
        ("all_gather_into", parameter_bytes),
        ("all_gather_into", mask_bytes),
    ]
    assert stats.bytes_norm == int(2 * norm * share)
    assert stats.bytes_values == int(values_bytes * share)
    assert stats.bytes_parameters == int(parameter_bytes * share)
    assert stats.bytes_mask == int(mask_bytes * share)
    assert stats.bytes_total == int(2 * norm * share) + sum(
        int(b * share) for b in (values_bytes, parameter_bytes, mask_bytes)
    )
    assert optimizer.bytes_per_step() == stats.bytes_total - stats.bytes_norm
    return {"density": stats.density}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("sparsity", "wire_dtype", "dtype", "update"),
    [
        (0.9, "bf16", torch.float32, "adamw"),
        (0.99, "fp32", torch.bfloat16, "adamw"),
        (0.999, "bf16", torch.float32, "adams"),
    ],
)
def test_a_step_without_votes_sends_four_messages_of_the_stated_sizes(
    run_ranks: RunRanks, sparsity: float, wire_dtype: str, dtype: torch.dtype, update: str, clip: bool
) -> None:
    config = ScapeConfig(sparsity=sparsity, wire_dtype=wire_dtype, mask_votes=0, sparsity_warmup_steps=0, update=update)
    run_ranks(count_messages, 2, config, dtype, clip)


def test_one_rank_sends_nothing_and_needs_no_process_group() -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0))
    before = values(params)
    for step in range(3):
        set_gradients(params, 0, step)
        optimizer.step()
    assert optimizer.stats is not None
    assert optimizer.stats.bytes_total == 0
    assert any(not torch.equal(a, b) for a, b in zip(before, params, strict=True))


# --------------------------------------------------------------------------- 6. what stands still, what catches up


@pytest.mark.parametrize("options", [{}, {"catch_up": "summed"}])
def test_unmasked_entries_stand_still_and_a_visit_catches_up(options: dict[str, Any]) -> None:
    # One block of 10, one entry sent. Entry 0 alone has a gradient for five steps; entry 3 gets a tiny one in the
    # sixth, hence a place in the mask of the seventh, where its decay of seven steps is made up for.
    parameter = nn.Parameter(torch.full((10,), 2.0, dtype=torch.float64))
    config = ScapeConfig(
        sparsity=0.9,
        block_size=10,
        wire_dtype="fp32",
        residual_dtype=torch.float64,
        second_moment="reconstructed",
        sparsity_warmup_steps=0,
        **options,
    )
    lr, decay, tiny = 0.1, 0.5, 2.0**-10
    optimizer = ScapeOptimizer([parameter], lr=lr, weight_decay=decay, config=config)

    def step(entry: int | None, value: float) -> None:
        parameter.grad = torch.zeros_like(parameter)
        if entry is not None:
            parameter.grad[entry] = value
        optimizer.step()

    for _ in range(5):
        step(0, 1.0)
    assert (parameter.detach()[1:] == 2.0).all()
    state = optimizer.engine.state
    assert state is not None
    assert state.last_step.view(-1).tolist() == [5] + [0] * 9
    assert (state.exp_avg.view(-1)[1:] == 0).all()
    step(3, tiny)
    old = parameter.detach().clone()
    assert (old[1:] == 2.0).all()
    step(None, 0.0)
    assert state.last_step.view(-1).tolist() == [6, 0, 0, 7, 0, 0, 0, 0, 0, 0]
    moments = [0.0]
    for _ in range(7):
        moments.append(0.9 * moments[-1] + 0.1 * tiny / 7)
    moved = sum(moments) if options else 7 * (0.7 / (0.9 + 0.7)) * tiny / 7
    expected = 2.0 * (1 - lr * decay) ** 7 - lr * moved / ((0.05 * tiny**2 / 7) ** 0.5 + 1e-8)
    assert float(parameter.detach()[3]) == pytest.approx(expected, rel=1e-9)
    others = [i for i in range(10) if i != 3]
    assert torch.equal(parameter.detach()[others], old[others])


def has_gradient(place: int, rank: int, step: int) -> bool:
    """Number 3 has one on rank 0 only, and at times on none; number 5 from the fourth step on."""
    return {3: rank == 0 and step % 3 != 1, 5: step >= 3}.get(place, True)


def step_beside_the_op(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Each step, entry by entry: what the op makes of the shard's state, and nothing where nothing was visited."""
    params, lrs = parameters(), (3e-2, 1e-2)
    groups = [{"params": params[:2], "lr": lrs[0], "betas": (0.8, 0.99)}, {"params": params[2:], "lr": lrs[1]}]
    config = ScapeConfig(sparsity=0.9, update="adamw", dense_steps=2, sparsity_warmup_steps=2, **options, **FP32)
    optimizer = ScapeOptimizer(groups, config=config)
    totals: list[Tensor] = []
    real = optimizer.engine.shard.update

    def update(state: Any, mask: Tensor | None, mean: Tensor, part: Any) -> tuple[Tensor, Tensor]:
        totals.append(mean.clone())
        return real(state, mask, mean, part)

    optimizer.engine.shard.update = update  # type: ignore[method-assign]
    pieces, taken, visited = optimizer.engine.local.pieces, [0] * len(params), 0
    state = optimizer.engine.state = optimizer.engine.allocate()
    for step in range(9):
        set_gradients(params, rank, step)
        for place, parameter in enumerate(params):
            if not has_gradient(place, rank, step):
                parameter.grad = None
        present = [any(has_gradient(place, other, step) for other in range(world_size)) for place in range(6)]
        shard = [t.clone() for t in (state.exp_avg, state.exp_avg_sq, state.last_step)]  # type: ignore[union-attr]
        before = values(params)
        optimizer.clip_grad_norm(8.0)
        optimizer.step()
        assert optimizer.stats is not None
        factor = torch.tensor(optimizer.stats.clip_factor)
        assert factor < 1
        mask, inside, total = optimizer.engine.masks.active, torch.zeros_like(shard[0]), torch.zeros_like(shard[0])
        own = None if mask is None else mask[optimizer.engine.local.rows]
        ops.scatter_blocks(inside, own, torch.ones_like(totals[-1]))
        ops.scatter_blocks(total, own, totals[-1])
        matrices = (*shard, inside, total, state.exp_avg, state.exp_avg_sq, state.last_step)
        views = [piece_views(matrix, pieces) for matrix in matrices]  # type: ignore[union-attr]
        for place in range(6):
            taken[place] += present[place]
        for piece, first, second, clock, chosen, arrived, *after in zip(pieces, *views, strict=True):
            place = piece.segment.index
            group, parameter = optimizer.param_groups[piece.segment.group], params[place]
            theta = before[place].view(-1)[piece.of_parameter]
            now = parameter.detach().view(-1)[piece.of_parameter]
            if not present[place]:
                for a, b in zip((first, second, clock, theta), (*after, now), strict=True):
                    assert torch.equal(a, b)
                continue
            part = None if parameter.grad is None else parameter.grad.view(-1)[piece.of_parameter]
            beta1, beta2 = group["betas"]
            if mask is not None:
                ops.accumulate_exp_avg_sq([second], [part], [1 - beta2], world_size, factor, None)
            given = (torch.tensor(group[name], dtype=torch.float64) for name in ("lr", "eps", "weight_decay"))
            lr, eps, decay = given
            numbers = ops.Hyper.of(
                torch.float32, lr, torch.tensor(beta1).double(), torch.tensor(beta2).double(), eps, decay
            )
            corrections = torch.tensor(1 - beta1 ** taken[place]), torch.tensor(1 - beta2 ** taken[place])
            tau, implicit = (taken[place] - clock).float(), config.catch_up == "implicit"
            new = ops.adamw_step(
                theta, first, second, tau, arrived, numbers, corrections, world_size, mask is None, implicit
            )
            there = chosen != 0
            visited += int((there & (tau > 1)).sum())
            for a, b, c in zip((now, *after[:2]), new, (theta, first, second), strict=True):
                torch.testing.assert_close(a[there], b[there], rtol=2e-5, atol=2e-6)
                torch.testing.assert_close(a[~there], c[~there], rtol=2e-6, atol=0)
            assert torch.equal(now[~there], theta[~there])
            assert torch.equal(after[2], torch.where(there, taken[place], clock))
    return visited


@pytest.mark.parametrize("options", [{}, {"catch_up": "summed", "mask_interval": 2}])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_is_the_op_on_what_the_owner_has(run_ranks: RunRanks, world_size: int, options: dict[str, Any]) -> None:
    assert min(run_ranks(step_beside_the_op, world_size, options)) > 100


# ------------------------------------------------------------------------------------------ 7. accumulation, clipping


def accumulate(rank: int, world_size: int, split: int) -> list[Tensor]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 3)).double()
    optimizer = ScapeOptimizer(
        model.parameters(),
        config=ScapeConfig(sparsity=0.9, wire_dtype="fp32", residual_dtype="float64", sparsity_warmup_steps=0),
    )
    torch.manual_seed(rank)
    for _ in range(5):
        batch = torch.randn(8, 8, dtype=torch.float64)
        for part in batch.chunk(split):
            (model(part).square().mean() / split).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_four_micro_batches_equal_one_large_batch(run_ranks: RunRanks) -> None:
    for one, four in zip(run_ranks(accumulate, 2, 1)[0], run_ranks(accumulate, 2, 4)[0], strict=True):
        torch.testing.assert_close(one, four, rtol=1e-6, atol=1e-7)


def clip_ranks(rank: int, world_size: int, kind: str, rule: str) -> tuple[float, float, float, float]:
    params = parameters(((700, 300), (200_000,), (17,)))
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.99, clip_norm=rule, **FP32))
    everyone = [gradients(params, other, 0) for other in range(world_size)]
    if kind == "heavy-tailed":
        everyone = [
            [g / torch.rand(g.shape, generator=torch.Generator().manual_seed(9)).clamp(min=1e-6) for g in grads]
            for grads in everyone
        ]
    for parameter, grad in zip(params, everyone[rank], strict=True):
        parameter.grad = grad
    mean = [torch.stack(grads).mean(0).view(-1) for grads in zip(*everyone, strict=True)]
    true = float(torch.cat(mean).double().norm())
    if rule == "local":
        own = [torch.cat([g.view(-1) for g in grads]).double().square().sum() for grads in everyone]
        true = float((sum(own) / world_size) ** 0.5)
    norm = float(optimizer.clip_grad_norm(true / 4))
    untouched = torch.equal(params[0].grad, everyone[rank][0])  # type: ignore[arg-type]
    assert untouched
    optimizer.step()
    stats, state = optimizer.stats, optimizer.engine.state
    assert stats is not None
    assert state is not None
    return norm, true, stats.clip_factor, stats.grad_norm


@pytest.mark.parametrize("kind", ["random", "heavy-tailed"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sketched_norm_is_within_five_percent_and_all_ranks_scale_alike(
    run_ranks: RunRanks, world_size: int, kind: str
) -> None:
    results = run_ranks(clip_ranks, world_size, kind, "sketch")
    norm, true, factor, shown = results[0]
    assert norm == pytest.approx(true, rel=0.05)
    assert factor == pytest.approx(true / 4 / norm, rel=1e-4)
    assert shown == norm
    assert len({(n, f) for n, _, f, _ in results}) == 1


def test_local_norm_is_the_root_mean_square_over_ranks(run_ranks: RunRanks) -> None:
    for norm, true, factor, _ in run_ranks(clip_ranks, 2, "random", "local"):
        assert norm == pytest.approx(true, rel=1e-5)
        assert factor == pytest.approx(0.25, rel=1e-4)


def test_one_rank_clips_by_the_exact_norm() -> None:
    norm, true, factor, _ = clip_ranks(0, 1, "heavy-tailed", "sketch")
    assert norm == pytest.approx(true, rel=1e-5)
    assert factor == pytest.approx(0.25, rel=1e-4)


def test_value_clipping_clamps_at_the_fold() -> None:
    params = parameters(((50,),))
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0, **FP32))
    ledger = Ledger(optimizer)
    params[0].grad = torch.linspace(-5, 5, 50)
    optimizer.clip_grad_value(1.0)
    optimizer.step()
    assert torch.equal(ledger.totals()[0], torch.linspace(-5, 5, 50).clamp(-1, 1).double())
    assert params[0].grad.max() == 5.0


def test_a_clip_recorded_for_a_gradient_that_is_gone_is_forgotten() -> None:
    params = parameters(((50,),))
    optimizer = ScapeOptimizer(params, config=ScapeConfig(**FP32))
    set_gradients(params, 0, 0)
    optimizer.clip_grad_norm(1e-3)
    optimizer.zero_grad()  # as after a step that a gradient scaler skipped
    set_gradients(params, 0, 1)
    optimizer.step()
    assert optimizer.stats is not None
    assert optimizer.stats.clip_factor == 1.0


@pytest.mark.parametrize("change", ["in place", "another", "gone"])
def test_gradients_that_change_after_the_clip_are_refused_and_nothing_is_done(change: str) -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    set_gradients(params, 0, 0)
    before = values(params)
    optimizer.clip_grad_norm(1.0)
    assert params[1].grad is not None
    if change == "in place":
        params[1].grad.view(-1)[0] = float("nan")
    else:
        params[1].grad = None if change == "gone" else params[1].grad.clone()
    with pytest.raises(RuntimeError, match=r"must stay as they are between .*, got another one for parameter 1: "):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, values(params), strict=True))
    optimizer.zero_grad()
    set_gradients(params, 0, 1)
    optimizer.step()
    assert not torch.equal(before[1], params[1])


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_clip_bounds_must_be_positive(bad: float) -> None:
    optimizer = ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(ValueError, match=r"`max_norm` must be > 0, got"):
        optimizer.clip_grad_norm(bad)
    with pytest.raises(ValueError, match=r"`clip_value` must be > 0, got"):
        optimizer.clip_grad_value(bad)


# ------------------------------------------------------------------------------------------- 8. not finite


def kept_by_a_skipped_step(state: Any) -> list[Tensor | None]:
    """All that a state holds between steps, but for masters, which are made at the first; ``missed`` comes last."""
    names = ("residual", "exp_avg", "last_step", "step", "local_exp_avg_sum", "local_exp_avg", "exp_avg_sq", "missed")
    return [getattr(state, name) for name in names]


def train_through_nan(rank: int, world_size: int, bad: float, clip: bool, statistic: str, update: str = "adams") -> int:
    params = parameters()
    config = ScapeConfig(sparsity=0.9, max_skipped=3, mask_statistic=statistic, sparsity_warmup_steps=0, update=update)
    optimizer = ScapeOptimizer(params, config=config)
    skipped = 0
    for step in range(12):
        set_gradients(params, rank, step)
        if step in (2, 5):
            params[5].grad = None
        poisoned = step in (4, 5, 9)
        if poisoned and rank == 1:
            params[3].grad.view(-1)[77] = bad  # type: ignore[union-attr]
        before, state = values(params), optimizer.engine.state
        held = None
        if state is not None:
            optimizer.drain()
            held = [None if t is None else t.clone() for t in kept_by_a_skipped_step(state)]
        if clip:
            norm = optimizer.clip_grad_norm(1.0)
            assert bool(norm.isfinite()) is not poisoned
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert optimizer.stats is not None
        assert optimizer.stats.skipped is poisoned
        skipped += poisoned
        assert optimizer.stats.skipped_total == skipped
        if poisoned:
            assert all(torch.equal(a, b) for a, b in zip(before, params, strict=True))
            assert held is not None
            assert state is not None
            for was, now in zip(held, kept_by_a_skipped_step(state), strict=True):
                assert (was is now is None) or torch.equal(was, now)
            assert bool(caught) == (rank == 0)
        else:
            assert any(not torch.equal(a, b) for a, b in zip(before, params, strict=True))
        assert_replicas_equal(params)
        assert all(p.isfinite().all() for p in params)
    return skipped


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(
    run_ranks: RunRanks, bad: float, clip: bool
) -> None:
    assert run_ranks(train_through_nan, 2, bad, clip, "residual") == [3, 3]


@pytest.mark.parametrize(
    ("statistic", "update"), [("first_moment", "adams"), ("residual", "adamw"), ("first_moment", "adamw")]
)
def test_a_skipped_step_keeps_evidence_and_second_moment(run_ranks: RunRanks, statistic: str, update: str) -> None:
    assert run_ranks(train_through_nan, 2, float("nan"), True, statistic, update) == [3, 3]


@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
@pytest.mark.parametrize("dense_steps", [0, 2])
def test_a_mask_made_in_a_step_that_is_skipped_is_made_anew(dense_steps: int) -> None:
    params = parameters()
    config = ScapeConfig(sparsity=0.9, mask_interval=4, dense_steps=dense_steps, sparsity_warmup_steps=0)
    optimizer = ScapeOptimizer(params, config=config)
    for step in range(dense_steps + 3):
        set_gradients(params, 0, step)
        if step in (dense_steps, dense_steps + 1):  # the first sparse step has nothing but its own gradient to rank
            params[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
        optimizer.step()
    assert optimizer.stats is not None
    assert optimizer.stats.energy_captured > 0.3  # the top tenth; an arbitrary tenth would have 0.1


def skip_forever(rank: int, world_size: int) -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(max_skipped=4, sparsity_warmup_steps=0))
    for step in range(9):
        set_gradients(params, rank, step)
        if rank == 1:
            params[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_max_skipped_in_a_row_raises_the_same_error_on_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(skip_forever, 2, expect_errors=True)
    assert isinstance(first, FloatingPointError)
    assert "got NaN or inf in 4 steps in a row (max_skipped=4)" in str(first)
    assert str(first) == str(second)


# --------------------------------------------------------------------------------------------- 9. bad input


class OwnAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), TypeError, r"must be torch.optim.AdamW.*got torch.optim.sgd.SGD"),
        (lambda p: OwnAdamW(p), TypeError, r"must be torch.optim.AdamW.*OwnAdamW"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), ValueError, "`amsgrad` must be False, got True"),
        (lambda p: torch.optim.AdamW(p, maximize=True), ValueError, "`maximize` must be False, got True"),
        (lambda p: torch.optim.Adam(p, differentiable=True), ValueError, "`differentiable` must be False, got True"),
        (lambda p: torch.optim.Adam(p, capturable=True), ValueError, "`capturable` must be False, got True"),
    ],
)
def test_an_optimizer_that_cannot_be_kept_is_refused(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ScapeOptimizer.from_optimizer(build(parameters()), ScapeConfig(sparsity_warmup_steps=0))


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    params = parameters()
    dense = torch.optim.AdamW(params)
    set_gradients(params, 0, 0)
    dense.step()
    with pytest.raises(ValueError, match="must not have stepped yet"):
        ScapeOptimizer.from_optimizer(dense, ScapeConfig(sparsity_warmup_steps=0))


def test_from_optimizer_keeps_settings_by_reference() -> None:
    params = parameters()
    own = {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.7}
    groups = [{"params": params[:2], **own}, {"params": params[2:]}]
    dense = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.125, fused=True)
    scape = ScapeOptimizer.from_optimizer(dense, ScapeConfig(sparsity_warmup_steps=0))
    assert scape.param_groups is dense.param_groups
    assert scape.defaults["lr"] == 0.25
    first, second = scape.param_groups
    assert (first["lr"], first["betas"], first["eps"], first["weight_decay"]) == (0.5, (0.8, 0.9), 1e-5, 0.7)
    assert (second["lr"], second["betas"], second["eps"], second["weight_decay"]) == (0.25, (0.9, 0.999), 1e-8, 0.125)


def test_adam_with_l2_decay_is_taken_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="decoupled"):
        ScapeOptimizer.from_optimizer(
            torch.optim.Adam(parameters(), weight_decay=0.1), ScapeConfig(sparsity_warmup_steps=0)
        )


def test_adams_keeps_its_bias_correction() -> None:
    params, twins = parameters(), parameters()
    scape = ScapeOptimizer.from_optimizer(AdamS(params, bias_correction=True), ScapeConfig(sparsity=0, **FP32))
    dense = AdamS(twins, bias_correction=True)
    set_gradients(params, 0, 0)
    set_gradients(twins, 0, 0)
    scape.step()
    dense.step()
    for a, b in zip(params, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "`lr` must be >= 0, got -1.0"),
        ({"betas": (0.9, 1.0)}, r"`betas` must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"eps": 0.0}, "`eps` must be at least 1.17549e-38, got 0.0"),
        ({"weight_decay": -0.1}, "`weight_decay` must be >= 0, got -0.1"),
    ],
)
def test_bad_hyperparameters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0), **options)


def test_parameters_that_cannot_be_carried_are_refused() -> None:
    complex_ = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"Parameters must be one of .* in torch.complex64, which the wire cannot"):
        ScapeOptimizer([complex_], config=ScapeConfig(sparsity_warmup_steps=0))
    eighth = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"in torch.float8_e4m3fn, which the wire cannot carry"):
        ScapeOptimizer([eighth], config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(ValueError, match="without overlap or gap"):
        ScapeOptimizer([nn.Parameter(torch.zeros(4, 8)[:, ::2])], config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(ValueError, match="At least one parameter must require grad"):
        ScapeOptimizer([nn.Parameter(torch.zeros(3), requires_grad=False)], config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(TypeError, match="`config` must be a ScapeConfig, got dict"):
        ScapeOptimizer(parameters(), config={"sparsity": 0.9})  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = ScapeOptimizer(embedding.parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="Gradients must be dense, got torch.sparse_coo.*sparse=False"):
        optimizer.step()


def test_parameter_groups_cannot_be_added_later() -> None:
    optimizer = ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
    with pytest.raises(ValueError, match="must be given when the optimizer is built"):
        optimizer.add_param_group({"params": parameters()})


@pytest.mark.parametrize(("before", "words"), [(True, "trained then, and is frozen now"), (False, "frozen then")])
def test_freezing_or_unfreezing_after_the_optimizer_was_built_is_refused(before: bool, words: str) -> None:
    params = parameters()
    params[0].requires_grad_(before)
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity_warmup_steps=0))
    set_gradients(params, 0, 0)
    params[0].grad = None
    params[0].requires_grad_(not before)
    with pytest.raises(ValueError, match=rf"got one of shape \(37, 11\) that was {words}. Build a new optimizer"):
        optimizer.step()


def test_another_memory_format_after_the_optimizer_was_built_is_refused() -> None:
    module = nn.Conv2d(3, 4, 3)
    optimizer = ScapeOptimizer(module.parameters(), config=ScapeConfig(sparsity_warmup_steps=0))
    module.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"must keep their memory order, got 'parameter 0' with strides"):
        optimizer.step()


# ------------------------------------------------------------------------------------------- odd shapes and groups


def train_small(rank: int, world_size: int, sizes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    params = parameters(sizes)
    optimizer = ScapeOptimizer(
        [{"params": []}, {"params": params}], config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
    )
    before = values(params)
    for step in range(5):
        set_gradients(params, rank, step)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        assert_replicas_equal(params)
    optimizer.consolidate_state_dict()
    assert rank or set(optimizer.state_dict()["state"]) == set(range(len(sizes)))
    assert all(p.numel() == 0 or not torch.equal(a, p) for a, p in zip(before, params, strict=True))
    return values(params)


@pytest.mark.parametrize("sizes", [((1,),), ((0,), (50,), (3, 0, 2), (9,)), ((7,), (2,))])
@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_parameters_and_more_ranks_than_blocks_are_fine(
    run_ranks: RunRanks, world_size: int, sizes: tuple[tuple[int, ...], ...]
) -> None:
    run_ranks(train_small, world_size, sizes)


def train_subgroup(rank: int, world_size: int) -> list[Tensor] | None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0), process_group=group)
    for step in range(4):
        set_gradients(params, rank - 1, step)
        optimizer.step()
    optimizer.consolidate_state_dict(to=1)
    if rank == 2:
        assert len(optimizer.state_dict()["scape"]["residuals"]) == 2
    return values(params)


def train_pair(rank: int, world_size: int) -> list[Tensor]:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    for step in range(4):
        set_gradients(params, rank, step)
        optimizer.step()
    return values(params)


def test_a_process_group_that_does_not_start_at_rank_zero_trains_alike(run_ranks: RunRanks) -> None:
    _, second, third = run_ranks(train_subgroup, 3)
    pair = run_ranks(train_pair, 2)[0]
    for a, b, c in zip(second, third, pair, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def build_differently(rank: int, world_size: int, kind: str) -> None:
    sizes: tuple[tuple[int, ...], ...] = SIZES
    sparsity = 0.9
    dtype = torch.float32
    if rank == 1 and kind == "shape":
        sizes = ((37, 12), *SIZES[1:])
    if rank == 1 and kind == "count":
        sizes = SIZES[:-1]
    if rank == 1 and kind == "sparsity":
        sparsity = 0.99
    if rank == 1 and kind == "dtype":
        dtype = torch.bfloat16
    if rank == 1 and kind == "bad lr":
        ScapeOptimizer(parameters(), lr=-1, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    if rank == 1 and kind == "version":
        sys.modules[ScapeOptimizer.__module__].__version__ = "9.9"  # type: ignore[attr-defined]
    params = parameters(sizes, dtype)
    if rank == 1 and kind == "order":
        params = params[::-1]
    if rank == 1 and kind == "values":
        params[3].data[0, 0] += 1
    lr = 0.5 if rank == 1 and kind == "lr" else 1e-3
    optimizer = ScapeOptimizer(params, lr=lr, config=ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
    optimizer.name_parameters([(f"layer{i}.weight", p) for i, p in enumerate(params)])
    set_gradients(params, 0, 0)
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", r"got a difference: parameters .*\[0\] is .*\(37, 12\).* on rank 1 and .*\(37, 11\).* on rank 0"),
        ("count", r"the number of parameters .* is 5 on rank 1 and 6 on rank 0"),
        ("sparsity", r"config\[0\] is 'sparsity=0.99' on rank 1 and 'sparsity=0.9' on rank 0"),
        ("dtype", r"parameters .*\[0\] is .*torch.bfloat16.* on rank 1"),
        ("order", r"parameters .*\[0\] is .* on rank 1 and .*\(37, 11\).* on rank 0"),
        ("version", r"lightning_scape's version is '9.9' on rank 1"),
        ("bad lr", r"On rank 1: `lr` must be >= 0, got -1"),
        ("lr", r"parameter groups\[0\] is .*'lr': 0.5.* on rank 1 and .*'lr': 0.001.* on rank 0"),
        ("values", r"bitwise equal parameters, got 'layer3.weight' of 2100 entries different from rank 0's on rank 1"),
    ],
)
def test_ranks_that_differ_get_the_same_error_everywhere(run_ranks: RunRanks, kind: str, words: str) -> None:
    import re

    errors = run_ranks(build_differently, 2, kind, expect_errors=True)
    assert all(isinstance(error, (ValueError, RuntimeError)) for error in errors)
    assert re.search(words, str(errors[0]))
    assert str(errors[0]) == str(errors[1])


def drift(rank: int, world_size: int) -> None:
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(check_replicas_every=3, sparsity_warmup_steps=0))
    for step in range(6):
        set_gradients(params, rank, step)
        if step == 3 and rank == 1:
            params[4].data.view(-1)[5] *= 1.0000001
        optimizer.step()


def test_check_replicas_names_the_first_parameter_that_differs(run_ranks: RunRanks) -> None:
    errors = run_ranks(drift, 2, expect_errors=True)
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "got 'parameter 4' of 27 entries different from rank 0's on rank 1" in str(error)


# --------------------------------------------------------------------------------------------------- figures


def collect_stats(rank: int, world_size: int) -> tuple[Any, float]:
    """The figures of the fourth step, and the share of its energy that left the residual."""
    params = parameters()
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, wire_dtype="fp32", sparsity_warmup_steps=0))
    assert optimizer.stats is None
    for step in range(4):
        state = optimizer.engine.state
        folded = None if state is None else state.residual.clone()
        set_gradients(params, rank, step)
        optimizer.step()
    assert state is not None
    assert folded is not None
    for part, parameter in zip(piece_views(folded, optimizer.engine.layout.everything().pieces), params, strict=True):
        assert parameter.grad is not None
        part += parameter.grad.view(-1)
    return optimizer.stats, float((folded - state.residual).square().sum() / folded.square().sum())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_energy_captured_is_what_left_the_residual(run_ranks: RunRanks, world_size: int) -> None:
    for stats, energy in run_ranks(collect_stats, world_size):
        assert stats.energy_captured == pytest.approx(energy, rel=1e-4)


def test_statistics_tell_what_the_step_did(run_ranks: RunRanks) -> None:
    for stats, _ in run_ranks(collect_stats, 2):
        assert stats.step == 4
        assert 0.1 <= stats.density <= 0.12  # a block that is mostly pads sends its whole quota all the same
        assert 0.5 < stats.mask_churn <= 1.0
        assert 0.1 < stats.energy_captured < 0.9
        assert stats.grad_norm > 0
        assert stats.clip_factor == 1.0
        assert stats.bytes_dense == sum(p.numel() for p in parameters()) * 4
        assert stats.compression == stats.bytes_dense / stats.bytes_total
        flat = stats.as_dict()
        assert flat["scape/bytes_total"] == stats.bytes_total
        assert 0 < stats.message_seconds < sum(stats.seconds.values())
        assert set(stats.seconds) == {k.removeprefix("scape/seconds/") for k in flat if "/seconds/" in k}
        assert all(isinstance(v, float) for v in flat.values())


def test_warm_up_falls_geometrically_to_the_quota() -> None:
    params = parameters()
    config = ScapeConfig(sparsity=0.99, dense_steps=2, sparsity_warmup_steps=3)
    optimizer = ScapeOptimizer(params, config=config)
    sent = []
    for step in range(8):
        set_gradients(params, 0, step)
        optimizer.step()
        assert optimizer.engine.record is not None
        sent.append(optimizer.engine.record.sent)
    assert sent == [200, 200, round(200 * 0.01**0.25), round(200 * 0.01**0.5), round(200 * 0.01**0.75), 2, 2, 2]


def test_masters_keep_what_bf16_would_round_away_and_follow_outside_changes() -> None:
    parameter = nn.Parameter(torch.full((8,), 100.0, dtype=torch.bfloat16))
    optimizer = ScapeOptimizer([parameter], lr=0.01, weight_decay=0.0, config=ScapeConfig(sparsity=0.0))
    for _ in range(200):
        parameter.grad = torch.ones(8, dtype=torch.bfloat16)
        optimizer.step()
    assert (parameter < 99).all()  # single steps of 0.01 are far below bf16's spacing of 0.5 there
    parameter.data.fill_(-50.0)
    optimizer.mark_masters_stale()
    parameter.grad = torch.zeros(8, dtype=torch.bfloat16)
    optimizer.step()
    assert ((parameter + 50).abs() < 1).all()


def test_masters_that_round_to_their_parameter_survive_a_reload() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.0))
    set_gradients(params, 0, 0)
    optimizer.step()
    state = optimizer.engine.state
    assert state is not None
    assert state.master is not None
    kept = state.master.clone()
    optimizer.mark_masters_stale()  # as when the same checkpoint's parameters are loaded after its optimizer
    params[0].data.view(-1)[7] = 3.0
    assert optimizer.engine.settled_state() is state
    kept.view(-1)[7] = 3.0
    assert torch.equal(state.master, kept)


def test_channels_last_parameters_and_gradients_of_other_strides_are_kept_in_step() -> None:
    weight = torch.randn(6, 5, 3, 3)
    mine = nn.Parameter(weight.clone().to(memory_format=torch.channels_last))
    twin = nn.Parameter(weight.clone())
    scape = ScapeOptimizer([mine], config=ScapeConfig(sparsity=0, **FP32))
    dense = AdamS([twin])
    for step in range(3):
        grad = torch.randn(6, 5, 3, 3, generator=torch.Generator().manual_seed(step))
        mine.grad = grad if step else grad.to(memory_format=torch.channels_last)
        twin.grad = grad.clone()
        scape.step()
        dense.step()
        torch.testing.assert_close(mine, twin, rtol=1e-6, atol=1e-7)


def test_step_returns_what_the_closure_returned_with_gradients_enabled() -> None:
    params = parameters(((4,),))
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity_warmup_steps=0))

    def closure() -> Tensor:
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad


def test_ranks_that_nobody_joined_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError, match=r"got WORLD_SIZE=2 and no process group: each would train on its own\. Call"
    ):
        ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"must not be copied or pickled"):
        copied(ScapeOptimizer(parameters(), config=ScapeConfig(sparsity_warmup_steps=0)))


def build_with_tensors(rank: int, world_size: int, apart: float) -> None:
    lr = torch.tensor(1e-3 + rank * apart)
    ScapeOptimizer(parameters(), lr=lr, config=ScapeConfig(sparsity_warmup_steps=0))  # type: ignore[arg-type]


def test_learning_rates_that_are_tensors_are_compared_as_numbers(run_ranks: RunRanks) -> None:
    run_ranks(build_with_tensors, 2, 0.0)
    with pytest.raises(ValueError, match=r"All ranks must be set up alike, got a difference: parameter groups"):
        run_ranks(build_with_tensors, 2, 1e-8)


ENDS = """
import os, sys, torch
import torch.distributed as dist
from lightning_scape import ScapeConfig, ScapeOptimizer
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
torch.manual_seed(0)
parameter = torch.nn.Parameter(torch.randn(30_000))
optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity_warmup_steps=0))
for _ in range(3):
    parameter.grad = torch.randn(30_000)
    optimizer.step()
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
"""
AT_EXIT = """
def last():
    parameter.grad = torch.randn(30_000)
    optimizer.step()
    parameter.grad = torch.randn(30_000)
    optimizer.step()
    optimizer.drain()
    print("stepped")
import atexit, lightning_scape
atexit.register(last)
"""


@pytest.mark.parametrize("end", ["nothing", "destroy", "step"])
def test_a_script_may_end_right_after_a_step(tmp_path: Path, end: str) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", (AT_EXIT if end == "step" else "") + ENDS, f"file://{tmp_path}/meet"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), end], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=80) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    # What fails in a handler at exit does not show in the exit code.
    assert [out for out, _ in said] == ["stepped\n" if end == "step" else ""] * 2, said


HOLDS = """
import time, torch
from lightning_scape.comm.worker import Worker
torch.set_num_threads(1)

class Held:
    def __del__(self):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            torch.zeros(8).add_(1)  # in and out of torch, as the end of a message is
        print("freed")

class Group:
    pass

group = Group()
worker = Worker(group)
job = worker.do(lambda held=Held(): None)
job.wait()
"""


def test_a_script_may_end_while_the_workers_thread_frees_what_a_message_held() -> None:
    ended = subprocess.run([sys.executable, "-c", HOLDS], capture_output=True, text=True, timeout=90)
    assert (ended.returncode, ended.stdout) == (0, "freed\n"), ended.stderr
