"""The drafter's attention in one kernel: q/k norm, rotary, softmax over S + T keys.

A request has T = G + K queries and S + T keys, a few dozen at most, so that one program holds all
scores of its heads at once: no running softmax, no cache, no mask but padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sglang_dlite.drafter.backbone import rms_norm, rotate
from sglang_dlite.kernels.launch import Launch, dot_precision

MAX_KEYS = 128
MAX_HEAD_DIM = 256
_MAX_QUERY_ROWS = 64  # queries x heads of one program, unless one head alone has more


@triton.jit
def _norm_rotate(first, second, weight_ptr, cos, sin, eps, HEAD_DIM: tl.constexpr, BLOCK):
    """RMSNorm and RoPE of rows held as halves [rows, BLOCK]; cos and sin likewise, in fp32."""
    dtype: tl.constexpr = first.dtype
    half: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK)
    inside = column < half
    first_weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    second_weight = tl.load(weight_ptr + half + column, mask=inside, other=0.0).to(tl.float32)
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_DIM + eps)[:, None]
    a = (first_weight[None, :] * (a * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    b = (second_weight[None, :] * (b * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def _attention_kernel(
    qkv_ptr,
    context_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    eps,
    scale,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of this program, all of one K/V head
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    half: tl.constexpr = HEAD_DIM // 2
    kv_width: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    width: tl.constexpr = NUM_HEADS * HEAD_DIM + 2 * kv_width
    request = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    kv_head = first_head // (NUM_HEADS // NUM_KV_HEADS)
    column = tl.arange(0, HALF_BLOCK)
    narrow = (column < half)[None, :]

    # Keys: the S context slots, then the T queries' own; the tables have their positions.
    key = tl.arange(0, KEY_BLOCK)
    is_slot = key < SLOTS
    is_query = (key >= SLOTS) & (key < SLOTS + QUERIES)
    slot_base = (request * SLOTS + key) * (2 * kv_width) + kv_head * HEAD_DIM
    query_base = (request * QUERIES + key - SLOTS) * width + (NUM_HEADS + kv_head) * HEAD_DIM
    slot_ptr = context_ptr + slot_base[:, None] + column[None, :]
    own_ptr = qkv_ptr + query_base[:, None] + column[None, :]
    slot_mask, own_mask = is_slot[:, None] & narrow, is_query[:, None] & narrow
    k_first = tl.where(
        is_slot[:, None],
        tl.load(slot_ptr, mask=slot_mask, other=0.0),
        tl.load(own_ptr, mask=own_mask, other=0.0),
    )
    k_second = tl.where(
        is_slot[:, None],
        tl.load(slot_ptr + half, mask=slot_mask, other=0.0),
        tl.load(own_ptr + half, mask=own_mask, other=0.0),
    )
    table = key[:, None] * HEAD_DIM + column[None, :]  # its two halves are equal
    table_mask = (key < SLOTS + QUERIES)[:, None] & narrow
    cos = tl.load(cos_ptr + table, mask=table_mask, other=0.0)
    sin = tl.load(sin_ptr + table, mask=table_mask, other=0.0)
    k_first, k_second = _norm_rotate(
        k_first, k_second, k_norm_ptr, cos, sin, eps, HEAD_DIM, HALF_BLOCK
    )

    # Queries: row = head * T + t.
    row = tl.arange(0, QUERY_BLOCK)
    head, t = first_head + row // QUERIES, row % QUERIES
    is_row = row < HEADS * QUERIES
    q_base = (request * QUERIES + t) * width + head * HEAD_DIM
    q_ptr = qkv_ptr + q_base[:, None] + column[None, :]
    q_mask = is_row[:, None] & narrow
    q_first = tl.load(q_ptr, mask=q_mask, other=0.0)
    q_second = tl.load(q_ptr + half, mask=q_mask, other=0.0)
    table = (SLOTS + t)[:, None] * HEAD_DIM + column[None, :]
    cos = tl.load(cos_ptr + table, mask=q_mask, other=0.0)
    sin = tl.load(sin_ptr + table, mask=q_mask, other=0.0)
    q_first, q_second = _norm_rotate(
        q_first, q_second, q_norm_ptr, cos, sin, eps, HEAD_DIM, HALF_BLOCK
    )

    scores = tl.dot(q_first, tl.trans(k_first), input_precision=PRECISION)
    scores += tl.dot(q_second, tl.trans(k_second), input_precision=PRECISION)
    scores = tl.where((key < SLOTS + QUERIES)[None, :], scores * scale, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    total = tl.sum(weights, axis=1)

    dim = tl.arange(0, DIM_BLOCK)
    wide = (dim < HEAD_DIM)[None, :]
    slot_ptr = context_ptr + slot_base[:, None] + kv_width + dim[None, :]
    own_ptr = qkv_ptr + query_base[:, None] + kv_width + dim[None, :]
    v = tl.where(
        is_slot[:, None],
        tl.load(slot_ptr, mask=is_slot[:, None] & wide, other=0.0),
        tl.load(own_ptr, mask=is_query[:, None] & wide, other=0.0),
    )
    mixed = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION) / total[:, None]
    out_base = (request * QUERIES + t) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    tl.store(
        out_ptr + out_base[:, None] + dim[None, :],
        mixed.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & wide,
    )


def _heads_per_program(num_heads: int, num_kv_heads: int, num_queries: int) -> int:
    """The most heads of one K/V head, a divisor of their number, whose rows fit a program."""
    shared = num_heads // num_kv_heads
    fitting = [
        heads
        for heads in range(1, shared + 1)
        if shared % heads == 0 and heads * num_queries <= _MAX_QUERY_ROWS
    ]
    return max(fitting, default=1)


def plan_attention(
    qkv: Tensor,
    context: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[Launch, Tensor]:
    """Attention of T queries over S context slots and themselves.

    qkv [n, T, (Hq + 2 Hkv) d]: q, k, v before norm and rotary. context [n, S, 2 Hkv d]: k, v of the
    slots, likewise. q_norm, k_norm [d]; cos, sin [S+T, d] fp32, halves equal. -> [n, T, Hq d].
    """
    n, num_queries, _ = qkv.shape
    num_slots, d = context.shape[1], q_norm.shape[0]
    heads = _heads_per_program(num_heads, num_kv_heads, num_queries)
    out = qkv.new_empty(n, num_queries, num_heads * d)
    block = lambda size: max(16, triton.next_power_of_2(size))  # noqa: E731 (tl.dot's least)
    launch = Launch(
        _attention_kernel,
        (n, num_heads // heads),
        (qkv, context, q_norm, k_norm, cos, sin, out, eps, d**-0.5),
        {
            "QUERIES": num_queries,
            "SLOTS": num_slots,
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "HEAD_DIM": d,
            "HEADS": heads,
            "QUERY_BLOCK": block(heads * num_queries),
            "KEY_BLOCK": block(num_slots + num_queries),
            "HALF_BLOCK": block(d // 2),
            "DIM_BLOCK": block(d),
            "PRECISION": dot_precision(qkv.dtype),
        },
        num_warps=4,
    )
    return launch, out


def attention_reference(
    qkv: Tensor,
    context: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> Tensor:
    """The same with the module's own operators."""
    n, num_queries, _ = qkv.shape
    d = q_norm.shape[0]
    q, own = qkv.split([num_heads * d, 2 * num_kv_heads * d], dim=-1)
    q = q.view(n, num_queries, num_heads, d).transpose(1, 2)
    keys = torch.cat([context, own], dim=1).unflatten(2, (2, num_kv_heads, d))
    k, v = keys.permute(2, 0, 3, 1, 4)  # [n, Hkv, S+T, d] each
    out = F.scaled_dot_product_attention(
        rotate(rms_norm(q, q_norm, eps), cos[-num_queries:], sin[-num_queries:]),
        rotate(rms_norm(k, k_norm, eps), cos, sin),
        v,
        enable_gqa=num_heads != num_kv_heads,
    )
    return out.transpose(1, 2).flatten(2)
