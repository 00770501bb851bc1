"""Compiles a planned launch for a GPU that is not there, and reads what the binary needs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from sglang_dlite.kernels.launch import Launch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Resources:
    """Of one kernel's binary; shared memory, spills and stack in bytes."""

    registers: int
    spilled: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers:3} registers, {self.spilled} B spilled, {self.shared:6} B shared"


def compile_launch(launch: Launch, capability: int) -> Any:
    """The binary that `launch.run()` would have compiled on a GPU of this compute capability."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], Any] = {}
    constants = dict(launch.constants)
    for i, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if name in launch.constants:
            signature[name] = "constexpr"
            continue
        value = launch.args[i]
        if isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            if not parameter.do_not_specialize_on_alignment:
                attributes[(i,)] = _ALIGNED
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = _ALIGNED
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
    )


def resources(binary: Any, folder: Path) -> Resources:
    """Registers and stack from the binary itself (cuobjdump), shared memory from its metadata."""
    file = folder / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    stack = sum(int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("STACK", "LOCAL"))
    return Resources(registers, stack, binary.metadata.shared)
