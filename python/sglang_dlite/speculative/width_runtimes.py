"""An attention backend and decode graphs for each width of --speculative-adaptive.

SGLang's attention backends on a GPU plan for one number of rows per request, and its decode graphs
are captured for one. So there is a set of both per width, and a verify pass puts the one of its
width in place first, as SGLang's own adaptive EAGLE does. A prefill runs on any of the backends.
Nothing here has run on a GPU yet (docs/cuda.md).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sglang.srt.runtime_context import get_spec
from sglang.srt.utils import get_available_gpu_memory

logger = logging.getLogger(__name__)


class _Runtime(NamedTuple):
    """What a pass of one width runs on; both are upstream's objects."""

    attention: Any
    graphs: Any  # the eager runner where decode graphs are off


class WidthRuntimes:
    """The runtimes of all widths of one target; the largest is what the runner has already."""

    def __init__(self, model_runner: Any, widths: Iterable[int]) -> None:
        """Build the others, wide ones first: their graphs' memory then serves the narrow ones.

        model_runner is upstream's ModelRunner, after its own graphs were captured at the largest
        of `widths`. `memory_gb` and `seconds` are what that took.

        Raises:
            RuntimeError: it failed, mostly for want of memory; names the options that help.
        """
        self._runner = model_runner
        self._largest, *self._others = sorted(widths, reverse=True)
        self._runtimes: dict[int, _Runtime] = {}
        self._build()
        # Graphs are captured again after a weight update that asks for it.
        updater = model_runner.weight_updater
        recapture: Callable[[], None] = updater.recapture_cuda_graph

        def recapture_all() -> None:
            self.use(self._largest)
            self._runtimes.clear()  # their graphs' memory first
            recapture()
            self._build()

        model_runner.weight_updater = dataclasses.replace(
            updater, recapture_cuda_graph=recapture_all
        )

    def _build(self) -> None:
        runner = self._runner
        started, before = time.perf_counter(), self._free_gb()
        graphs = runner.decode_cuda_graph_runner
        self._runtimes[self._largest] = _Runtime(runner.attn_backend, graphs)
        captured = has_graphs(runner)
        try:
            for width in self._others:
                # Backends read their width when they are made. The scheduler's reserve of K/V
                # slots goes by the largest and is not asked for in between.
                with get_spec().override(speculative_num_draft_tokens=width):
                    attention = _attention_backend(runner)
                    self._runtimes[width] = _Runtime(
                        attention, _capture(runner, attention, width) if captured else graphs
                    )
        except Exception as error:  # upstream's own is a bare one
            raise RuntimeError(
                f"--speculative-adaptive: the verify width {width} of {self._others} could not be "
                f"made ready ({error}). Each needs an attention backend's buffers and decode "
                "graphs: lower --mem-fraction-static or --cuda-graph-max-bs-decode, or drop the "
                "option."
            ) from error
        self.memory_gb = before - self._free_gb()
        self.seconds = time.perf_counter() - started
        logger.info(
            "DLITE: verify widths %s made ready in %.2f s, mem usage=%.2f GB.",
            self._others,
            self.seconds,
            self.memory_gb,
        )

    def _free_gb(self) -> float:
        return get_available_gpu_memory(self._runner.device, self._runner.gpu_id)

    def use(self, width: int) -> None:
        """Verify passes are of `width` rows per request from now on."""
        runtime = self._runtimes[width]
        self._runner.attn_backend = runtime.attention
        self._runner.decode_cuda_graph_runner = runtime.graphs


def has_graphs(model_runner: Any) -> bool:
    """Whether decode graphs were captured: an eager runner has no batch sizes."""
    return bool(getattr(model_runner.decode_cuda_graph_runner, "capture_bs", None))


def _attention_backend(model_runner: Any) -> Any:
    """A backend with buffers of its own: graphs keep the addresses of those they were made with."""
    kept = model_runner.init_new_workspace
    try:
        return model_runner._get_attention_backend(init_new_workspace=True)
    finally:
        model_runner.init_new_workspace = kept


def _capture(model_runner: Any, attention: Any, width: int) -> Any:
    runner_class = model_runner._decode_cuda_graph_runner_cls()  # ours: hook H1
    return runner_class(model_runner, attn_backend=attention, speculative_num_draft_tokens=width)
