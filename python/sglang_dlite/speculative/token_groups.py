"""The G real tokens that end in the anchor, after a prefill."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.utils.common import async_h2d


def prefill_token_group(batch: Any, anchor: torch.Tensor, group_size: int) -> torch.Tensor:
    """Token group [n, G] int64 for an extend batch: its last G-1 prompt tokens, then the anchor.

    The last token of each request is in the batch even on a full prefix-cache hit (SGLang always
    recomputes one). Older ones may be cached, so they come from the request's ids; a prompt
    shorter than the group repeats its first token. `anchor` [n] may be int32: upstream's sampler
    returns that unless it took an argmax.
    """
    anchor = anchor.to(torch.int64)
    if group_size == 1:
        return anchor[:, None]
    if group_size == 2:
        lens = async_h2d(batch.extend_lens, dtype=torch.int64, device=anchor.device)
        last = torch.cumsum(lens, dim=0) - 1  # [n]
        return torch.stack([batch.input_ids[last], anchor], dim=1)
    rows = []
    for req, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
        ids = (list(req.origin_input_ids) + list(req.output_ids))[: prefix + extend]
        rows.append([ids[max(len(ids) - back, 0)] for back in range(group_size - 1, 0, -1)])
    older = async_h2d(rows, dtype=torch.int64, device=anchor.device)  # [n, G-1]
    return torch.cat([older, anchor[:, None]], dim=1)
