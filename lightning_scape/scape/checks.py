"""The rules for a saved state of SCAPE. Each error gives rule, value received and remedy. Checks change nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_scape.checkpoint.checks import DAMAGED, check_mapping, check_places, is_shape, said
from lightning_scape.checkpoint.parts import Source
from lightning_scape.core.local_shards import is_sharded
from lightning_scape.core.parameters import Parameters, problem_of_group
from lightning_scape.scape.keys import held, residual_key, state_key

FORMAT = 1
"""The version of a state's facts and tensors, in memory and in a directory."""
_SAME_MODEL = "Load it into the same model with the same parameter groups."
_FROM_ONE = ("format", "world_size", "shards", "block_size")
_FROM_ZERO = (
    "step",
    "calls",
    "second_moment_since",
    "warmup_steps",
    "skipped_in_row",
    "skipped_total",
)


def check_whole(saved: Any) -> None:
    """Checks the form of a whole state: its dicts and lists are there, and its facts are possible.

    Raises:
        ValueError: the first rule that it breaks.
    """
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= set(saved):
        raise ValueError(
            "An optimizer state must have `state` and `param_groups`, got"
            f" {sorted(map(str, saved)) if isinstance(saved, Mapping) else type(saved).__name__}. {_SAME_MODEL}"
        )
    if "scape" in saved:
        whole = saved["scape"]
        _check_facts(whole)
        if "mask" not in whole:
            raise ValueError(f"A state must hold a `mask` or None for it, got neither. {DAMAGED}")
        residuals = whole.get("residuals")
        if not isinstance(residuals, list) or len(residuals) != whole["world_size"]:
            got = len(residuals) if isinstance(residuals, list) else type(residuals).__name__
            raise ValueError(
                f"A state of {whole['world_size']} ranks must hold as many residuals, got {got}. {DAMAGED}"
            )
        for rank, residual in enumerate(residuals):
            check_mapping(f"residuals[{rank}]", residual)
    check_mapping("state", saved["state"])
    for index, entry in saved["state"].items():
        check_mapping(f"state[{index!r}]", entry)


def _check_facts(facts: Any) -> None:
    """Checks the facts of a state of SCAPE: all are there and possible, and the format is not newer."""
    check_mapping("scape", facts)
    version = facts.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(
            f"The state's format must be at most {FORMAT}, got {version}: it was written by a newer lightning_scape."
            " Upgrade this installation."
        )
    counts = {name: facts.get(name) for name in (*_FROM_ONE, *_FROM_ZERO)}
    missed = facts.get("missed")
    counts |= {f"missed[{i!r}]": count for i, count in missed.items()} if isinstance(missed, Mapping) else {}
    for name, value in counts.items():
        least = int(name in _FROM_ONE)
        if not isinstance(value, int) or not least <= value < 2**31:  # clocks are int32
            raise ValueError(
                f"`{name}` of a SCAPE state must be a whole number from {least} to 2**31 - 1, got {said(value)}."
                f" {DAMAGED}"
            )
    for name in ("config", "names", "missed"):
        check_mapping(name, facts.get(name))


def check_directory(common: Mapping[str, Any]) -> None:
    """Checks the form of a state's facts in a directory: they say what is read from it.

    Raises:
        ValueError: the first rule that they break.
    """
    _check_facts(common)
    check_places(common)
    check_mapping("beside_state", common.get("beside_state", {}))
    if not isinstance(common.get("param_groups"), list):
        raise ValueError(f"`param_groups` of an optimizer state must be a list, got others. {DAMAGED}")
    names, masks = common.get("tensors"), common.get("mask_shapes")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"`tensors` of an optimizer state must be a list of names, got {said(names)}. {DAMAGED}")
    masks = masks if isinstance(masks, list) else [common.get("mask_shape")]
    if not all(mask is None or (is_shape(mask) and len(mask) == 2) for mask in masks):
        raise ValueError(f"A mask's shape must be two whole numbers, got others. {DAMAGED}")


