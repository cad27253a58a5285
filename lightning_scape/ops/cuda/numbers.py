"""Numbers in memory, and arithmetic that rounds as torch does; for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def widen(raw, DTYPE: tl.constexpr):
    """What lies in memory as DTYPE (bf16 comes as int16), in at least fp32."""
    if DTYPE == tl.bfloat16:
        value = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float64:
        value = raw
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """The reverse, to the nearest, ties to even; by way of fp32, as torch converts fp64."""
    if DTYPE == tl.float64:
        raw = value.to(tl.float64)
    elif DTYPE == tl.bfloat16:
        single = value.to(tl.float32)
        bits = single.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(single == single, rounded, 0x7FC0)
        raw = rounded.to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        raw = value.to(tl.float32).to(DTYPE)
    return raw


@triton.jit
def pointer(address, DTYPE: tl.constexpr):
    """An address out of a table, as a pointer."""
    if DTYPE == tl.bfloat16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    return pointer


@triton.jit
def clamp(value, limit):
    """Keeps NaN, as torch's clamp does."""
    value = tl.where(value > limit, limit, value)
    return tl.where(value < -limit, -limit, value)


@triton.jit
def divide(a, b):
    """The quotient, to the nearest."""
    if a.dtype == tl.float32:
        quotient = tl.div_rn(a, b)  # a plain division of fp32 is off by 2 units in the last place
    else:
        quotient = a / b
    return quotient


@triton.jit
def root(a):
    """The square root, to the nearest."""
    if a.dtype == tl.float32:
        root = tl.sqrt_rn(a)
    else:
        root = tl.sqrt(a)
    return root
