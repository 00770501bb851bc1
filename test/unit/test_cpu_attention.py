"""CPU attention of suffix rows against a naive double loop."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_dlite.platforms.attention import CpuAttentionBackend, attend_suffix, suffix_mask


def naive(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Causal attention, row by row and head by head. Shapes as in `attend_suffix`."""
    out = torch.zeros(query.shape[0], query.shape[1], values.shape[2])
    share = query.shape[1] // keys.shape[1]
    for row in range(query.shape[0]):
        position = keys.shape[0] - query.shape[0] + row
        first = 0 if window is None else max(0, position - window)
        for head in range(query.shape[1]):
            k = keys[first : position + 1, head // share]
            v = values[first : position + 1, head // share]
            weights = torch.softmax(k @ query[row, head] / math.sqrt(query.shape[2]), dim=0)
            out[row, head] = weights @ v
    return out


def tensors(rows: int, context: int, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + context)
    shapes = [(rows, heads, 8), (context, kv_heads, 8), (context, kv_heads, 6)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    mask = suffix_mask(query.shape[0], keys.shape[0], window, query.dtype)
    return attend_suffix(query, keys, values, mask, scale=None)


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(
    "rows,context", [(1, 1), (1, 20), (8, 8), (8, 30), (3, 4), (0, 5), (70, 90)]
)
def test_suffix_rows(rows: int, context: int, window: int | None) -> None:
    """70 rows take the unfolded path, the others the folded one."""
    query, keys, values = tensors(rows, context)
    out = attend(query, keys, values, window)
    assert out.shape == (rows, 4, 6)
    torch.testing.assert_close(out, naive(query, keys, values, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads: int) -> None:
    query, keys, values = tensors(5, 11, kv_heads=kv_heads)
    out = attend(query, keys, values)
    torch.testing.assert_close(out, naive(query, keys, values, None), atol=1e-5, rtol=1e-5)


def test_a_prompt_needs_no_mask() -> None:
    query, keys, values = tensors(9, 9)
    out = attend_suffix(query, keys, values, None, scale=None, is_prompt=True)
    torch.testing.assert_close(out, naive(query, keys, values, None), atol=1e-5, rtol=1e-5)


def test_scale() -> None:
    query, keys, values = tensors(2, 9)
    scaled = attend_suffix(query, keys, values, suffix_mask(2, 9, None, torch.float32), scale=0.5)
    expected = naive(query * 0.5 * math.sqrt(8), keys, values, None)
    torch.testing.assert_close(scaled, expected, atol=1e-5, rtol=1e-5)


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches [64, 2, 8] and a request table whose rows use shuffled slots."""
    generator = torch.Generator().manual_seed(5)
    slots = torch.randperm(64, generator=generator)
    table, used = torch.zeros(4, 32, dtype=torch.int32), 0
    for row, length in zip((2, 0, 3), lengths, strict=False):
        table[row, :length] = slots[used : used + length].to(torch.int32)
        used += length
    caches = (torch.randn(64, 2, 8, generator=generator) for _ in range(2))
    return *caches, table


def planned_backend(
    table: torch.Tensor, pool: list[int], lengths: list[int], extend: list[int] | None
) -> CpuAttentionBackend:
    """A backend that has planned one forward; its runner is not needed for that."""
    backend = CpuAttentionBackend.__new__(CpuAttentionBackend)
    backend.use_sliding_window_kv_pool = False
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    backend.init_forward_metadata(
        SimpleNamespace(
            forward_mode=ForwardMode.DECODE if extend is None else ForwardMode.TARGET_VERIFY,
            seq_lens=torch.tensor(lengths),
            extend_seq_lens=None if extend is None else torch.tensor(extend),
            req_pool_indices=torch.tensor(pool),
            out_cache_loc=None,
        )
    )
    return backend


OPTIONS = {"causal": True, "scaling": None, "sliding_window_size": None, "is_cross_attn": False}


@pytest.mark.parametrize("extend", [[8, 8, 8], [5, 1, 12], None])
def test_a_batch_reads_its_own_slots(extend: list[int] | None) -> None:
    """Verify rows, a ragged extend, and a decode step (None), over shuffled slots."""
    pool, lengths = [2, 0, 3], [12, 9, 20]
    k_cache, v_cache, table = paged(lengths)
    counts = extend or [1, 1, 1]
    query = torch.randn(sum(counts), 4, 8, generator=torch.Generator().manual_seed(6))
    backend = planned_backend(table, pool, lengths, extend)
    out = torch.empty(sum(counts), 4, 8)
    run = backend._run_sdpa_forward_extend if extend else backend._run_sdpa_forward_decode
    run(query, out, k_cache, v_cache, **OPTIONS)
    start = 0
    for row, length, rows in zip(pool, lengths, counts, strict=True):
        slots = table[row, :length].long()
        expected = naive(query[start : start + rows], k_cache[slots], v_cache[slots], None)
        torch.testing.assert_close(out[start : start + rows], expected, atol=1e-5, rtol=1e-5)
        start += rows


def test_a_lower_precision_cache_is_read_in_the_querys_dtype() -> None:
    k_cache, v_cache, table = paged([6])
    backend = planned_backend(table, [2], [6], [2])
    query, out = torch.randn(2, 4, 8), torch.empty(2, 4, 8)
    backend._run_sdpa_forward_extend(query, out, k_cache.half(), v_cache.half(), **OPTIONS)
    slots = table[2, :6].long()
    expected = naive(query, k_cache.half().float()[slots], v_cache.half().float()[slots], None)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
