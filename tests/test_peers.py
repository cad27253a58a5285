"""Other methods over simulated ranks: against real implementations where there are any, and against one another."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from example_modules import EXAMPLES, load_example
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from warm_python import warm_python

RANKS, STEPS = 2, 7
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    return load_example("peers")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train(ranks: Any, net: nn.Module, first: int = 0, stop: int = STEPS) -> Tensor:
    for step in range(first, stop):
        batches = [batch(rank, step) for rank in range(RANKS)]
        ranks.backward(batches, lambda x: (net(x) - x[:, :3].sin()).square().mean(), torch.cat)
        ranks.step(1e-2, 1.0)
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])


OPTIONS: dict[str, dict[str, Any]] = {
    "averaging": {"sync_every": 3},
    "diloco": {"sync_every": 3},
    "demo": {"top": 4, "chunk": 8},
    "powersgd": {},
    "signsgd": {},
    "topk": {"density": 0.1},
    "sparseloco": {"sync_every": 3, "density": 1 / 8},
    "sparseloco, saved while it exchanges": {"sync_every": 3, "density": 1 / 8, "overlap_steps": 2},
}


@pytest.mark.parametrize("named", OPTIONS)
def test_a_run_that_was_saved_goes_on_bit_for_bit(peers: ModuleType, named: str, tmp_path: Path) -> None:
    method = named.split(",")[0]

    def build() -> tuple[Any, nn.Module]:
        net = model()
        return peers.METHODS[method](net, RANKS, SETTINGS, **OPTIONS[named]), net

    ranks, net = build()
    train(ranks, net, 0, 4)
    torch.save({"model": net.state_dict(), "ranks": ranks.state_dict()}, tmp_path / "saved")
    straight = train(ranks, net, 4)
    saved = torch.load(tmp_path / "saved")
    ranks, net = build()
    net.load_state_dict(saved["model"])
    ranks.load_state_dict(saved["ranks"])
    assert torch.equal(train(ranks, net, 4), straight)
    before = straight.clone()
    ranks.end()
    ends = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
    assert torch.equal(ends, before) == (method not in ("averaging", "diloco", "sparseloco"))


def test_sparseloco_that_sends_everything_is_averaging(peers: ModuleType) -> None:
    first, second = model(), model()
    exact = {"density": 1.0, "bits": None, "error_decay": 1.0}
    ours = train(peers.METHODS["sparseloco"](first, RANKS, SETTINGS, sync_every=3, **exact), first)
    theirs = train(peers.METHODS["averaging"](second, RANKS, SETTINGS, sync_every=3), second)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_sparseloco_exchanges_beside_steps_and_counts_every_byte(peers: ModuleType) -> None:
    ends = []
    for overlap in (0, 1):
        net = model()
        ranks = peers.METHODS["sparseloco"](net, RANKS, SETTINGS, sync_every=3, density=1 / 8, overlap_steps=overlap)
        sent = []
        for step in range(7):
            train(ranks, net, step, step + 1)
            sent.append(ranks.bytes_sent())
        ended = [2 + overlap, 5 + overlap]
        assert [step for step, each in enumerate(sent) if each] == ended
        stats = ranks.wrappers[0].stats
        assert sent[ended[0]] == pytest.approx(stats.bytes_total, abs=8)
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]))
        ranks.end()
        assert ranks.bytes_sent() == sent[ended[0]] * (1 + overlap)  # step 6 ended an exchange, and began a window
    assert not torch.equal(*ends)


def test_diloco_with_a_plain_outer_step_is_averaging(peers: ModuleType) -> None:
    first, second = model(), model()
    diloco = peers.METHODS["diloco"]  # SGD's Nesterov refuses a momentum of 0
    ranks = diloco(first, RANKS, SETTINGS, sync_every=3, outer_lr=1.0, outer_momentum=1e-12)
    averaged = peers.METHODS["averaging"](second, RANKS, SETTINGS, sync_every=3)
    torch.testing.assert_close(train(ranks, first), train(averaged, second), rtol=1e-5, atol=1e-6)


class Meeting:
    """Stands in for torchft's Manager, one for each thread: what it is asked for, with a mean over the ranks."""

    _use_async_quorum = False

    def __init__(self, rank: int, barrier: threading.Barrier, shared: dict[tuple[int, int], Tensor]) -> None:
        self.rank, self.barrier, self.shared, self.calls = rank, barrier, shared, 0

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Any:
        self.calls += 1
        self.shared[self.calls, self.rank] = tensor.clone()
        self.barrier.wait(60)
        tensor.copy_(torch.stack([self.shared[self.calls, rank] for rank in range(RANKS)]).mean(dim=0))
        return SimpleNamespace(wait=lambda: True)

    def should_commit(self) -> bool:
        return True

    def current_step(self) -> int:
        return 0

    def errored(self) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None  # a quorum, states to be sent: nobody joins or leaves


