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


def dot_precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: fp32 exactly, never as TF32; of no effect on bf16 and fp16."""
    return "ieee" if dtype == torch.float32 else "tf32"
