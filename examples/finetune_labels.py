"""Finetune a pretrained byte model on a labelled task without a download: which part of the library is a test of?

    python examples/finetune_labels.py out/tiny_cpu/final --answers out/scape-labels.json
    python examples/python_questions.py compare out/adamw-labels.json out/scape-labels.json

The tests that ship with Python are in no training corpus of this project. A window of their bytes is to be named
after the package that it tests: ten packages, so chance is 10%. A third of each package's files is held out. A linear
layer reads the mean of the last block's outputs; it and the whole model are trained by AdamW for a few hundred steps,
the rate one of three, chosen on a part of the training windows. Models of one context see the same windows in the same
order, so that their answers can be compared one by one.

The checkpoint is a folder of LitGPT's over bytes: of `litgpt-scape pretrain`, or of `bench_quality.py --keep-models`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import random
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
from evaluate_litgpt import check_checkpoint, load_model
from python_questions import accuracy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_scape.tools import arguments
from lightning_scape.tools.console import ends_quietly

PACKAGES = (
    "test/test_asyncio",
    "test/test_email",
    "test/test_importlib",
    "test/test_sqlite3",
    "ctypes/test",
    "distutils/tests",
    "idlelib/idle_test",
    "lib2to3/tests",
    "tkinter/test",
    "unittest/test",
)
"""Of Python 3.11. Other versions lack some: their figures compare with none of these."""
TRAINED, TESTED = 400, 200
"""Windows of a package."""
BATCH = 32
RATES = (1e-4, 3e-4, 1e-3)


class Windows(NamedTuple):
    """Bytes and labels."""

    inputs: Tensor
    """int64 ``[n, T]``."""
    labels: Tensor
    """int64 ``[n]``."""


def read(context: int, library: Path, seed: int = 0) -> tuple[Windows, Windows]:
    """Windows to train on, and windows of other files to test on.

    Raises:
        ValueError: a package is not there.
    """
    draw = random.Random(seed)
    parts: tuple[list[tuple[list[int], int]], list[tuple[list[int], int]]] = ([], [])
    for label, package in enumerate(PACKAGES):
        files = sorted((library / package).rglob("*.py"))
        contents: tuple[list[bytes], list[bytes]] = ([], [])
        for path in files:
            name = path.relative_to(library).as_posix()
            held_out = hashlib.sha256(name.encode()).digest()[0] < 256 // 3
            if len(content := path.read_bytes()) > context:
                contents[held_out].append(content)
        if not all(contents):
            raise ValueError(f"{package} must be in the standard library, got none in {library}. Use Python 3.11.")
        for part, texts, count in zip(parts, contents, (TRAINED, TESTED), strict=True):
            for text in draw.choices(texts, weights=[len(text) for text in texts], k=count):
                start = draw.randrange(len(text) - context)
                part.append(([*text[start : start + context]], label))
    for part in parts:
        draw.shuffle(part)
    train, test = (Windows(torch.tensor([w for w, _ in p]), torch.tensor([label for _, label in p])) for p in parts)
    return train, test


class Classifier(nn.Module):
    """A GPT of LitGPT's that names a window.

    Args:
        gpt: pretrained; changed.
        classes: number of names.
    """

    def __init__(self, gpt: Any, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt, self.head = gpt, nn.Linear(gpt.config.n_embd, classes)
        gpt.lm_head = nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        """``[n, T]`` bytes to ``[n, classes]`` logits."""
        named: Tensor = self.head(self.gpt(inputs).mean(dim=1))
        return named


def train(model: nn.Module, windows: Windows, steps: int, rate: float) -> None:
    """AdamW, linear warm-up over a tenth, then a cosine to zero; batches in an order that the seed alone decides."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    draw = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        here = torch.randint(len(windows.labels), (BATCH,), generator=draw)
        loss = cross_entropy(model(windows.inputs[here]), windows.labels[here])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.inference_mode()
def answers(model: nn.Module, windows: Windows) -> list[int]:
    """Right (1) or wrong (0), window by window."""
    model.eval()
    found = [model(part).argmax(dim=1) for part in windows.inputs.split(4 * BATCH)]
    return (torch.cat(found) == windows.labels).int().tolist()


def finetune(
    gpt: Any, train_on: Windows, test_on: Windows, steps: int, rates: tuple[float, ...]
) -> tuple[float, dict[float, float], list[int]]:
    """The best rate by a fifth of the training windows that is left out for it, what each rate got, and the answers."""
    cut = len(train_on.labels) * 4 // 5
    rest, chosen_by = Windows(*(t[:cut] for t in train_on)), Windows(*(t[cut:] for t in train_on))
    right = {}
    for rate in rates if len(rates) > 1 else ():
        model = Classifier(copy.deepcopy(gpt), len(PACKAGES))
        train(model, rest, steps, rate)
        right[rate] = sum(answers(model, chosen_by)) / len(chosen_by.labels)
        print(f"lr {rate:g}: {right[rate]:.1%} of the windows left out for it", flush=True)
    best = max(right, key=right.__getitem__) if right else rates[0]
    model = Classifier(copy.deepcopy(gpt), len(PACKAGES))
    train(model, train_on, steps, best)
    return best, right, answers(model, test_on)


@ends_quietly
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="LitGPT's folder, such as out/tiny_cpu/final")
    parser.add_argument("--steps", type=arguments.count, default=300)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help=f"to choose from (default: {RATES})")
    parser.add_argument("--answers", type=Path, help="file for every answer")
    args = parser.parse_args()
    from litgpt import Config

    if not all(0 < rate < math.inf for rate in args.rates):
        parser.error(f"--rates must be numbers > 0, got {args.rates}. Leave it out for {RATES}.")
    torch.set_num_threads(1)
    try:
        check_checkpoint(args.checkpoint)
        config = Config.from_file(args.checkpoint / "model_config.yaml")
        train_on, test_on = read(config.block_size, Path(sysconfig.get_paths()["stdlib"]))
        gpt = load_model(config, args.checkpoint)
        if args.answers is not None:
            args.answers.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    rate, tried, found = finetune(gpt, train_on, test_on, args.steps, tuple(args.rates))
    share, error = accuracy(found)
    print(f"lr {rate:g}, {args.steps} steps: {share:.1%} ± {100 * error:.1f} of {len(found):,} windows named right")
    if args.answers is not None:
        digest = hashlib.sha256(test_on.inputs.numpy().tobytes()).hexdigest()
        settings = {"model": args.checkpoint.name, "steps": args.steps, "lr": rate, "tried": tried}
        answered = {"questions": digest[:16], **settings, "answers": {"package": found}}
        args.answers.write_text(json.dumps(answered) + "\n")


if __name__ == "__main__":
    main()
