"""Bandwidth of the compiled CPU kernels, beside what the machine's memory gives.

Weights and K/V are as large as those of SmolLM2-135M's 30 layers, so that no cache holds them.

    python benchmark/dlite/cpu_kernels.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import sglang_dlite_kernel as kernels
import torch

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # out, in: qkv, o, gate and up, down


def seconds(run: Callable[[], object], repeats: int = 15) -> float:
    """Median time of `run`, after one call for warming up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def memory_bandwidth() -> float:
    """GB/s at which the team reads 256 MB: the best of torch's reductions and of a packed matrix.

    No single reader of torch saturates the memory everywhere, and a share above 100 % would say
    nothing; so the longest possible linear layer counts as a reader as well.
    """
    torch.set_num_threads(kernels.num_threads())
    data = torch.ones(64 << 20)
    rates = [data.nbytes / seconds(reader, 5) for reader in (data.sum, data.max)]
    weight = torch.ones(2048, 65536).to(torch.bfloat16)
    (packed,) = kernels.pack_linear_weights([weight])
    x = torch.ones(1, 65536).to(torch.bfloat16)
    spent = seconds(lambda: kernels.linear(x, packed, 2048, None), 5)
    return max(*rates, weight.nbytes / spent) / 1e9


def linear_rows(rows: int) -> tuple[int, float]:
    """Bytes of all layers' weights, and the seconds of one pass over them with `rows` rows."""
    weights = [torch.randn(shape).to(torch.bfloat16) for _ in range(LAYERS) for shape in SHAPES]
    packed = kernels.pack_linear_weights(weights)
    inputs = {size: torch.randn(rows, size).to(torch.bfloat16) for _, size in SHAPES}

    def run() -> None:
        for weight, matrix in zip(weights, packed, strict=True):
            kernels.linear(inputs[weight.shape[1]], matrix, weight.shape[0], None)

    return sum(weight.nbytes for weight in weights), seconds(run)


def attention_rows(requests: int, rows: int, context: int) -> tuple[int, float]:
    """Bytes of K and V, and the seconds of all layers' attention over them."""
    slots = requests * context
    caches = [torch.randn(slots, KV_HEADS, HEAD_DIM).to(torch.bfloat16) for _ in range(2 * LAYERS)]
    query = torch.randn(requests * rows, HEADS, HEAD_DIM).to(torch.bfloat16)
    table = torch.arange(slots, dtype=torch.int32).view(requests, context)
    plan = (
        table,
        torch.arange(requests),
        torch.full((requests,), context),
        torch.arange(requests + 1) * rows,
    )

    def run() -> None:
        for layer in range(LAYERS):
            key, value = caches[2 * layer : 2 * layer + 2]
            kernels.attention(query, key, value, *plan, HEAD_DIM**-0.5, -1)

    return sum(cache.nbytes for cache in caches), seconds(run)


def main() -> None:
    """Print the table."""
    memory = memory_bandwidth()
    print(f"{kernels.isa()}, {kernels.num_threads()} threads; memory: {memory:.1f} GB/s\n")
    print("| kernel | ms | GB/s | of the memory's |")
    print("|---|---|---|---|")
    work: list[tuple[str, tuple[int, float]]] = [
        (f"linear, {rows} rows", linear_rows(rows)) for rows in (1, 8, 16, 64)
    ]
    work += [
        (f"attention, {n} x {rows} rows on {context}", attention_rows(n, rows, context))
        for n, rows, context in ((1, 1, 2048), (1, 8, 2048), (1, 1, 8000), (8, 1, 2048))
    ]
    for name, (size, spent) in work:
        rate = size / spent / 1e9
        print(f"| {name} | {1000 * spent:.2f} | {rate:.1f} | {100 * rate / memory:.0f} % |")


if __name__ == "__main__":
    main()
