"""SCAPE (arXiv 2607.01678) on one page, in plain torch, with N ranks simulated in one process. Read `Scape.step`.

    python examples/scape_simple.py                 # 4 ranks train a small model, at 99%, beside torch's AdamW

The package does the same with real messages, and with all that goes wrong around them. A test holds both equal.
Symbols: P parameters, N ranks, B block length, q entries sent per block, t step. All state lies in blocks [P/B, B], of
which rank j owns the j-th N-th. docs/design.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional

LONGEST_MOVE = 25  # of an entry in one update, in learning rates


class Scape:
    """AdamW whose N ranks exchange q of B entries in each step.

    Args:
        parameters: the replicas, which are always equal, so that one stands for all.
        ranks, sparsity: N; 0.99 sends 2 of 200 entries in the end, 0.9 sends 25 of 250.
        lr, betas, eps, weight_decay: AdamW's.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        ranks: int,
        sparsity: float = 0.99,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        density = 1 - Fraction(str(sparsity))
        self.block = max(b for b in range(1, 257) if (density * b).denominator == 1)
        self.quota = int(density * self.block)
        wait = 50 * max(1.0, 10 * float(density) ** 0.5)  # of the warm-up: the density at step i is 1 / (1 + i/wait)
        self.warmup = -int(-wait * (1 / float(density) - 1) // 1)
        self.parameters, self.ranks = list(parameters), ranks
        self.lr, (self.b1, self.b2), self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.t = 0
        self.mask: Tensor | None = None  # made in the step before: [rows, q]
        rows = self.blocks(self.parameters).shape
        self.residual = torch.zeros(ranks, *rows)  # of each rank: its gradients that were not sent yet
        self.m, self.v = torch.zeros(rows), torch.zeros(rows)  # of the owners
        self.last = torch.zeros(rows, dtype=torch.int64)  # step of each entry's last update
        self.error = torch.zeros(rows)  # what rounding has left of its changes
        self.everything = torch.arange(self.block).expand(rows)

    def blocks(self, tensors: Sequence[Tensor]) -> Tensor:
        """Cuts each tensor into blocks, the last one filled up with zeros; then zeros, for N equal shards."""
        flats = [tensor.detach().reshape(-1) for tensor in tensors]
        rows = torch.cat([functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block) for flat in flats])
        return functional.pad(rows, (0, 0, 0, -len(rows) % self.ranks))

    def sent(self, step: int) -> int:
        """Entries of a block that a step sends, counted from 0: all while that is over half, q after the warm-up."""
        density = 1 / (1 + (self.block / self.quota - 1) * min(1.0, (step + 1) / (self.warmup + 1)))
        sent = max(self.quota, round(density * self.block))
        return sent if 2 * sent <= self.block else self.block

    # ------------------------------------------------------------------------------------------- the step

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """One step of all ranks, from the gradients of each rank, of each parameter."""
        self.t += 1
        grads = torch.stack([self.blocks(own) for own in gradients])
        self.residual += grads
        mask = self.mask_of_step(self.sent(self.t - 1))
        if mask is not None:  # the owner's v takes its own gradient for the ranks' mean; noise averages down by N
            self.v = self.b2 * self.v + ((1 - self.b2) / self.ranks) * self.owned(grads).square()
        at = self.everything if mask is None else mask
        values = self.take(at)  # all-to-all: to the owners, in 4 bits
        mean = sum(values) / self.ranks  # in rank order: every implementation gets the same bits
        changes = self.update(mask, at, mean, self.owned(values))  # all-gather: back, in 4 bits
        self.write(at, changes)
        # Behind the next forward and backward: the mask of the next step, from what is left.
        following = self.sent(self.t)
        self.mask = self.new_mask(following) if mask is not None and following < self.block else None

    def take(self, at: Tensor) -> Tensor:
        """The masked entries leave the residuals, as [N, rows, q]; their rounding errors stay."""
        there = self.residual.gather(2, at := at.expand(self.ranks, -1, -1))
        parts = there.reshape(self.ranks**2, -1)  # of each rank for each owner
        sent, own = in_bits(parts), slice(None, None, self.ranks + 1)
        sent[own] = parts[own]  # does not travel
        self.residual.scatter_(2, at, (parts - sent).reshape_as(there))
        return sent.reshape_as(there)

    def mask_of_step(self, q: int) -> Tensor | None:
        """None sends everything. The first sparse step makes its own mask, from its own gradient."""
        if q == self.block:
            return None
        return self.new_mask(q) if self.mask is None else self.mask

    def new_mask(self, q: int) -> Tensor:
        """In step t rank (j + t) mod N makes the mask of shard j, from its own residual there: so each has its turn."""
        shards = self.residual.view(self.ranks, self.ranks, -1, self.block)
        mask = largest(torch.cat([shards[(j + self.t) % self.ranks, j] for j in range(self.ranks)]), q)
        return mask if 8 * q <= self.block + 7 else mask.sort().values  # all-gather: positions, or bits, if shorter

    def update(self, mask: Tensor | None, at: Tensor, mean: Tensor, own: Tensor) -> Tensor:
        """tau steps of AdamW at once on the masked entries, each by its owner; returns how far they move."""
        theta = self.blocks(self.parameters).gather(1, at)
        m, v, tau = (state.gather(1, at) for state in (self.m, self.v, self.t - self.last))
        tau, c1, c2, new_square = tau.clamp(min=1), 1 - self.b1**self.t, 1 - self.b2**self.t, 1 - self.b2
        new_part = tau * (1 - self.b1) / ((tau - 1) * (1 - self.b1) + 1)  # backward Euler: for tau = 1 it is 1 - b1
        m = (1 - new_part) * m + new_part * (mean / tau)
        moved = tau * m / c1
        if mask is None:  # everything is sent: v is AdamW's own
            v = v * self.b2 + mean.square() / tau * new_square
        else:  # what the ranks have in common, beyond the owner's own part; and what the owner cannot have seen
            shared = torch.where(tau == 1, mean, own) * mean - own.square() / self.ranks
            shared = new_square / tau.maximum(new_square * tau * tau) * shared  # not below AdamW's own, nor zero:
            v = (v + shared).maximum((tau == 1) * new_square * mean.square())
            v += new_square * (tau > 1) * (mean.square() - v / c2 * self.ranks * tau * tau).clamp(min=0)
        u = torch.maximum(v / c2, (tau > 1) * torch.maximum((m / c1).abs(), moved.abs() / LONGEST_MOVE).square())
        new = (1 - self.lr * self.weight_decay) ** tau * theta - moved * self.lr / (u.sqrt() + self.eps)
        due = new - theta + self.error.gather(1, at)
        changes = in_bits(due.view(self.ranks, -1)).reshape_as(due)
        here = torch.full_like(at, self.t)
        for state, entries in ((self.m, m), (self.v, v), (self.last, here), (self.error, due - changes)):
            state.scatter_(1, at, entries)
        return changes

    def write(self, at: Tensor, changes: Tensor) -> None:
        """Every rank adds the same changes to its parameters."""
        dense = torch.zeros(len(changes), self.block).scatter_(1, at, changes)
        row = 0
        for parameter in self.parameters:
            rows = -(-parameter.numel() // self.block)
            parameter.data += dense[row : row + rows].view(-1)[: parameter.numel()].view(parameter.shape)
            row += rows

    def owned(self, of_ranks: Tensor) -> Tensor:
        """From every rank its own shard: [rows, B or q] of [N, rows, B or q]."""
        shards = of_ranks.view(self.ranks, self.ranks, -1, of_ranks.shape[2])
        return torch.cat([shards[rank, rank] for rank in range(self.ranks)])


def in_bits(values: Tensor) -> Tensor:
    """What arrives of values [shards, n]: multiples, 7 at most in 4 bits, of a unit that 64 share. It has 16 bits."""
    groups = functional.pad(values, (0, -values.shape[1] % 64)).view(len(values), -1, 64)
    exact = groups.abs().amax(2, keepdim=True) / 7
    unit = (exact.view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)
    multiples = torch.where(exact > 1e-30, groups / unit, 0.0).round().clamp(-7, 7)
    return (multiples * unit).flatten(1)[:, : values.shape[1]]


def largest(statistic: Tensor, count: int) -> Tensor:
    """Positions of the largest magnitudes of each block; their lowest bits give way to the position, for ties."""
    low = (1 << ((length := statistic.shape[1]) - 1).bit_length()) - 1
    keys = statistic.view(torch.int32) & (0x7FFFFFFF & ~low) | (low - torch.arange(length, dtype=torch.int32))
    return (low - (keys.topk(count, dim=1).values & low)).long()


def main(steps: int = 1000, ranks: int = 4) -> None:
    """A regression on noise and a signal, at 99% and with AdamW."""
    for method in ("AdamW", "SCAPE 99%"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 1))
        parameters = list(model.parameters())
        scape, adamw = Scape(parameters, ranks), torch.optim.AdamW(parameters)
        for step in range(steps + 1):
            inputs = torch.randn(ranks, 16, 20)
            losses = [(model(own)[:, 0] - (own[:, :5].prod(1) + own[:, 5].sin())).square().mean() for own in inputs]
            if step % 250 == 0:
                sends = f", sends {scape.sent(step)} of 200 entries" if method != "AdamW" else ""
                print(f"{method}: step {step}, loss {sum(losses).item() / ranks:.4f}{sends}")
            gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
            for parameter, *own in zip(parameters, *gradients, strict=True):
                parameter.grad = sum(own) / ranks
            scape.step(gradients) if method != "AdamW" else adamw.step()


if __name__ == "__main__":
    main()
