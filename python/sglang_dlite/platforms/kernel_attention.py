"""Attention on the compiled kernel: one call per layer for decode, extend and verify rows alike."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_dlite.platforms.attention import CpuAttentionBackend
from sglang_dlite.platforms.kernels import KERNEL_DTYPES


class KernelAttentionBackend(CpuAttentionBackend):
    """Paged attention in place; what the kernel does not do goes to the torch operators.

    That is: cross attention and encoders, a K/V cache of another dtype, and pools that keep
    sliding-window layers apart.
    """

    def __init__(self, runner: Any, kernels: ModuleType) -> None:
        super().__init__(runner)
        self._kernel = kernels.attention

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make `plan`, which all layers share: table, pool rows, lengths, first rows."""
        super().init_forward_metadata(forward_batch)
        n = forward_batch.seq_lens.shape[0]
        starts = torch.zeros(n + 1, dtype=torch.int64)
        if forward_batch.forward_mode.is_decode_or_idle():
            torch.arange(n + 1, out=starts)
        else:
            torch.cumsum(forward_batch.extend_seq_lens, 0, out=starts[1:])
        self.plan = (
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices.to(torch.int64),  # [n]
            forward_batch.seq_lens.to(torch.int64),  # [n]
            starts,  # [n + 1]
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [rows, Hq * d], k [rows, Hkv, d], v [rows, Hkv, dv] -> [rows, Hq * dv], in any mode."""
        if kwargs or forward_batch.forward_mode.is_idle() or not self.serves(layer, q.dtype):
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        window = layer.sliding_window_size
        out = self._kernel(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            *self.plan,
            layer.scaling,
            window if window is not None and window > -1 else -1,
        )
        return out.view(out.shape[0], -1)

    def serves(self, layer: Any, dtype: torch.dtype) -> bool:
        """Whether the kernel does the attention of this RadixAttention."""
        return (
            layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and not self.use_sliding_window_kv_pool
            and dtype in KERNEL_DTYPES
            and self.token_to_kv_pool.dtype == dtype
        )
