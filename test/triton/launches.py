"""Every launch of a draft step, planned on shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_cases import Size
from sglang_dlite.kernels import activation, attention, norms, projection, recurrence
from sglang_dlite.kernels.launch import Launch
from sglang_dlite.kernels.projection import Sampling


def draft_step_launches(
    size: Size, n: int, dtype: torch.dtype, vocab: int = 151936
) -> dict[str, Launch]:
    """Name -> launch, for n requests, greedy and sampled."""

    def empty(*shape: int, of: torch.dtype = dtype) -> Any:
        return torch.empty(*shape, dtype=of, device="meta")

    rank, d = size.rank, size.head_dim
    x, weight = empty(n, size.queries, size.hidden), empty(size.hidden)
    slots = empty(n, size.slots, size.hidden)
    table = empty(size.slots + size.queries, d, of=torch.float32)
    state = empty(n, rank, of=torch.float32)
    candidates = -(-vocab // projection.VOCAB_BLOCK)
    values = empty(n, candidates, of=torch.float32)
    ids = empty(n, candidates, of=torch.int64)
    group = empty(n, 2, of=torch.int64)
    head = (empty(vocab, rank), empty(2 * rank, 2 * rank), empty(2 * rank))
    seeds = empty(n, size.drafts, of=torch.int64)[:, 0]
    sampling = Sampling(empty(n, of=torch.float32), seeds)
    plans: dict[str, Callable[[], tuple[Launch, Any]]] = {
        "norm": lambda: norms.plan_norm(x, weight, 1e-6),
        "add_norm": lambda: norms.plan_add_norm(x, x, weight, 1e-6),
        "final_norm": lambda: norms.plan_final_norm(x, x, weight, 1e-6, size.drafts),
        "context_norm": lambda: norms.plan_context_norm(slots, slots[0], weight, 1e-6),
        "silu_mul": lambda: activation.plan_silu_mul(empty(n, size.queries, 2 * size.intermediate)),
        "attention": lambda: attention.plan_attention(
            empty(n, size.queries, size.qkv_width),
            empty(n, size.slots, 2 * size.kv_heads * d),
            *(empty(d), empty(d), table, table, size.heads, size.kv_heads, 1e-6),
        ),
        "advance, first": lambda: recurrence.plan_advance(None, group[:, -1:], None, *head),
        "advance": lambda: recurrence.plan_advance(values, ids, state, *head),
        "combine": lambda: recurrence.plan_combine(
            state, empty(rank, rank + size.hidden), empty(n, size.drafts, rank)[:, 0]
        ),
        "project": lambda: projection.plan_project(empty(n, rank), head[0], None),
        "project, sampled": lambda: projection.plan_project(empty(n, rank), head[0], sampling),
        "pick": lambda: recurrence.plan_pick(values, ids),
    }
    return {name: plan()[0] for name, plan in plans.items()}
