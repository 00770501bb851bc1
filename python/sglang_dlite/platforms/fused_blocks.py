"""The two halves of a decoder layer, each as one call of the compiled kernels.

A step of a small model spends as much time in Python between its operators as in them. The
modules named here keep their weights, names and signatures; only their `forward` is replaced, and
it hands over to upstream's own wherever the kernels do not do the job.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.graph_utils import padded_extend_real_tokens
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.llama import LlamaAttention, LlamaMLP
from sglang.srt.models.qwen2 import Qwen2Attention, Qwen2MLP
from sglang.srt.models.qwen3 import Qwen3Attention

from sglang_dlite.platforms.kernel_attention import KernelAttentionBackend
from sglang_dlite.platforms.packed_linear import MAX_ROWS_WITHOUT_MATRIX_UNIT, packed_weight

# Exact classes: a subclass may compute something else.
_ATTENTIONS = (LlamaAttention, Qwen2Attention, Qwen3Attention)
_MLPS = (LlamaMLP, Qwen2MLP)
_ROTARIES = (RotaryEmbedding, Llama3RotaryEmbedding)

Forward = Callable[..., torch.Tensor]


def fuse_blocks(model: torch.nn.Module, kernels: ModuleType) -> int:
    """Give the attention and MLP modules of `model` a fused forward; returns how many got one.

    Its linear layers must have been packed. Calling it again changes nothing.
    """
    max_rows = None if kernels.has_matrix_unit() else MAX_ROWS_WITHOUT_MATRIX_UNIT
    fused = 0
    for module in model.modules():
        if "forward" in module.__dict__:
            continue
        if type(module) in _MLPS and _fits_mlp(module):
            module.forward = _mlp_forward(module, kernels, max_rows)
        elif type(module) in _ATTENTIONS and _fits_attention(module):
            module.forward = _attention_forward(module, kernels, max_rows)
        else:
            continue
        fused += 1
    return fused


def _fits_mlp(module: Any) -> bool:
    return (
        type(module.act_fn) is SiluAndMul
        and packed_weight(module.gate_up_proj) is not None
        and packed_weight(module.down_proj) is not None
        and _whole(module.down_proj)
    )


def _fits_attention(module: Any) -> bool:
    norms: list[Any] = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    return (
        type(module.rotary_emb) in _ROTARIES
        and packed_weight(module.qkv_proj) is not None
        and packed_weight(module.o_proj) is not None
        and _whole(module.o_proj)
        and (norms[0] is None) == (norms[1] is None)
        and all(norm is None or norm.weight.dtype == torch.bfloat16 for norm in norms)
        and (norms[0] is None or norms[0].variance_epsilon == norms[1].variance_epsilon)
    )


def _whole(layer: Any) -> bool:
    """Whether a row-parallel layer is all on this rank and adds its own bias."""
    return layer.input_size_per_partition == layer.input_size and not layer.skip_bias_add


def _watched(*modules: torch.nn.Module) -> bool:
    """Whether somebody's hooks (--forward-hooks, a tensor dump) wait for these to be called."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)


def _mlp_forward(module: Any, kernels: ModuleType, max_rows: int | None) -> Forward:
    original, run = module.forward, kernels.mlp
    gate_up, down = module.gate_up_proj, module.down_proj
    weights = (
        packed_weight(gate_up),
        gate_up.bias,
        gate_up.weight.shape[0],
        packed_weight(down),
        down.bias,
        down.weight.shape[0],
    )

    def forward(x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        # A LoRA manager, which comes after loading, puts its wrappers in the layers' places.
        replaced = module.gate_up_proj is not gate_up or module.down_proj is not down
        too_many = max_rows is not None and x.shape[0] > max_rows
        if replaced or too_many or x.dtype != torch.bfloat16 or _watched(gate_up, down):
            return original(x, forward_batch)
        return run(x, *weights)

    return forward


def _attention_forward(module: Any, kernels: ModuleType, max_rows: int | None) -> Forward:
    original, run = module.forward, kernels.attention_block
    layer, rotary = module.attn, module.rotary_emb
    qkv, o = module.qkv_proj, module.o_proj
    query_norm, key_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    projection = (
        packed_weight(qkv),
        qkv.bias,
        layer.tp_q_head_num,
        None if query_norm is None else query_norm.weight,
        None if key_norm is None else key_norm.weight,
        0.0 if query_norm is None else query_norm.variance_epsilon,
    )
    window = layer.sliding_window_size
    output = (
        layer.scaling,
        window if window is not None and window > -1 else -1,
        packed_weight(o),
        o.bias,
        o.weight.shape[0],
    )

    def forward(
        positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        backend = get_attn_backend()
        if (
            not isinstance(backend, KernelAttentionBackend)
            or not backend.serves(layer, hidden_states.dtype)
            or forward_batch.forward_mode.is_idle()
            or module.qkv_proj is not qkv
            or module.o_proj is not o
            or _watched(qkv, layer, o)
            or padded_extend_real_tokens(hidden_states, forward_batch) is not None
            or positions.dim() != 1
            or (max_rows is not None and hidden_states.shape[0] > max_rows)
        ):
            return original(positions, hidden_states, forward_batch)
        pool = backend.token_to_kv_pool
        return run(
            hidden_states,
            *projection,
            positions,
            rotary.cos_sin_cache_as(hidden_states.dtype),
            rotary.is_neox_style,
            forward_batch.out_cache_loc,
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            *backend.plan,
            *output,
        )

    return forward
