"""The random number generators of a process: dropout and data augmentation go on from them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Of Python, NumPy, torch and this process's CUDA device, as ``weights_only`` reads it."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    current: Any = np.random.get_state()
    if isinstance(current, tuple):  # else a generator of the user's own choice, of which NumPy gives a dict
        kind, keys, *rest = current
        states["numpy"] = (kind, keys.tolist(), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Takes up what :func:`rng_state` gave."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
