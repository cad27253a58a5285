"""The random number generators of a process, as one tensor. Dropout and data augmentation go on from them."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint import atomic_files as files


def rng_state() -> Tensor:
    """States of the generators of Python, NumPy (where imported), torch and this process's CUDA device; uint8."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        current: Any = np.random.get_state()
        if isinstance(current, tuple):  # else a generator of the user's own choice, of which NumPy gives a dict
            kind, keys, *rest = current
            states["numpy"] = (kind, [int(key) for key in keys], *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    file = io.BytesIO()
    torch.save(states, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def states_in(saved: Tensor) -> dict[str, Any]:
    """What :func:`rng_state` packed.

    Raises:
        CheckpointError: it is something else.
    """
    states = None
    if isinstance(saved, Tensor) and saved.dtype == torch.uint8 and saved.dim() == 1:
        states = files.load_stream(io.BytesIO(saved.cpu().numpy().tobytes()), _CALLED)
    if not isinstance(states, dict) or not {"python", "torch"} <= set(states):
        raise files.CheckpointError(_what(f"a {type(states).__name__}"))
    return states


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
            import numpy as np

            np.random.set_state(states["numpy"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
    except (TypeError, ValueError, RuntimeError) as error:
        raise files.CheckpointError(_what(f"others ({error})")) from error


_CALLED = "the state of random number generators"


def _what(got: str) -> str:
    return f"A checkpoint must hold states of Python's and torch's generators, got {got}. Load another checkpoint."
