"""The K/V pool of the CPU platform."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_dlite.platforms.kernels import KERNEL_DTYPES, compiled_kernels


class CpuKVPool(MHATokenToKVPool):
    """Upstream's pool without its Triton tile-copy warm-up, and with our writer of rows.

    The copy serves tree verification; DLITE verifies a chain in place and never moves K/V.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _store_kv_layer(
        self, layer_idx: int, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Rows cache_k [n, Hkv, d] and cache_v [n, Hkv, dv] into slots loc [n] int64 of a layer."""
        kernels = compiled_kernels()
        if kernels is None or cache_k.dtype not in KERNEL_DTYPES:
            super()._store_kv_layer(layer_idx, loc, cache_k, cache_v)
        else:
            kernels.store_kv(
                cache_k, cache_v, loc, self.k_buffer[layer_idx], self.v_buffer[layer_idx]
            )
