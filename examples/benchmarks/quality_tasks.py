"""What `quality.py` trains: a language model on the Python library, and networks that read handwritten digits."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from litgpt import GPT, Config
from quality_domains import DomainWindows, domains, held_out
from quality_runs import SIZES, Run
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

sys.path.append(str(Path(__file__).resolve().parents[1]))
from python_source import (  # noqa: E402 - the examples' corpus
    VOCABULARY,
    Corpus,
    Shard,
    TrainingWindows,
    ValidationWindows,
    WindowLoader,
    read_corpus,
)


class Batches(Protocol):
    """One rank's batches, without end; goes on from a saved state bit for bit."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Task(Protocol):
    """A model, its data, and what is reported of it."""

    fingerprint: str
    """Of the data: results of different ones are not compared."""

    def loaders(self) -> list[Batches]:
        """Each rank's batches."""

    def build_model(self) -> nn.Module:
        """With the initial weights of the run's seed."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over a batch."""

    def joined(self, batches: list[Any]) -> Any:
        """The ranks' batches as one: its loss is the mean of theirs, for all are of one size."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On held-out data: at least ``loss`` and ``accuracy``."""


def task_of(run: Run) -> Task:
    """The task that a run names."""
    return TASKS[run.task](run)


def build_gpt(size: str, context: int) -> GPT:
    """A small Llama-like GPT on bytes, with fresh weights."""
    config = Config(
        name=f"python-{size}",
        block_size=context,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",  # SwiGLU
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        **SIZES[size],
    )
    model = GPT(config)
    return model.apply(model._init_weights)


@cache
def python_files() -> Corpus:
    """Read once for all ranks."""
    return read_corpus()


