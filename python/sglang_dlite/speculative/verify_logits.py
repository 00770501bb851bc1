"""Request options that change logits, exact at each of the D verify rows.

Row j predicts the token after the anchor and j drafts, so whatever depends on the output so far
(penalties, min_new_tokens, a grammar, a processor) is evaluated for exactly that output. Upstream's
order is kept: penalties, grammar, logit_bias, custom processors. A batch without such options
passes through untouched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask
from sglang.srt.utils.common import async_h2d

from sglang_dlite.speculative.logit_processors import apply_processors, row_params
from sglang_dlite.speculative.output_history import OutputHistory, PendingOutput, output_counts
from sglang_dlite.speculative.penalties import (
    PenaltyRules,
    additive_penalty,
    penalize_rows,
    scaling_penalty,
)

Barrier = Callable[[], None]


def penalty_rules(reqs: list[Any], device: torch.device) -> PenaltyRules:
    """The penalties of upstream's requests."""
    params = [req.sampling_params for req in reqs]
    numbers = [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params]
    frequency, presence, repetition = async_h2d(numbers, dtype=torch.float32, device=device).split(
        1, dim=1
    )
    # A request that has output enough already needs no stop token held back.
    stops = [
        sorted(stop_tokens(req)) if len(req.output_ids) < p.min_new_tokens else []
        for req, p in zip(reqs, params, strict=True)
    ]
    longest = max(map(len, stops))
    ids = [row + (row[:1] or [0]) * (longest - len(row)) for row in stops]
    least = [[p.min_new_tokens if row else 0] for p, row in zip(params, stops, strict=True)]
    return PenaltyRules(
        frequency=frequency,
        presence=presence,
        repetition=repetition,
        min_new_tokens=async_h2d(least, dtype=torch.int64, device=device),
        stop_ids=async_h2d(ids, dtype=torch.int64, device=device),
        use_frequency=any(row[0] != 0.0 for row in numbers),
        use_presence=any(row[1] != 0.0 for row in numbers),
        use_repetition=any(row[2] != 1.0 for row in numbers),
    )


def stop_tokens(req: Any) -> set[int]:
    """The token ids that end a request, as upstream's min_new_tokens understands it."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= set(req.tokenizer.additional_stop_token_ids or ())
    return {token for token in ids | {req.tokenizer.eos_token_id} if token is not None}


def needs_history(info: Any) -> bool:
    """Whether a batch's logits depend on its output, by upstream's forward-only SamplingBatchInfo.

    Upstream has accumulated penalties for the batch if any request has one.
    """
    return info.acc_additive_penalties is not None or info.has_custom_logit_processor


def allow_one_token(logits: torch.Tensor) -> None:
    """Let rows [m, V] without an allowed token take token 0, in place, as argmax would.

    Behind a draft that the target never takes, the options may contradict each other: a grammar
    at its end allows the end-of-text token only, and min_new_tokens holds that back. Drawing from
    such a row, which filters lead to, ends the scheduler.
    """
    nothing = logits.amax(-1) == float("-inf")  # [m]
    logits[:, 0].masked_fill_(nothing, 0.0)


class VerifyLogits:
    """Applies request options in prefills and verify passes of width D."""

    def __init__(self, width: int, request_table: Callable[[], torch.Tensor]) -> None:
        """`request_table` gives upstream's req_to_token once it exists: its rows are counted."""
        self._width = width
        self._request_table = request_table

    @cached_property
    def _history(self) -> OutputHistory:
        table = self._request_table()
        return OutputHistory(table.shape[0], self._width, table.device)

    # -- prefill --------------------------------------------------------------------------------

    def before_extend(self, batch: Any, barrier: Barrier | None) -> None:
        """Bring the options of a prefill batch up to date; upstream then applies them itself.

        Fresh prompts have no output. A retracted request has, which upstream forgets, and so have
        the decoding rows of a mixed batch, where upstream lags behind a pending verify pass.
        """
        info, mixed = batch.sampling_info, batch.forward_mode.is_mixed()
        if mixed and batch.has_grammar and barrier is not None:
            barrier()
        if not needs_history(info):
            return
        if not mixed and not any(len(req.output_ids) for req in batch.reqs):
            return
        pending = self._history.pending(batch, batch.seq_lens)
        if info.acc_additive_penalties is not None:
            rules = penalty_rules(batch.reqs, pending.lens.device)
            counts = output_counts(batch.reqs, pending, info.vocab_size)
            info.acc_additive_penalties = additive_penalty(counts, pending.num_outputs, rules)
            info.acc_scaling_penalties = scaling_penalty(counts, rules)
        if mixed and info.has_custom_logit_processor:
            info.custom_params = row_params(info, pending, pending.token_ids[:, :0])

    # -- verify ---------------------------------------------------------------------------------

    def before_verify(self, batch: Any, candidates: torch.Tensor) -> GrammarTree | None:
        """Start copying candidates [n, D] to the host, where a grammar reads them."""
        return GrammarTree.from_linear_chain(candidates) if batch.has_grammar else None

    def apply(
        self,
        batch: Any,
        candidates: torch.Tensor,
        logits: torch.Tensor,
        tree: GrammarTree | None,
        barrier: Barrier | None,
    ) -> None:
        """Change the target's logits [n * D, V] of candidates [n, D] in place."""
        info = batch.sampling_info
        rows = logits.view(*candidates.shape, -1)  # [n, D, V]
        # A drafter's head may be padded past the vocabulary; such a draft is never accepted.
        drafts = candidates[:, 1:].clamp(max=rows.shape[-1] - 1)
        pending: PendingOutput | None = None
        if needs_history(info):
            pending = self._history.pending(batch, batch.seq_lens + 1)
        if pending is not None and info.acc_additive_penalties is not None:
            rules = penalty_rules(batch.reqs, logits.device)
            counts = output_counts(batch.reqs, pending, rows.shape[-1])
            penalize_rows(rows, drafts, counts, pending.num_outputs, rules)
        if tree is not None:
            mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=tree,
                sampling_info=info,
                device=logits.device,
                barrier=barrier,
            )
            if mask is not None:
                mask.apply(logits)
        if info.logit_bias is not None:
            rows.add_(info.logit_bias[:, None])
        if pending is not None and info.has_custom_logit_processor:
            apply_processors(logits, info, row_params(info, pending, drafts))
        if tree is not None or info.has_custom_logit_processor:
            allow_one_token(logits)

    # -- both -----------------------------------------------------------------------------------

    def after_step(self, batch: Any, output_ids: torch.Tensor) -> None:
        """Remember what a step has output, [n, m], for the step that may not know it yet."""
        if needs_history(batch.sampling_info):
            self._history.record(batch, output_ids)
