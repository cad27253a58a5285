"""Will it help here? Step time, bytes and memory of a step, predicted before a job is launched.

What is dense (DDP, FSDP, ZeRO-1) is predicted here; what the registered methods do, by themselves: :class:`StepCost`.

Symbols: ``P`` parameters, ``N`` ranks, ``G`` ranks per node, ``W`` bytes per second of one node's link, ``a`` seconds
of latency, ``h`` seconds of the processor per byte, ``C`` seconds of forward and backward of one step.

The model, in full:

- **Bytes** are the package's own count (:mod:`lightning_scape.comm.collectives`): ``q`` entries of every block, pads
  included, times the width of the values, of what comes back and of the mask; dense methods send ``(N-1)/N`` of what
  they gather or scatter, twice for an all-reduce.
- **A message** takes ``max(bytes/W, bytes*h) + hops*a``. ``h`` is what the processor spends on sending and adding; it
  is what a fast link waits for where the processor moves the bytes (gloo), and 0 where a device does. Rings (reduce,
  all-gather, reduce-scatter) take ``N-1`` hops a pass; an all-to-all takes one, and ``N-1`` times ``PEER_SECONDS``.
- All-gather and all-to-all may reach only a share of the bandwidth: gloo's send and receive by turns.
- **A node's link** is shared by its ranks: a ring crosses it once, an all-to-all with the bytes of all ``G`` ranks.
- **Overlap**: DDP reduces buckets of 25 MB during the backward pass, each as soon as its gradients are there; backward
  is two thirds of ``C``, spread over the parameters by their matrix products. FSDP gathers the next block while one
  computes, but waits for what lies outside of blocks (embedding and head). ZeRO-1 overlaps its gradients as DDP does
  and waits for its parameters. Where the processor moves the bytes, its work is added to the compute that it
  interrupts.
- **Copies**: DDP and ZeRO-1 copy gradients into buckets and back, FSDP into and out of flat buffers: 4 tensors, at the
  speed at which AdamW moves its 7.
- **The optimizer's own time** is proportional to parameters: measured (``lightning-scape plan --measure``), or taken
  from the bytes of memory that it touches. Sharded work is divided by ``N``.
- Ranks are equally fast: nobody waits for a straggler.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from lightning_scape.core import method as methods

PEER_SECONDS = 2e-6
"""What each further peer of an all-to-all costs."""
BUCKET_BYTES = 25 << 20
"""Of a DDP bucket; the first is of 1 MB."""
BACKWARD_SHARE = 2 / 3
"""Of forward and backward."""
ADAMW_TENSORS = 7
"""That a step of torch's AdamW reads or writes, each in the parameter's own dtype."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, in the order in which the forward pass uses them."""

    numel: int
    block: int | None = None
    """Which repeated layer it belongs to; None is outside of them (embedding, head)."""
    multiplied: bool = True
    """Whether it takes part in matrix products; an embedding is looked up."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, and on how many ranks."""

    weights: tuple[Weight, ...]
    ranks: int
    step_compute: float
    """C: seconds of forward and backward of one step on one rank, all micro-batches of it."""
    ranks_per_node: int = 1
    parameter_bytes: int = 4
    """Bytes of one parameter, and of its gradient: 4 (fp32) or 2 (bf16-true)."""
    clip: bool = True
    """Whether the gradient norm is clipped, which costs SCAPE a sketch of 16 KB."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "parameter_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1, got {getattr(self, name)}. Give a positive number.")
        if self.ranks % self.ranks_per_node:
            raise ValueError(
                f"`ranks` must be a multiple of `ranks_per_node`, got {self.ranks} and {self.ranks_per_node}. Nodes are"
                " taken to be alike."
            )
        if 1 < self.ranks == self.ranks_per_node:
            raise ValueError(
                f"`ranks` must be on at least 2 nodes, got {self.ranks} on one. Only the link between nodes is known:"
                " give 1 as `ranks_per_node` if it connects the ranks themselves."
            )
        if not self.step_compute > 0:
            raise ValueError(
                f"`step_compute` must be > 0 seconds, got {self.step_compute!r}. Time a step of one rank alone."
            )

    @property
    def parameters(self) -> int:
        """P."""
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One node's connection to the others, each direction for itself."""

    bandwidth: float
    """W: bytes per second that reach the program, protocol headers taken off."""
    latency: float = 50e-6
    """a: seconds of one hop, software included."""
    exchange_share: float = 1.0
    """Of the bandwidth, what all-to-all and all-gather reach. gloo's send and receive by turns: about a half."""
    copy_seconds: float = 0.0
    """h of moving bytes (all-to-all, all-gather): processor seconds per byte sent."""
    reduce_seconds: float = 0.0
    """h of moving and adding (all-reduce, reduce-scatter)."""

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"`bandwidth` must be > 0 bytes per second, got {self.bandwidth!r}. 1 Gbit/s is 1.25e8.")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What optimizers cost on one rank: seconds per parameter."""

    adamw: float
    """Dense AdamW (and AdamS), for every parameter that is updated here."""
    clip: float
    """Norm and scaling of a dense gradient."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """By a method's name: what its own work costs, as its :class:`StepCost` tells it."""

    @classmethod
    def of_memory(cls, bytes_per_second: float, parameter_bytes: int = 4) -> Machine:
        """An estimate for devices bound by their memory, from the bytes that a step touches per parameter.

        AdamW reads four and writes three tensors, all of the parameters' own dtype.

        Args:
            bytes_per_second: of the device's memory.
            parameter_bytes: of one parameter: 4 (fp32) or 2 (bf16-true).

        Raises:
            ValueError: the bandwidth is not a positive number.
        """
        if not 0 < bytes_per_second < math.inf:
            raise ValueError(
                f"`bytes_per_second` must be > 0 and finite, got {bytes_per_second!r}. An H100 reaches 3e12, a"
                " desktop's processor 5e10."
            )
        own = {name: cost.of_memory(bytes_per_second, parameter_bytes) for name, cost in step_costs().items()}
        tensor = parameter_bytes / bytes_per_second
        return cls(adamw=ADAMW_TENSORS * tensor, clip=3 * tensor, own=own)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One method on one job: what it takes."""

    method: str
    """As it is shown, with the options that matter."""
    title: str = ""
    """Of a registered method; empty is dense training."""
    seconds: float
    """Of a step."""
    bytes_sent: int
    """By one rank in a step."""
    memory: int
    """Bytes of one rank for parameters, gradients, optimizer and buffers; activations are the same for all but FSDP's
    gathered blocks, and are left out."""
    sparsity: float | None = None
    exposed: float = 0.0
    """Of a registered method: seconds of the step in which it waits for messages."""
    latency: float = 0.0
    """Of these, what the hops take, whatever the bandwidth."""
    card_bytes: int | None = None
    """Bytes that a node's network card sends in a step; None: as many as a rank sends (a ring leaves a node once)."""
    group_size: int = 1
    """``local_group_size``: ranks that hold a replica together."""
    window: int = 1
    """Steps from one exchange to the next."""
    option: str = ""
    """By which it is chosen among the method's predictions: ``sync_every=30``."""
    begins: Callable[[int], Sequence[tuple[int, Prediction]]] | None = field(default=None, repr=False, compare=False)
    """Of a run of so many steps: how many are like which other prediction (a warm-up). None: all are like this one."""
    gathered: int = 0
    """Bytes of its state that a rank sends to rank 0 for a checkpoint that is one file."""

    @property
    def on_card(self) -> int:
        """Bytes that a node's network card sends in a step."""
        return self.bytes_sent if self.card_bytes is None else self.card_bytes


