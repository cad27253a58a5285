"""How ranks are started, and the options of DDP that have no meaning here."""

from __future__ import annotations

from lightning.fabric.utilities.imports import _IS_INTERACTIVE

NOTEBOOK = "scape_notebook"
"""The name under which both hosts know the strategy that forks its processes."""


def check_start_method(strategy: str, start_method: str, interactive: bool = _IS_INTERACTIVE) -> None:
    """Raises ``ValueError`` where the session is interactive, a notebook or ``python -i``, and ranks are not forked.

    Lightning would refuse it as well, and name ``ddp_notebook`` as the remedy.

    Args:
        strategy: name of the class.
        start_method: its option.
        interactive: whether there is no script that a new process could run.
    """
    if interactive and start_method != "fork":
        raise ValueError(
            f"{strategy}'s `start_method` must be 'fork' in an interactive session (a notebook, python -i), got"
            f" {start_method!r}: other ways start processes by running the script again, and there is none. Use"
            f" `strategy=\"{NOTEBOOK}\"` or `{strategy}(start_method='fork')`, or run a script."
        )
