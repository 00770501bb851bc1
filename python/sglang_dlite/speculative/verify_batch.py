"""The TARGET_VERIFY batch that the target runs: D rows per request behind its committed prefix."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_dlite.speculative.inputs import DLiteVerifyInput


def verify_batch(
    batch: Any,
    candidates: torch.Tensor,
    offsets: torch.Tensor,
    target_worker: Any,
    *,
    greedy_tail: bool = False,
) -> ForwardBatch:
    """The forward batch of SGLang's ScheduleBatch `batch`, planned for attention.

    candidates [n, D] int64 is [anchor | drafts]; offsets [>= D] int64 is 0, 1, ... on the target's
    device. greedy_tail asks for the graph that also accepts and drafts (verify_tail.py).
    """
    runner, width = target_worker.model_runner, candidates.shape[1]
    if batch.seq_lens.is_cuda:
        # It may have been made on the scheduler's stream.
        batch.seq_lens.record_stream(torch.cuda.current_stream())
    positions = batch.seq_lens.to(torch.int64)[:, None] + offsets[:width]  # [n, D]
    # The scheduler has reserved 2 D slots per request; rejected rows are overwritten later.
    batch.out_cache_loc = (
        runner.req_to_token_pool.req_to_token[
            batch.req_pool_indices.to(torch.int64)[:, None], positions
        ]
        .reshape(-1)
        .to(torch.int64)
    )  # [n * D]
    verify_input = DLiteVerifyInput(
        draft_token=candidates.reshape(-1),
        positions=positions.reshape(-1),
        draft_token_num=width,
        greedy_tail=greedy_tail,
    )
    on_cpu = runner.device == "cpu"
    prefix_lens = batch.seq_lens
    prefix_lens_cpu, prefix_lens_sum = batch.seq_lens_cpu, batch.seq_lens_sum
    if prefix_lens_cpu is not None:
        # Host-planned backends (FlashInfer) want the length after the verify rows.
        batch.seq_lens_cpu = prefix_lens_cpu + width
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    forward_batch, _ = verify_input.prepare_for_verify(
        batch, target_worker, defer_metadata_init=on_cpu
    )
    batch.seq_lens_cpu, batch.seq_lens_sum = prefix_lens_cpu, prefix_lens_sum
    if on_cpu:
        # torch_native plans from the extend fields, which init_new leaves out for a verify.
        forward_batch.extend_prefix_lens = prefix_lens
        forward_batch.extend_seq_lens = torch.full_like(prefix_lens, width)
        forward_batch.seq_lens = prefix_lens + width
    else:
        forward_batch.apply_deprecated_skip_attn_backend_init(True)
    return forward_batch