def test_diloco_is_torchfts(peers: ModuleType) -> None:
    local_sgd = pytest.importorskip(
        "torchft.local_sgd", reason="to compare with torchft's DiLoCo: pip install torchft==0.2.0", exc_type=ImportError
    )
    barrier, shared, nets = threading.Barrier(RANKS), {}, [model() for _ in range(RANKS)]

    def run(rank: int) -> None:
        net = nets[rank]
        inner = torch.optim.AdamW(net.parameters(), **SETTINGS)
        outer = torch.optim.SGD(net.parameters(), 0.7, momentum=0.9, nesterov=True)
        home = {"backup_device": torch.device("cpu"), "pin_memory": False}
        with local_sgd.DiLoCo(Meeting(rank, barrier, shared), [net], inner, outer, sync_every=3, **home):
            for step in range(9):
                x = batch(rank, step)
                inner.zero_grad()
                (net(x) - x[:, :3].sin()).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                inner.step()

    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(run, range(RANKS)))
    ours = model()
    end = train(peers.METHODS["diloco"](ours, RANKS, SETTINGS, sync_every=3), ours, stop=9)
    for net in nets:
        assert torch.equal(end, torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]))


def test_topk_that_sends_everything_is_dense_adamw(peers: ModuleType) -> None:
    first, second = model(), model()
    sparse = train(peers.METHODS["topk"](first, RANKS, SETTINGS, density=1.0), first)
    optimizer = torch.optim.AdamW(second.parameters(), **SETTINGS)
    for step in range(STEPS):
        gradients = []
        for rank in range(RANKS):
            second.zero_grad()
            x = batch(rank, step)
            (second(x) - x[:, :3].sin()).square().mean().backward()
            nn.utils.clip_grad_norm_(second.parameters(), 1.0)
            gradients.append([parameter.grad.clone() for parameter in second.parameters()])
        for parameter, *parts in zip(second.parameters(), *gradients, strict=True):
            parameter.grad = torch.stack(parts).mean(dim=0)
        optimizer.step()
    dense = torch.cat([parameter.detach().reshape(-1) for parameter in second.parameters()])
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-6)


def test_demos_transform_is_orthonormal_and_comes_back() -> None:
    load_example("peers")
    demo = sys.modules["peers.demo"]
    for shape in ((16, 24), (10, 7), (5,), (3, 4, 5)):
        tensor = torch.randn(shape)
        chunks = demo.transform(tensor, 8)
        torch.testing.assert_close(chunks.norm(), tensor.norm())
        torch.testing.assert_close(demo.inverse(chunks, tensor, 8), tensor)


def test_demo_steps_as_detonation_does(peers: ModuleType) -> None:
    """By DeToNATION's transform, selection and mean; its messages are left out."""
    needed = "to compare with detonation's DeMo: pip install --no-deps detonation==0.5.2 einops mltiming"
    compress = pytest.importorskip("detonation.util.dct_compress", reason=needed, exc_type=ImportError).DCTCompress
    transforms = pytest.importorskip("detonation.util.dct_transform", reason=needed).DCTTransform
    net = nn.Sequential(nn.Linear(24, 16), nn.Linear(16, 8))  # it divides chunks evenly, ours are filled up
    parameters = list(net.parameters())
    ranks = peers.METHODS["demo"](net, RANKS, {**SETTINGS, "weight_decay": 0.0}, chunk=8, top=5)
    reference = transforms([{"params": parameters}], 8)
    deltas = [[torch.zeros_like(p) for p in parameters] for _ in range(RANKS)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        gradients = [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(RANKS)]
        signs, _ = ranks.combine(gradients)
        for index in range(len(parameters)):
            places, values = [], []
            for delta, gradient in zip((own[index] for own in deltas), (own[index] for own in gradients), strict=True):
                delta.mul_(0.999).add_(gradient)
                place, value, shape = compress.compress(reference.encode(delta), 5)
                alike = (shape, delta.device, delta.dtype)
                delta -= reference.decode(compress.decompress(place, value, *alike))
                places.append(place)
                values.append(value)
            theirs = reference.decode(compress.batch_decompress(places, values, *alike))
            clear = theirs.abs() > 1e-5  # elsewhere rounding decides
            assert clear.float().mean() > 0.9
            assert torch.equal(signs[index][clear], theirs.sign()[clear])


def test_majority_of_signs_moves_by_one_rate(peers: ModuleType) -> None:
    net = model()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    ranks = peers.METHODS["signsgd"](net, RANKS, {**SETTINGS, "weight_decay": 0.0})
    train(ranks, net, 0, 1)
    for old, new in zip(before, net.parameters(), strict=True):
        moved = ((old - new) / 1e-2).detach()
        assert bool(((moved - moved.round()).abs() < 1e-3).all())
        assert bool((moved.abs().round() == 1).all())  # one bit holds no tie


def _torchs_powersgd(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """torch's DDP hook: each step's own gradient, the q it starts from, and what comes out."""
    torch.manual_seed(0)
    net = nn.Linear(24, 16, bias=False)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, orthogonalization_epsilon=0
    )
    ddp = DistributedDataParallel(net)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    seen: dict[str, list[Tensor]] = {"own": [], "q": [], "out": []}
    for step in range(6):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + rank))
        own = nn.Linear(24, 16, bias=False)
        own.load_state_dict(net.state_dict())
        own(x).square().mean().backward()
        memory = state.q_memory_dict.get(0)
        ddp.zero_grad()
        q = None if memory is None else memory.clone()
        ddp(x).square().mean().backward()
        if q is not None:
            assert own.weight.grad is not None
            assert net.weight.grad is not None
            seen["own"].append(own.weight.grad)
            seen["q"].append(q.view(24, 2))
            seen["out"].append(net.weight.grad.clone())
        elif 0 in state.error_dict:  # the step that made the first q
            seen["errors"] = [state.error_dict[0].clone()]
    return seen