class RunBytes(NamedTuple):
    """What one rank sends in some steps of an optimizer, by its options; checkpoints left out."""

    sent: int
    """In all of them."""
    last: int
    """In the last step, or, of a method that exchanges after several steps, in an exchange."""
    dense: int
    """What ring all-reduces of the gradient (DDP) would send, in the parameters' own dtypes."""


def all_reduce_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    """What a rank sends for the ring all-reduces of gradients of these parameters, in their own dtypes (DDP)."""
    size: int = sum(p.numel() * p.element_size() for p in parameters)
    return 2 * (ranks - 1) * size // ranks


class StepCost(ABC):
    """What a method tells a plan of its steps: ``Method.step_cost``."""

    @abstractmethod
    def predict(self, job: Job, link: Link, machine: Machine, sparsities: Sequence[float]) -> list[Prediction]:
        """Its steps with the options that are worth a comparison.

        Args:
            job: what is trained, on how many ranks.
            link: between nodes.
            machine: what the optimizers cost.
            sparsities: those that the user asks for, if the method has such an option.
        """

    def of_memory(self, bytes_per_second: float, parameter_bytes: int) -> Any:
        """What its own work costs a device that is bound by its memory: its part of ``Machine.own``."""
        return None

    def measure(self, parameters: Sequence[Tensor], sparsities: Sequence[float], repeats: int) -> Any:
        """The same, measured here; parameters have gradients, and may be changed."""
        return None

    def alternatives(self, job: Job, link: Link, machine: Machine, late: Prediction) -> list[Prediction]:
        """The same method with further options that are worth a word where they help; each in ``option``.

        Args:
            job: what is trained, on how many ranks.
            link: between nodes.
            machine: what the optimizers cost.
            late: one that :meth:`predict` has given.
        """
        return []

    def run_bytes(self, method: Any, first: int, steps: int, clips: bool) -> RunBytes | None:
        """What a rank sends in the steps from ``first``, counted from 0, up to, not including, ``steps``.

        None: that is not known.

        Args:
            method: an optimizer under it.
            first: steps before them.
            steps: those before the end.
            clips: whether the norm of the gradient is clipped.
        """
        return None


