"""How ranks are started, and the options of DDP that have no meaning here."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning_scape.comm.collectives import is_distributed, world_size
from lightning_scape.hosts import registration


def check_start_method(strategy: str, method: str, start_method: str) -> None:
    """Raises ``ValueError`` where the session is interactive, a notebook or ``python -i``, and ranks are not forked.

    Lightning would refuse it as well, and name ``ddp_notebook`` as the remedy.

    Args:
        strategy: name of the class.
        method: that of its method.
        start_method: its option.
    """
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)  # there is no script that a process could run
    if interactive and start_method != "fork":
        raise ValueError(
            f"{strategy}'s `start_method` must be 'fork' in an interactive session (a notebook, python -i), got"
            f" {start_method!r}: other ways start processes by running the script again, and there is none. Use"
            f" `strategy=\"{registration.notebook(method)}\"` or `{strategy}(start_method='fork')`, or run a script."
        )


def check_ranks(asked: int) -> None:
    """Raises ``ValueError`` where the process group of an earlier Trainer or Fabric has another number of ranks.

    Its processes run the rest of the script as well, whatever number the next one asks for.

    Args:
        asked: ``devices`` times ``num_nodes``.
    """
    if is_distributed() and world_size() != asked:
        raise ValueError(
            "All Trainers (Fabrics) of one script must have the same number of ranks, `devices` times `num_nodes`, got"
            f" {asked} after {world_size()}: the processes that the first one started run the whole script. Use the"
            ' same numbers, two scripts, or `start_method="fork"`, with which processes end when the fit does.'
        )


def as_timeout(timeout: timedelta | float | None) -> timedelta | None:
    """A strategy's ``timeout``; a number counts seconds.

    Raises:
        ValueError: it is not above 0, or no time at all.
    """
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 < timeout < math.inf:
        timeout = timedelta(seconds=timeout)
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise ValueError(
            f"`timeout` must be a timedelta or a number of seconds, above 0, got {timeout!r}. Write `timeout=20` or"
            " `timeout=timedelta(minutes=5)`."
        )
    return timeout


_OF_DDP = {
    "find_unused_parameters": "the backward pass waits for no parameter's gradient",
    "static_graph": "the backward pass sends nothing",
    "gradient_as_bucket_view": "there are no buckets",
    "bucket_cap_mb": "there are no buckets",
    "ddp_comm_hook": "the strategy's own options say what is sent",
    "ddp_comm_state": "the strategy's own options say what is sent",
    "ddp_comm_wrapper": "the strategy's own options say what is sent",
    "model_averaging_period": "the strategy sees to it that ranks' parameters are equal",
    "init_sync": "parameters and buffers are always made equal at the start",
    "check_reduction": "the strategy checks its own messages",
    "mixed_precision": "the Trainer's `precision` says it",
    "skip_all_reduce_unused_params": "parameters without a gradient cost nothing",
    "delay_all_reduce_named_params": "the backward pass sends nothing",
    "param_to_hook_all_reduce": "the backward pass sends nothing",
}
"""DDP's options, and why they are not needed."""


def refuse_options_of_ddp(options: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` where options of DDP are given that have no meaning here."""
    for name in options.keys() & _OF_DDP.keys():
        raise TypeError(
            f"`{name}` is an option of DDP's and must be left out, got {options[name]!r}. It is not needed here:"
            f" {_OF_DDP[name]}."
        )
