"""RMSNorm of rows, with the sum before it: residual + RMSNorm, and the context slots' norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dlite.drafter.backbone import rms_norm
from sglang_dlite.kernels.launch import Launch


@triton.jit
def _norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    eps,
    ROWS: tl.constexpr,  # rows per request
    SKIP: tl.constexpr,  # rows of each request that are not normed
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    SHARED_DELTA: tl.constexpr,  # delta [ROWS, SIZE], the same for every request
    STORE_SUM: tl.constexpr,
):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    place = row % (ROWS - SKIP) + SKIP
    source = row // (ROWS - SKIP) * ROWS + place
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + source * SIZE + column, mask=inside, other=0.0)
    # Rounded where the module rounds: a bf16 sum, a bf16 normed value, then times the weight.
    x = x.to(dtype).to(tl.float32)
    if HAS_DELTA:
        delta_row = place if SHARED_DELTA else source
        delta = tl.load(delta_ptr + delta_row * SIZE + column, mask=inside, other=0.0)
        x = (x + delta.to(tl.float32)).to(dtype).to(tl.float32)
    if STORE_SUM:
        tl.store(sum_ptr + source * SIZE + column, x.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    normed = (x * scale).to(dtype).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * SIZE + column, (normed * weight).to(dtype), mask=inside)


def _plan(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    out: Tensor,
    eps: float,
    *,
    shared_delta: bool = False,
) -> Launch:
    """x [n, T, h], out [n, T' <= T, h]: the last T' rows of each request."""
    n, rows, size = x.shape
    kept = out.shape[1]
    return Launch(
        _norm_kernel,
        (n * kept,),
        (x, x if delta is None else delta, weight, out if total is None else total, out, eps),
        {
            "ROWS": rows,
            "SKIP": rows - kept,
            "SIZE": size,
            "BLOCK": triton.next_power_of_2(size),
            "HAS_DELTA": delta is not None,
            "SHARED_DELTA": shared_delta,
            "STORE_SUM": total is not None,
        },
        num_warps=8 if size > 2048 else 4,
    )


def plan_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Launch, Tensor]:
    """RMSNorm of x [n, T, h] -> [n, T, h]."""
    out = torch.empty_like(x)
    return _plan(x, None, weight, None, out, eps), out


def norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps)


def plan_context_norm(
    states: Tensor, depth: Tensor, weight: Tensor, eps: float
) -> tuple[Launch, Tensor]:
    """RMSNorm of states [n, S, h] (cast to the weight's dtype) + depth [S, h] -> [n, S, h]."""
    out = torch.empty_like(states, dtype=weight.dtype)
    return _plan(states, depth, weight, None, out, eps, shared_delta=True), out


def context_norm_reference(states: Tensor, depth: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(states.to(weight.dtype) + depth, weight, eps)


def plan_add_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """x + delta and its RMSNorm, all [n, T, h]."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    return _plan(x, delta, weight, total, out, eps), (total, out)


def add_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm(total, weight, eps)


def plan_final_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, num_rows: int
) -> tuple[Launch, Tensor]:
    """RMSNorm of the last `num_rows` rows of each request of x + delta [n, T, h]."""
    out = x.new_empty(x.shape[0], num_rows, x.shape[2])
    return _plan(x, delta, weight, None, out, eps), out


def final_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, num_rows: int
) -> Tensor:
    return rms_norm((x + delta)[:, -num_rows:], weight, eps)
