"""Attention on torch operators: decode, extend with a prefix, and verify rows, per request.

Upstream's torch_native backend computes an extend over prefix + new rows as a full square of
prefix + new rows, so that a verify pass over 8 rows at 4k context costs 4k x 4k. Here only the
new rows are queries; the mask is the bottom-right corner of the causal one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


def suffix_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Bool mask [num_queries, num_keys] for queries that are the last rows of the keys.

    Query i stands at position num_keys - num_queries + i and sees keys up to itself; with a
    sliding window it sees at most `window` keys before itself (upstream's convention). None where
    nothing is masked.
    """
    windowed = window is not None and num_keys > window
    if num_queries == 1 and not windowed:
        return None
    q = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]  # [q, 1]
    k = torch.arange(num_keys, device=device)[None, :]  # [1, k]
    mask = k <= q  # [q, k]
    if windowed:
        mask &= k >= q - window
    return mask


def attend_suffix(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Attention of the last rows of one request over its whole context.

    query [q, Hq, d], keys and values [k, Hkv, d] (k >= q, Hq a multiple of Hkv) -> [q, Hq, dv].
    """
    num_queries, num_keys = query.shape[0], keys.shape[0]
    q = query.transpose(0, 1)[None]  # [1, Hq, q, d]
    k = keys.transpose(0, 1)[None].to(q.dtype)  # [1, Hkv, k, d]
    v = values.transpose(0, 1)[None].to(q.dtype)  # [1, Hkv, k, dv]
    is_prompt = causal and window is None and num_queries == num_keys
    mask = None
    if causal and not is_prompt:
        mask = suffix_mask(num_queries, num_keys, window, query.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_prompt, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)  # [q, Hq, dv]


class CpuAttentionBackend(TorchNativeAttnBackend):
    """`torch_native` with suffix queries; plugs into upstream's forward_decode/forward_extend."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """query [rows, Hq, d] into output [rows, Hq, dv]; caches [slots, Hkv, d]."""
        if encoder_lens is not None:  # encoder-decoder models: upstream's general path
            return super()._run_sdpa_forward_extend(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
        start = 0
        for pool_index, num_keys, num_queries in zip(
            req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True
        ):
            slots = req_to_token[pool_index, :num_keys]
            output[start : start + num_queries] = attend_suffix(
                query[start : start + num_queries],
                k_cache[slots],
                v_cache[slots],
                scale=scaling,
                causal=causal,
                window=sliding_window_size,
            )
            start += num_queries
        return output

    def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A decode step is an extend by one row per request."""
        query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens = args[:7]
        ones = torch.ones_like(seq_lens)
        kwargs["causal"] = True  # masks nothing for one row; needed for a sliding window
        return self._run_sdpa_forward_extend(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            seq_lens - ones,
            ones,
            *args[7:],
            **kwargs,
        )
