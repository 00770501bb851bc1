"""RMSNorm, rotary embedding and SiLU on the compiled kernels, through upstream's registry.

Each function is bound to the upstream module as `self`. What the kernel does not do goes to the
module's own torch implementation.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from sglang_dlite.platforms.kernels import KERNEL_DTYPES


def register_fused_ops(kernels: ModuleType, platform_key: str) -> None:
    """Make upstream's modules call the kernels on the platform named by `platform_key`.

    Modules look their function up at their first call, so that this may follow the loading of the
    model. The registry goes by exact class: rotary variants with another table (YaRN, ...) keep
    upstream's own code.
    """
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding

    def rms_norm(
        self: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        quant_linear: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plain = (
            post_residual_addition is None
            and self.has_weight
            and x.dtype in KERNEL_DTYPES
            and self.weight.dtype == x.dtype
            and (residual is None or residual.dtype == x.dtype)
            and self.variance_size_override is None
            and self.override_orig_dtype is None
            and not self.cast_x_before_out_mul
            and not self.fp32_residual
            and x.shape[-1] == self.hidden_size
        )
        if not plain:
            return self.forward_native(x, residual, post_residual_addition, quant_linear)
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.variance_epsilon)
        return kernels.add_rms_norm(x, residual, self.weight, self.variance_epsilon)

    def rotary(
        self: RotaryEmbedding,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        offsets: torch.Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plain = (
            offsets is None
            and fused_set_kv_buffer_arg is None
            and positions.dim() == 1
            and query.dtype in KERNEL_DTYPES
            and key.dtype == query.dtype
            and query.dim() == 2
            and key.dim() == 2
            and query.stride(1) == 1
            and key.stride(1) == 1
        )
        if not plain:
            return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
        # In place, as upstream's CUDA kernel does: query and key are views of the projection.
        kernels.rotary_(
            positions,
            query,
            key,
            self.head_size,
            self.cos_sin_cache_as(query.dtype),
            self.is_neox_style,
        )
        return query, key

    def silu_and_mul(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
        return kernels.silu_and_mul(x) if x.dtype in KERNEL_DTYPES else self.forward_native(x)

    for op_class, function in (
        (RMSNorm, rms_norm),
        (RotaryEmbedding, rotary),
        (Llama3RotaryEmbedding, rotary),
        (SiluAndMul, silu_and_mul),
    ):
        BaseFusedOp.register_oot_forward(op_class, function, platform_key)
