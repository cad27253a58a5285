"""NumPy's numbers in what is saved: a schedule that uses ``np.cos`` makes the learning rate one of them.

They become Python's, which are equal, and which ``weights_only`` reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def plain_number(value: Any) -> Any:
    """A number of NumPy's as Python's; anything else as it is."""
    return value.item() if isinstance(value, (np.number, np.bool_)) else value


def with_plain_numbers(value: Any) -> Any:
    """The same of all numbers in dicts, lists and tuples, which are new; the rest is shared."""
    if type(value) is dict:
        return {key: with_plain_numbers(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_plain_numbers(each) for each in value)
    return plain_number(value)