class Python:
    """A small GPT predicts the next byte of the Python files on this machine."""

    def __init__(self, run: Run) -> None:
        self.run = run
        validation = ValidationWindows(python_files(), run.context, 128, Shard(0, 1))
        self.validation = list(itertools.islice(validation, 8))
        self.fingerprint = python_files().fingerprint

    def loaders(self) -> list[Batches]:
        """As PythonSource deals them out to the ranks."""
        run = self.run
        shards = [Shard(rank, run.ranks) for rank in range(run.ranks)]
        windows = [TrainingWindows(python_files(), run.context, run.batch, run.seed, shard) for shard in shards]
        return [WindowLoader(mine) for mine in windows]

    def build_model(self) -> GPT:
        """LitGPT's, with fresh weights."""
        torch.manual_seed(self.run.seed)
        return build_gpt(self.run.size, self.run.context)

    def predict(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the bytes that are right."""
        return model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """In nats per byte."""
        return cross_entropy(*self.predict(model, batch))

    def joined(self, batches: list[Tensor]) -> Tensor:
        """Their windows one after the other."""
        return torch.cat(batches)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On held-out files: nats per byte, bits per byte, and how often the likeliest byte is the right one."""
        device = next(model.parameters()).device
        loss, accuracy = MeanMetric().to(device), MulticlassAccuracy(VOCABULARY, average="micro").to(device)
        for batch in (batch.to(device) for batch in self.validation):
            logits, targets = self.predict(model, batch)
            loss.update(cross_entropy(logits, targets), weight=targets.numel())
            accuracy.update(logits, targets)
        value = float(loss.compute())
        return {"loss": value, "bits_per_byte": value / math.log(2), "accuracy": float(accuracy.compute())}


class FourDomains(Python):
    """The same GPT reads four kinds of text; with the task "domains" each rank one, with "domains-even" all alike."""

    def __init__(self, run: Run) -> None:
        if run.ranks % 4:
            raise SystemExit(f"error: the four domains need a multiple of 4 ranks, got {run.ranks}.")
        self.run = run
        self.validation = held_out(run.context)
        self.fingerprint = domains().fingerprint

    def loaders(self) -> list[Batches]:
        """Each rank's windows."""
        run, apart = self.run, self.run.task == "domains"
        return [DomainWindows(run.ranks, run.batch, run.context, run.seed, rank, apart) for rank in range(run.ranks)]


class OfExperts(FourDomains):
    """The four domains, one a rank, and in every block an MLP for each domain: what one rank alone uses."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.validation = [
            torch.cat([batch, torch.full_like(batch[:, :1], of)], 1) for of, batch in enumerate(self.validation)
        ]

    def loaders(self) -> list[Batches]:
        """Each rank's windows, with their domain behind the last byte."""
        run = self.run
        return [NamedDomains(run.ranks, run.batch, run.context, run.seed, rank, True) for rank in range(run.ranks)]

    def build_model(self) -> nn.Module:
        """That of the other tasks, with new MLPs."""
        gpt = super().build_model()
        for block in gpt.transformer.h:
            block.mlp = Experts([type(block.mlp)(gpt.config) for _ in range(4)])
        return gpt.apply(gpt._init_weights)

    def predict(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the bytes that are right."""
        for module in model.modules():
            if isinstance(module, Experts):
                module.domains = batch[:, -1]
        return super().predict(model, batch[:, :-1])


class Experts(nn.Module):
    """In place of an MLP: the one of a window's domain."""

    domains: Tensor

    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """Of ``[windows, T, C]``; what no window uses has a gradient of zeros."""
        shares = (self.domains[:, None] == torch.arange(len(self.experts), device=x.device)).to(x.dtype)
        return sum(expert(x) * share[:, None, None] for expert, share in zip(self.experts, shares.T, strict=True))


class NamedDomains(DomainWindows):
    """Windows of one domain a rank, each with the domain's number behind it."""

    def of_all_ranks(self) -> Tensor:
        """int64 ``[ranks, batch, context + 2]``."""
        windows = super().of_all_ranks()
        domains = torch.arange(self.ranks)[:, None, None] % 4
        return torch.cat([windows, domains.expand(-1, self.batch, 1)], 2)


class Digits:
    """A convolutional or a recurrent network names the digit in scikit-learn's 1,797 images of 8 x 8 pixels."""

    CLASSES = 10
    TRAINED = 600
    """Images; the other two thirds are held out, so that the accuracy tells methods apart."""

    def __init__(self, run: Run) -> None:
        self.run = run
        images, digits, self.fingerprint = load_digits()
        self.train = images[: self.TRAINED], digits[: self.TRAINED]
        self.test = images[self.TRAINED :], digits[self.TRAINED :]

    def loaders(self) -> list[Batches]:
        """Each rank's part of every batch."""
        return [DigitBatches(*self.train, self.run, rank) for rank in range(self.run.ranks)]

    def build_model(self) -> nn.Module:
        """About 30,000 parameters."""
        torch.manual_seed(self.run.seed)
        return {"digits-conv": Convolutional, "digits-gru": Recurrent}[self.run.task](self.CLASSES)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """In nats per image."""
        images, digits = batch
        return cross_entropy(model(images), digits)

    def joined(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Their images one after the other."""
        images, digits = zip(*batches, strict=True)
        return torch.cat(images), torch.cat(digits)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """On the images held out: nats per image, and the share named right."""
        device = next(model.parameters()).device
        images, digits = (part.to(device) for part in self.test)
        logits, accuracy = model(images), MulticlassAccuracy(self.CLASSES, average="micro").to(device)
        accuracy.update(logits, digits)
        return {"loss": float(cross_entropy(logits, digits)), "accuracy": float(accuracy.compute())}


@cache
def load_digits() -> tuple[Tensor, Tensor, str]:
    """Images ``[n, 8, 8]`` from -1 to 1 and their digits, shuffled once for all runs, and where they are from."""
    try:
        import sklearn.datasets
    except ImportError as error:
        raise SystemExit(
            "error: the digits come with scikit-learn, which is not installed. Run `pip install scikit-learn`."
        ) from error
    images, digits = sklearn.datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    scaled = torch.from_numpy(images).float().view(-1, 8, 8) / 8 - 1
    return scaled[order], torch.from_numpy(digits).long()[order], f"scikit-learn {sklearn.__version__}, digits"


class DigitBatches:
    """One rank's part of each batch. Every epoch goes through the images in an order of its own, the same on all ranks.

    The last images of an epoch, too few for a batch, are left out.
    """

    def __init__(self, images: Tensor, digits: Tensor, run: Run, rank: int) -> None:
        self.images, self.digits, self.run, self.rank = images, digits, run, rank
        self.step = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        run = self.run
        per_epoch = len(self.digits) // (run.ranks * run.batch)
        while True:
            epoch, within = divmod(self.step, per_epoch)
            generator = torch.Generator().manual_seed(1_000_000 * run.seed + epoch)
            order = torch.randperm(len(self.digits), generator=generator)
            for batch in order.split(run.ranks * run.batch)[within:per_epoch]:
                mine = batch[self.rank * run.batch : (self.rank + 1) * run.batch]
                self.step += 1
                yield self.images[mine], self.digits[mine]

    def state_dict(self) -> dict[str, Any]:
        """The place reached."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`."""
        self.step = state_dict["step"]


class Convolutional(nn.Sequential):
    """Three convolutions and two linear layers."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            nn.Unflatten(1, (1, 8)),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 96),
            nn.ReLU(),
            nn.Linear(96, classes),
        )


class Recurrent(nn.Module):
    """A gated recurrent unit reads an image row by row, and names it at the end."""

    def __init__(self, classes: int, width: int = 96) -> None:
        super().__init__()
        self.rows = nn.GRU(8, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[n, classes]`` of images ``[n, 8, 8]``."""
        return self.head(self.rows(images)[0][:, -1])


TASKS: dict[str, Callable[[Run], Task]] = {
    "python": Python,
    "domains": FourDomains,
    "domains-even": FourDomains,
    "experts": OfExperts,
    "digits-conv": Digits,
    "digits-gru": Digits,
}
"""By the name that a run gives; those that begin with "digits" have no size and no context."""
