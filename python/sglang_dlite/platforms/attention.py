"""Attention on torch operators: decode, extend with a prefix, and verify rows, per request.

Upstream's torch_native backend computes an extend over prefix + new rows as a full square of
prefix + new rows, so that a verify pass over 8 rows at 4k context costs 4k x 4k. Here only the
new rows are queries, and what all layers share (slots, masks) is made once per forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

# Up to here the query heads of a K/V head are folded into rows, which reads K and V once for all
# of them. Above, the mask of the folded form would cost more than the reads.
_MAX_FOLDED_QUERIES = 64


def suffix_mask(
    num_queries: int, num_keys: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """Additive mask [num_queries, num_keys] (0 or -inf) for queries that are the last of the keys.

    Query i stands at position num_keys - num_queries + i and sees keys up to itself; with a
    sliding window it sees at most `window` keys before itself (upstream's convention). None where
    nothing is masked.
    """
    windowed = window is not None and num_keys > window
    if num_queries == 1 and not windowed:
        return None
    q = torch.arange(num_keys - num_queries, num_keys)[:, None]  # [q, 1]
    k = torch.arange(num_keys)[None, :]  # [1, k]
    hidden = k > q  # [q, k]
    if windowed:
        hidden |= k < q - window
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(hidden, float("-inf"))


def attend_suffix(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scale: float | None,
    is_prompt: bool = False,
) -> torch.Tensor:
    """Attention of the last rows of one request over its whole context.

    query [q, Hq, d], keys [k, Hkv, d] and values [k, Hkv, dv] (Hq a multiple of Hkv), mask
    [q, k] additive or None -> [q, Hq, dv]. is_prompt: q = k and plainly causal, no mask given.
    """
    num_queries, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    k = keys.transpose(0, 1)[None]  # [1, Hkv, k, d]
    v = values.transpose(0, 1)[None]  # [1, Hkv, k, dv]
    if is_prompt or num_queries > _MAX_FOLDED_QUERIES:
        q = query.transpose(0, 1)[None]  # [1, Hq, q, d]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_prompt, scale=scale, enable_gqa=group > 1
        )
        return out[0].transpose(0, 1)  # [q, Hq, dv]
    rows = query.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)[None]
    if mask is not None and group > 1:
        mask = mask.repeat(group, 1)  # [g * q, k], rows head by head as the queries
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
    out = out[0].unflatten(1, (group, num_queries))  # [Hkv, g, q, dv]
    return out.permute(2, 0, 1, 3).flatten(1, 2)  # [q, Hq, dv]


@dataclass
class RequestPlan:
    """One request of a forward: its rows, its K/V slots, and its masks by sliding window."""

    num_queries: int
    slots: torch.Tensor  # [k] int64
    masks: dict[tuple[int | None, torch.dtype], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The additive mask, made by the first layer that asks."""
        key = (window, dtype)
        if key not in self.masks:
            self.masks[key] = suffix_mask(self.num_queries, len(self.slots), window, dtype)
        return self.masks[key]


class CpuAttentionBackend(TorchNativeAttnBackend):
    """`torch_native` with suffix queries; plugs into upstream's forward_decode/forward_extend."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Take note of a forward; upstream calls it before the first layer."""
        super().init_forward_metadata(forward_batch)
        self._forward_batch = forward_batch
        self._requests: list[RequestPlan] | None = None

    def _plan(self) -> list[RequestPlan]:
        """What the layers of this forward share, made by the first one that asks."""
        if self._requests is None:
            batch, table = self._forward_batch, self.req_to_token_pool.req_to_token
            seq_lens = batch.seq_lens.tolist()
            num_queries = [1] * len(seq_lens)
            if not batch.forward_mode.is_decode_or_idle():
                num_queries = batch.extend_seq_lens.tolist()
            self._requests = [
                RequestPlan(queries, table[row, :keys].to(torch.int64))
                for row, keys, queries in zip(
                    batch.req_pool_indices.tolist(), seq_lens, num_queries, strict=True
                )
            ]
        return self._requests

    def _run_sdpa_forward_extend(
        self, query: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """query [rows, Hq, d] into output [rows, Hq, dv]; caches [slots, Hkv, d]."""
        k_cache, v_cache = args[:2]
        causal, window = kwargs["causal"], kwargs["sliding_window_size"]
        if kwargs["is_cross_attn"] or not causal:  # encoders: upstream's general path
            return super()._run_sdpa_forward_extend(query, output, *args, **kwargs)
        start = 0
        for plan in self._plan():
            end = start + plan.num_queries
            is_prompt = window is None and plan.num_queries == len(plan.slots)
            output[start:end] = attend_suffix(
                query[start:end],
                _take(k_cache, plan.slots, query.dtype),
                _take(v_cache, plan.slots, query.dtype),
                None if is_prompt else plan.mask(window, query.dtype),
                scale=kwargs["scaling"],
                is_prompt=is_prompt,
            )
            start = end
        return output

    def _run_sdpa_forward_decode(
        self, query: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """A decode step is an extend by one row per request."""
        if kwargs["is_cross_attn"]:
            return super()._run_sdpa_forward_decode(query, output, *args, **kwargs)
        # Upstream says causal=False here: for one row the last key is the row itself either way.
        return self._run_sdpa_forward_extend(query, output, *args, **{**kwargs, "causal": True})


def _take(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a cache [N, H, d] -> [k, H, d]. Not cache[slots]: general indexing is slower."""
    rows = cache.flatten(1).index_select(0, slots)
    return rows.view(-1, *cache.shape[1:]).to(dtype)