def step_costs(*, every_step: bool | None = None) -> dict[str, StepCost]:
    """By name: the methods that can be planned; of ``every_step``, only those that exchange in each step, or do not."""
    known = {name: methods.named(name) for name in methods.names()}
    return {
        name: method.step_cost
        for name, method in known.items()
        if method.step_cost is not None and every_step in (None, method.exchanges_every_step)
    }


def moments(job: Job) -> int:
    """Bytes that torch's AdamW keeps for each parameter, in the parameter's own dtype."""
    return 2 * job.parameter_bytes


def replicated_memory(job: Job, state: float) -> int:
    """Bytes of a rank that holds all parameters and gradients, and ``state`` bytes for each of them."""
    return round(job.parameters * (2 * job.parameter_bytes + state))


# ------------------------------------------------------------------------------------------------- the methods' steps


def predict(job: Job, link: Link, machine: Machine, sparsities: Sequence[float] = (0.9, 0.99)) -> list[Prediction]:
    """Compute alone, DDP (fp32 and bf16 wire), ZeRO-1, FSDP, and the methods that exchange in every step."""
    found = [compute_only(job, machine), ddp(job, link, machine), ddp(job, link, machine, wire_bytes=2)]
    return [
        *found,
        zero1(job, link, machine),
        fsdp(job, link, machine),
        *of_methods(job, link, machine, sparsities, every_step=True),
    ]


def predict_local(job: Job, link: Link, machine: Machine, sparsities: Sequence[float] = ()) -> list[Prediction]:
    """The methods that exchange after several steps, at several lengths of their window, shortest first."""
    return of_methods(job, link, machine, sparsities, every_step=False)


def of_methods(
    job: Job, link: Link, machine: Machine, sparsities: Sequence[float], *, every_step: bool
) -> list[Prediction]:
    """The registered methods that exchange in every step, or those that do after several."""
    costs = step_costs(every_step=every_step).values()
    return [found for cost in costs for found in cost.predict(job, link, machine, sparsities)]


def compute_only(job: Job, machine: Machine) -> Prediction:
    """No messages, and the whole of AdamW on every rank: what shards the optimizer may take less."""
    return Prediction(
        method="compute only",
        seconds=job.step_compute + _dense_optimizer(job, machine),
        bytes_sent=0,
        memory=replicated_memory(job, moments(job)),
    )


def ddp(job: Job, link: Link, machine: Machine, wire_bytes: int | None = None) -> Prediction:
    """All-reduce of the gradient in ``wire_bytes`` per entry (None: the parameters' own), and AdamW on every rank."""
    width = wire_bytes or job.parameter_bytes
    seconds, sent = _overlapped_gradients(job, link, width, passes=2)
    return Prediction(
        method="DDP" if wire_bytes is None else "DDP (bf16 wire)",
        seconds=seconds + _copies(job, machine) + _dense_optimizer(job, machine),
        bytes_sent=sent,
        memory=replicated_memory(job, moments(job) + job.parameter_bytes),  # the buckets hold the gradient once more
    )


def zero1(job: Job, link: Link, machine: Machine) -> Prediction:
    """Reduce-scatter of the gradient, AdamW on one N-th, all-gather of the parameters."""
    width = job.parameter_bytes
    seconds, sent = _overlapped_gradients(job, link, width, passes=1)
    gather = _ring(job, link, job.parameters * width, passes=1, adding=False)
    own = job.parameters * (machine.adamw / job.ranks + (machine.clip if job.clip else 0))
    return Prediction(
        method="ZeRO-1",
        seconds=seconds + gather + _copies(job, machine) + own,
        bytes_sent=2 * sent,
        memory=replicated_memory(job, moments(job) / job.ranks + width),
        gathered=round(moments(job) * job.parameters / job.ranks),
    )


