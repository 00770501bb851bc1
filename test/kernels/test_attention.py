"""Paged attention against a dense softmax in fp64, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import sglang_dlite_kernel as kernels
import torch
from kernel_reference import assert_rounded_once, attention

HEADS = [(9, 3, 64, 64), (4, 4, 96, 96), (8, 1, 128, 128), (4, 2, 16, 24), (3, 3, 20, 5)]
BATCHES = [
    [(1, 1)],
    [(1, 70)],
    [(8, 8), (8, 100), (8, 1500)],  # verify rows
    [(1, 600), (1, 3)],  # a decode step
    [(200, 200)],  # a prompt
    [(120, 700), (1, 5), (40, 64)],  # a mixed extend
]


@dataclass
class Paged:
    """A batch of requests over shuffled slots; `requests` are (new rows, keys)."""

    requests: list[tuple[int, int]]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    page: int = 1

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(len(self.requests))

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        pages = [-(-keys // self.page) for _, keys in self.requests]
        slots = sum(pages) * self.page
        order = torch.randperm(sum(pages), generator=generator)
        self.key_cache = random(slots, self.num_kv_heads, self.head_dim)
        self.value_cache = random(slots, self.num_kv_heads, self.value_dim)
        rows = sum(new for new, _ in self.requests)
        # Rows of a wider matrix, as the projection gives them.
        wide = random(rows, self.num_heads * self.head_dim + 8)
        self.query = wide[:, :-8].view(rows, self.num_heads, self.head_dim)
        self.pool_rows = torch.randperm(len(self.requests) + 2, generator=generator)[: len(pages)]
        longest = max(keys for _, keys in self.requests)
        self.table = torch.zeros(len(pages) + 2, longest + 3, dtype=torch.int32)
        self.slots = []
        for row, (_, keys), first in zip(
            self.pool_rows, self.requests, torch.tensor([0, *pages]).cumsum(0), strict=False
        ):
            own = order[first : first + -(-keys // self.page)]
            own = (own[:, None] * self.page + torch.arange(self.page)).flatten()[:keys]
            self.table[row, :keys] = own.to(torch.int32)
            self.slots.append(own)
        self.starts = torch.tensor([0, *(new for new, _ in self.requests)]).cumsum(0)
        self.lens = torch.tensor([keys for _, keys in self.requests])

    def run(self, window: int = -1) -> torch.Tensor:
        return kernels.attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.table,
            self.pool_rows,
            self.lens,
            self.starts,
            self.head_dim**-0.5,
            window,
        )

    def expected(self, window: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            attention(
                self.query[start : start + new],
                self.key_cache[slots],
                self.value_cache[slots],
                self.head_dim**-0.5,
                window,
            )
            for start, (new, _), slots in zip(self.starts, self.requests, self.slots, strict=False)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([scale for _, scale in parts])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("requests", BATCHES)
@pytest.mark.parametrize("heads", HEADS)
def test_against_a_dense_softmax(
    isa: str, dtype: torch.dtype, requests: list[tuple[int, int]], heads: tuple[int, ...]
) -> None:
    batch = Paged(requests, *heads, dtype=dtype)
    exact, scale = batch.expected()
    # The weights carry 16 bits on AMX: 2^-17 of what was summed, beside the rounding.
    assert_rounded_once(batch.run(), exact, scale * (8 if dtype == torch.bfloat16 else 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 5, 64, 100, 5000])
def test_sliding_window(isa: str, dtype: torch.dtype, window: int) -> None:
    batch = Paged([(8, 300), (1, 700), (100, 130)], 9, 3, 64, 64, dtype)
    exact, scale = batch.expected(window)
    assert_rounded_once(batch.run(window), exact, scale * (8 if dtype == torch.bfloat16 else 2))


@pytest.mark.parametrize("page", [1, 16, 64])
def test_page_sizes(isa: str, page: int) -> None:
    """Neighbouring slots are read in place, scattered ones through a copy: same result."""
    batch = Paged([(8, 333), (1, 65)], 4, 2, 64, 64, torch.bfloat16, page=page)
    exact, scale = batch.expected()
    assert_rounded_once(batch.run(), exact, scale * 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_verify_row_is_a_decode_step_bit_for_bit(isa: str, dtype: torch.dtype) -> None:
    """The same row among 8, among 100 and alone, over more than one split of the keys."""
    keys = 1200
    whole = Paged([(100, keys)], 9, 3, 64, 64, dtype)
    together = whole.run()
    for rows, behind in ((8, 0), (8, 50), (1, 0), (1, 7), (1, 99)):
        last = 100 - behind
        part = Paged([(100, keys)], 9, 3, 64, 64, dtype)
        part.query = part.query[last - rows : last]
        part.starts = torch.tensor([0, rows])
        part.lens = torch.tensor([keys - behind])
        assert torch.equal(part.run(), together[last - rows : last])


def test_no_requests(isa: str) -> None:
    batch = Paged([(1, 4)], 4, 2, 16, 16, torch.bfloat16)
    batch.query = batch.query[:0]
    batch.starts, batch.lens = torch.tensor([0]), batch.lens[:0]
    batch.pool_rows = batch.pool_rows[:0]
    assert batch.run().shape == (0, 4, 16)


def test_garbage_in_unused_slots_does_no_harm(isa: str) -> None:
    """The pool is not cleared: slots beyond a request hold anything, NaN too."""
    batch = Paged([(1, 70), (8, 75)], 4, 2, 64, 64, torch.bfloat16)
    clean = batch.run()
    used = torch.cat(batch.slots)
    for name in ("key_cache", "value_cache"):
        cache = getattr(batch, name)
        larger = torch.full((len(cache) + 200, *cache.shape[1:]), float("nan")).to(cache.dtype)
        larger[used] = cache[used]
        setattr(batch, name, larger)
    assert torch.equal(batch.run(), clean)


def test_bad_lengths_are_refused() -> None:
    batch = Paged([(2, 9)], 4, 2, 16, 16, torch.bfloat16)
    batch.lens = torch.tensor([10_000])
    with pytest.raises(RuntimeError, match="request 0 has 2 rows and 10000 keys"):
        batch.run()


def test_store_kv_writes_the_slots_and_no_other() -> None:
    cache_k, cache_v = torch.zeros(10, 2, 4), torch.zeros(10, 2, 6)
    wide = torch.randn(3, 40)
    key, value = wide[:, :8].view(3, 2, 4), wide[:, 8:20].view(3, 2, 6)
    slots = torch.tensor([7, 0, 3])
    kernels.store_kv(key, value, slots, cache_k, cache_v)
    assert torch.equal(cache_k[slots], key)
    assert torch.equal(cache_v[slots], value)
    assert cache_k.count_nonzero() == key.numel()
    with pytest.raises(RuntimeError, match="slots\\[1\\] = 10, the cache has 10"):
        kernels.store_kv(key[:2], value[:2], torch.tensor([1, 10]), cache_k, cache_v)
