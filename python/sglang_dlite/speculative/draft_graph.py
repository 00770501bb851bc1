"""The draft step as one CUDA graph per batch size: backbone and serial loop in a single replay.

Imports torch alone, so that it runs on a GPU machine without SGLang. Nothing here has run on a
GPU yet (docs/cuda.md); test/server/graph_double.py stands in for one.

A graph reads and writes fixed addresses. So inputs are copied into static tensors, and what leaves
is copied out of them: the next replay overwrites them while another stream may still be reading
the last result (SGLang's overlap scheduler copies results on a stream that the forward stream
never waits for).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sglang_dlite.drafter import DraftBlock

if TYPE_CHECKING:
    from sglang_dlite.speculative.drafting import Drafter, Embedding

WARM_UPS = 2  # loads kernels, tunes, and sizes workspaces: none of it may happen in a capture


class Recording(Protocol):
    """A recorded function; torch.cuda.CUDAGraph is one."""

    def replay(self) -> None:
        """Repeat the kernels on the tensors of the recording."""
        ...


Record = Callable[[Callable[[], None]], Recording]
"""Runs a function on static tensors and returns what repeats it."""


@contextmanager
def own_stream() -> Iterator[torch.cuda.Stream]:
    """A side stream to capture on, which has waited for the current one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream


class CudaRecorder:
    """Records functions as CUDA graphs that share one memory pool, by default one of their own.

    They may share it, also with other graphs, because all are replayed one after the other on one
    stream, and because what they leave behind lies in static tensors outside of it. Record large
    shapes first: the small ones then reuse their memory. `capture_stream` opens a context that
    yields the stream to capture on.
    """

    def __init__(
        self,
        capture_stream: Callable[[], AbstractContextManager[Any]] = own_stream,
        pool: Any = None,
    ) -> None:
        self._capture_stream = capture_stream
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool

    def __call__(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Warm up, then capture. Raises whatever torch does when that fails."""
        graph = torch.cuda.CUDAGraph()
        with self._capture_stream() as stream:
            for _ in range(WARM_UPS):
                function()
            torch.cuda.synchronize()
            # Other threads (detokenizer clients, watchdogs) may call CUDA meanwhile.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                function()
        torch.cuda.synchronize()
        return graph


class GraphedDrafter:
    """A drafter whose `draft` replays a graph, for batches up to the largest captured size.

    `draft` takes and returns what the wrapped drafter's does. A batch is padded to the next
    captured size; the padding rows hold what an earlier batch left there (valid token ids), and
    rows do not mix, so they change nothing. Larger and empty batches run eagerly.
    """

    def __init__(
        self,
        drafter: Drafter,
        embed: Embedding,
        sizes: Sequence[int],
        record: Record,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Capture `drafter` at each batch size of `sizes`; dtype is that of the pivot states.

        Raises:
            ValueError: no size, or one below 1.
        """
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes = {list(sizes)}: at least one, each at least 1")
        self._drafter, self._embed = drafter, embed
        config = self.config = drafter.config
        self.sizes = sorted(set(sizes))
        largest = self.sizes[-1]
        self._states = torch.zeros(
            largest, config.num_pivot_states, config.hidden_size, dtype=dtype, device=device
        )
        self._groups = torch.zeros(
            largest, config.anchor_group_size, dtype=torch.int64, device=device
        )
        # Only a first block tells which head vectors a drafter gives.
        block = drafter.draft(self._states, self._groups, embed)
        self._block = DraftBlock(*(torch.zeros_like(part) for part in block))
        self._recordings = {size: record(self._step(size)) for size in reversed(self.sizes)}

    def __getattr__(self, name: str) -> Any:
        # What the worker asks beyond the greedy draft is the wrapped drafter's.
        if name == "_drafter":
            raise AttributeError(name)
        return getattr(self._drafter, name)

    def _step(self, size: int) -> Callable[[], None]:
        """The function of one graph: from the first `size` static rows to the static block."""

        def step() -> None:
            block = self._drafter.draft(self._states[:size], self._groups[:size], self._embed)
            for static, part in zip(self._block, block, strict=True):
                static[:size].copy_(part)

        return step

    def draft(self, pivot_states: Tensor, token_group: Tensor, embed: Embedding) -> DraftBlock:
        """pivot_states [n, S, h], token_group [n, G] int64 -> a block of the caller's own."""
        n = token_group.shape[0]
        place = bisect.bisect_left(self.sizes, n)
        if n == 0 or place == len(self.sizes) or embed is not self._embed:
            return self._drafter.draft(pivot_states, token_group, embed)
        self._states[:n].copy_(pivot_states)
        self._groups[:n].copy_(token_group)
        self._recordings[self.sizes[place]].replay()
        return DraftBlock(*(part[:n].clone() for part in self._block))
