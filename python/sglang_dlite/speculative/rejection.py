"""Drawn drafts and their verification: --speculative-use-rejection-sampling.

The rule itself is `acceptance.reject_drafts`; here are its two laws and its uniform numbers, from
what SGLang knows of a batch. A batch of greedy requests never comes here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32
from sglang.srt.layers.logprob_processor import compute_spec_logprobs

from sglang_dlite.drafter import DraftBlock, temperature_law
from sglang_dlite.speculative.acceptance import Acceptance, reject_drafts
from sglang_dlite.speculative.drafting import Embedding, SampledDrafter
from sglang_dlite.speculative.target_tokens import broadcast_from_rank0, expand_sampling_info

# What a uniform number is for. Under a seed it is a hash of (seed, position, purpose); upstream
# hashes token ids in the third place, at positions before the first anchor.
DRAFT, ACCEPT, FINISH = range(3)


def uniform_numbers(
    seeds: torch.Tensor | None, positions: torch.Tensor, purpose: int
) -> torch.Tensor:
    """fp64 in [0, 1), of the shape of positions [n, m] int64, for one purpose.

    seeds [n] int64 are the requests' sampling seeds; None draws from torch's generator. Upstream
    gives seeds only with --enable-deterministic-inference, and hashes them on CUDA only.
    """
    if seeds is None:
        return torch.rand(positions.shape, dtype=torch.float64, device=positions.device)
    rows = seeds.repeat_interleave(positions.shape[1])  # [n * m]
    column = torch.full((1,), purpose, device=positions.device)
    hashed = murmur_hash32(rows, positions.reshape(-1), column)  # [n * m, 1] uint32
    return hashed.view(positions.shape).to(torch.float64) / 2**32


def target_law(
    sampler: Any, info: Any, logits: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The law [rows, V] fp32 that upstream's sampler would draw from; logits [rows, V] stay.

    info is the SamplingBatchInfo of these rows (not all of them greedy). Greedy rows have their
    most likely token's law. Temperature, then top-k, top-p and min-p as upstream's own sampling
    backend filters them: it hands out the weights that it samples from.
    """
    logits = sampler._preprocess_logits(logits.to(torch.float32, copy=True), info)
    law = torch.softmax(logits / info.temperatures, dim=-1)
    if info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling:
        law = _filtered(sampler, info, law, positions)
    top = torch.zeros_like(law).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(is_greedy(info)[:, None], top, law)


def _filtered(sampler: Any, info: Any, law: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The law [rows, V] after each row's top-k, top-p and min-p."""
    if law.device.type == "cpu":  # where a row costs a sort, and reading back costs nothing
        wanted = (info.top_ks < law.shape[1]) | (info.top_ps < 1) | (info.min_ps > 0)
        rows = (wanted & ~is_greedy(info)).nonzero().squeeze(1)  # [m]
        if not len(rows):
            return law
    else:
        rows = torch.arange(len(law), device=law.device)
    capture = dataclasses.replace(
        info,
        top_ks=info.top_ks[rows],
        top_ps=info.top_ps[rows],
        min_ps=info.min_ps[rows],
        sampling_mask_batch_indices=torch.arange(len(rows), device=law.device),
        sampling_seed=None,  # the token that is drawn beside is not used
    )
    _, kept = sampler._sample_from_probs(law[rows], capture, positions[rows], False)
    weights = kept.weights.float()
    if kept.token_ids is not None:  # sorted by weight: back to the vocabulary's order
        weights = weights.new_zeros(len(rows), law.shape[1]).scatter_(
            1, kept.token_ids.long(), weights
        )
    return law.index_copy(0, rows, weights / weights.sum(dim=-1, keepdim=True))


def is_greedy(info: Any) -> torch.Tensor:
    """[n] bool: upstream turns temperature 0 into top_k 1."""
    return info.top_ks <= 1


class RejectionSampling:
    """Draws drafts and accepts them, for batches with sampling requests."""

    def __init__(self, drafter: SampledDrafter, width: int, device: str) -> None:
        self.drafter = drafter
        self.width = width
        # Called before memory is profiled: the law's fp32 weight is then not given to the KV pool.
        drafter.law_logits(torch.zeros(1, drafter.config.sequential_rank, device=device))

    def draft(
        self,
        pivot_states: torch.Tensor,
        token_group: torch.Tensor,
        embed: Embedding,
        info: Any,
        anchor_positions: torch.Tensor,
    ) -> DraftBlock:
        """As `Drafter.draft`, at each request's temperature; anchor_positions [n]."""
        steps = torch.arange(self.drafter.config.num_drafts, device=anchor_positions.device)
        positions = anchor_positions.to(torch.int64)[:, None] + steps  # [n, K]
        return self.drafter.draft_sampled(
            pivot_states,
            token_group,
            embed,
            info.temperatures.view(-1),
            is_greedy(info),
            uniform_numbers(info.sampling_seed, positions, DRAFT),
        )

    def accept(
        self,
        sampler: Any,
        batch: Any,
        logits_output: Any,
        positions: torch.Tensor,
        candidates: torch.Tensor,
        head_vectors: torch.Tensor,
    ) -> Acceptance:
        """What a verify pass keeps; head_vectors [n, D - 1, R] are those of the drafts.

        logits_output.next_token_logits is [n * D, V], with the request options applied; positions
        [n * D]. Log-probabilities, where asked for, are written to logits_output.
        """
        info, n = batch.sampling_info, len(candidates)
        logits = logits_output.next_token_logits
        rows = expand_sampling_info(info, self.width)
        law = target_law(sampler, rows, logits, positions).view(n, self.width, -1)  # [n, D, V]
        drafted = temperature_law(self.drafter.law_logits(head_vectors), info.temperatures)
        # A drafter may have ids that pad the target's table: never the target's own.
        law = torch.nn.functional.pad(law, (0, drafted.shape[-1] - law.shape[-1]))
        places = positions.view(n, self.width)
        accepted = reject_drafts(
            candidates,
            law,
            drafted,
            uniform_numbers(info.sampling_seed, places[:, :-1], ACCEPT),
            uniform_numbers(info.sampling_seed, places[:, :1], FINISH).squeeze(1),
        )
        decided = torch.cat([accepted.num_accepted[:, None], accepted.output_ids], dim=1)
        decided = broadcast_from_rank0(decided)  # [n, 1 + D]: every rank has its own numbers
        num_accepted, output_ids = decided[:, 0], decided[:, 1:].contiguous()
        anchor = output_ids.gather(1, num_accepted[:, None]).squeeze(1)
        if batch.return_logprob:
            compute_spec_logprobs(
                batch, logits_output, output_ids.reshape(-1), chain_stride=self.width
            )
        return Acceptance(num_accepted, output_ids, anchor)
