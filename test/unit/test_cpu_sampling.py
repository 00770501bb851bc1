"""The CPU sampler draws from the law that upstream's draws from, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler
from sglang_dlite.platforms import sampling

V, DRAWS = 600, 20_000

upstream = sampler.top_k_top_p_min_p_sampling_from_probs_torch
upstream = getattr(upstream, "__wrapped__", upstream)


def draw(function: Any, probs: torch.Tensor, kinds: list[tuple[int, float, float]]) -> torch.Tensor:
    """Token ids [DRAWS, len(kinds)]; kinds are (top_k, top_p, min_p) of each row."""
    top_k, top_p, min_p = map(torch.tensor, zip(*kinds, strict=True))
    rows = probs.repeat(DRAWS, 1)
    tokens = function(
        rows.clone(), top_k.int().repeat(DRAWS), top_p.float().repeat(DRAWS),
        min_p.float().repeat(DRAWS), bool(min_p.any()), None, None,
    )  # fmt: skip
    return tokens.view(DRAWS, len(kinds))


def ours(*args: Any, **kwargs: Any) -> Any:
    return sampling.sample_rows(upstream, *args, **kwargs)


@pytest.mark.parametrize("scale", [1.0, 6.0])  # a flat law, whose nucleus is wide; a peaked one
def test_each_row_has_its_own_law(scale: float) -> None:
    torch.manual_seed(0)
    kinds = [
        (1, 1.0, 0.0),
        (1 << 30, 1.0, 0.0),
        (5, 1.0, 0.0),
        (1 << 30, 0.7, 0.0),
        (40, 0.9, 0.05),
    ]
    probs = torch.softmax(scale * torch.randn(len(kinds), V), -1)
    mine, theirs = draw(ours, probs, kinds), draw(upstream, probs, kinds)
    assert (mine[:, 0] == probs[0].argmax()).all()
    for row in range(1, len(kinds)):
        got = mine[:, row].long().bincount(minlength=V).double()
        want = theirs[:, row].long().bincount(minlength=V).double()
        if row != 1:  # filtered: nothing outside of the support, all of a small support met
            kept = kept_tokens(probs[row], kinds[row])
            assert not got[~kept].any()
        both = got + want
        seen = both >= 10
        chi = ((got - want) ** 2 / both)[seen].sum()
        freedom = int(seen.sum())
        assert chi < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("weights", [False, True])
def test_a_row_that_allows_no_token_takes_token_0(weights: bool) -> None:
    """And disturbs nobody: upstream's draw ends the scheduler."""
    logits = torch.full((3, V), float("-inf"))
    logits[0, 7] = logits[2, 9] = 0.0
    filters = (
        torch.full((3,), 20, dtype=torch.int32), torch.full((3,), 0.9), torch.zeros(3), False,
        None, None,
    )  # fmt: skip
    drawn = ours(torch.softmax(logits, -1), *filters, return_filtered_probs=weights)
    assert (drawn[0] if weights else drawn).tolist() == [7, 0, 9]


def kept_tokens(probs: torch.Tensor, kind: tuple[int, float, float]) -> torch.Tensor:
    """Which tokens survive (top_k, top_p, min_p): bool [V]."""
    top_k, top_p, min_p = kind
    ordered, ids = probs.sort(descending=True)
    keep = (torch.arange(V) < top_k) & (ordered.cumsum(0) - ordered <= top_p)
    keep &= ordered >= min_p * ordered[0]
    return torch.zeros(V, dtype=torch.bool).scatter_(0, ids, keep)


def test_the_cut_to_the_likeliest_is_only_made_where_it_loses_nothing() -> None:
    flat, peaked = torch.full((1, V), 1 / V), torch.zeros(1, V)
    peaked[0, 3] = 1.0
    free, nucleus = torch.tensor([1 << 30]), torch.tensor([0.9])
    assert sampling._sufficient(flat, free, nucleus) is None
    assert sampling._sufficient(flat, torch.tensor([20]), nucleus) == 256
    assert sampling._sufficient(peaked, free, nucleus) == 256
    assert sampling._sufficient(peaked[:, :100], free, nucleus) is None


@pytest.mark.parametrize("change", ["seeded", "filtered"])
def test_what_needs_the_whole_sort_is_upstreams(change: str) -> None:
    calls = []
    ones = torch.ones(1)
    sampling.sample_rows(
        lambda *args, **kwargs: calls.append((args, kwargs)), torch.ones(1, 4), ones.int(), ones,
        ones * 0, False, torch.tensor([7]) if change == "seeded" else None, ones,
        return_filtered_probs=change == "filtered",
    )  # fmt: skip
    assert len(calls) == 1


def test_filtered_weights_of_the_likeliest() -> None:
    """As upstream's own; those beyond the cut are 0 there."""
    probs = torch.softmax(6 * torch.randn(4, V, generator=torch.Generator().manual_seed(2)), -1)
    top_k = torch.tensor([1 << 30, 5, 40, 1 << 30], dtype=torch.int32)
    top_p, min_p = torch.tensor([0.7, 1.0, 0.9, 0.6]), torch.tensor([0.0, 0.0, 0.05, 0.0])
    results = []
    for function in (ours, upstream):
        tokens, weights, ids, picked = function(
            probs.clone(), top_k, top_p, min_p, True, None, None, return_filtered_probs=True
        )
        assert torch.equal(picked, probs.gather(1, tokens[:, None].long()).squeeze(1))
        results.append(torch.zeros(4, V).scatter_(1, ids.long(), weights))
    assert torch.equal(*results)