def fsdp(job: Job, link: Link, machine: Machine, *, reduce_passes: int = 1) -> Prediction:
    """Everything sharded (ZeRO-3), a unit per block: gather in forward and in backward, reduce-scatter of the gradient.

    What lies outside of the blocks is gathered once and kept, as torch's ``fully_shard`` does with its root.

    Args:
        job: model and ranks.
        link: between nodes.
        machine: what the optimizer costs.
        reduce_passes: 2 where reduce-scatter is an all-reduce of which each rank keeps its part (gloo).
    """
    width, share = job.parameter_bytes, (job.ranks - 1) / job.ranks
    blocks: dict[int, int] = {}
    for weight in job.weights:
        if weight.block is not None:
            blocks[weight.block] = blocks.get(weight.block, 0) + weight.numel
    inside = sum(blocks.values())
    root = job.parameters - inside

    def gather(numel: int) -> float:
        return _ring(job, link, numel * width, passes=1, adding=False)

    def scatter(numel: int) -> float:
        return _ring(job, link, numel * width, passes=reduce_passes, adding=True)

    hidden = sum(2 * gather(numel) + scatter(numel) for numel in blocks.values())
    exposed = gather(root) + scatter(root)
    copied = (2 * inside + root) * width * share * link.copy_seconds
    copied += job.parameters * width * share * reduce_passes * link.reduce_seconds
    compute = job.step_compute
    seconds = max(exposed + max(compute, hidden), compute + copied)
    own = job.parameters / job.ranks * (machine.adamw + (machine.clip if job.clip else 0))
    largest = max([root, *blocks.values()])
    return Prediction(
        method="FSDP",
        seconds=seconds + _copies(job, machine) + own,
        bytes_sent=round((2 * inside + root + reduce_passes * job.parameters) * width * share),
        memory=round((2 * width + moments(job)) * job.parameters / job.ranks + 2 * largest * width),
        gathered=round((width + moments(job)) * job.parameters / job.ranks),
    )


def nodes_share(ranks: int, ranks_per_node: int) -> float:
    """Bytes of an all-to-all that cross a node's link, over those that one rank sends to all others together."""
    return ranks_per_node * (ranks - ranks_per_node) / max(1, ranks - 1)


def _dense_optimizer(job: Job, machine: Machine) -> float:
    return job.parameters * (machine.adamw + (machine.clip if job.clip else 0))


def all_to_all(job: Job, link: Link, sent: float) -> float:
    """Seconds of an all-to-all in which a rank sends so many bytes, but for its hop."""
    crossing = sent * nodes_share(job.ranks, job.ranks_per_node)
    return max(crossing / (link.bandwidth * link.exchange_share), sent * link.copy_seconds)


def all_to_all_hop(job: Job, link: Link) -> float:
    """Seconds that come on top, whatever the bandwidth."""
    return link.latency + (job.ranks - 1) * PEER_SECONDS if job.ranks > 1 else 0.0


def message(link: Link, sent: float, hops: int, *, adding: bool) -> float:
    """Seconds of a message around a ring: of its bytes, and of its hops."""
    share, per_byte = (1.0, link.reduce_seconds) if adding else (link.exchange_share, link.copy_seconds)
    return max(sent / (link.bandwidth * share), sent * per_byte) + hops * link.latency


def _ring(job: Job, link: Link, size: float, *, passes: int, adding: bool) -> float:
    """Seconds of a ring over a buffer of ``size`` bytes: 1 pass gathers or scatters, 2 reduce."""
    sent = passes * size * (job.ranks - 1) / job.ranks
    return message(link, sent, passes * (job.ranks - 1), adding=adding)


def _overlapped_gradients(job: Job, link: Link, width: int, *, passes: int) -> tuple[float, int]:
    """Seconds from the start of a step until the gradient is reduced everywhere, and the bytes that took."""
    buckets: list[tuple[float, int]] = []  # when it is ready, entries
    forward = (1 - BACKWARD_SHARE) * job.step_compute
    multiplied = max(1, sum(weight.numel for weight in job.weights if weight.multiplied))
    done, entries, limit = 0, 0, 1 << 20
    for weight in reversed(job.weights):
        done += weight.numel if weight.multiplied else 0
        entries += weight.numel
        if entries * job.parameter_bytes >= limit:
            buckets.append((forward + (job.step_compute - forward) * done / multiplied, entries))
            entries, limit = 0, BUCKET_BYTES
    if entries:
        buckets.append((job.step_compute, entries))
    free = 0.0
    for ready, size in buckets:
        free = max(free, ready) + _ring(job, link, size * width, passes=passes, adding=True)
    sent = passes * job.parameters * width * (job.ranks - 1) // job.ranks
    return max(free, job.step_compute + sent * link.reduce_seconds), sent


def _copies(job: Job, machine: Machine) -> float:
    return 4 / ADAMW_TENSORS * machine.adamw * job.parameters if job.ranks > 1 else 0.0


def scaling(job: Job, link: Link, machine: Machine, sparsities: Sequence[float]) -> dict[int, list[Prediction]]:
    """The same per-rank work on 4 to 1,024 ranks (weak scaling), by number of ranks: 2, 4, 8, ... nodes.

    Where nodes are so large that no such number is within these bounds, on two of them.
    """
    doublings = (job.ranks_per_node << i for i in range(1, 11))
    counts = [n for n in doublings if 4 <= n <= 1024] or [2 * job.ranks_per_node]
    return {n: predict(replace(job, ranks=n), link, machine, sparsities) for n in counts}
