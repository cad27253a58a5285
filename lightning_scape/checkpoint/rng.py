"""The random number generators of a process, as one tensor. Dropout and data augmentation go on from them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_scape.checkpoint.packed import pack, unpack
from lightning_scape.checkpoint.regular import CheckpointError


def rng_state() -> Tensor:
    """States of the generators of Python, NumPy, torch and this process's CUDA device; uint8."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    current: Any = np.random.get_state()
    if isinstance(current, tuple):  # else a generator of the user's own choice, of which NumPy gives a dict
        kind, keys, *rest = current
        states["numpy"] = (kind, [int(key) for key in keys], *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return pack(states)


def states_in(saved: Tensor) -> dict[str, Any]:
    """What :func:`rng_state` packed.

    Raises:
        CheckpointError: it is something else.
    """
    return unpack(saved, "the state of random number generators", {"python", "torch"}, weights_only=True)


def set_rng_state(saved: Tensor) -> None:
    """Takes up what :func:`rng_state` gave.

    Raises:
        CheckpointError: it is something else.
    """
    states = states_in(saved)
    try:
        random.setstate(states["python"])
        torch.set_rng_state(states["torch"])
        if "numpy" in states:
            np.random.set_state(states["numpy"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"A checkpoint must hold states of Python's and torch's generators, got others ({error}). Load another"
            " checkpoint."
        ) from error
