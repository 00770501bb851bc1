"""One launch of a Triton kernel as a value: planned on any device, run on a GPU.

The plan is made by a pure function of shapes and dtypes, so that the ahead-of-time compilation of
the tests compiles exactly what a GPU would be asked to run.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """`kernel[grid](*args, **constants)` with its tuning."""

    kernel: Any  # a triton.jit function
    grid: tuple[int, ...]
    args: tuple[Any, ...]  # tensors, ints, floats: the run-time arguments, in order
    constants: dict[str, Any]  # the constexpr arguments
    num_warps: int
    num_stages: int = 3

    def run(self) -> None:
        """Launch on the current stream of the first tensor's device; nothing for an empty grid."""
        if not prod(self.grid):
            return
        with torch.cuda.device_of(self.args[0]):
            self.kernel[self.grid](
                *self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
            )


MIN_CAPABILITY = (8, 0)  # A100: bf16


def unsupported_gpu(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device; None where they can, as on a CPU (references)."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "this is a ROCm build of torch; the kernels are made for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, MIN_CAPABILITY))
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {have}; {need} (A100) or newer is needed"
    return None


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: fp32 exactly, never as TF32; of no effect on bf16 and fp16."""
    return "ieee" if dtype == torch.float32 else "tf32"