def test_powersgd_is_torchs_hook(run_ranks: Callable[..., list[Any]], peers: ModuleType) -> None:
    ranks = run_ranks(_torchs_powersgd, 2)
    steps = len(ranks[0]["own"])
    assert steps >= 3
    net = nn.Linear(24, 16, bias=False)
    ours = peers.METHODS["powersgd"](net, 2, SETTINGS, rank=2)
    for errors, seen in zip(ours.errors, ranks, strict=True):
        errors[0].copy_(seen["errors"][0].view(16, 24))
    for step in range(steps):
        # torch makes an orthonormal basis of the q it kept before it uses it; the space is what counts.
        ours.qs[0].copy_(ranks[0]["q"][step])
        (approximation,), _ = ours.combine([[seen["own"][step].clone()] for seen in ranks])
        torch.testing.assert_close(approximation, ranks[0]["out"][step], rtol=1e-4, atol=1e-6)


@pytest.mark.few(0)
def test_the_benchmarks_short_form_trains_every_method(tmp_path: Path) -> None:
    command = [warm_python(), str(EXAMPLES / "bench_pareto.py"), "--short", f"--out={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("pareto.md", "pareto.json", "pareto.png"):
        assert (tmp_path / name).stat().st_size > 100
    for method in dict.fromkeys(named.split(",")[0] for named in OPTIONS):
        assert f"| {method}" in done.stdout or f"| **{method}" in done.stdout


def test_the_front_is_what_no_other_beats() -> None:
    pareto = load_example("bench_pareto")

    def point(label: str, size: float, loss: float) -> Any:
        return pareto.Point(label, None, 0.0, size, loss, 1e-3, 1, 1, None)

    points = [point("a", 10, 1.0), point("b", 5, 1.1), point("c", 5, 1.2), point("d", 1, 1.15), point("e", 20, 1.0)]
    front = pareto.front_of(points)
    assert [each.label for each in front] == ["d", "b", "a"]
    assert pareto.above_front(points[2], front) == pytest.approx(1.2 / 1.1)


def test_a_longer_run_spreads_the_warm_up_and_four_bits_stand_beside_bf16() -> None:
    pareto = load_example("bench_pareto")
    (scape, sign) = (
        pareto.Point(each["method"], run.setting, 0.0, late, loss, 1e-3, 1, 1, run)
        for each, late, loss in ((pareto.SCAPE[1], 0.06, 1.7), (pareto.peer("signsgd"), 0.19, 1.6))
        for run in pareto.sweep([each], [1e-3], **pareto.SMALL)
    )
    rows = pareto.whole_runs([scape, sign], 3000)
    assert [row["label"] for row in rows] == ["scape, bf16", "signsgd", "scape, int4"]
    assert [row["on_front"] for row in rows] == [False, True, True]
    assert [row["computed"] for row in rows] == [False, False, True]
    for row in rows[::2]:
        short, longer, longest = row["bytes_by_length"].values()
        assert short > 1.5 * longer > 2 * longest
    config = pareto.ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0, wire_dtype="bf16")
    proposals = 5 / 200  # two of a block
    assert pareto.mean_bytes(config, 4, 10) == pytest.approx((0.01 * (2 + 2 + 1) + proposals) * 3 / 4)


def test_late_bytes_are_those_that_grow_with_the_model() -> None:
    pareto = load_example("bench_pareto")
    (run,) = pareto.sweep([pareto.scape(0.9)], [1e-3], **pareto.TINY)
    fixed = 2 * 4 * (4093 + 1) // 2  # two ranks
    history = [{"step": 2, "bytes": 9 * fixed}, {"step": 4, "bytes": 11 * fixed + 200}]
    result = {"run": pareto.json.loads(pareto.json.dumps(vars(run))), "step": 4, "bytes": 11 * fixed + 200}
    assert pareto.late_bytes({**result, "history": history}) == pytest.approx(100, abs=20)
