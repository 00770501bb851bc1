"""The K/V pool of the CPU platform."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuKVPool(MHATokenToKVPool):
    """Upstream's pool without its Triton tile-copy warm-up.

    The copy serves tree verification; DLITE verifies a chain in place and never moves K/V.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
