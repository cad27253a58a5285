"""Learning rate schedulers: which optimizer they drive, and their states as data. Knows no host.

A scheduler is any object that keeps an optimizer among its attributes: torch's, or a wrapper of the user's. Schedulers
may hold schedulers, at any depth and in any container.

torch's ``LRScheduler.state_dict`` holds all attributes but the optimizer. If one of them is another scheduler, that
one's optimizer, and so the model, goes into the checkpoint. It could be read only by executing what is in the file, and
the resulting scheduler would drive a copy of the optimizer. So :func:`as_data` replaces an inner scheduler by its
state, and :func:`with_live` replaces that by the scheduler of the run that loads it.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_scape.core.numbers import plain_number

STATE = "scape_scheduler"
"""Key of the dict that stands for a scheduler inside another one's state; None: the state is not known."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor)


def retarget_schedulers(schedulers: Iterable[object], swaps: Sequence[tuple[Optimizer, Optimizer]]) -> None:
    """Makes each scheduler that drives an ``old`` optimizer drive the ``new`` one of its pair.

    Sharing the parameter groups would not be enough: a scheduler also watches whether its optimizer steps.

    Args:
        schedulers: the outermost ones.
        swaps: pairs of an old and a new optimizer.
    """
    new_for = {id(old): new for old, new in swaps}
    seen: set[int] = set()
    waiting = list(schedulers)
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for place, value in list(_members(holder)):
            new = new_for.get(id(value))
            if new is not None and isinstance(place, (str, int)):
                _put(holder, place, new)
            elif _may_drive(value):
                waiting.append(value)


def _members(holder: object) -> Iterator[tuple[Any, object]]:
    """What an object or a container holds, with its place there; None where it cannot be replaced."""
    if isinstance(holder, MethodType):
        yield None, holder.__self__
    elif isinstance(holder, dict):
        yield from holder.items()
    elif isinstance(holder, (list, deque)):
        yield from enumerate(holder)
    elif isinstance(holder, (tuple, set, frozenset)):
        yield from ((None, value) for value in holder)
    else:
        yield from getattr(holder, "__dict__", {}).items()


def _put(holder: Any, place: Any, value: object) -> None:
    if isinstance(holder, (dict, list, deque)):
        holder[place] = value
    else:
        setattr(holder, place, value)


def _may_drive(value: object) -> bool:
    """Whether an optimizer may be reached through the value."""
    if isinstance(value, (Tensor, nn.Module, Optimizer, type)):
        return False
    containers = (dict, list, tuple, set, frozenset, deque, MethodType)
    return isinstance(value, containers) or _is_scheduler(value)


def _is_scheduler(value: object) -> bool:
    if isinstance(value, (nn.Module, Optimizer, type)) or not hasattr(value, "__dict__"):
        return False
    return callable(getattr(value, "step", None)) or any(isinstance(held, Optimizer) for held in vars(value).values())


def as_data(state: Any) -> Any:
    """A scheduler's state without objects that lead to an optimizer.

    Inner schedulers give their own states. Whatever else leads to an optimizer (a bound method) is no state and is left
    out: the run that loads it has its own. Containers are new, the rest is shared.

    Args:
        state: what ``state_dict()`` of a scheduler gave; a user's own may give anything.
    """
    return _state_as_data(state, ()) if isinstance(state, Mapping) else state


def _state_as_data(state: Mapping[Any, Any], around: tuple[int, ...]) -> dict[Any, Any]:
    data = {name: _as_data(value, around) for name, value in state.items()}
    return {name: value for name, value in data.items() if not (type(value) is dict and value == {STATE: None})}


def _as_data(value: Any, around: tuple[int, ...]) -> Any:
    value = plain_number(value)
    if isinstance(value, _PLAIN):
        return value
    if type(value) is dict:
        return {key: _as_data(each, around) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_as_data(each, around) for each in value)
    if not _leads_to_optimizer(value):
        return value
    known = isinstance(value, (dict, deque)) or _is_scheduler(value)
    if not known or id(value) in around:
        return {STATE: None}
    return {STATE: _state_as_data(_state_of(value), (*around, id(value)))}


def _state_of(scheduler: Any) -> dict[Any, Any]:
    if isinstance(scheduler, (dict, deque)):
        return dict(_members(scheduler))
    if callable(getattr(scheduler, "state_dict", None)) and callable(getattr(scheduler, "load_state_dict", None)):
        return dict(scheduler.state_dict())
    return {name: value for name, value in vars(scheduler).items() if not isinstance(value, Optimizer)}


class _Search(pickle.Pickler):
    """Looks at all that an object would take along, without copying tensors."""

    found = False

    def persistent_id(self, obj: Any) -> str | None:
        self.found = self.found or isinstance(obj, Optimizer)
        return "" if isinstance(obj, (Optimizer, Tensor)) else None


def _leads_to_optimizer(value: object) -> bool:
    search = _Search(io.BytesIO())
    try:
        search.dump(value)
    except Exception:  # whoever writes the file will say what is wrong with it
        return search.found
    return search.found


def with_live(scheduler: object, data: Any) -> Any:
    """The state to load into ``scheduler``: with its own inner schedulers, after they have taken up their states.

    Args:
        scheduler: of the run.
        data: what :func:`as_data` gave, or any other state.

    Raises:
        ValueError: ``scheduler`` has none inside where the state has one.
    """
    if not isinstance(data, Mapping):
        return data
    return {name: _with_live(_inside(scheduler, name), value, name) for name, value in data.items()}


def _with_live(live: Any, data: Any, place: str) -> Any:
    if isinstance(data, dict) and STATE in data:
        if data[STATE] is None:
            return live
        if live is None:
            raise ValueError(
                f"The schedulers must be those of the checkpoint, got none at {place!r}, where it has the state of one."
                " Build them as when it was saved, or load the weights alone."
            )
        _take_up(live, with_live(live, data[STATE]))
        return live
    if type(data) is dict:
        return {key: _with_live(_inside(live, key), each, f"{place}.{key}") for key, each in data.items()}
    if type(data) in (list, tuple):
        return type(data)(_with_live(_inside(live, at), each, f"{place}.{at}") for at, each in enumerate(data))
    return data


def _take_up(live: Any, state: dict[Any, Any]) -> None:
    if callable(getattr(live, "load_state_dict", None)):
        live.load_state_dict(state)
        return
    for place, value in state.items():
        _put(live, place, value)


class Restored:
    """Stands for a scheduler while a host loads a checkpoint into it.

    Args:
        scheduler: of the run.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> Any:
        """The scheduler's, as data."""
        return as_data(self.scheduler.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Takes up what :meth:`state_dict` gave, or any other state."""
        self.scheduler.load_state_dict(with_live(self.scheduler, state))


def is_scheduler(value: object) -> bool:
    """Whether it is one with a state of its own."""
    own = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return own and _is_scheduler(value)


def _inside(holder: object, place: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(place)
    if isinstance(holder, (list, tuple, deque)):
        return holder[place] if isinstance(place, int) and place < len(holder) else None
    return getattr(holder, "__dict__", {}).get(place)
