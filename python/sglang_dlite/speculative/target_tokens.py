"""The target's own token at each verify row, by upstream's sampler."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.runtime_context import get_parallel


def broadcast_from_rank0(values: torch.Tensor) -> torch.Tensor:
    """Make a decision identical on all tensor-parallel ranks (in place); a no-op for one rank."""
    group = get_parallel().tp_group
    if group.world_size > 1:
        group.broadcast(values, src=0)
    return values


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Ids [n] int64 of the largest of each row [n, V], the lowest on ties, as upstream's argmax."""
    if logits.device.type != "cpu":
        return torch.argmax(logits, dim=-1)
    # A third of argmax's time on a CPU; where they can part, at NaN, there is no right answer.
    return logits.max(dim=-1).indices


def expand_sampling_info(info: Any, width: int) -> Any:
    """Upstream's SamplingBatchInfo of n requests, for the sampler on n * width verify rows.

    Each row samples under its request's parameters. Seeded sampling hashes (seed, position), so a
    row draws what plain decoding would draw at that position. Options that change logits are left
    out: they are in the logits by now (verify_logits.py).
    """

    def repeat(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.repeat_interleave(width, dim=0)

    return dataclasses.replace(
        info,
        **{
            name: repeat(getattr(info, name))
            for name in (
                "temperatures",
                "top_ps",
                "top_ks",
                "min_ps",
                "sampling_seed",
            )
        },
        grammars=None,  # else ranks agree on the least of their tokens, which has another law
        logit_bias=None,
        has_custom_logit_processor=False,
        custom_logit_processor=None,
        custom_params=None,
    )


def target_tokens(
    sampler: Any, batch: Any, logits_output: Any, positions: torch.Tensor
) -> torch.Tensor:
    """Token ids [n, D] int64: argmax for greedy requests, else a sample at every row.

    logits_output.next_token_logits is [n * D, V], with the request options applied; positions
    [n * D] are those of the input tokens, as in plain decoding. Log-probabilities, where asked for,
    are written to logits_output.
    """
    n = len(batch.seq_lens)
    logits = logits_output.next_token_logits
    width = logits.shape[0] // n
    if batch.sampling_info.is_all_greedy:
        tokens = likeliest(logits)
    else:
        info = expand_sampling_info(batch.sampling_info, width)
        # The sampler turns logits into probabilities in place; log-probabilities need them.
        scratch = dataclasses.replace(
            logits_output, next_token_logits=logits.clone() if batch.return_logprob else logits
        )
        tokens = sampler(scratch, info, False, [], [], positions)
    tokens = broadcast_from_rank0(tokens.to(torch.int64))
    if batch.return_logprob:
        compute_spec_logprobs(batch, logits_output, tokens, chain_stride=width)
    return tokens.view(n, width)
