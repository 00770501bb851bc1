"""What every request of a batch has output, although the host may not know it all yet.

Under the overlap scheduler a step is launched before the scheduler has read the result of the
step before: `Req.output_ids` then lacks that step's tokens. They are kept here, on the device. How
many are lacking is arithmetic on the committed lengths, so that nothing has to be reset when a
request ends, is retracted, or its row of the request table goes to another one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.utils.common import async_h2d


class PendingOutput(NamedTuple):
    """Output beyond the host's knowledge, n requests and verify width D."""

    token_ids: torch.Tensor  # [n, D] int64, the first `lens` of a row are real
    lens: torch.Tensor  # [n, 1] int64, 0 to D
    num_outputs: torch.Tensor  # [n, 1] int64, known to the host and pending


class OutputHistory:
    """Remembers the newest step's output tokens by row of the request table."""

    def __init__(self, num_rows: int, width: int, device: torch.device | str) -> None:
        self._newest = torch.zeros(num_rows, width, dtype=torch.int64, device=device)

    def record(self, batch: Any, token_ids: torch.Tensor) -> None:
        """Keep what a step has output: token_ids [n, m], m up to D, real tokens first."""
        rows = batch.req_pool_indices.to(torch.int64)
        self._newest[rows, : token_ids.shape[1]] = token_ids.to(torch.int64)

    def pending(self, batch: Any, lens_with_anchor: torch.Tensor) -> PendingOutput:
        """What the host lacks; lens_with_anchor [n] counts prompt and output up to the anchor.

        The scheduler is one step behind at most, so this is the newest step's output or nothing.
        Nothing is pending for a request whose prompt is not wholly in this batch.
        """
        device = lens_with_anchor.device
        lens_on_host = [(len(req.origin_input_ids), len(req.output_ids)) for req in batch.reqs]
        prompt, known = async_h2d(lens_on_host, dtype=torch.int64, device=device).unbind(1)
        lacking = lens_with_anchor.to(torch.int64) - prompt - known  # [n]
        lens = lacking.clamp(0, self._newest.shape[1])
        rows = batch.req_pool_indices.to(torch.int64)
        return PendingOutput(self._newest[rows], lens[:, None], (known + lens)[:, None])


def output_counts(reqs: list[Any], pending: PendingOutput, vocab_size: int) -> torch.Tensor:
    """How often each request has output each token: [n, V] float32."""
    device, n = pending.lens.device, len(reqs)
    counts = torch.zeros(n, vocab_size, dtype=torch.float32, device=device)
    # One cell of the table per known token. `output_ids` is an array, read here without a loop.
    row_starts = np.arange(n, dtype=np.int64) * vocab_size
    known = [np.asarray(req.output_ids, dtype=np.int64) for req in reqs]
    cells = np.concatenate(known) + np.repeat(row_starts, [len(ids) for ids in known])
    index = async_h2d(cells, dtype=torch.int64, device=device)
    counts.view(-1).scatter_add_(0, index, torch.ones_like(index, dtype=torch.float32))
    width = pending.token_ids.shape[1]
    real = torch.arange(width, device=device) < pending.lens  # [n, D]
    return counts.scatter_add_(1, pending.token_ids, real.to(torch.float32))
