"""Compiles every kernel launch of a few operations for GPUs that are not there: `compile_kernels.py 90 80`.

Run without TRITON_INTERPRET. Launches are recorded on CPU tensors instead of run, and each is compiled, with the very
arguments and constants it was given, to machine code by the assembler that comes with Triton.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton.backends.nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.core.layout import Layout
from lightning_scape.ops import cuda
from lightning_scape.ops.cuda import launch as cuda_launch
from lightning_scape.ops.cuda import wire as cuda_wire
from lightning_scape.ops.naive.wire import GROUP, GROUP_BYTES
from lightning_scape.scape.opening import SKETCH_WIDTHS, random_signs

NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
}


class Launch:
    """One recorded launch: what the compiler has to know of it."""

    def __init__(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        self.kernel = kernel
        self.options = {name: meta.pop(name) for name in ("num_warps",) if name in meta}
        given = dict(zip(kernel.arg_names, args, strict=False)) | meta
        general = _not_specialized(kernel)
        constants = {n for n in meta if n.isupper()} | {n for n, v in given.items() if _is_one(v) and n not in general}
        self.constants = {name: given[name] for name in constants}
        self.signature = {n: "constexpr" if n in constants else _type_of(given[n]) for n in kernel.arg_names}
        # What Triton notices by itself at a launch: addresses and sizes that are multiples of 16.
        self.attributes = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if name not in constants | general and _is_multiple_of_16(given[name])
        }

    @property
    def key(self) -> str:
        return f"{self.kernel.__name__} {self.signature} {sorted(self.constants.items(), key=str)} {self.attributes}"

    def compile(self, capability: int) -> Any:
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        target = GPUTarget("cuda", capability, 32)
        return compile(source, target=target, options={**self.options, "enable_fp_fusion": False})


def _not_specialized(kernel: Any) -> set[str]:
    """Numbers that are compiled alike, whatever they are; in Triton's interpreter, too, which keeps what it is told."""
    names = getattr(kernel, "do_not_specialize", None) or getattr(kernel, "kwargs", {}).get("do_not_specialize")
    return set(names or ())


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and value == 1


