"""One step of the sequential head around the projection (equations: drafter/sequential_head.py).

`advance`: the previous token from its candidates, its embedding, the next state s_k.
`combine`: the head vector u_k = W_s s_k + projected h_k.

Two kernels, not one: u_k needs all of s_k, and one program per request would read all 5 R^2 weights
through one multiprocessor. Here R / 16 programs per request read 16 rows each.
The state is carried in fp32; sums are in fp32 whatever the weights' dtype. A row's result does not
depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dlite.kernels.launch import Launch

_ROW_BLOCK = 16
_MAX_COLUMN_BLOCK = 256


@triton.jit
def _best_candidate(
    value_ptr, id_ptr, request, id_stride, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """The id of the greatest value, the lowest of equals; the only one where there is but one."""
    if COUNT == 1:
        token = tl.load(id_ptr + request * id_stride)
    else:
        i = tl.arange(0, BLOCK)
        value = tl.load(value_ptr + request * COUNT + i, mask=i < COUNT, other=float("-inf"))
        ids = tl.load(id_ptr + request * id_stride + i, mask=i < COUNT, other=0)
        is_best = (i < COUNT) & (value == tl.max(value, axis=0))
        token = tl.min(tl.where(is_best, ids, 0x7FFFFFFF), axis=0)
    return token


@triton.jit(do_not_specialize=["id_stride"], do_not_specialize_on_alignment=["id_ptr"])
def _pick_kernel(value_ptr, id_ptr, token_ptr, id_stride, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    token = _best_candidate(value_ptr, id_ptr, request, id_stride, COUNT, BLOCK)
    tl.store(token_ptr + request, token)


@triton.jit(do_not_specialize=["id_stride"], do_not_specialize_on_alignment=["id_ptr"])
def _advance_kernel(
    value_ptr,
    id_ptr,
    state_ptr,
    embedding_ptr,
    weight_ptr,
    bias_ptr,
    token_ptr,
    next_ptr,
    id_stride,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    HAS_STATE: tl.constexpr,  # else it is zero
):
    request = tl.program_id(0).to(tl.int64)
    token = _best_candidate(value_ptr, id_ptr, request, id_stride, COUNT, COUNT_BLOCK)
    if tl.program_id(1) == 0:
        tl.store(token_ptr + request, token)
    is_known = (token >= 0) & (token < VOCAB)  # an id from outside reads as zeros, not as a fault
    row = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    is_row = row < RANK
    gate_sum = tl.zeros([ROW_BLOCK, COLUMN_BLOCK], tl.float32)
    candidate_sum = tl.zeros([ROW_BLOCK, COLUMN_BLOCK], tl.float32)
    gate_row = weight_ptr + row[:, None] * (2 * RANK)  # gates are the first R rows
    candidate_row = gate_row + 2 * RANK * RANK
    for start in tl.static_range(0, RANK, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)
        is_column = column < RANK
        mask = is_row[:, None] & is_column[None, :]
        if HAS_STATE:
            state = tl.load(state_ptr + request * RANK + column, mask=is_column, other=0.0)
            weight = tl.load(gate_row + column[None, :], mask=mask, other=0.0)
            gate_sum += weight.to(tl.float32) * state[None, :]
            weight = tl.load(candidate_row + column[None, :], mask=mask, other=0.0)
            candidate_sum += weight.to(tl.float32) * state[None, :]
        previous = tl.load(
            embedding_ptr + token * RANK + column, mask=is_column & is_known, other=0.0
        ).to(tl.float32)
        weight = tl.load(gate_row + RANK + column[None, :], mask=mask, other=0.0)
        gate_sum += weight.to(tl.float32) * previous[None, :]
        weight = tl.load(candidate_row + RANK + column[None, :], mask=mask, other=0.0)
        candidate_sum += weight.to(tl.float32) * previous[None, :]
    gate_bias = tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    candidate_bias = tl.load(bias_ptr + RANK + row, mask=is_row, other=0.0).to(tl.float32)
    keep = tl.sigmoid(tl.sum(gate_sum, axis=1) + gate_bias)
    # tanh(x) = 2 sigmoid(2x) - 1
    candidate = 2 * tl.sigmoid(2 * (tl.sum(candidate_sum, axis=1) + candidate_bias)) - 1
    following = (1 - keep) * candidate
    if HAS_STATE:
        following += keep * tl.load(state_ptr + request * RANK + row, mask=is_row, other=0.0)
    tl.store(next_ptr + request * RANK + row, following, mask=is_row)


@triton.jit(do_not_specialize=["projected_stride"])
def _combine_kernel(
    state_ptr,
    weight_ptr,
    projected_ptr,
    vector_ptr,
    projected_stride,
    WEIGHT_STRIDE: tl.constexpr,
    RANK: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    is_row = row < RANK
    total = tl.zeros([ROW_BLOCK, COLUMN_BLOCK], tl.float32)
    for start in tl.static_range(0, RANK, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)
        is_column = column < RANK
        state = tl.load(state_ptr + request * RANK + column, mask=is_column, other=0.0)
        weight = tl.load(
            weight_ptr + row[:, None] * WEIGHT_STRIDE + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        total += weight.to(tl.float32) * state[None, :]
    projected = tl.load(projected_ptr + request * projected_stride + row, mask=is_row, other=0.0)
    vector = tl.sum(total, axis=1) + projected.to(tl.float32)
    tl.store(vector_ptr + request * RANK + row, vector.to(vector_ptr.dtype.element_ty), mask=is_row)


def _column_block(rank: int) -> int:
    return min(_MAX_COLUMN_BLOCK, triton.next_power_of_2(rank))


def plan_pick(values: Tensor, ids: Tensor) -> tuple[Launch, Tensor]:
    """The token [n] int64 of candidates values [n, C] fp32, ids [n, C] int64 (`plan_project`)."""
    n, count = ids.shape
    tokens = ids.new_empty(n)
    launch = Launch(
        _pick_kernel,
        (n,),
        (values, ids, tokens, ids.stride(0)),
        {"COUNT": count, "BLOCK": triton.next_power_of_2(count)},
        num_warps=4,
    )
    return launch, tokens


def pick_reference(values: Tensor, ids: Tensor) -> Tensor:
    best = values == values.amax(-1, keepdim=True)
    return torch.where(best, ids, 0x7FFFFFFF).amin(-1)


def plan_advance(
    values: Tensor | None,
    ids: Tensor,
    state: Tensor | None,
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The previous token and the state after it.

    values [n, C] fp32 and ids [n, C] int64: its candidates, values None if C = 1 (a known token).
    state [n, R] fp32, None for zero; embedding [V, R]; weight [2R, 2R] and bias [2R] of state_proj.
    -> token [n] int64, next state [n, R] fp32. An id outside the vocabulary embeds as zero.
    """
    n, count = ids.shape
    vocab, rank = embedding.shape
    token = ids.new_empty(n)
    following = ids.new_empty(n, rank, dtype=torch.float32)
    launch = Launch(
        _advance_kernel,
        (n, triton.cdiv(rank, _ROW_BLOCK)),
        (
            following if values is None else values,
            ids,
            following if state is None else state,
            embedding,
            weight,
            bias,
            token,
            following,
            ids.stride(0),
        ),
        {
            "COUNT": count,
            "COUNT_BLOCK": triton.next_power_of_2(count),
            "VOCAB": vocab,
            "RANK": rank,
            "ROW_BLOCK": _ROW_BLOCK,
            "COLUMN_BLOCK": _column_block(rank),
            "HAS_STATE": state is not None,
        },
        num_warps=4,
    )
    return launch, (token, following)


