"""Penalties on logits: pure functions of the tokens that were output so far; no host sync.

The rules are upstream's (sampling/penaltylib), which keep running sums per request and add one
token per decode step; a verify pass has D rows per request, each after a different output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PenaltyRules(NamedTuple):
    """The requests' parameters, n requests, and which kinds any of them uses (on the host)."""

    frequency: torch.Tensor  # [n, 1] float32
    presence: torch.Tensor  # [n, 1] float32
    repetition: torch.Tensor  # [n, 1] float32
    min_new_tokens: torch.Tensor  # [n, 1] int64; 0 where no stop token is to be held back
    stop_ids: torch.Tensor  # [n, S] int64, padded; 0 where there is none to hold back
    use_frequency: bool
    use_presence: bool
    use_repetition: bool


def additive_penalty(
    counts: torch.Tensor, num_outputs: torch.Tensor, rules: PenaltyRules
) -> torch.Tensor:
    """What is added to logits [n, V], after `num_outputs` [n, 1] output tokens.

    counts [n, V] float32 says how often each token was output. Frequency counts, presence does
    not; a stop token is out of reach while fewer than min_new_tokens are output.
    """
    penalty = torch.zeros_like(counts)
    if rules.use_frequency:
        penalty.sub_(rules.frequency * counts)
    if rules.use_presence:
        penalty.sub_(rules.presence * (counts > 0))
    if rules.stop_ids.shape[1]:
        held = num_outputs < rules.min_new_tokens  # [n, 1]
        stops = penalty.gather(1, rules.stop_ids)  # [n, S]
        penalty.scatter_(1, rules.stop_ids, torch.where(held, float("-inf"), stops))
    return penalty


def scaling_penalty(counts: torch.Tensor, rules: PenaltyRules) -> torch.Tensor | None:
    """The repetition penalty's divisor of logits [n, V], or None where no request has one."""
    if not rules.use_repetition:
        return None
    return torch.where(counts > 0, rules.repetition, 1.0)


def penalize_rows(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    num_outputs: torch.Tensor,
    rules: PenaltyRules,
) -> None:
    """Penalise the verify rows logits [n, D, V] in place.

    Row j has read drafts[:, :j] of the n requests' drafts [n, D-1] < V: it is penalised for these
    and for the output before the block, whose counts [n, V] and number [n, 1] include the anchor.
    """
    counts = counts.clone()
    one = torch.ones_like(counts[:, :1])
    for row in range(logits.shape[1]):
        if row:
            counts.scatter_add_(1, drafts[:, row - 1 : row], one)
        values = logits[:, row]  # [n, V]
        values.add_(additive_penalty(counts, num_outputs + row, rules))
        divisor = scaling_penalty(counts, rules)
        if divisor is not None:
            # A negative logit grows smaller by a product: the penalty never favours a token.
            values.copy_(torch.where(values < 0, values * divisor, values / divisor))
