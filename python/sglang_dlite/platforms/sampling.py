"""Sampling on a CPU without sorting the whole vocabulary for rows that do not need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A nucleus is seldom wider; where one is, the whole vocabulary is sorted as before.
_CANDIDATES = 256


def sample_rows(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    return_filtered_probs: bool = False,
    max_top_k: int | None = None,
) -> Any:
    """AROUND `top_k_top_p_min_p_sampling_from_probs_torch`: token ids int32 [n] of probs [n, V].

    Upstream sorts every row as soon as one request of the batch asks for top-k, top-p or min-p,
    and a greedy request is top-k = 1: one sampled request among 47 greedy ones costs a sort of
    48 x V numbers per step. Each row's law stays the same; what it needs is done for it:
    the peak for top-k = 1, a plain draw without any filter, and the filters on the 256 likeliest
    tokens where the nucleus ends among them. Seeded rows are left to upstream, whose draw depends
    on the order of the sort. Where the filtered weights are asked for, those are the 256's too.
    """
    if probs.device.type != "cpu" or sampling_seed is not None:
        return original(
            probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions,
            return_filtered_probs=return_filtered_probs, max_top_k=max_top_k,
        )  # fmt: skip
    probs = _allow_one_token(probs)
    if return_filtered_probs:
        return _with_weights(original, probs, top_ks, top_ps, min_ps, need_min_p_sampling)
    vocab_size = probs.shape[-1]
    greedy = top_ks == 1
    plain = ~greedy & (top_ks >= vocab_size) & (top_ps >= 1.0)
    if need_min_p_sampling:
        plain &= min_ps <= 0.0
    tokens = torch.empty(len(probs), dtype=torch.int32)
    for kind in (greedy, plain, ~(greedy | plain)):
        rows = kind.nonzero().squeeze(1)  # [m]
        if not len(rows):
            continue
        some = probs[rows]  # [m, V]
        if kind is greedy:
            picked = some.argmax(-1)
        elif kind is plain:
            picked = torch.multinomial(some, num_samples=1).squeeze(1)
        else:
            picked = original(
                some, top_ks[rows], top_ps[rows], min_ps[rows], need_min_p_sampling, None, None,
                max_top_k=_sufficient(some, top_ks[rows], top_ps[rows]),
            )  # fmt: skip
        tokens[rows] = picked.to(torch.int32)
    return tokens


def _allow_one_token(probs: Tensor) -> Tensor:
    """Rows that allow no token, NaN after softmax, take token 0, as argmax would.

    A request's options may contradict each other (a grammar that only allows its end, under
    min_new_tokens). Drawing from such a row ends the scheduler, and all other requests with it.
    """
    nothing = probs[:, :1].isnan()  # [n, 1]: all of a row's are, or none
    if not bool(nothing.any()):
        return probs
    first = torch.zeros_like(probs[:1])
    first[0, 0] = 1.0
    return torch.where(nothing, first, probs)


def _with_weights(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
) -> Any:
    """As upstream's with return_filtered_probs: (tokens, weights, their ids, the drawn weights)."""
    filters = (top_ks, top_ps, min_ps, need_min_p_sampling, None, None)
    count = _sufficient(probs, top_ks, top_ps)
    if count is None:
        return original(probs, *filters, return_filtered_probs=True)
    likeliest, ids = probs.topk(count, dim=-1)  # [n, 256]
    places, weights, order, drawn = original(likeliest, *filters, return_filtered_probs=True)
    ids = ids.to(torch.int32)
    tokens = ids.gather(1, places[:, None].long()).squeeze(1)
    return tokens, weights, ids.gather(1, order.long()), drawn


def _sufficient(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> int | None:
    """How many of the likeliest tokens hold all that survives top-k and top-p; None: all."""
    if probs.shape[-1] <= _CANDIDATES:
        return None
    mass = probs.topk(_CANDIDATES, dim=-1, sorted=False).values.sum(-1)
    # A margin for the sum's rounding: the cut is where upstream's own running sum passes top-p.
    enough = (top_ks <= _CANDIDATES) | (mass > top_ps + 1e-3)
    return _CANDIDATES if bool(enough.all()) else None
