"""The training losses, exact over the whole vocabulary without ever holding [N, V] logits.

With z = u W^T the draft law is q = softmax(z). The target's law p is known on its M likeliest
tokens T, renormalised on T and 0 elsewhere, so that per draft
    CE = lse(z) - z_label
    TV = sum_i |p_i - q_i| = sum_T |p_i - q_i| + (1 - sum_T q_i)
TV is the L1 distance without the half, as in the authors' recipe. Its gradient needs
no second pass over the vocabulary: with s_i = sign(q_i - p_i) - 1 on T and c = sum_T s_i q_i,
    d CE / d z_j = q_j - [j = label]            d TV / d z_j = q_j (s_j [j in T] - c)
Both are q_j times a number per row, plus a few entries. So each block of rows is visited once:
logits, softmax, gradient, and the two products that carry it to u and W.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_ROWS = 512  # rows at a time; memory is O(_ROWS * V) of the compute dtype


class DraftLosses(NamedTuple):
    """`total` is differentiable; the others are measurements, fp32 [N]."""

    total: Tensor  # scalar: sum over rows of weight * (w_ce * CE + w_tv * TV)
    ce: Tensor
    tv: Tensor


class _FusedDraftLoss(torch.autograd.Function):
    """Computes the gradients in forward; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        head: Tensor,
        labels: Tensor,
        top_ids: Tensor,
        top_probs: Tensor,
        weights: Tensor,
        factors: tuple[float, float],
        dtype: torch.dtype,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        w_ce, w_tv = factors
        low_u, low_w = u.to(dtype), head.to(dtype)
        ce, tv = torch.empty(len(u)), torch.empty(len(u))
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_u = torch.empty_like(low_u) if wanted else None
        grad_w: Tensor | None = None
        for start in range(0, len(u), rows):
            block = slice(start, start + rows)
            label, ids, p = labels[block, None], top_ids[block], top_probs[block]
            z = low_u[block] @ low_w.T  # [rows, V]
            q = torch.softmax(z, -1)  # one fused pass, sums in fp32
            q_top = q.gather(-1, ids).float()
            z_label = z.gather(-1, label).float()
            # lse from the row's own peak, where q is largest and its rounding matters least.
            peak = p.argmax(-1, keepdim=True)
            lse = z.gather(-1, ids.gather(-1, peak)).float() - q_top.gather(-1, peak).log()
            ce[block] = (lse - z_label)[:, 0]
            tv[block] = (p - q_top).abs().sum(-1) + (1 - q_top.sum(-1)).clamp_min(0)
            if grad_u is None:
                continue
            # grad_z = scale * q but for the few entries below; scale is left to u's side of the
            # products, which is 400 times smaller than q. common >= w_ce, as slope <= 0.
            slope = torch.sign(q_top - p) - 1
            common = (w_ce - w_tv * (slope * q_top).sum(-1, keepdim=True)).clamp_min(1e-6)
            scale = weights[block, None] * common
            at_top = q_top + (w_tv * slope * q_top - w_ce * (ids == label)) / common
            at_label = q.gather(-1, label).float() - w_ce / common
            # put_ on flat places: scatter_ copies the whole block first.
            place = torch.arange(len(q))[:, None] * q.shape[-1]
            q.put_(place + label, at_label.to(dtype))
            q.put_(place + ids, at_top.to(dtype))
            grad_u[block] = (q @ low_w) * scale
            part = q.T @ (low_u[block] * scale).to(dtype)
            grad_w = part.to(head.dtype) if grad_w is None else grad_w.add_(part)
        if grad_u is not None:
            grad_w = torch.zeros_like(head) if grad_w is None else grad_w
            ctx.save_for_backward(grad_u.to(u.dtype), grad_w)
        total = (weights * (w_ce * ce + w_tv * tv)).sum()
        ctx.mark_non_differentiable(ce, tv)
        return total, ce, tv

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        grad_u, grad_w = ctx.saved_tensors
        return (grad_u * grad, grad_w * grad, *[None] * 7)


def draft_losses(
    u: Tensor,
    head: Tensor,
    labels: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    weights: Tensor,
    w_ce: float,
    w_tv: float,
    dtype: torch.dtype = torch.bfloat16,
    rows: int = _ROWS,
) -> DraftLosses:
    """CE and TV of N drafts against the target, and their weighted sum.

    u [N, R] head vectors; head [V, R] the output projection; labels [N] int64, the target's greedy
    tokens; top_ids int64 and top_logprobs, [N, M]: the target's law; weights [N] fp32.
    Products and q are in `dtype`; float32 makes all of it exact to rounding.
    """
    probs = torch.softmax(top_logprobs.float(), -1)
    return DraftLosses(
        *_FusedDraftLoss.apply(u, head, labels, top_ids, probs, weights, (w_ce, w_tv), dtype, rows)
    )


def position_weights(num_drafts: int, gamma: float) -> Tensor:
    """exp(-j/gamma) for draft j = 0..K-1, fp32 [K]."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


def sample_positions(labelled: Tensor, gamma: float, generator: torch.Generator) -> Tensor:
    """Which drafts of the batch to compute a loss for: bool [n, K], labelled [n, K] bool.

    Draft j is kept with probability exp(-j/gamma) and then counts fully: in expectation the
    gradient is that of the weights exp(-j/gamma), for about half of the vocabulary work.
    """
    chance = position_weights(labelled.shape[1], gamma)
    return labelled & (torch.rand(labelled.shape, generator=generator) < chance)


def expected_accept_length(tv: Tensor, labelled: Tensor) -> Tensor:
    """1 + sum_k prod_{j<=k} (1 - TV_j/2) per anchor: tv [n, K] -> fp32 [n].

    1 - TV/2 = sum_i min(p_i, q_i) is the probability that rejection sampling keeps a draft whose
    predecessors were right; positions without label count as rejected.
    """
    keep = (1 - tv / 2) * labelled
    return 1 + keep.cumprod(-1).sum(-1)
