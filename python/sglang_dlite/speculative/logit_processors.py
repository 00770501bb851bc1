"""Custom logit processors on verify rows: each row sees its own request, as of its own prefix."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry

from sglang_dlite.speculative.output_history import PendingOutput

REQUEST_KEY = "__req__"  # upstream's name for the request among a processor's parameters


class RequestPrefix:
    """A request whose output also has `more`: what a processor would read one step at a time."""

    def __init__(self, req: Any, more: Sequence[int]) -> None:
        self._req = req
        self.output_ids = req.output_ids + array("q", more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class _RowInfo:
    """The part of SamplingBatchInfo that upstream's function reads, for all rows."""

    def __init__(self, entries: dict[int, ProcessorEntry], params: list[Any], device: Any) -> None:
        self.custom_logit_processor = entries
        self.custom_params = params
        self.device = device

    def __len__(self) -> int:
        return len(self.custom_params)


def row_params(
    info: Any, pending: PendingOutput, drafts: torch.Tensor
) -> list[dict[str, Any] | None]:
    """custom_params of n * (1 + m) rows: row j of a request has also output drafts[:, :j].

    `info` is upstream's SamplingBatchInfo of n requests; drafts [n, m] int64. The parameters are
    copied per row and their request is a RequestPrefix: processors run on the host, so its tokens
    are fetched from the device.
    """
    newest, lens = pending.token_ids.tolist(), pending.lens.flatten().tolist()
    rows: list[dict[str, Any] | None] = []
    for request, chain in enumerate(drafts.tolist()):
        params = info.custom_params[request]
        output = newest[request][: lens[request]]
        for num_drafts in range(len(chain) + 1):
            if params is not None and REQUEST_KEY in params:
                prefix = RequestPrefix(params[REQUEST_KEY], output + chain[:num_drafts])
                rows.append({**params, REQUEST_KEY: prefix})
            else:
                rows.append(params)
    return rows


def apply_processors(logits: torch.Tensor, info: Any, params: list[Any]) -> None:
    """Run the batch's processors on all verify rows: logits [n * D, V] in place.

    `info` is upstream's SamplingBatchInfo of n requests; params are the n * D rows' parameters.
    """
    width = logits.shape[0] // len(info)
    offsets = torch.arange(width, device=logits.device)
    entries = {
        key: ProcessorEntry(
            processor=entry.processor,
            rows=[row * width + j for row in entry.rows for j in range(width)],
            indices=(entry.indices[:, None] * width + offsets).flatten(),
        )
        for key, entry in info.custom_logit_processor.items()
    }
    apply_custom_logit_processor(logits, _RowInfo(entries, params, logits.device))
