"""Rows of a sampler's batch: upstream's description of them, and each row's law by hand."""

from __future__ import annotations

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

VOCAB = 40

# temperature, top_k, top_p, min_p of each row
Row = tuple[float, int, float, float]


def sampling_info(rows: list[Row], seeds: list[int] | None = None) -> SamplingBatchInfo:
    temperatures, top_ks, top_ps, min_ps = zip(*rows, strict=True)
    return SamplingBatchInfo(
        temperatures=torch.tensor(temperatures)[:, None],
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        top_ps=torch.tensor(top_ps),
        min_ps=torch.tensor(min_ps),
        is_all_greedy=all(k <= 1 for k in top_ks),
        is_any_greedy=any(k <= 1 for k in top_ks),
        need_top_p_sampling=any(p != 1.0 for p in top_ps),
        need_top_k_sampling=any(k != TOP_K_ALL for k in top_ks),
        need_min_p_sampling=any(p > 0 for p in min_ps),
        vocab_size=VOCAB,
        sampling_seed=None if seeds is None else torch.tensor(seeds),
        device="cpu",
    )


def naive_law(logits: list[float], row: Row) -> list[float]:
    """One row, token by token, likeliest first; the three filters all look at the whole law."""
    temperature, top_k, top_p, min_p = row
    law = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, 0).tolist()
    order = sorted(range(len(law)), key=lambda token: -law[token])
    kept, before = [0.0] * len(law), 0.0
    for rank, token in enumerate(order):
        if rank < top_k and before <= top_p and law[token] >= min_p * law[order[0]]:
            kept[token] = law[token]
        before += law[token]
    total = sum(kept)
    return [weight / total for weight in kept]
