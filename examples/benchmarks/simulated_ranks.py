"""N data-parallel ranks in one process: one model, N real ScapeOptimizers, messages that are copies in memory.

The optimizers are the package's own, with their own residuals, shards, masks and clocks; only the communicator is
replaced. Ranks take turns: each runs in a thread of its own, one thread at a time, and hands over where it waits for a
message. So a study of what SCAPE does to training needs one core, not N processes, and is deterministic. With two
ranks the results equal those of two real processes bit for bit (sums of two numbers have one order).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scape import SparseLoCo
from lightning_scape.comm.collectives import Work
from lightning_scape.scape.communicator import ScapeCommunicator, scape_bytes
from lightning_scape.scape.config import ScapeConfig
from lightning_scape.scape.optimizer import ScapeOptimizer

sys.path.append(str(Path(__file__).resolve().parents[1]))
from scape_simple import Scape  # noqa: E402 - an example


class Meeting:
    """Where ranks hand in a value and get everyone's; between meetings one rank runs at a time, in rank order.

    The last rank to come goes on at once. Then the others take their turns, each until its next meeting: so every
    meeting costs one switch of threads for each rank.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._turns = [threading.Semaphore(0) for _ in range(world_size)]
        self._turns[0].release()
        self._ended = 0
        self._failure: BaseException | None = None
        self._open()

    def start(self, rank: int) -> None:
        """Waits for this rank's turn."""
        self._turns[rank].acquire()
        if self._failure is not None:
            raise RuntimeError("Another simulated rank has failed.") from self._failure

    def end(self, rank: int) -> None:
        """Lets the next rank run; after the last one rank 0 may start anew."""
        self._ended = (self._ended + 1) % self._world_size
        if self._ended:
            self._pass_on(rank)
        else:
            self._turns[0].release()

    def fail(self, error: BaseException) -> None:
        """Wakes everyone who waits, with an error."""
        self._failure = self._failure or error
        for turn in self._turns:
            turn.release(self._world_size)

    def share(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values = self._values
        values[rank] = value
        self._missing -= 1
        if not self._missing:
            self._open()
        else:
            self._pass_on(rank)
            self.start(rank)
        return values

    def _open(self) -> None:
        """The next meeting, with a list of its own: some have yet to read this one's."""
        self._values: list[Any] = [None] * self._world_size
        self._missing = self._world_size

    def _pass_on(self, rank: int) -> None:
        self._turns[(rank + 1) % self._world_size].release()


class LocalCommunicator(ScapeCommunicator):
    """The package's communicator over a :class:`Meeting`; counts the bytes as the real one does."""

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        super().__init__()
        self.meeting, self.rank, self.world_size = meeting, rank, world_size
        self.others_add = False
        """Whether changes come back, which their owners alone must add: all have the parameters in the same memory."""

    def side_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """No other: what ranks hand each other is then ready when the next one reads it."""
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        parts = self.meeting.share(self.rank, tensor.clone())
        self.traffic.count("norm", 2 * tensor.nbytes, self.world_size)
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor += part
        return tensor

    def all_to_all(self, values: Tensor) -> Work:
        self.traffic.count("values", values.nbytes, self.world_size)
        rows = values.shape[0] // self.world_size
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        return Work(torch.stack([part[mine] for part in self.meeting.share(self.rank, values)]))

    def all_gather(self, shard: Tensor) -> Work:
        full = torch.cat(self.meeting.share(self.rank, shard))
        self.traffic.count("parameters", full.nbytes, self.world_size)
        return Work(full.fill_(-0.0) if self.others_add else full)

    def gather_mask(self, make: Callable[[], Tensor], full: Tensor) -> Work:
        self.traffic.count("mask", full.nbytes, self.world_size)
        return Work(full.copy_(torch.cat(self.meeting.share(self.rank, make()))))

    def carry(self, sent: Iterable[Tensor], into: Sequence[Sequence[Tensor]], to: int, device: torch.device) -> None:
        for tensors, theirs in zip(into, self.meeting.share(self.rank, [each.clone() for each in sent]), strict=True):
            for tensor, other in zip(tensors, theirs, strict=False):  # on the other ranks there are none
                tensor.copy_(other)

    def all_gather_stacked(self, tensor: Tensor, kind: str = "facts") -> Tensor:
        full = torch.stack(self.meeting.share(self.rank, tensor))
        self.traffic.count(kind, full.nbytes, self.world_size)
        return full

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.meeting.share(self.rank, value)


class Ranks:
    """N data-parallel ranks over one model: replicas that cannot differ need only one memory.

    Args:
        model: its parameters are every rank's.
        world_size: N.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.parameters = list(model.parameters())
        self.world_size = world_size

    def backward(
        self, batches: Sequence[Any], loss: Callable[[Any], Tensor], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        """Every rank's gradient of the loss of its own batch.

        Args:
            batches: one for each rank, all of one size.
            loss: the mean over a batch.
            join: makes one batch of several.
        """
        raise NotImplementedError

    def step(self, lr: float, max_norm: float) -> None:
        """One step of all ranks, clipped."""
        raise NotImplementedError

    def end(self) -> None:
        """Ends the training: methods whose ranks differ between exchanges make them equal."""

    def bytes_sent(self) -> float:
        """By a rank in the last step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on, beside the model."""
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        raise NotImplementedError

    def gradient_of(self, value: Tensor) -> list[Tensor | None]:
        """Of ``value``, one tensor a parameter; None where it does not depend on the parameter."""
        value.backward()
        gradient = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradient


class DenseRanks(Ranks):
    """A plain optimizer on the averaged gradient: that of all ranks' batches as one.

    Args:
        model: its parameters are every rank's.
        world_size: N.
        optimizer: over the model's own parameters.
    """

    def __init__(self, model: nn.Module, world_size: int, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, world_size)
        self.optimizer = optimizer

    def backward(
        self, batches: Sequence[Any], loss: Callable[[Any], Tensor], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        """In one pass, for the mean of the ranks' means is the mean over all."""
        self.optimizer.zero_grad()
        loss(join(batches)).backward()

    def step(self, lr: float, max_norm: float) -> None:
        """One step, clipped."""
        torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def bytes_sent(self) -> int:
        """By a rank in a step: a ring all-reduce of the gradient, as DDP does it (computed)."""
        return 2 * sum(p.numel() * p.element_size() for p in self.parameters) * (self.world_size - 1) // self.world_size

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.optimizer.load_state_dict(state_dict)


class OnePage(Ranks):
    """N ranks of the method on one page, scape_simple.py, clipped by the exact norm.

    Args:
        model: its parameters are every rank's.
        world_size: N.
        settings: lr, betas, ...
        sparsity: the share that is not sent.
    """

    _STATE = ("t", "mask", "residual", "m", "v", "last", "error")

    def __init__(self, model: nn.Module, world_size: int, settings: dict[str, Any], sparsity: float) -> None:
        super().__init__(model, world_size)
        self.scape = Scape(self.parameters, world_size, sparsity, **settings)
        self.gradients: list[tuple[Tensor, ...]] = []
        self.config = ScapeConfig(sparsity=sparsity)
        self._bytes: dict[int, int] = {}

    def backward(
        self, batches: Sequence[Any], loss: Callable[[Any], Tensor], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        """Rank after rank."""
        self.gradients = [torch.autograd.grad(loss(batch), self.parameters) for batch in batches]

    def step(self, lr: float, max_norm: float) -> None:
        """One step of all ranks, clipped."""
        means = [sum(own) / self.world_size for own in zip(*self.gradients, strict=True)]
        norm = torch.stack([mean.norm() for mean in means]).norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self.scape.lr = lr
        self.scape.step([[gradient * factor for gradient in own] for own in self.gradients])

    def bytes_sent(self) -> int:
        """By a rank in the last step, as the package would send it (computed)."""
        sent = self.scape.sent(self.scape.t - 1)
        if sent not in self._bytes:
            numels = [parameter.numel() for parameter in self.parameters]
            self._bytes[sent] = sum(scape_bytes(numels, self.world_size, self.config, sent=sent).values())
        return self._bytes[sent]

    def state_dict(self) -> dict[str, Any]:
        """All but the parameters."""
        return {name: getattr(self.scape, name) for name in self._STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        vars(self.scape).update(state_dict)


class Turns:
    """N ranks that take turns, each in a thread of its own.

    Args:
        world_size: N.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.meeting = Meeting(world_size)
        self._threads = ThreadPoolExecutor(world_size)

    def each(self, act: Callable[[int], Any]) -> list[Any]:
        """``act(rank)`` on every rank, in turns; their results."""

        def run(rank: int) -> Any:
            self.meeting.start(rank)
            try:
                return act(rank)
            except BaseException as error:
                self.meeting.fail(error)
                raise
            finally:
                self.meeting.end(rank)

        return [future.result() for future in [self._threads.submit(run, rank) for rank in range(self.world_size)]]


class SimulatedRanks(Ranks):
    """N ScapeOptimizers.

    Args:
        model: its parameters are every rank's.
        world_size: N.
        config: of all optimizers.
        settings: lr, betas, ... of all optimizers.
    """

    def __init__(self, model: nn.Module, world_size: int, config: ScapeConfig, settings: dict[str, Any]) -> None:
        super().__init__(model, world_size)
        self.turns = Turns(world_size)
        self.meeting, self.each = self.turns.meeting, self.turns.each
        self.handles = [[nn.Parameter(p.detach()) for p in self.parameters] for _ in range(world_size)]
        """Per rank a handle on every parameter: the same memory, a gradient of its own."""
        self.settings, self.config = settings, config
        self.optimizers: list[ScapeOptimizer] = self.each(self._make)

    def _make(self, rank: int) -> ScapeOptimizer:
        communicator = LocalCommunicator(self.meeting, rank, self.world_size)
        optimizer = ScapeOptimizer(self.handles[rank], **self.settings, config=self.config, communicator=communicator)
        communicator.others_add = optimizer.engine.shard.packed
        return optimizer

    def backward(
        self, batches: Sequence[Any], loss: Callable[[Any], Tensor], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        """Rank after rank."""
        for batch, handles in zip(batches, self.handles, strict=True):
            for handle, grad in zip(handles, self.gradient_of(loss(batch)), strict=True):
                handle.grad = grad

    def step(self, lr: float, max_norm: float) -> None:
        """One step of all ranks, clipped."""

        def step(rank: int) -> None:
            optimizer = self.optimizers[rank]
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.clip_grad_norm(max_norm)
            optimizer.step()

        self.each(step)

    def bytes_sent(self) -> int:
        """By a rank in the last step, counted from the tensors."""
        stats = self.optimizers[0].stats
        return 0 if stats is None else stats.bytes_total

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, as a checkpoint holds it."""
        self.each(lambda rank: self.optimizers[rank].consolidate_state_dict())
        return self.optimizers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.each(lambda rank: self.optimizers[rank].load_state_dict(state_dict))


class SparseLoCoRanks(Ranks):
    """N ranks of SparseLoCo: each steps on parameters of its own, all meet now and then.

    The model's parameters point to the memory of the rank whose turn it is, and to rank 0's between steps.

    Args:
        model: has the initial parameters.
        world_size: N.
        make: makes a rank's optimizer, given the model's names with the rank's parameters.
        **options: of SparseLoCo.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        make: Callable[[list[tuple[str, Tensor]]], torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        super().__init__(model, world_size)
        names = [name for name, _ in model.named_parameters()]
        self.replicas = [[nn.Parameter(p.detach().clone()) for p in self.parameters] for _ in range(world_size)]
        self.optimizers = [make(list(zip(names, replica, strict=True))) for replica in self.replicas]
        self.turns, self.ended, self.sent = Turns(world_size), 0, 0

        def wrap(rank: int) -> SparseLoCo:
            communicator = LocalCommunicator(self.turns.meeting, rank, world_size)
            return SparseLoCo(self.optimizers[rank], **options, communicator=communicator)

        self.wrappers: list[SparseLoCo] = self.turns.each(wrap)
        self._show(0)

    def _show(self, rank: int) -> None:
        for parameter, replica in zip(self.parameters, self.replicas[rank], strict=True):
            parameter.data = replica.data

    def backward(
        self, batches: Sequence[Any], loss: Callable[[Any], Tensor], join: Callable[[Sequence[Any]], Any]
    ) -> None:
        """Rank after rank, each with its own parameters."""
        for rank, batch in enumerate(batches):
            self._show(rank)
            for replica, gradient in zip(self.replicas[rank], self.gradient_of(loss(batch)), strict=True):
                replica.grad = gradient
        self._show(0)

    def step(self, lr: float, max_norm: float) -> None:
        """One step of every rank, clipped by its own norm; exchanges run in the hooks of the optimizers' steps."""
        for replica, optimizer in zip(self.replicas, self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(replica, max_norm)
            for group in optimizer.param_groups:
                group["lr"] = lr
        self.turns.each(lambda rank: self.optimizers[rank].step())
        self.sent = self._exchanged()

    def _exchanged(self) -> int:
        """Bytes of the exchanges that have ended since the last question."""
        progress = self.wrappers[0].progress
        before, self.ended = self.ended, progress.exchanges
        return (self.ended - before) * self.wrappers[0].exchange_bytes

    def end(self) -> None:
        """Ends the exchange that runs, and the window that has begun."""
        self.turns.each(lambda rank: self.wrappers[rank].sync())
        self.sent += self._exchanged()

    def bytes_sent(self) -> int:
        """By a rank in the last step."""
        return self.sent

    def state_dict(self) -> dict[str, Any]:
        """The state of all ranks, parameters included."""
        self.turns.each(lambda rank: self.wrappers[rank].consolidate_state_dict())
        return self.wrappers[0].state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.turns.each(lambda rank: self.wrappers[rank].load_state_dict(state_dict))
        progress = self.wrappers[0].progress
        self.ended = progress.exchanges
