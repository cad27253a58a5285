"""The random number generators of a process, as one tensor. Dropout and data augmentation go on from them."""

from __future__ import annotations

import io
import random
import sys

import torch
from torch import Tensor


def rng_state() -> Tensor:
    """States of the generators of Python, NumPy (where imported), torch and this process's CUDA device; uint8."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        kind, keys, *rest = np.random.get_state()
        states["numpy"] = (kind, [int(key) for key in keys], *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    file = io.BytesIO()
    torch.save(states, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def set_rng_state(saved: Tensor) -> None:
    """Takes up what :func:`rng_state` gave."""
    states = torch.load(io.BytesIO(bytes(saved.tolist())), weights_only=True)
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
