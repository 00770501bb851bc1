"""Room for what a verify pass reserves: rows of upstream's request table, and the end of the pool.

Each request holds slots for two verify widths beyond its committed length while it decodes
(mem_cache/allocation_sizing.py). Upstream's sizes leave that room for its own algorithms only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dlite.speculative import serves_dlite


def wider_rows(original: Callable[[], int]) -> int:
    """AROUND `get_req_to_token_extra_context_len`: head-room for two verify widths per row.

    Upstream sizes a row for 4 + D at page size 1: for D > 8 the reserve runs past the row near the
    context's end.
    """
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_page_size,
        get_alloc_reserve_per_decode,
    )

    extra = original()
    if not serves_dlite():
        return extra
    return max(extra, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)


def reachable_length(
    original: Callable[..., int | None],
    allocator: Any,
    input_tokens: int,
    max_new_tokens: int,
    *,
    token_capacity: int,
    sliding_window_size: int | None,
    chunk_size: int | None,
) -> int | None:
    """AROUND `max_new_tokens_for_memory`: how many tokens a request alone in the pool can get.

    Upstream clips to the pool's end, where the reserve no longer fits: it would abort the request
    there, its text lost. It ends by length that much earlier instead; pages that are as large as
    the reserve have the room anyway. The first token comes from the prefill and needs none.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    def clipped(capacity: int) -> int | None:
        return original(
            allocator,
            input_tokens,
            max_new_tokens,
            token_capacity=capacity,
            sliding_window_size=sliding_window_size,
            chunk_size=chunk_size,
        )

    allowed = clipped(token_capacity)
    if not allowed or not serves_dlite():
        return allowed
    room = max(0, get_alloc_reserve_per_decode() - allocator.page_size)
    return max(1, clipped(token_capacity - room) or 0)
