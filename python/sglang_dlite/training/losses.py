"""The training losses, exact over the whole vocabulary without ever holding [N, V] logits.

With z = u W^T the draft law is q = softmax(z); p is the law to learn, the target's or the
teacher's. Per draft
    CE = lse(z) - z_label      TV = sum_i |p_i - q_i|      KL = sum_i p_i (log p_i - log q_i)
TV is the L1 distance without the half, as in the authors' recipe. With s_i = sign(q_i - p_i)
    dCE/dz_j = q_j - [j = label]      dTV/dz_j = q_j (s_j - sum_i s_i q_i)      dKL/dz_j = q_j - p_j
so each block of rows is visited once: logits, softmax, gradient, and the two products that carry
it to u and W.

Where p is known on its M likeliest tokens T only (renormalised, 0 elsewhere), s_j is 1 outside T,
and all three gradients are q_j times a number per row but for a few entries: no [rows, V]
temporary is needed beside q itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_TOP_ROWS = 512
_DENSE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}  # a CPU wants its temporaries in the caches


def block_rows(vocab_size: int, whole_law: bool, device: str) -> int:
    """Rows at a time; the losses' memory is O(rows * V)."""
    return max(16, _DENSE_ELEMENTS[device] // vocab_size) if whole_law else _TOP_ROWS


class Weights(NamedTuple):
    """How the losses of a row add up."""

    ce: float
    tv: float
    kl: float = 0.0


class TopP(NamedTuple):
    """p on M tokens: ids [N, M] int64, log-probabilities [N, M], renormalised."""

    ids: Tensor
    logprobs: Tensor


class LinearP(NamedTuple):
    """p = softmax(vectors @ matrix^T): [N, r] and [V, r]; made block by block, no gradient."""

    vectors: Tensor
    matrix: Tensor


class DraftLosses(NamedTuple):
    """`total` is differentiable; the others are measurements, fp32 [N], NaN where not asked for."""

    total: Tensor  # scalar: sum over rows of weight * (w_ce * CE + w_tv * TV + w_kl * KL)
    ce: Tensor
    tv: Tensor
    kl: Tensor


class _FusedDraftLoss(torch.autograd.Function):
    """Computes the gradients in forward; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        head: Tensor,
        labels: Tensor,
        law: TopP | LinearP | None,
        weights: Tensor,
        factors: Weights,
        dtype: torch.dtype,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        low_u, low_w = u.to(dtype), head.to(dtype)
        values = torch.full((3, len(u)), float("nan"), device=u.device)
        wants_u, wants_w = ctx.needs_input_grad[:2]
        grad_u = torch.empty_like(low_u) if wants_u or wants_w else None
        grad_w = torch.zeros_like(head, dtype=torch.float32) if wants_w else None
        for start in range(0, len(u), rows):
            block = slice(start, start + rows)
            z = low_u[block] @ low_w.T  # [rows, V]
            row_weights = weights[block, None]
            if isinstance(law, TopP):
                top = TopP(law.ids[block], law.logprobs[block])
                got, dz, scale = _top(z, labels[block, None], top, factors, row_weights)
            else:
                z_law = _law(law, block, dtype)
                got, dz, scale = _dense(z, labels[block, None], z_law, factors, row_weights)
            values[:, block] = got
            if grad_u is None:
                continue
            # `scale` is left to u's side of the products, which is much narrower than dz.
            grad_u[block] = ((dz @ low_w) * scale).to(dtype)
            if grad_w is not None:
                grad_w += dz.T @ (low_u[block] * scale).to(dtype)
        if grad_u is not None:
            ctx.save_for_backward(grad_u.to(u.dtype), grad_w)
        each = torch.tensor(factors, device=u.device)[:, None] * values
        total = (weights * each[torch.tensor(factors) != 0].sum(0)).sum()
        ctx.mark_non_differentiable(*values)
        return total, *values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        grad_u, grad_w = ctx.saved_tensors
        wants_u, wants_w = ctx.needs_input_grad[:2]
        by_u = grad_u * grad if wants_u else None
        by_w = grad_w * grad if wants_w else None
        return (by_u, by_w, *[None] * 6)


def _law(law: LinearP | None, block: slice, dtype: torch.dtype) -> Tensor | None:
    """The law's logits [rows, V] of these rows."""
    if law is None:
        return None
    return law.vectors[block].to(dtype) @ law.matrix.to(dtype).T


def _log_normaliser(logits: Tensor, probabilities: Tensor) -> Tensor:
    """logsumexp [rows, 1] fp32, from the peak, where rounding matters least: no third pass."""
    peak, place = logits.max(-1, keepdim=True)
    return peak.float() - probabilities.gather(-1, place).float().log()


def _dense(
    z: Tensor, label: Tensor, z_law: Tensor | None, w: Weights, row_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(CE, TV, KL) [3, rows]; dz / scale [rows, V] in z's dtype; scale [rows, 1].

    Every pass is in z's dtype, with sums in fp32: memory traffic is what this costs.
    """
    q = torch.softmax(z, -1)
    lse = _log_normaliser(z, q)
    ce = (lse - z.gather(-1, label).float())[:, 0]
    if z_law is None:
        tv = kl = torch.full_like(ce, float("nan"))
        dz = q.mul_(w.ce)
    else:
        p = torch.softmax(z_law, -1)
        kl = (lse - _log_normaliser(z_law, p))[:, 0]
        kl = kl + (z_law.sub_(z)).mul_(p).sum(-1, dtype=torch.float32)
        dz = q - p
        tv = dz.abs().sum(-1, dtype=torch.float32)
        if w.tv:
            dz.sign_()
            mean_sign = (dz * q).sum(-1, keepdim=True, dtype=torch.float32)
            dz.mul_(w.tv).add_((w.ce + w.kl - w.tv * mean_sign).to(z.dtype)).mul_(q)
        else:
            dz = q.mul_(w.ce + w.kl)
        if w.kl:
            dz.sub_(p, alpha=w.kl)
    place = torch.arange(len(z), device=z.device)[:, None] * z.shape[-1]
    dz.put_(place + label, dz.new_full(label.shape, -w.ce), accumulate=True)
    return torch.stack([ce, tv, kl]), dz, row_weights


def _top(
    z: Tensor, label: Tensor, law: TopP, w: Weights, row_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_dense`; q is turned into the gradient in its place."""
    ids, log_p = law.ids, torch.log_softmax(law.logprobs.float(), -1)
    p = log_p.exp()
    q = torch.softmax(z, -1)  # one fused pass, sums in fp32
    q_top = q.gather(-1, ids).float()
    z_label, z_top = z.gather(-1, label).float(), z.gather(-1, ids).float()
    # lse from the row's own peak, where q is largest and its rounding matters least.
    peak = p.argmax(-1, keepdim=True)
    lse = z_top.gather(-1, peak) - q_top.gather(-1, peak).log()
    ce = (lse - z_label)[:, 0]
    tv = (p - q_top).abs().sum(-1) + (1 - q_top.sum(-1)).clamp_min(0)
    kl = (p * (log_p - z_top + lse)).sum(-1)
    # dz = scale * q but for the entries on T and at the label. common >= 0, as slope <= 0; it is 0
    # where only TV counts and q is above p on all of T: every gradient is 0 there.
    slope = torch.sign(q_top - p) - 1
    common = w.ce + w.kl - w.tv * (slope * q_top).sum(-1, keepdim=True)
    common = common.clamp_min(1e-6)
    at_top = q_top + (w.tv * slope * q_top - w.kl * p - w.ce * (ids == label)) / common
    at_label = q.gather(-1, label).float() - w.ce / common
    # put_ on flat places: scatter_ copies the whole block first.
    place = torch.arange(len(q), device=q.device)[:, None] * q.shape[-1]
    q.put_(place + label, at_label.to(q.dtype))
    q.put_(place + ids, at_top.to(q.dtype))
    return torch.stack([ce, tv, kl]), q, row_weights * common


def draft_losses(
    u: Tensor,
    head: Tensor,
    labels: Tensor,
    law: TopP | LinearP | None,
    weights: Tensor,
    factors: Weights,
    dtype: torch.dtype = torch.bfloat16,
    rows: int | None = None,
) -> DraftLosses:
    """CE, TV and KL of N drafts, and their weighted sum.

    u [N, R] head vectors (or [N, h] hiddens, for the base CE); head [V, R] the output projection
    (or the target's lm_head [V, h]); labels [N] int64; law: p, None where only CE is wanted;
    weights [N] fp32. Products are in `dtype`, with float32 all of it is exact to rounding.
    """
    if rows is None:
        rows = block_rows(len(head), not isinstance(law, TopP), u.device.type)
    if law is None and (factors.tv or factors.kl):
        raise ValueError("TV and KL need a law")
    total, ce, tv, kl = _FusedDraftLoss.apply(u, head, labels, law, weights, factors, dtype, rows)
    return DraftLosses(total, ce, tv, kl)


def position_weights(num_drafts: int, gamma: float) -> Tensor:
    """exp(-j/gamma) for draft j = 0..K-1, fp32 [K]; ones for gamma = 0 (no decay)."""
    places = torch.arange(num_drafts, dtype=torch.float32)
    return torch.exp(-places / gamma) if gamma else torch.ones(num_drafts)


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
    keep = torch.where(labelled, 1 - tv / 2, 0.0)
    return 1 + keep.cumprod(-1).sum(-1)
