"""What this machine and its link can do, measured: what ``lightning-scape plan --measure`` predicts from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch
from torch import Tensor, nn

from lightning_scape.comm.collectives import Communicator
from lightning_scape.planning.cost_model import Link, Machine, nodes_share, step_costs

CPU = torch.device("cpu")


def measure_compute(
    model: nn.Module, batch_size: int, context: int, seconds: float = 5.0, precision: str = "32-true"
) -> float:
    """Seconds of forward and backward in a step, where the model is: the mean over steps. Collective.

    Each step counts as long as it takes on the slowest rank, for which the others wait. Gradients are left behind.

    Args:
        model: a LitGPT model; for ``bf16-true``, converted already.
        batch_size: sequences of a step.
        context: tokens of a sequence.
        seconds: for how long steps are timed: 5 to 40 of them, after two that are not.
        precision: ``bf16-mixed`` computes under autocast.
    """
    device = next(model.parameters()).device
    vocabulary = int(model.config.padded_vocab_size)  # type: ignore[union-attr,arg-type]
    tokens = torch.randint(0, vocabulary, (batch_size, context + 1), dtype=torch.int64, device=device)
    ranks = Communicator()

    def step() -> float:
        model.zero_grad()
        began = _now(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return _now(device) - began

    ranks.raise_on_all_ranks(step)  # it may not fit into one's memory
    once = max(ranks.all_gather_object(step()))
    times = ranks.all_gather_object([step() for _ in range(min(max(5, round(seconds / once)), 40))])
    return fmean(map(max, zip(*times, strict=True)))


def measure_machine(
    parameters: Sequence[Tensor], sparsities: Sequence[float], repeats: int = 4, fused: bool | None = None
) -> Machine:
    """What the optimizers cost here, per parameter; parameters must have gradients, and are changed.

    Methods are timed in a group of this rank alone: messages are the link's, not the machine's. ``fused`` is torch's
    option of AdamW; None: as LitGPT sets it, True on CUDA alone.
    """
    device = parameters[0].device
    count = sum(parameter.numel() for parameter in parameters)
    clip = median_seconds(lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e9), repeats, device)
    dense = torch.optim.AdamW(parameters, lr=1e-6, fused=device.type == "cuda" if fused is None else fused)
    adamw = median_seconds(dense.step, repeats, device)
    del dense
    own = {name: cost.measure(parameters, sparsities, repeats) for name, cost in step_costs().items()}
    return Machine(adamw=adamw / count, clip=clip / count, own=own)


def measure_link(
    megabytes: float = 4.0, repeats: int = 5, *, device: torch.device = CPU, ranks_per_node: int = 1
) -> Link:
    """What messages between the ranks of the default process group cost, from the point of view of the program.

    Args:
        megabytes: of a large message.
        repeats: messages of each kind that are timed, after one that is not.
        device: where messages are.
        ranks_per_node: how many of them share a node's link.
    """
    communicator = Communicator()
    ranks = communicator.world_size
    if ranks == 1:
        raise ValueError("`measure_link` needs several ranks, got one. Launch with torchrun on all nodes.")
    small = torch.zeros(1, dtype=torch.float32, device=device)
    large = torch.zeros(round(megabytes * 2.5e5) // ranks * ranks, 1, dtype=torch.float32, device=device)
    hop = median_seconds(lambda: communicator.all_reduce_sum(small), 4 * repeats, device) / (2 * (ranks - 1))
    sent = large.numel() * large.element_size() * (ranks - 1) / ranks
    elapsed, copying = message_cost(lambda: communicator.all_to_all(large).wait(), repeats, device)
    elapsed_reduce, reducing = message_cost(lambda: communicator.all_reduce_sum(large), repeats, device)
    bandwidth = 2 * sent / max(elapsed_reduce - 2 * hop, 1e-9)
    crossing = sent * nodes_share(ranks, ranks_per_node)
    return Link(
        bandwidth=bandwidth,
        latency=hop,
        exchange_share=min(1.0, crossing / max(elapsed - hop, 1e-9) / bandwidth),
        copy_seconds=copying / sent,
        reduce_seconds=reducing / (2 * sent),
    )


def message_cost(work: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, float]:
    """Median seconds, and seconds of the processor in all threads, of a message; on CUDA it moves no bytes.

    The first is not counted.
    """
    elapsed, busy = [], []
    for _ in range(repeats + 1):
        began_busy, began = time.process_time(), _now(device)
        work()
        elapsed.append(_now(device) - began)
        busy.append(time.process_time() - began_busy)
    return median(elapsed[1:]), 0.0 if device.type == "cuda" else median(busy[1:])


def median_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Of a call, its work on the device included; the first is not counted."""
    return message_cost(work, repeats, device)[0]


def _now(device: torch.device) -> float:
    """The CPU's clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
