"""CPU attention of suffix rows against a naive double loop."""

from __future__ import annotations

import math

import pytest
import torch
from sglang_dlite.platforms.attention import CpuAttentionBackend, attend_suffix


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


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("rows,context", [(1, 1), (1, 20), (8, 8), (8, 30), (3, 4), (0, 5)])
def test_suffix_rows(rows: int, context: int, window: int | None) -> None:
    query, keys, values = tensors(rows, context)
    out = attend_suffix(query, keys, values, scale=None, causal=True, window=window)
    assert out.shape == (rows, 4, 6)
    torch.testing.assert_close(out, naive(query, keys, values, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads: int) -> None:
    query, keys, values = tensors(5, 11, kv_heads=kv_heads)
    out = attend_suffix(query, keys, values, scale=None, causal=True, window=None)
    torch.testing.assert_close(out, naive(query, keys, values, None), atol=1e-5, rtol=1e-5)


def test_scale_and_lower_precision_cache() -> None:
    query, keys, values = tensors(2, 9)
    scaled = attend_suffix(query, keys, values, scale=0.5, causal=True, window=None)
    expected = naive(query * 0.5 * math.sqrt(8), keys, values, None)
    torch.testing.assert_close(scaled, expected, atol=1e-5, rtol=1e-5)
    half = attend_suffix(query, keys.half(), values.half(), scale=None, causal=True, window=None)
    assert half.dtype == torch.float32


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


@pytest.mark.parametrize("extend", [[8, 8, 8], [5, 1, 12], [1, 1, 1]])
def test_a_batch_reads_its_own_slots(extend: list[int]) -> None:
    """Verify rows, a ragged extend, and a decode step through the same function."""
    lengths = [12, 9, 20]
    k_cache, v_cache, table = paged(lengths)
    query = torch.randn(sum(extend), 4, 8, generator=torch.Generator().manual_seed(6))
    pool, seq_lens = torch.tensor([2, 0, 3]), torch.tensor(lengths)
    backend = CpuAttentionBackend.__new__(CpuAttentionBackend)  # its runner is not needed here
    out = torch.empty(sum(extend), 4, 8)
    backend._run_sdpa_forward_extend(
        query,
        out,
        k_cache,
        v_cache,
        table,
        pool,
        seq_lens,
        seq_lens - torch.tensor(extend),
        torch.tensor(extend),
        causal=True,
    )
    start = 0
    for row, length, rows in zip(pool.tolist(), lengths, extend, strict=True):
        slots = table[row, :length].long()
        expected = naive(query[start : start + rows], k_cache[slots], v_cache[slots], None)
        torch.testing.assert_close(out[start : start + rows], expected, atol=1e-5, rtol=1e-5)
        start += rows
    if extend == [1, 1, 1]:
        decoded = torch.empty_like(out)
        backend._run_sdpa_forward_decode(query, decoded, k_cache, v_cache, table, pool, seq_lens)
        torch.testing.assert_close(decoded, out)
