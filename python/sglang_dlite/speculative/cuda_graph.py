"""DLITE in SGLang's decode CUDA graphs (hooks H1 and H2), and the capture of its own.

Nothing here has run on a GPU yet (docs/cuda.md). On a CPU the tests run upstream's runner with
graphs that are replayed by calling the captured function again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_dlite import ALGORITHM
from sglang_dlite.speculative.draft_graph import (
    CudaRecorder,
    GraphedDrafter,
    Record,
    Recording,
)
from sglang_dlite.speculative.verify_tail import VerifyTail

if TYPE_CHECKING:
    from sglang_dlite.speculative.drafting import Drafter, Embedding

logger = logging.getLogger(__name__)

TAIL_VARIANT = "greedy-tail"


def tail_label(label: str | None) -> str:
    """The label of the variant with the tail; `label` is upstream's own (LoRA), or None."""
    return TAIL_VARIANT if label is None else f"{label}+{TAIL_VARIANT}"


def _is_dlite(algorithm: Any) -> bool:
    return getattr(algorithm, "name", None) == ALGORITHM


# -- the verify graphs -----------------------------------------------------------------------------


class BothVariants:
    """A graph backend that, during capture, records each shape without and with the tail.

    One call of the runner gives both, on the same attention metadata: FlashInfer keeps one set of
    wrappers per batch size, and a second preparation would leave the first graph with stale ones.
    """

    def __init__(self, backend: Any, tail: VerifyTail) -> None:
        self._backend, self._tail = backend, tail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def capture_session(self, stream: Any) -> AbstractContextManager[None]:
        """As upstream's."""
        return self._backend.capture_session(stream)

    def capture_one(self, shape_key: Any, forward_fn: Callable[[], Any], **options: Any) -> None:
        """As upstream's, twice; the second key carries the variant."""

        def forward_with_tail() -> Any:
            with self._tail.recording():
                return forward_fn()

        self._backend.capture_one(shape_key, forward_fn, **options)
        key = dataclasses.replace(shape_key, variant_label=tail_label(shape_key.variant_label))
        self._backend.capture_one(key, forward_with_tail, **options)


@lru_cache(maxsize=1)
def decode_runner_class() -> type:
    """Upstream's decode graph runner, for DLITE."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    from sglang_dlite.speculative.inputs import capture_verify_input

    class DLiteDecodeCudaGraphRunner(DecodeCudaGraphRunner):
        """Upstream's decode graphs with a verify input of width D, and the greedy tail."""

        def get_spec_info(self, num_tokens: int) -> Any:
            return capture_verify_input(self.captured_req_width)

        def capture(self) -> None:
            hooks = self.model_runner.capture_tail_hooks
            tail = next((hook for hook in hooks if isinstance(hook, VerifyTail)), None)
            if tail is None:
                super().capture()
                return
            tail.reserve(self.max_bs, self.device)
            backend: Any = self.backend
            self.backend: Any = BothVariants(backend, tail)
            try:
                super().capture()
            finally:
                self.backend = backend

        def _resolve_lora_variant(self, forward_batch: Any) -> Any:
            # Upstream's one per-batch label of a graph.
            label = super()._resolve_lora_variant(forward_batch)
            folded = getattr(forward_batch.spec_info, "greedy_tail", False)
            return tail_label(label) if folded else label

    return DLiteDecodeCudaGraphRunner


def decode_graph_runner_class(original: Callable[[Any], type], model_runner: Any) -> type:
    """AROUND `ModelRunner._decode_cuda_graph_runner_cls` (H1)."""
    if _is_dlite(model_runner.spec_algorithm):
        return decode_runner_class()
    return original(model_runner)


def dummy_verify_input(
    original: Callable[..., Any],
    spec_algorithm: Any,
    custom_mask: Any,
    num_tokens_per_req: int,
    is_draft_worker: bool,
) -> Any:
    """AROUND `create_dummy_verify_input` (H2)."""
    if _is_dlite(spec_algorithm):
        from sglang_dlite.speculative.inputs import capture_verify_input

        return capture_verify_input(num_tokens_per_req)
    return original(spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker)


# -- the draft graphs ------------------------------------------------------------------------------


class CapturedDraft(NamedTuple):
    """The drafter that serves from now on, and what its graphs cost."""

    drafter: GraphedDrafter
    memory_gb: float
    seconds: float


class _ScopedReplay(NamedTuple):
    """A graph whose replay SGLang's graph pool is told of."""

    graph: Recording
    scope: Callable[[], AbstractContextManager[None]]

    def replay(self) -> None:
        with self.scope():
            self.graph.replay()


def _cuda_recorder() -> Record:
    """Records into SGLang's own graph pool, as its other graph runners do.

    No memory is taken twice, as draft and target never run at once. And under tensor parallelism
    --enable-symm-mem needs it: the embedding then allocates aside of the pool that SGLang knows.
    """
    import torch
    from sglang.srt.distributed.device_communicators.pynccl_allocator import set_graph_pool_id
    from sglang.srt.distributed.parallel_state import graph_capture
    from sglang.srt.model_executor.runner_utils import pool as upstream

    pool = upstream.get_or_create_global_graph_memory_pool(torch.cuda)

    @contextmanager
    def capture_stream() -> Iterator[Any]:
        set_graph_pool_id(pool)
        stream = upstream.get_or_create_global_graph_capture_stream()
        # Makes collectives capturable: under tensor parallelism the embedding holds one.
        with upstream.graph_pool_capture_scope(), graph_capture(stream=stream) as context:
            yield context.stream

    record = CudaRecorder(capture_stream, pool)
    return lambda function: _ScopedReplay(record(function), upstream.graph_pool_replay_scope)


def capture_draft(drafter: Drafter, embed: Embedding, model_runner: Any) -> CapturedDraft | None:
    """Capture the draft step at the batch sizes of the target's verify graphs.

    None where the target has none (a CPU, --disable-decode-cuda-graph): the draft is then eager.

    Raises:
        RuntimeError: the capture failed; names the options that help.
    """
    from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.utils import get_available_gpu_memory

    graphs = model_runner.decode_cuda_graph_runner
    sizes = getattr(graphs, "capture_bs", None)  # an eager runner has none
    if not sizes:
        return None
    device, gpu = model_runner.device, model_runner.gpu_id
    started, before = time.perf_counter(), get_available_gpu_memory(device, gpu)
    logger.info("Capture draft CUDA graph begin. avail mem=%.2f GB", before)
    try:
        with freeze_gc(get_exec().graph.enable_cudagraph_gc):  # torch collects at each capture
            graphed = GraphedDrafter(
                drafter, embed, sizes, _cuda_recorder(), device=device, dtype=model_runner.dtype
            )
    except RuntimeError as error:
        raise RuntimeError(
            f"--cuda-graph-max-bs-decode = {graphs.max_bs}: the draft step could not be captured "
            f"in CUDA graphs ({error}). Allowed is any size whose graphs fit into memory: lower "
            "it or --mem-fraction-static, or add --disable-decode-cuda-graph."
        ) from error
    after, seconds = get_available_gpu_memory(device, gpu), time.perf_counter() - started
    logger.info(
        "Capture draft CUDA graph end. bs=%s, elapsed=%.2f s, mem usage=%.2f GB, "
        "avail mem=%.2f GB.",
        graphed.sizes,
        seconds,
        before - after,
        after,
    )
    return CapturedDraft(graphed, before - after, seconds)