def _is_multiple_of_16(value: Any) -> bool:
    return (value.data_ptr() if isinstance(value, Tensor) else value) % 16 == 0


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "*" + NAMES[value.dtype]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def record() -> dict[str, Launch]:
    """The launches of whole steps, dense and sparse, over parameters of several dtypes, and of what those leave out."""
    launches: dict[str, Launch] = {}

    def note(kernel: Any, programs: Any, *args: Any, **meta: Any) -> None:
        launch = Launch(kernel, args, dict(meta))
        launches.setdefault(launch.key, launch)

    with patch.object(cuda_launch, "launch", note), ops.using("cuda"):
        for dtypes in ([torch.float32], [torch.bfloat16], [torch.bfloat16, torch.float32]):
            for sparsity in (0.99, 0.9, 0.0):
                steps(dtypes, ScapeConfig(sparsity=sparsity, update="adamw", sparsity_warmup_steps=0))
        steps([torch.float32], ScapeConfig(sparsity_warmup_steps=0, update="adamw"), groups=1, gap=True)
        for dtype in (torch.float32, torch.bfloat16):  # as it is with several ranks
            pieces = list(Layout([300], [0], 100, 1).pieces)
            for mask in (None, torch.zeros(3, 1, dtype=torch.uint8)):
                changes = torch.zeros(3, 100 if mask is None else 1)
                ops.scatter_params(
                    ops.ParamEntries([torch.zeros(300, dtype=dtype)], pieces, mask, 100), changes, True, torch.ones(())
                )
        signs = random_signs(1 << 17)
        for dtype in (torch.float32, torch.bfloat16):
            ops.sketch([torch.zeros(100_000, dtype=dtype)], signs, SKETCH_WIDTHS)
        flats, mask = [torch.zeros(300, dtype=torch.bfloat16)], torch.zeros(3, 1, dtype=torch.uint8)
        entries = ops.ParamEntries(flats, pieces, mask, 100)  # what a narrower parameter loses to rounding
        ops.scatter_params(entries, torch.zeros(3, 1), True, torch.ones(()), torch.zeros(3, 100))
        for length in (200, 256, 1000, 4096):
            ops.unpack_mask(torch.zeros(3, -(-length // 8), dtype=torch.uint8), length // 4, length)
        ops.select(torch.zeros(3, 1000), 1)
        ops.select(torch.zeros(3, 256), 32)
        for dtype in (torch.float32, torch.bfloat16):
            for masked in (True, False):
                sweep(dtype, masked=masked)
                sweep(dtype, masked=masked, own=True)
        for length, sent in ((250, 25), (1000, 1), (4096, 3)):
            sweep(torch.float32, length=length, sent=sent)
        sweep(torch.float32, length=250, sent=25, own=True)
        for count in (GROUP, 1000, 4096):
            ops.dequantize(ops.quantize(torch.zeros(count)).repeat(3, 1, 1), count)
            for sent in (1, 2, 25, 200):
                rows = count // sent
                mask = None if sent == 200 else torch.zeros(rows, sent, dtype=torch.uint8)
                message = torch.zeros(1, -(-rows * sent // GROUP), GROUP_BYTES, dtype=torch.uint8)
                cuda_wire.pack_values(torch.zeros(rows, 200), mask, torch.zeros(rows, sent), message)
    return launches


def sweep(
    dtype: torch.dtype,
    own: bool = False,
    masked: bool = True,
    length: int = 200,
    sent: int = 2,
) -> None:
    """Of the other ranks' rows, or of this rank's ``own``, for gradients of a dtype."""
    layout = Layout([20 * length + 8], [0], length, 3)
    region, rows = layout.local(0) if own else layout.remote(1), layout.blocks
    state = [torch.zeros(rows, length, dtype=torch.float32) for _ in range(2)]
    grads = [torch.zeros(20 * length + 8, dtype=dtype)]
    positions = ops.position_dtype(length)
    mask = torch.zeros(rows, sent, dtype=positions) if masked else None
    values = torch.zeros(rows, sent if masked else length)
    if own:
        moment = ops.SecondMoment(state[1], [0.1] * len(region.pieces), 3)
        ops.sweep(ops.Sweep(region, state[0], grads, torch.ones(rows), mask, values, moment))
    else:
        ops.sweep(ops.Sweep(region, state[0], grads, torch.ones(()), mask, values))


def steps(dtypes: list[torch.dtype], config: ScapeConfig, groups: int = 2, gap: bool = False) -> None:
    """Three steps; the numbers are whatever the memory holds, for nothing is computed.

    With a ``gap``, the first parameter has no gradient in the last of them.
    """
    parameters = [torch.nn.Parameter(torch.zeros(3000 + 8 * i, dtype=d)) for i, d in enumerate(dtypes * 2)]
    half = len(parameters) // groups
    parts = [{"params": part} for part in (parameters[:half], parameters[half:]) if part]
    optimizer = ScapeOptimizer(parts, config=config)
    with (
        patch.object(cuda, "select", lambda statistic, sent: _first(statistic, sent)),
        patch.object(optimizer.engine, "_hear_verdict"),
    ):
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            if gap and step == 2:
                parameters[0].grad = None
            optimizer.step()
    ops.select(torch.zeros(40, config.quota.block_size), config.quota.sent)


def _first(statistic: Tensor, sent: int) -> Tensor:
    """A mask is used as an index on the host, so it must hold positions."""
    return torch.arange(sent, dtype=torch.uint8).expand(statistic.shape[0], sent).contiguous()


class Resources(NamedTuple):
    """What a program takes of a multiprocessor."""

    registers: int
    """Of each thread."""
    spilled: int
    """Bytes of each thread's memory, which a kernel without arrays only needs for registers that were not there."""


def resources(cubin: bytes) -> Resources:
    """Read from the machine code, by the tool that comes with Triton."""
    tool = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.run(
            [tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"])


def check(launch: Launch, ptx: str, used: Resources) -> None:
    """What the source promises and a compiler could take back."""
    name, constants = launch.kernel.__name__, launch.constants
    lines = ptx.splitlines()
    if any("fma.rn.f32" in line for line in lines):
        raise AssertionError(f"{name} {constants}: a product and a sum were contracted, their twin's are not")
    if used.spilled:
        raise AssertionError(f"{name} {constants}: {used.spilled} bytes of registers are spilled to memory")
    if name == "_sweep_kernel" and not any("st.global.v" in line for line in lines):
        raise AssertionError(f"{name} {constants}: memory is not accessed 16 bytes at a time")


def main() -> None:
    launches = list(record().values())
    # The first of each kernel, and an eighth of the others.
    first = {launch.kernel.__name__: launch for launch in reversed(launches)}
    launches = [launch for place, launch in enumerate(launches) if place % 8 == 0 or launch in first.values()]
    capabilities = [int(argument) for argument in sys.argv[1:] if argument.isdecimal()] or [90]
    most: dict[str, int] = {}
    for launch in launches:
        for capability in capabilities:
            compiled = launch.compile(capability)
            used = resources(compiled.asm["cubin"])
            check(launch, compiled.asm["ptx"], used)
            most[launch.kernel.__name__] = max(used.registers, most.get(launch.kernel.__name__, 0))
    print(f"compiled {len(capabilities)} x {len(launches)} launches; registers of a thread, at most: {most}")


if __name__ == "__main__":
    main()
