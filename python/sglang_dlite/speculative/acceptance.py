"""Acceptance rules: pure functions on tensors, no sglang, no host synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_dlite.drafter.sampling import draw


class Acceptance(NamedTuple):
    """What one verify pass keeps, for n requests and verify width D."""

    num_accepted: torch.Tensor  # [n] int64, accepted drafts 0..D-1
    output_ids: torch.Tensor  # [n, D] int64, the first num_accepted + 1 of each row are output
    anchor: torch.Tensor  # [n] int64, the newest verified token


def match_drafts(candidates: torch.Tensor, target_ids: torch.Tensor) -> Acceptance:
    """Sample-and-match: keep drafts while each equals the target's own token.

    candidates [n, D] int64 is [anchor | drafts]; target_ids [n, D] int64 is the target's token
    at each verify row (argmax, or a sample under the request's parameters). Row j has read
    candidates[:, : j + 1], so its token is the target's continuation of exactly that prefix; it
    counts only while the prefix was kept. Each output token is therefore a fresh choice of the
    target given the output before it: exact for any deterministic draft.

    The accepted drafts equal the target's tokens, hence the output row is target_ids itself:
    num_accepted drafts, then the target's token at the first mismatch, then padding.
    """
    matches = candidates[:, 1:] == target_ids[:, :-1]  # [n, D-1]
    num_accepted = matches.cumprod(dim=1).sum(dim=1)  # [n]
    anchor = target_ids.gather(1, num_accepted[:, None]).squeeze(1)  # [n]
    return Acceptance(num_accepted, target_ids, anchor)


def reject_drafts(
    candidates: torch.Tensor,
    target_law: torch.Tensor,
    draft_law: torch.Tensor,
    accept_uniforms: torch.Tensor,
    draw_uniforms: torch.Tensor,
) -> Acceptance:
    """Rejection sampling: keep draft j with chance min(1, p_j / q_j), else draw from (p_j - q_j)+.

    candidates [n, D] int64 is [anchor | drafts]; target_law [n, D, V] fp32 is p, row j for the
    token after candidates[:, : j + 1]; draft_law [n, K, V] fp32 is q, the laws that the drafts
    were really drawn from; rows of both sum to 1. accept_uniforms [n, K] and draw_uniforms [n]
    fp64 are in [0, 1). A block that is kept whole is followed by a token drawn from p's last row.
    The output has the target's law (Leviathan et al., arXiv 2211.17192, theorem 3.5; Chen et al.,
    arXiv 2302.01318).

    Where p is one token's (a greedy request), q plays no part: the draft is kept if it is that
    token, and else the residual is that token's.
    """
    drafts = candidates[:, 1:]  # [n, K]
    num_drafts = drafts.shape[1]
    p = target_law[:, :-1].gather(2, drafts[:, :, None]).squeeze(2)  # [n, K]
    q = draft_law.gather(2, drafts[:, :, None]).squeeze(2)  # [n, K]
    kept = accept_uniforms.double() * q < p  # u < p / q; never where p = 0
    num_accepted = kept.cumprod(dim=1).sum(dim=1)  # [n]

    rows = torch.arange(len(candidates), device=candidates.device)
    law = target_law[rows, num_accepted]  # [n, V]: of the first rejected draft, or the bonus
    rejected = draft_law[rows, num_accepted.clamp(max=num_drafts - 1)]  # [n, V]
    rejected = rejected * (num_accepted < num_drafts)[:, None]
    residual = (law - rejected).clamp(min=0)
    # p = q leaves no mass, and rejects nothing but by rounding.
    residual = torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, law)
    anchor = draw(residual, draw_uniforms)  # [n]
    # Rejected drafts leave with nothing of them: they may be ids that the target does not have.
    places = torch.arange(num_drafts, device=drafts.device)
    kept_ids = torch.where(places < num_accepted[:, None], drafts, anchor[:, None])
    output_ids = torch.cat([kept_ids, anchor[:, None]], dim=1)  # [n, D]
    return Acceptance(num_accepted, output_ids, anchor)


def pivot_rows(num_accepted: torch.Tensor, width: int) -> torch.Tensor:
    """Row of each request's pivot among the n * width verify rows: [n] int64.

    The pivot is the last token whose K/V stays: the old anchor plus the accepted drafts, i.e.
    row num_accepted of its request (DLite release, `spec_generate`).
    """
    first = torch.arange(num_accepted.shape[0], device=num_accepted.device) * width  # [n]
    return first + num_accepted


def next_token_group(
    earlier: torch.Tensor, candidates: torch.Tensor, accepted: Acceptance, group_size: int
) -> torch.Tensor:
    """The G real tokens that end in the new anchor: [n, G] int64.

    earlier [n, max(G-2, 0)] are the tokens before the old anchor, oldest first; candidates
    [n, D]. The stream earlier | candidates[: num_accepted + 1] | anchor is what is verified.
    """
    if group_size == 1:
        return accepted.anchor[:, None]
    stream = torch.cat([earlier, candidates], dim=1)  # [n, G-2+D]
    offsets = torch.arange(group_size - 1, device=stream.device)  # [G-1]
    # candidates[num_accepted] stands at G-2 + num_accepted; the window of G-1 ends there.
    window = stream.gather(1, accepted.num_accepted[:, None] + offsets)  # [n, G-1]
    return torch.cat([window, accepted.anchor[:, None]], dim=1)
