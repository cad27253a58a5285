"""What the loops of :mod:`.kernels` and :mod:`.masks` share: numbers in memory, and how numba compiles.

numba keeps compiled code on disk, and looks for changes in the file of a loop only. :func:`jit` makes it look at all
files of loops, for they use one another.
"""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

if numba.config.DISABLE_JIT:
    raise ImportError("the environment variable NUMBA_DISABLE_JIT must not be set")

CACHE_LINE = 64
"""Bytes."""


def jit(function=None, **options):
    """Compiles on first use, keeps the code on disk, and releases Python's lock while it runs.

    No C code calls a loop: without the wrapper for it, compiling takes 4% less.
    """
    if function is None:
        return lambda function: jit(function, **options)
    options |= {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        dispatcher = numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder to write to: compiled anew by each process
        return numba.njit(function, **options)
    cache = dispatcher._cache
    if hasattr(cache, "_guard_against_spurious_io_errors"):
        cache._guard_against_spurious_io_errors = lambda: _at_most_slower(cache)
    index = getattr(cache, "_cache_file", None)
    if index is not None and hasattr(index, "_source_stamp"):  # numba's own; without it, its stamp of one file serves
        index._source_stamp = _SOURCES
    return dispatcher


@contextlib.contextmanager
def _at_most_slower(cache):
    """Around a read or a write of compiled code: a full disk, or a file that was cut off, costs only time."""
    try:
        yield
    except Exception:  # of what a damaged file holds, of any kind
        with contextlib.suppress(OSError):
            cache.flush()  # so that the next process writes what this one could not read


def is_compiled(dispatcher: Any) -> bool:
    """Whether compiled code of a loop lies on disk. True where numba does not say."""
    index: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if not hasattr(index, "_load_index"):
        return True
    with contextlib.suppress(Exception):  # a damaged file
        return bool(index._load_index())
    return False


def _digest_of_sources():
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _digest_of_sources()
"""Code in the cache is used while this is the same."""


@intrinsic
def _pointer(typingctx, address, like):
    """An address, as a pointer to entries like those of an array."""
    pointer = types.CPointer(like.dtype)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@intrinsic
def prefetch_line(typingctx, address):
    """Asks for the cache line at an address, into the second cache: more lines can be under way to it."""

    def generate(context, builder, signature, args):
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        signature_of_llvm = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], signature_of_llvm)
        to_read, second_cache, data = number(0), number(2), number(1)
        builder.call(function, [builder.inttoptr(args[0], pointer), to_read, second_cache, data])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@jit
def prefetch(address, size):
    """Asks for ``size`` bytes that are read soon. An address behind the end of an array does no harm."""
    for byte in range(0, size, CACHE_LINE):
        prefetch_line(address + byte)


@jit
def array_at(address, start, count, like):
    """``count`` entries that begin ``start`` entries behind an address."""
    return numba.carray(_pointer(address + start * like.itemsize, like), count)


def widen(raw):
    """What lies in memory, in fp32."""
    raise NotImplementedError


@overload(widen)
def _overload_widen(raw):
    if raw == types.uint16:
        return lambda raw: np.uint32(np.uint32(raw) << 16).view(np.float32)
    if raw == types.int16:
        return _widen_half
    return lambda raw: raw


def _widen_half(raw):
    magnitude = np.int32(raw) & 0x7FFF
    value = np.int32(magnitude << 13).view(np.float32) * np.float32(2.0**112)
    if magnitude >= 0x7C00:
        value = np.int32(0x7F800000 | (magnitude << 13)).view(np.float32)
    return -value if raw < 0 else value


def narrow(value, like):
    """The reverse, to the nearest, ties to even."""
    raise NotImplementedError


@overload(narrow)
def _overload_narrow(value, like):
    if like.dtype == types.uint16:
        return _narrow_to_bfloat
    if like.dtype == types.int16:
        return _narrow_to_half
    return lambda value, like: like.dtype.type(value)


def _narrow_to_bfloat(value, like):
    single = np.float32(value)
    bits = single.view(np.uint32)
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.uint16(rounded if single == single else 0x7FC0)


def _narrow_to_half(value, like):
    single = np.float32(value)
    bits = single.view(np.int32)
    magnitude = np.int32(bits & 0x7FFFFFFF)
    if magnitude >= 0x47800000:  # 2**16 and more, NaN
        rounded = np.int32(0x7E00 if magnitude > 0x7F800000 else 0x7C00)
    elif magnitude < 0x38800000:  # denormal: adding 0.5 rounds it to units of the last place
        rounded = np.int32(
            np.float32(np.int32(magnitude).view(np.float32) + np.float32(0.5)).view(np.int32) - 0x3F000000
        )
    else:
        rounded = np.int32((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13)
    return np.int16(rounded | ((bits >> 16) & 0x8000))


@jit
def clamp(value, limit):
    """Keeps NaN, as torch's clamp does."""
    value = limit if value > limit else value
    return -limit if value < -limit else value


@jit
def larger(a, b):
    """NaN if either is, as torch's maximum."""
    return a if a > b or a != a else b


@jit
def overlap(first, last, before, count):
    """The part of ``first .. last`` in the ``count`` entries that come after ``before`` others, counted in these."""
    return max(first - before, 0), min(last - before, count)