def check(source: Source, parameters: Parameters, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Checks that a state of SCAPE belongs to this model.

    Returns:
        Warnings for the user.

    Raises:
        ValueError: the first rule that it breaks.
    """
    common = source.common
    _check_facts(common)
    _check_groups(common.get("param_groups"), groups)
    _check_count(set(source.entries) ^ set(common["names"]), source, len(common["names"]))
    names = {"exp_avg", "last_step"} | held(source)
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        if index not in source.entries:  # it was frozen
            continue
        called = f"{name!r} (number {index})"
        _check_entry(source, index, called, parameter, names)
        _check_clock(source.find(state_key(index, "last_step")), called, common["step"])
        for rank in range(common["world_size"]):
            _check_tensor(source.find(residual_key(rank, index)), f"residual of {called} on rank {rank}", parameter)
        _check_order(common.get("strides", {}).get(index), name, parameter)
    return _check_names(parameters, common["names"])


def check_foreign(source: Source, parameters: Parameters, groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks that a state of AdamW, Adam or AdamS belongs to this model.

    Raises:
        ValueError: the first rule that it breaks.
    """
    _check_groups(source.common["param_groups"], groups)
    # torch leaves out parameters that never had a gradient, and keeps those that were frozen since.
    given = sum(len(group["params"]) for group in groups)
    _check_count(set(source.entries) - set(range(given)), source, given)
    for index, name, parameter in zip(parameters.indices, parameters.names, parameters.tensors, strict=True):
        if index in source.entries:
            moments = {"exp_avg", "exp_avg_sq"} & {"exp_avg", *source.entries[index]}
            _check_entry(source, index, f"{name!r} (number {index})", parameter, moments)
            _check_step(source.find(state_key(index, "step")), f"{name!r} (number {index})")


def _check_groups(saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks that saved parameter groups match the optimizer's, and that their options are possible."""
    if not isinstance(saved, list) or len(saved) != len(groups):
        got = len(saved) if isinstance(saved, list) else type(saved).__name__
        raise ValueError(f"The state must have {len(groups)} parameter groups, got {got}. {_SAME_MODEL}")
    for number, (theirs, mine) in enumerate(zip(saved, groups, strict=True)):
        check_mapping(f"param_groups[{number}]", theirs)
        given = theirs.get("params")
        count = len(given) if isinstance(given, list) else None
        if count != len(mine["params"]):
            raise ValueError(
                f"Parameter group {number} of the state must have {len(mine['params'])} parameters, got {count}."
                f" {_SAME_MODEL}"
            )
        try:
            problem = problem_of_group({**mine, **theirs})
        except (TypeError, ValueError) as error:
            problem = f"{error}."
        if problem is not None:
            raise ValueError(f"Parameter group {number} of the state cannot be taken: {problem}")


def _check_entry(source: Source, index: int, called: str, parameter: Tensor, names: set[str]) -> None:
    """Checks that one parameter has the tensors of these names, and that they fit it."""
    if "exp_avg" not in source.entries[index]:
        raise ValueError(
            f"The state of {called} must hold a first moment `exp_avg`, got"
            f" {sorted(map(str, source.entries[index]))}. Load a state of AdamW, Adam, AdamS or ScapeOptimizer."
        )
    for name in sorted(names):
        integer = name == "last_step"
        _check_tensor(source.find(state_key(index, name)), f"{name} of {called}", parameter, integer=integer)


def _check_tensor(tensor: Any, name: str, parameter: Tensor, *, integer: bool = False) -> None:
    """Checks kind and shape of a saved tensor. One without entries may have any kind."""
    kind = "integer" if integer else "floating-point"
    got: Any = None
    if not isinstance(tensor, Tensor):
        got = type(tensor).__name__
    elif tensor.layout != torch.strided:
        got = tensor.layout
    elif is_sharded(tensor):
        got = "a DTensor (collect whole ones by torch's get_optimizer_state_dict, `full_state_dict=True`)"
    elif tensor.numel() and (tensor.is_floating_point() == integer or tensor.is_complex()):
        got = tensor.dtype
    if got is not None:
        raise ValueError(f"The state's {name} must be a {kind} tensor, got {got}. {_SAME_MODEL}")
    if tuple(tensor.shape) != tuple(parameter.shape):
        raise ValueError(
            f"The state's {name} must have shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}. {_SAME_MODEL}"
        )


def check_mask(mask: Any, block_size: int) -> None:
    """Checks that each block of a mask has distinct positions.

    Raises:
        ValueError: some block has not.
    """
    problem = None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype not in (torch.uint8, torch.uint16):
        problem = f"a {tuple(mask.shape)} {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
    elif mask.numel():
        rows = mask.to(torch.int32).sort(dim=1).values
        if int(rows.max()) >= block_size or bool((rows[:, 1:] == rows[:, :-1]).any()):
            problem = "positions that are outside or not distinct"
    if problem is not None:
        raise ValueError(
            f"A mask must be [blocks, q] uint8 or uint16, of distinct positions below {block_size}, got {problem}."
            f" {DAMAGED}"
        )


def _check_count(odd: set[Any], source: Source, count: int) -> None:
    if odd:
        raise ValueError(
            f"The state must hold the {count} parameters that it speaks of, got {len(source.entries)};"
            f" the first that only one of them has is number {min(odd, key=str)}. {_SAME_MODEL}"
        )


def _check_clock(clock: Tensor, called: str, step: int) -> None:
    """Checks the values of a state in memory. Those in a directory have a digest."""
    if clock.is_meta or not clock.numel():
        return
    least, most = int(clock.min()), int(clock.max())
    if least < 0 or most > step:
        raise ValueError(
            f"last_step of {called} must be between 0 and the state's step ({step}), got {least} to {most}. {DAMAGED}"
        )


def _check_step(step: Any, called: str) -> None:
    """Checks a dense optimizer's step: a number, a tensor of one, or None."""
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if number is not None and not (isinstance(number, (int, float)) and 0 <= number < 2**31):
        raise ValueError(f"step of {called} must be a number from 0 to 2**31 - 1, got {step!r}. {DAMAGED}")


def _check_order(strides: Sequence[int] | None, name: str, parameter: Tensor) -> None:
    if strides is not None and tuple(strides) != parameter.stride() and parameter.numel():
        raise ValueError(
            f"A sharded state of {name!r} must have its memory order {parameter.stride()}, got {tuple(strides)}. Make"
            " it one file by `lightning-scape consolidate`: there, memory order does not matter."
        )


def _check_names(parameters: Parameters, saved: Mapping[int, str]) -> list[str]:
    """Checks that no parameter would get another one's state: parameters are taken by position."""
    mine = dict(zip(parameters.indices, parameters.names, strict=True))
    known = {name: index for index, name in mine.items()}
    renamed = []
    for index, name in mine.items():
        theirs = _plain_name(str(saved.get(index, name)))
        if theirs == _plain_name(name) or "parameter " in name or "parameter " in theirs:
            continue
        renamed.append(f"{theirs!r} (now {name!r})")
        if theirs in known:
            raise ValueError(
                f"Parameters must come in the checkpoint's order, got {name!r} as number {index}, which was {theirs!r}"
                " there. Build the optimizer over the parameters in the same order."
            )
    if not renamed:
        return []
    return [
        f"The checkpoint knows {len(renamed)} parameters by other names, the first as {renamed[0]}; shapes agree, and"
        " they are taken by position."
    ]


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "").removeprefix("module.")
