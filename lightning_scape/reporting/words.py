"""Names as a page and a drawing can show them, whatever a module or a file calls them."""

from __future__ import annotations

from typing import Any


def plain(value: Any, most: int = 300) -> str:
    """One line of printable text, the middle of a long one left out; what is neither text nor a number is not known.

    >>> plain("val" + chr(10) + "loss" + chr(0))
    'val loss�'
    >>> plain("val_loss_of_a_long_name/dataloader_idx_3", 24)
    'val_loss_of_…ader_idx_3'
    """
    if not isinstance(value, (str, int, float)):
        return "not known"
    # Control characters are none that XML allows, and a half of a surrogate pair is none that UTF-8 has.
    words = " ".join(str(value).split())
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in words) or "(no name)"
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"
