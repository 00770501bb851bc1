"""CUDA graphs without a GPU: a recorded function is called again on the same static tensors.

What a real replay does to memory that somebody still reads, `Doubles` does on purpose: outputs
are poisoned as soon as a step has returned, and inputs are filled with garbage before the next
one, so that a returned view, an input that was not staged, or a padding row that matters shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


class DoubleGraph:
    """A recording whose replay runs the function, and writes its results where they lay before."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        function()  # the warm-ups
        self.output = function()  # the capture
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        _overwrite(self.output, self._function())


def _overwrite(old: Any, new: Any) -> None:
    """Copy a result's tensors into the earlier result's memory, as a replay does."""
    names = () if old is None else vars(old)
    for name in names:
        before, after = getattr(old, name), getattr(new, name)
        if isinstance(before, torch.Tensor) and before.data_ptr() != after.data_ptr():
            before.copy_(after)


class DoubleBackend:
    """Upstream's graph backend interface (BaseCudaGraphBackend) over double graphs."""

    def __init__(self) -> None:
        self.graphs: dict[Any, DoubleGraph] = {}

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self,
        shape_key: Any,
        forward_fn: Callable[[], Any],
        capture_inputs: Any = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> None:
        self.graphs[shape_key] = DoubleGraph(forward_fn)

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self.graphs

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any) -> Any:
        graph = self.graphs[shape_key]
        graph.replay()
        return graph.output

    def cleanup(self) -> None:
        self.graphs.clear()


class Doubles:
    """The static tensors of a worker's graphs, spoilt between its steps."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.graphs: list[DoubleGraph] = []

    def record(self, function: Callable[[], None]) -> DoubleGraph:
        """What takes CudaRecorder's place."""
        self.graphs.append(DoubleGraph(function))
        return self.graphs[-1]

    def spoil_inputs(self, *tensors: torch.Tensor | None) -> None:
        """NaN, or valid token ids that are nobody's: what padding rows may hold at worst."""
        for tensor in tensors:
            if tensor is None:
                continue
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            else:
                tensor.random_(self.vocab_size)

    def spoil_outputs(self, *tensors: torch.Tensor | None) -> None:
        """NaN or -1: what a result that is read too late turns into."""
        for tensor in tensors:
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def spoil(self, worker: Any) -> None:
        """Everything static of a DLiteWorker with graphs, after one of its steps."""
        drafter, tail = worker.drafter, worker.tail
        self.spoil_inputs(drafter._states, drafter._groups)
        self.spoil_outputs(*drafter._block)
        if tail is not None:
            self.spoil_inputs(tail._earlier)
            self.spoil_outputs(tail._rounds)
        self.spoil_outputs(worker.capture._table)
