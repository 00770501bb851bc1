"""The CPU platform: defaults, KV pool, packed linear weights, attention.

SGLang resolves the platform while its own utilities are being imported, so that this module may
import nothing of sglang beyond the platform interface; the parts are imported when asked for.
"""

from __future__ import annotations

import logging
import os
import platform as host
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sglang_dlite import ALGORITHM
from sglang_dlite.platforms.threads import set_thread_environment

logger = logging.getLogger(__name__)

ATTENTION_BACKEND = "torch_native"
OVERLAP_SWITCH = "DLITE_CPU_OVERLAP"


class DLiteCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's device services on torch operators alone."""

    _enum = PlatformEnum.OOT

    def __init__(self) -> None:
        if host.machine() not in ("x86_64", "AMD64"):
            raise RuntimeError(
                f"sglang-dlite's CPU platform runs on x86-64; this machine is {host.machine()!r}, "
                "where sglang 0.5.23 calls operators that its PyPI wheel does not have. Use an "
                "x86-64 machine, or a machine with a supported accelerator."
            )
        set_thread_environment()

    # -- configuration -------------------------------------------------------------------------

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill what the user left open; an explicit flag wins.

        Two of them are plain switches that can only be typed on, so nothing typed is overridden.

        Raises:
            RuntimeError: a hook is not in place; without DLITE they are needed as well.
        """
        from sglang_dlite.speculative.hooks import require_hooks

        require_hooks()
        given = getattr(server_args, "_raw_input", None) or {}
        if given.get("attention_backend") is None:
            server_args.attention_backend = ATTENTION_BACKEND
        # A scheduler that polls while idle would burn one of the few cores that decoding needs.
        server_args.sleep_on_idle = True
        # The way back is an environment variable, for tests: two streams on one CPU gain nothing.
        if os.environ.get(OVERLAP_SWITCH, "0") != "1":
            server_args.disable_overlap_schedule = True
        ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
        set_thread_environment(max(1, ranks // server_args.nnodes))

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm.upper() == ALGORITHM

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    # -- factories -----------------------------------------------------------------------------

    def get_compile_backend(self, mode: str | None = None) -> str:
        # Upstream compiles small functions at their first call, the repetition penalty's among
        # them: with inductor that is 13 s in a request, and without a C++ compiler the server dies.
        return "eager"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        from sglang_dlite.platforms.kv_pool import CpuKVPool

        return CpuKVPool if kind == "mha" else None

    # -- model ---------------------------------------------------------------------------------

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Pack every linear weight once (upstream calls this right after loading)."""
        from sglang_dlite.platforms.fused_ops import register_fused_ops
        from sglang_dlite.platforms.kernels import compiled_kernels
        from sglang_dlite.platforms.packed_linear import pack_linear_weights

        packed, kernels = pack_linear_weights(model), compiled_kernels()
        if kernels is None:
            logger.info("Packed %d linear weights for oneDNN.", packed)
            return
        from sglang_dlite.platforms.fused_blocks import fuse_blocks

        register_fused_ops(kernels, self.get_dispatch_key_name())
        fused = fuse_blocks(model, kernels)
        logger.info(
            "Packed %d linear weights, fused %d blocks. Compiled kernels: %s, %d threads.",
            packed,
            fused,
            kernels.isa(),
            kernels.num_threads(),
        )


def register_attention() -> None:
    """Put our attention behind the name `torch_native`; called by the plugin on a CPU.

    A name of our own would not do: upstream takes Triton paths for names it does not know
    (`allocation.get_last_loc`), and the command line offers only listed ones.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(ATTENTION_BACKEND)
    def create(runner: Any) -> Any:
        from sglang_dlite.platforms.attention import CpuAttentionBackend
        from sglang_dlite.platforms.kernel_attention import KernelAttentionBackend
        from sglang_dlite.platforms.kernels import compiled_kernels

        kernels = compiled_kernels()
        return (
            CpuAttentionBackend(runner)
            if kernels is None
            else KernelAttentionBackend(runner, kernels)
        )
