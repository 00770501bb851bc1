"""The tail of the verify graph: greedy acceptance, pivot gather and the next draft.

With it a decode step of plainly greedy requests is one replay. Imports torch alone. Nothing here
has run on a GPU yet (docs/cuda.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_dlite.speculative.acceptance import match_drafts, next_token_group, pivot_rows
from sglang_dlite.speculative.pivot_capture import split_states

if TYPE_CHECKING:
    from sglang_dlite.speculative.drafting import Drafter, Embedding


class GreedyRound(NamedTuple):
    """What a verify pass and the draft after it decide, for n requests."""

    num_accepted: Tensor  # [n] int64, accepted drafts 0..D-1
    output_ids: Tensor  # [n, D] int64, the first num_accepted + 1 of each row are output
    token_group: Tensor  # [n, G] int64, ends in the new anchor
    draft_ids: Tensor  # [n, K] int64


def greedy_round(
    candidates: Tensor,
    earlier: Tensor,
    logits: Tensor,
    states: Tensor,
    drafter: Drafter,
    embed: Embedding,
) -> GreedyRound:
    """Accept greedily and draft again: static shapes, nothing read back to the host.

    candidates [n, D] int64 is [anchor | drafts]; earlier [n, max(G-2, 0)] int64 the tokens before
    the anchor, oldest first; logits [n * D, V] and states [n * D, S * h] are the verify rows'.
    """
    n, width = candidates.shape
    config = drafter.config
    target_ids = torch.argmax(logits, dim=-1).view(n, width)
    accepted = match_drafts(candidates, target_ids)
    pivots = states[pivot_rows(accepted.num_accepted, width)]  # [n, S * h]
    group = next_token_group(earlier, candidates, accepted, config.anchor_group_size)
    block = drafter.draft(split_states(pivots, config.num_pivot_states), group, embed)
    return GreedyRound(accepted.num_accepted, accepted.output_ids, group, block.token_ids)


def is_plain_greedy(batch: Any) -> bool:
    """Whether argmax over the raw logits is the target's own token for the whole batch.

    batch is SGLang's ScheduleBatch. False for any option that changes logits or reads them
    afterwards: those take the steps one by one.
    """
    info = batch.sampling_info
    penalizer = info.penalizer_orchestrator
    return bool(
        info.is_all_greedy
        and not batch.has_grammar
        and not batch.return_logprob
        and not info.has_custom_logit_processor
        and not info.has_watermark_candidates
        and info.logit_bias is None
        and info.grammar_mask is None
        and info.acc_additive_penalties is None
        and info.acc_scaling_penalties is None
        and info.sampling_mask_batch_indices is None
        and (penalizer is None or not penalizer.is_required)
    )


class VerifyTail:
    """One of SGLang's `capture_tail_hooks`: runs behind the target while a graph is captured.

    The round is written to one static row per request, so that reading it back is a single copy.
    """

    def __init__(self, drafter: Drafter, embed: Embedding, width: int) -> None:
        """width is D. The graphs keep using `drafter` and `embed` as they are given here."""
        self._drafter, self._embed, self._width = drafter, embed, width
        group_size = drafter.config.anchor_group_size
        self._columns = (1, width, group_size, drafter.config.num_drafts)
        self._num_earlier = max(group_size - 2, 0)
        self._earlier: Tensor | None = None  # [max_bs, E]
        self._rounds: Tensor | None = None  # [max_bs, 1 + D + G + K]
        self._recording = False

    def fits(self, n: int) -> bool:
        """Whether a verify graph with this tail exists for a batch of n requests."""
        return self._rounds is not None and n <= self._rounds.shape[0]

    def reserve(self, max_batch_size: int, device: torch.device | str) -> None:
        """Make the static rows; before the first graph of a capture session."""
        ids = {"dtype": torch.int64, "device": device}
        self._earlier = torch.zeros(max_batch_size, self._num_earlier, **ids)
        self._rounds = torch.zeros(max_batch_size, sum(self._columns), **ids)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A forward that is captured inside gets the tail; others stay the target's alone."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def __call__(self, runner: Any, output: Any, forward_batch: Any, num_tokens: int) -> None:
        """SGLang's signature. Padding rows hold token ids of earlier batches: valid, unread."""
        if not self._recording:
            return
        assert self._earlier is not None and self._rounds is not None
        n = num_tokens // self._width
        step = greedy_round(
            forward_batch.input_ids.view(n, self._width),
            self._earlier[:n],
            output.next_token_logits,
            output.hidden_states,
            self._drafter,
            self._embed,
        )
        columns = [step.num_accepted[:, None], *step[1:]]
        self._rounds[:n].copy_(torch.cat(columns, dim=1))

    def stage(self, earlier: Tensor) -> None:
        """Before a replay: the tokens before the anchor, oldest first, [n, E] int64."""
        assert self._earlier is not None
        self._earlier[: earlier.shape[0]].copy_(earlier)

    def read(self, n: int) -> GreedyRound:
        """After a replay: the round of its first n requests, in memory of the caller's own."""
        assert self._rounds is not None
        accepted, output, group, drafts = self._rounds[:n].clone().split(self._columns, dim=1)
        return GreedyRound(accepted[:, 0], output, group, drafts)
