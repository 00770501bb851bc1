"""Upstream's own decode graph runner on a CPU, with graphs that are doubles, under the oracle.

`DLITE_DRAFTER_FACTORY=graph_engine:make` puts it into a spawned scheduler, before that builds
attention and graphs; `make_scripted` with the widths of scripted_widths.py as well. What upstream
does only on a CUDA device is replaced: which runner is made, the capture stream, the graph backend.
Buffers, padding, keys, hooks and replay are upstream's.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from graph_double import DoubleBackend, Doubles
from oracle import LOG_VARIABLE, OracleDrafter
from scripted_widths import script_widths
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor import model_runner as upstream
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.runtime_context import get_spec
from sglang_dlite.platforms.attention import CpuAttentionBackend
from sglang_dlite.platforms.kernel_attention import KernelAttentionBackend
from sglang_dlite.speculative import cuda_graph
from sglang_dlite.speculative.worker import DLiteWorker

SIZES = [1, 2, 4, 8]  # a batch of 3 has a padding row, one above 8 runs eagerly


def replay_counts(folder: Path) -> Counter[str]:
    """How often each kind of graph was replayed, in all and at each width.

    By the engine whose oracle lives in `folder`.
    """
    log = folder / "log.graphs"  # written by the first step
    return Counter(json.loads(log.read_text()) if log.exists() else {})


def make(path: str, device: str, dtype: torch.dtype) -> OracleDrafter:
    """The factory that DLITE_DRAFTER_FACTORY names."""
    drafter = OracleDrafter(path)
    _install(Doubles(drafter.config.vocab_size), get_spec().speculative_num_draft_tokens)
    return drafter


def make_scripted(path: str, device: str, dtype: torch.dtype) -> OracleDrafter:
    """The same for an adaptive engine."""
    script_widths()
    return make(path, device, dtype)


def _install(doubles: Doubles, width: int) -> None:
    _attention()

    class DoubleRunner(cuda_graph.decode_runner_class()):  # type: ignore[misc]
        """The runner of DLITE without streams and CUDA events."""

        def _capture(self) -> None:
            self.buffers.seq_lens.fill_(self.seq_len_fill_value)
            self.buffers.seq_lens_cpu.fill_(self.seq_len_fill_value)
            self.buffers.reset_index_buffers()
            with self.backend.capture_session(None):
                self._capture_one_stream()

        def _record_in_graph_metadata_prep_done(self) -> None:
            pass

    def capture(*, model_runner: Any) -> Any:
        model_runner.graph_shared_output = GraphSharedOutput(
            device=torch.device("cpu"), max_rows=max(SIZES) * width
        )
        return cuda_graph_setup.GraphCapture(
            runner=DoubleRunner(model_runner),
            memory_phase="target_verify",
            memory_usage_gb=0.0,
            capture_time=0.0,
        )

    cuda_graph.decode_runner_class = lambda: DoubleRunner  # what hook H1 answers
    cuda_graph_setup.capture_decode_graph = capture
    cuda_graph_setup.current_platform = SimpleNamespace(
        capabilities=SimpleNamespace(graph_capture=True)
    )
    assert upstream.capture_cuda_graphs is cuda_graph_setup.capture_cuda_graphs
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    decode_cuda_graph_runner.get_batch_sizes_to_capture = lambda *a, **k: (list(SIZES), [])
    decode_cuda_graph_runner.resolve_decode_backend = lambda runner: DoubleBackend()
    cuda_graph._cuda_recorder = lambda: doubles.record
    _spoil_after_each_step(doubles)


def _attention() -> None:
    """The CPU's attention in a graph: planned before each replay, on the runner's buffers.

    As a GPU's, it is made for one width, and knows no other.
    """
    backend: Any = CpuAttentionBackend
    initialise = backend.__init__

    def remember_width(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self.width = get_spec().speculative_num_draft_tokens

    def plan(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        n = forward_batch.batch_size
        self.init_forward_metadata(
            SimpleNamespace(
                forward_mode=ForwardMode.TARGET_VERIFY,
                req_pool_indices=forward_batch.req_pool_indices[:n],
                seq_lens=forward_batch.seq_lens[:n],
                extend_seq_lens=torch.full((n,), self.width),
                out_cache_loc=forward_batch.out_cache_loc,
                spec_info=forward_batch.spec_info,
            )
        )

    backend.__init__ = remember_width
    for each in (CpuAttentionBackend, KernelAttentionBackend):
        each.init_forward_metadata = _of_one_width(each.init_forward_metadata)
    backend.init_forward_metadata_out_graph = plan
    backend.init_cuda_graph_state = lambda self, max_bs, max_num_tokens: None
    # The worker's lengths include the verify rows on a CPU; a padding row has nothing else.
    backend.get_cuda_graph_seq_len_fill_value = lambda self: self.width
    backend.shared_read_ends = lambda self, mode: SharedReadEnds.UNKNOWN


def _of_one_width(init_forward_metadata: Any) -> Any:
    @wraps(init_forward_metadata)
    def checked(self: Any, forward_batch: Any) -> None:
        if forward_batch.forward_mode.is_target_verify():
            assert forward_batch.spec_info.draft_token_num == self.width
        init_forward_metadata(self, forward_batch)

    return checked


def _spoil_after_each_step(doubles: Doubles) -> None:
    step = DLiteWorker.forward_batch_generation
    report = Path(os.environ[LOG_VARIABLE] + ".graphs")

    @wraps(step)
    def spoiling(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        doubles.spoil(self)
        counts = Counter(draft=sum(graph.replays for graph in doubles.graphs))
        for runner in _decode_runners(self):
            doubles.spoil_inputs(runner.buffers.input_ids)
            doubles.spoil_outputs(runner.buffers.next_token_logits_buffer)
            for key, graph in runner.backend.graphs.items():
                variant = key.variant_label or "verify"
                counts[variant] += graph.replays
                counts[f"{variant} {runner.captured_req_width}"] += graph.replays
        report.write_text(json.dumps(counts))
        return result

    DLiteWorker.forward_batch_generation = spoiling


def _decode_runners(worker: Any) -> list[Any]:
    """One, or one per width."""
    if worker.runtimes is None:
        return [worker._target_worker.model_runner.decode_cuda_graph_runner]
    return [runtime.graphs for runtime in worker.runtimes._runtimes.values()]
