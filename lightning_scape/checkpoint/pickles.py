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

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any, NamedTuple

_HASHING = frozenset(("set", "frozenset", "Counter", "OrderedDict"))
_MOST_NODES = 1000
"""Of a key: hashing one that is nested too deeply ends the process; a short pickle can make one of endless size."""


class UnknownOpcode(ValueError):
    """The pickle has an instruction that neither torch's checkpoints nor its indexes have."""


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


def read(data: bytes | mmap, may_name: Callable[[Named], bool] | None = None, number: int = 0) -> Any:
    """What a pickle says.

    Args:
        data: the pickle, or several, one after another.
        may_name: whether it may name a class or function; None: any.
        number: which of several; all up to it are read.

    Raises:
        ValueError: it is none, or damaged; or what it says cannot be built (a dict's key of more than 1000 parts).
        UnknownOpcode: see there.
    """
    machine = _Machine(data, may_name)
    try:
        for _ in range(number + 1):
            machine.run()
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
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
    def __init__(self, data: bytes | mmap, may_name: Callable[[Named], bool] | None) -> None:
        self._data, self._at = data, 0
        self._may_name = may_name

    def run(self) -> None:
        """To the end of the pickle; again to that of the next one."""
        self.stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        data = self._data
        while True:
            code = data[self._at]
            self._at += 1
            if code == _STOP:
                return
            act = _ACTS.get(code)
            if act is None:
                raise UnknownOpcode(f"it has the instruction {bytes([code])!r}")
            act(self)

    def _bytes(self, count: int) -> bytes:
        begin, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise ValueError("it is cut off")
        return self._data[begin : self._at]

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._bytes(form.size))[0]

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        if end < 0:
            raise ValueError("it is cut off")
        return self._bytes(end + 1 - self._at)[:-1].decode()

    def _push_memo(self) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _do_mark(self) -> None:
        self._below.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self._below.pop()
        return items

    def _last(self, count: int) -> list[Any]:
        items = [self.stack.pop() for _ in range(count)]
        return items[::-1]

    def _do_empty_list(self) -> None:
        self.stack.append([])

    def _do_empty_dict(self) -> None:
        self.stack.append(Pairs())

    def _do_tuple(self) -> None:
        items = self._since_mark()
        self.stack.append(tuple(items))

    def _do_append(self) -> None:
        self._extend(self._last(1))

    def _do_appends(self) -> None:
        self._extend(self._since_mark())

    def _do_additems(self) -> None:
        items = self._since_mark()
        _check_keys(items)
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def _do_setitem(self) -> None:
        self._set(self._last(2))

    def _do_setitems(self) -> None:
        self._set(self._since_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = target.pairs if isinstance(target, Made) else target
        if not isinstance(pairs, Pairs) or len(items) % 2:
            raise ValueError(f"it sets items of a {type(target).__name__}")
        _check_keys(items[::2])
        pairs.extend(zip(items[::2], items[1::2], strict=True))

    def _do_global(self) -> None:
        self._name(self._line(), self._line())

    def _do_stack_global(self) -> None:
        module, name = self._last(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("it names a class by something else than strings")
        self._name(module, name)

    def _name(self, module: str, name: str) -> None:
        named = Named(module, name)
        if self._may_name is not None and not self._may_name(named):
            raise ValueError(f"it names {module[:100]}.{name[:100]}")
        self.stack.append(named)

    def _do_reduce(self) -> None:
        maker, arguments = self._last(2)
        if isinstance(maker, Named) and maker.name in _HASHING:
            for argument in arguments:
                if isinstance(argument, (list, tuple)):
                    _check_keys([member[0] if _is_pair(member) else member for member in argument])
        self.stack.append(Made(maker, arguments))

    def _do_binpersid(self) -> None:
        (identity,) = self._last(1)
        _check_keys([identity])
        self.stack.append(Made("persistent", identity))

    def _do_build(self) -> None:
        (state,) = self._last(1)
        made = self.stack[-1]
        if not isinstance(made, Made):
            raise ValueError("it sets attributes of what it has not made")
        made.state = state


_Act = Callable[[_Machine], None]


def _number(form: str) -> _Act:
    packed = struct.Struct(form)
    return lambda machine: machine.stack.append(machine._number(packed))


def _text(form: str, decode: Callable[[bytes], Any]) -> _Act:
    length = struct.Struct(form)
    return lambda machine: machine.stack.append(decode(machine._bytes(machine._number(length))))


def _constant(value: Any) -> _Act:
    return lambda machine: machine.stack.append(value)


def _tuple(count: int) -> _Act:
    return lambda machine: machine.stack.append(tuple(machine._last(count)))


def _put(form: str) -> _Act:
    key = struct.Struct(form)
    return lambda machine: machine._memo.__setitem__(machine._number(key), machine.stack[-1])


def _get(form: str) -> _Act:
    key = struct.Struct(form)
    return lambda machine: machine.stack.append(machine._memo[machine._number(key)])


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_STOP = ord(".")
_ACTS: dict[int, _Act] = {
    ord(code): act
    for code, act in {
        "\x80": lambda machine: machine._bytes(1),  # protocol
        "\x95": lambda machine: machine._bytes(8),  # a frame's length
        "K": _number("<B"),
        "M": _number("<H"),
        "J": _number("<i"),
        "G": _number(">d"),
        "\x8a": _text("<B", _long),
        "\x8b": _text("<I", _long),
        "U": _text("<B", _utf8),
        "T": _text("<I", _utf8),
        "\x8c": _text("<B", _utf8),
        "X": _text("<I", _utf8),
        "\x8d": _text("<Q", _utf8),
        "C": _text("<B", bytes),
        "B": _text("<I", bytes),
        "\x8e": _text("<Q", bytes),
        "N": _constant(None),
        "\x88": _constant(True),
        "\x89": _constant(False),
        ")": _constant(()),
        "(": _Machine._do_mark,
        "t": _Machine._do_tuple,
        "\x85": _tuple(1),
        "\x86": _tuple(2),
        "\x87": _tuple(3),
        "]": _Machine._do_empty_list,
        "\x8f": _Machine._do_empty_list,  # a set
        "}": _Machine._do_empty_dict,
        "a": _Machine._do_append,
        "e": _Machine._do_appends,
        "\x90": _Machine._do_additems,
        "s": _Machine._do_setitem,
        "u": _Machine._do_setitems,
        "q": _put("<B"),
        "r": _put("<I"),
        "\x94": _Machine._push_memo,
        "h": _get("<B"),
        "j": _get("<I"),
        "c": _Machine._do_global,
        "\x93": _Machine._do_stack_global,
        "R": _Machine._do_reduce,
        "\x81": _Machine._do_reduce,  # of a new object
        "Q": _Machine._do_binpersid,
        "b": _Machine._do_build,
    }.items()
}


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
