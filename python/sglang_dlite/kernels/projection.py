"""R -> V projection and argmax in one pass: the V logits of a draft are never written.

Each program takes a block of the vocabulary for a block of requests and keeps one candidate, the
best score and its id. `recurrence.py` reduces the candidates where it needs the token. The lowest
id wins a tie; a NaN counts as the least score, so that a token is always one of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dlite.kernels.launch import Launch, dot_precision
from sglang_dlite.kernels.noise import exponential_noise, exponential_noise_reference

VOCAB_BLOCK = 128
_MAX_REQUEST_BLOCK = 64


class Sampling(NamedTuple):
    """How each request's draft is drawn: one draw of softmax(logits / T)."""

    temperatures: Tensor  # [n] fp32; 0 is greedy
    seeds: Tensor  # [n] int64, of any stride: one seed for one draw


@triton.jit(do_not_specialize=["n", "seed_stride"], do_not_specialize_on_alignment=["seed_ptr"])
def _project_kernel(
    vectors_ptr,
    weight_ptr,
    temperature_ptr,
    seed_ptr,
    value_ptr,
    id_ptr,
    n,
    seed_stride,
    VOCAB: tl.constexpr,
    RANK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    VOCAB_BLOCK: tl.constexpr,
    REQUEST_BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SAMPLED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0)
    token = block * VOCAB_BLOCK + tl.arange(0, VOCAB_BLOCK)
    request = tl.program_id(1) * REQUEST_BLOCK + tl.arange(0, REQUEST_BLOCK)
    is_token, is_request = token < VOCAB, request < n
    weight_row = weight_ptr + token.to(tl.int64)[:, None] * RANK
    vector_row = vectors_ptr + request.to(tl.int64)[None, :] * RANK
    score = tl.zeros([VOCAB_BLOCK, REQUEST_BLOCK], tl.float32)
    for start in range(0, RANK, RANK_BLOCK):
        r = start + tl.arange(0, RANK_BLOCK)
        weight = tl.load(
            weight_row + r[None, :], mask=is_token[:, None] & (r < RANK)[None, :], other=0.0
        )
        vector = tl.load(
            vector_row + r[:, None], mask=is_request[None, :] & (r < RANK)[:, None], other=0.0
        )
        score = tl.dot(weight, vector, score, input_precision=PRECISION)
    if SAMPLED:
        temperature = tl.load(temperature_ptr + request, mask=is_request, other=0.0)[None, :]
        seed = tl.load(seed_ptr + request * seed_stride, mask=is_request, other=0)[None, :]
        noise = exponential_noise(seed, token[:, None])
        drawn = score / tl.where(temperature > 0, temperature, 1.0) - tl.log(noise)
        score = tl.where(temperature > 0, drawn, score)
    score = tl.where(is_token[:, None] & (score == score), score, float("-inf"))
    best = tl.max(score, axis=0)
    is_best = is_token[:, None] & (score == best[None, :])
    best_id = tl.min(tl.where(is_best, token[:, None], VOCAB), axis=0)
    place_out = request.to(tl.int64) * CANDIDATES + block
    tl.store(value_ptr + place_out, best, mask=is_request)
    tl.store(id_ptr + place_out, best_id.to(tl.int64), mask=is_request)


def plan_project(
    vectors: Tensor, weight: Tensor, sampling: Sampling | None
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """Candidates of the logits of vectors [n, R] under weight [V, R].

    -> values [n, C] fp32 and ids [n, C] int64, C = ceil(V / VOCAB_BLOCK), ids ascending.
    """
    (n, rank), vocab = vectors.shape, weight.shape[0]
    candidates = triton.cdiv(vocab, VOCAB_BLOCK)
    values = vectors.new_empty(n, candidates, dtype=torch.float32)
    ids = vectors.new_empty(n, candidates, dtype=torch.int64)
    exact = weight.dtype == torch.float32  # multiplied without tensor cores: more registers
    request_block = min(
        16 if exact or sampling is not None else _MAX_REQUEST_BLOCK,
        max(16, triton.next_power_of_2(n)),
    )
    # Without sampling nothing reads these.
    temperatures, seeds = (values, ids) if sampling is None else sampling
    launch = Launch(
        _project_kernel,
        (candidates, triton.cdiv(n, request_block)),
        (vectors, weight, temperatures, seeds, values, ids, n, seeds.stride(0)),
        {
            "VOCAB": vocab,
            "RANK": rank,
            "CANDIDATES": candidates,
            "VOCAB_BLOCK": VOCAB_BLOCK,
            "REQUEST_BLOCK": request_block,
            "RANK_BLOCK": min(32 if exact else 64, max(16, triton.next_power_of_2(rank))),
            "SAMPLED": sampling is not None,
            "PRECISION": dot_precision(weight.dtype),
        },
        num_warps=8 if exact else 4,
    )
    return launch, (values, ids)


def project_reference(
    vectors: Tensor, weight: Tensor, sampling: Sampling | None
) -> tuple[Tensor, Tensor]:
    """The same in torch, from all V logits, in fp32."""
    vocab = weight.shape[0]
    score = vectors.float() @ weight.float().t()  # [n, V]
    if sampling is not None:
        tokens = torch.arange(vocab, device=weight.device)
        noise = exponential_noise_reference(sampling.seeds[:, None], tokens[None])
        hot = sampling.temperatures[:, None] > 0
        drawn = score / torch.where(hot, sampling.temperatures[:, None], 1.0) - noise.log()
        score = torch.where(hot, drawn, score)
    score = torch.where(score.isnan(), float("-inf"), score)
    padding = -vocab % VOCAB_BLOCK
    score = torch.nn.functional.pad(score, (0, padding), value=float("-inf"))
    blocks = score.unflatten(1, (-1, VOCAB_BLOCK))  # [n, C, VOCAB_BLOCK]
    values = blocks.amax(-1)
    first = (blocks == values[..., None]).int().argmax(-1)
    offsets = torch.arange(blocks.shape[1], device=weight.device) * VOCAB_BLOCK
    return values, first + offsets
