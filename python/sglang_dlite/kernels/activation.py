"""SiLU(gate) * up of a fused gate/up projection."""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sglang_dlite.kernels.launch import Launch

_BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_ptr = gate_up_ptr + row * 2 * SIZE + column
    gate = tl.load(gate_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + SIZE, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)  # rounded as the module does
    tl.store(out_ptr + row * SIZE + column, (silu * up).to(dtype), mask=inside)


def plan_silu_mul(gate_up: Tensor) -> tuple[Launch, Tensor]:
    """gate_up [n, T, 2 I], gates first -> [n, T, I]."""
    *lead, double = gate_up.shape
    size = double // 2
    out = gate_up.new_empty(*lead, size)
    launch = Launch(
        _silu_mul_kernel,
        (gate_up.shape[0] * gate_up.shape[1], triton.cdiv(size, _BLOCK)),
        (gate_up, out),
        {"SIZE": size, "BLOCK": _BLOCK},
        num_warps=4,
    )
    return launch, out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
