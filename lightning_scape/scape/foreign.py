"""States of the dense optimizers AdamW, Adam and AdamS: SCAPE goes on from theirs, and they go on from SCAPE's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint.parts import Source
from lightning_scape.scape.keys import has_second, state_key
from lightning_scape.scape.snapshot import Snapshot

_GUESS_COUNTS = 10
"""Steps for which a guessed second moment counts: about as many gradients as a first moment remembers."""


def load_foreign(snapshot: Snapshot, source: Source, rank: int, groups: Sequence[Mapping[str, Any]]) -> str:
    """Fills fresh buffers with the moments and steps of an AdamW, Adam or AdamS.

    Args:
        snapshot: only its buffers are changed.
        source: the state; :func:`~lightning_scape.scape.checks.check_foreign` has passed it.
        rank: its part is taken.
        groups: parameter groups, with the options that hold from now on.

    Returns:
        A warning for the user.
    """
    state, parameters = snapshot.state, snapshot.parameters
    steps = {
        index: int(source.find(state_key(index, "step")) or 0) if index in source.entries else 0
        for index in parameters.indices
    }
    step = max(steps.values(), default=0)
    snapshot.set_steps(step, {index: step - own for index, own in steps.items()}, rank)
    pieces = snapshot.layout.local(rank).pieces
    known = [piece for piece in pieces if parameters.indices[piece.segment.index] in source.entries]
    second = state.exp_avg_sq is not None and all("exp_avg_sq" in entry for entry in source.entries.values())
    for name, shard in snapshot.shard():
        if name == "exp_avg" or (name == "exp_avg_sq" and second):
            held = snapshot.owned(name, shard, known).held
            source.read({state_key(i, name): chunk for i, chunk in held.items() if i in source.entries})
    if state.exp_avg_sq is not None and not second:
        guess_second_moment(snapshot, groups, rank)
    moments = "first and second moments" if second else "first moments"
    return (
        f"The checkpoint was not written by SCAPE: {moments} and step ({step}) carry over"
        + ("" if second else ", a second moment does not")
        + "; residuals start at zero."
    )


def by_number(saved: Mapping[str, Any], names: Mapping[int, str]) -> Mapping[str, Any]:
    """A dense optimizer's state by parameters' numbers, also where it was saved by their names.

    torch's ``get_optimizer_state_dict`` and Lightning's strategies for FSDP2 save whole states by names.

    Args:
        saved: the state.
        names: of the parameters, by number.
    """
    keys = [*saved["state"], *(key for group in saved["param_groups"] for key in group.get("params", ()))]
    if not any(isinstance(key, str) for key in keys):
        return saved
    number_of = {name: number for number, name in names.items()}
    groups = [
        {**group, "params": [number_of.get(key, key) for key in group.get("params", ())]}
        for group in saved["param_groups"]
    ]
    return {**saved, "state": {number_of.get(k, k): v for k, v in saved["state"].items()}, "param_groups": groups}


def guess_second_moment(snapshot: Snapshot, groups: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Guesses second moments from first moments: for noise, ``E[g**2] = E[m**2] * (1 + b1) / (1 - b1)``.

    Without the guess, the first step would divide a moment of many gradients by the root of a single one.
    """
    state = snapshot.state
    assert state.exp_avg_sq is not None
    step = int(state.step)
    state.exp_avg_sq_since = max(0, step - _GUESS_COUNTS)
    for piece in snapshot.layout.local(rank).pieces:
        entries = piece.of_blocks(snapshot.layout.block_size)
        beta1, beta2 = (float(beta) for beta in groups[piece.segment.group]["betas"])
        weight = 1 - beta2 ** (step - state.exp_avg_sq_since)
        guess = state.exp_avg.view(-1)[entries].square() * (weight * (1 + beta1) / (1 - beta1))
        state.exp_avg_sq.view(-1)[entries] = guess


def add_second_moment(whole: Mapping[str, Any]) -> None:
    """Adds what AdamW misses in a whole state of the update of AdamS: a second moment, the square of the first.

    AdamS's denominator has the same. SCAPE itself ignores it (:func:`~lightning_scape.scape.keys.has_second`).
    """
    if not has_second(whole["scape"]):
        for entry in whole["state"].values():
            entry["exp_avg_sq"] = torch.square(entry["exp_avg"])


def dense_state(saved: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A whole state of :class:`ScapeOptimizer` as one of ``torch.optim.AdamW``, and a sentence on what carries over.

    The update of AdamS has no second moment: it is set to the first one's square, as AdamS's denominator has it.
    """
    kept = has_second(saved["scape"])
    betas = {index: group["betas"][1] for group in saved["param_groups"] for index in group["params"]}
    since = saved["scape"]["second_moment_since"]

    def second(index: int, entry: Mapping[str, Any]) -> Tensor:
        if not kept:
            return torch.square(entry["exp_avg"])
        started = 1 - betas[index] ** entry["step"]
        moment: Tensor = entry["exp_avg_sq"] * (started / (1 - betas[index] ** max(1, entry["step"] - since)))
        return moment

    state = {
        index: {
            "step": torch.tensor(float(entry["step"]), dtype=torch.float32, device="cpu"),
            "exp_avg": entry["exp_avg"],
            "exp_avg_sq": second(index, entry),
        }
        for index, entry in saved["state"].items()
    }
    moments = (
        "both moments and step carry over"
        if kept
        else "first moments and step carry over; the second moment, which AdamS does not have, is set to the first"
        " one's square"
    )
    return {**{name: value for name, value in saved.items() if name != "scape"}, "state": state}, moments


def residual_norm(saved: Mapping[str, Any]) -> float:
    """Root mean square over ranks of the residuals' L2 norms, in a whole state of SCAPE."""
    residuals = saved["scape"]["residuals"]
    squares = sum(float(tensor.double().square().sum()) for residual in residuals for tensor in residual.values())
    return float((squares / max(1, len(residuals))) ** 0.5)
