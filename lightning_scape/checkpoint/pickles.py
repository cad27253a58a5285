"""What a pickle says, without making any of it: nothing is imported, called, built or hashed.

=============================== ======================================================================================
in the pickle                   here
=============================== ======================================================================================
numbers, strings, None, tuples  themselves
lists, sets                     lists
dicts                           :class:`Pairs`
classes and functions           :class:`Named`
what they make                  :class:`Made`
=============================== ======================================================================================
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

_HASHING = frozenset(("set", "frozenset", "Counter", "OrderedDict"))
_MOST_NODES = 1000
"""Of a key: hashing one that is nested too deeply ends the process; a short pickle can make one of endless size."""


class UnknownOpcode(ValueError):
    """The pickle has an instruction that torch's checkpoints do not have."""


class Pairs(list[tuple[Any, Any]]):
    """The items of a dict, in the order in which they were set; keys may come twice."""


class Named(NamedTuple):
    """A class or function, by its name."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """What calling ``maker`` would give."""

    maker: Any
    arguments: Any
    state: Any = None
    pairs: Pairs = field(default_factory=Pairs)
    """Items that are set on it, if it is a dict of a kind."""


def read(data: bytes) -> Any:
    """What a pickle says.

    Raises:
        ValueError: it is none, or damaged; or what it says cannot be built (a dict's key of more than 1000 parts).
        UnknownOpcode: see there.
    """
    machine = _Machine(io.BytesIO(data))
    try:
        machine.run()
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from error
    if len(machine.stack) != 1:
        raise ValueError(f"it makes {len(machine.stack)} objects")
    return machine.stack[0]


def entry(holder: Any, name: str) -> Any:
    """The entry of this name in a dict, or in what is one of a kind; None if there is none."""
    pairs = holder.pairs if isinstance(holder, Made) else holder
    if not isinstance(pairs, Pairs):
        return None
    return next((value for key, value in reversed(pairs) if isinstance(key, str) and key == name), None)


class _Machine:
    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> None:
        """To the end of the pickle."""
        while (code := self._stream.read(1)) != pickle.STOP:
            if not code:
                raise ValueError("it is cut off")
            if code not in _ACTS:
                raise UnknownOpcode(f"it has the instruction {code!r}")
            argument, act = _ACTS[code]
            if argument is None:
                act(self)
            else:
                act(self, argument.reader(self._stream))

    def _line(self) -> str:
        line: bytes = self._stream.readline()
        if not line.endswith(b"\n"):
            raise ValueError("it is cut off")
        return line[:-1].decode()

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _pass(self, _: Any) -> None:
        """The protocol, or a frame's length."""

    def _put(self, key: int) -> None:
        self._memo[key] = self.stack[-1]

    def _get(self, key: int) -> None:
        self.stack.append(self._memo[key])

    def do_memoize(self) -> None:
        self._put(len(self._memo))

    def do_mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def _last(self, count: int) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def do_tuple(self) -> None:
        items = self._since_mark()
        self.stack.append(tuple(items))

    def do_append(self) -> None:
        self._extend(self._last(1))

    def do_appends(self) -> None:
        self._extend(self._since_mark())

    def do_additems(self) -> None:
        items = self._since_mark()
        _check_keys(items)
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def do_setitem(self) -> None:
        self._set(self._last(2))

    def do_setitems(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = target.pairs if isinstance(target, Made) else target
        if not isinstance(pairs, Pairs) or len(items) % 2:
            raise ValueError(f"it sets items of a {type(target).__name__}")
        _check_keys(items[::2])
        pairs.extend(zip(items[::2], items[1::2], strict=True))

    def do_global(self) -> None:
        self.stack.append(Named(self._line(), self._line()))

    def do_stack_global(self) -> None:
        module, name = self._last(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names a class by something else than strings")
        self.stack.append(Named(module, name))

    def do_reduce(self) -> None:
        maker, arguments = self._last(2)
        if isinstance(maker, Named) and maker.name in _HASHING:
            for argument in arguments:
                if isinstance(argument, (list, tuple)):
                    _check_keys([member[0] if _is_pair(member) else member for member in argument])
        self.stack.append(Made(maker, arguments))

    def do_binpersid(self) -> None:
        (identity,) = self._last(1)
        _check_keys([identity])
        self.stack.append(Made("persistent", identity))

    def do_build(self) -> None:
        (state,) = self._last(1)
        made = self.stack[-1]
        if not isinstance(made, Made):
            raise ValueError("it sets attributes of what it has not made")
        made.state = state


def _new(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make())


def _tuple(count: int) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(tuple(machine._last(count)))


_BY_NAME: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("PROTO", "FRAME"), _Machine._pass),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1", "LONG4"), _Machine._push),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine._push),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), _Machine._push),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _Machine._push),
    "NONE": _new(lambda: None),
    "NEWTRUE": _new(lambda: True),
    "NEWFALSE": _new(lambda: False),
    "EMPTY_TUPLE": _new(tuple),
    "EMPTY_LIST": _new(list),
    "EMPTY_SET": _new(list),
    "EMPTY_DICT": _new(Pairs),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine._get),
    "NEWOBJ": _Machine.do_reduce,
}
"""Those of pickle's instructions that have no method of their own name."""
_ACTS = {
    # Of a global pickletools makes one text, in which an escape would be another name than torch reads.
    each.code.encode("latin-1"): (None if each.name == "GLOBAL" else each.arg, act)
    for each in pickletools.opcodes
    if (act := _BY_NAME.get(each.name) or getattr(_Machine, f"do_{each.name.lower()}", None)) is not None
}
"""What to read behind an instruction, and what to do."""


def _is_pair(member: Any) -> bool:
    return isinstance(member, (list, tuple)) and len(member) == 2


def _check_keys(keys: list[Any]) -> None:
    """Raises ``ValueError`` if hashing one of them would not end, or end the process."""
    for key in keys:
        if isinstance(key, (str, int)):
            continue
        left, nodes = [key], 0
        while left:
            item, nodes = left.pop(), nodes + 1
            if nodes > _MOST_NODES:
                raise ValueError(f"it has a key of more than {_MOST_NODES} parts")
            if isinstance(item, (list, tuple)):
                left.extend(item)
            elif isinstance(item, Made):
                left.append(item.arguments)