def advance_reference(
    values: Tensor | None,
    ids: Tensor,
    state: Tensor | None,
    embedding: Tensor,
    weight: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same in torch, in fp32."""
    token = ids[:, 0].clone() if values is None else pick_reference(values, ids)
    vocab, rank = embedding.shape
    known = (token >= 0) & (token < vocab)
    previous = embedding[token.clamp(0, vocab - 1)].float() * known[:, None]
    if state is None:
        state = torch.zeros_like(previous)
    raw = torch.cat([state, previous], dim=-1) @ weight.float().t() + bias.float()
    keep = torch.sigmoid(raw[:, :rank])
    return token, keep * state + (1 - keep) * torch.tanh(raw[:, rank:])


def plan_combine(state: Tensor, weight: Tensor, projected: Tensor) -> tuple[Launch, Tensor]:
    """Head vectors [n, R] in projected's dtype.

    state [n, R] fp32; weight [R, >= R]: state_hidden_mlp's, its first R columns are read;
    projected [n, R] = W_h h_k + b, rows of any stride.
    """
    n, rank = state.shape
    vectors = projected.new_empty(n, rank)
    launch = Launch(
        _combine_kernel,
        (n, triton.cdiv(rank, _ROW_BLOCK)),
        (state, weight, projected, vectors, projected.stride(0)),
        {
            "WEIGHT_STRIDE": weight.stride(0),
            "RANK": rank,
            "ROW_BLOCK": _ROW_BLOCK,
            "COLUMN_BLOCK": _column_block(rank),
        },
        num_warps=4,
    )
    return launch, vectors


def combine_reference(state: Tensor, weight: Tensor, projected: Tensor) -> Tensor:
    mixed = state @ weight[:, : state.shape[1]].float().t()
    return (mixed + projected.float()).to(projected.dtype)
