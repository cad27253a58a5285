"""Numbers in memory, and arithmetic that rounds as torch does; for Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def widen(raw, DTYPE: tl.constexpr):
    """What lies in memory as DTYPE (bf16 comes as int16), in fp32."""
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True) if DTYPE == tl.bfloat16 else raw


@triton.jit
def narrow(value, DTYPE: tl.constexpr):
    """The reverse, to the nearest, ties to even."""
    if DTYPE == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        raw = tl.where(value == value, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        raw = value
    return raw


@triton.jit
def pointer(address, DTYPE: tl.constexpr):
    """An address out of a table, as a pointer."""
    if DTYPE == tl.bfloat16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(DTYPE))
    return pointer
