"""The history-free backbone: pivot states and local tokens in, one hidden vector per draft out.

Equations: DLite's release, `dlite/modeling/{dlite,qwen3}.py` (arXiv 2610.23787).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dlite.drafter.config import DLiteConfig


class Constants(nn.Module):
    """Tensors fixed by the config, as non-persistent buffers `self.<name>` on the model's device.

    They are not in the state dict, so a model built on meta or by `to_empty` has nowhere to load
    them from, and `.to(torch.bfloat16)` would round the RoPE table. One rule avoids both: whatever
    is done to the module, the buffers are then the CPU originals again, moved, dtype kept.
    """

    # Which keys a query may see; only the history-aware teacher hides any (see history.py).
    key_mask: Tensor | None = None

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        self._originals = values
        for name, value in values.items():
            self.register_buffer(name, value, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constants:
        super()._apply(fn, recurse)
        for name, value in self._originals.items():
            self._buffers[name] = value.to(self._buffers[name].device)
        return self


def rope_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [P, head_dim], fp32, of the angles p * theta^(-2i/head_dim), halves equal."""
    exponents = torch.arange(0, head_dim, 2, device="cpu", dtype=torch.float32) / head_dim
    angles = positions.float()[:, None] / theta**exponents  # [P, d/2]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def build_constants(config: DLiteConfig) -> Constants:
    """RoPE tables of the S context slots and T queries (`key_*`); ids of the S target layers.

    All context slots share position max(0, G-2), queries are at 0..T-1: the same for every request
    and context length. `device="cpu"` throughout, so that these are real in a model built on meta.
    """
    num_queries = config.anchor_group_size + config.num_drafts
    slots = torch.full(
        (config.num_pivot_states,), max(0, config.anchor_group_size - 2), device="cpu"
    )
    positions = torch.cat([slots, torch.arange(num_queries, device="cpu")])  # [S+T]
    cos, sin = rope_table(positions, config.head_dim, config.rope_theta)
    layer_ids = torch.tensor(config.target_layer_ids, dtype=torch.int64, device="cpu")
    return Constants(key_cos=cos, key_sin=sin, layer_ids=layer_ids)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [..., P, d] with fp32 tables [P, d]: in fp32, rounded once to x's dtype."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; normed in fp32, cast back, as Qwen3 does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Non-causal grouped-query attention of T queries over S context slots and themselves."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            d,
        )
        self.q_proj = nn.Linear(h, self.num_heads * d, bias=False)
        self.k_proj = nn.Linear(h, self.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, self.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.num_heads * d, h, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, constants: Any) -> Tensor:
        """x [n, T, h] (normed), context [n, S, h] -> [n, T, h]."""
        n, num_queries, _ = x.shape
        source = torch.cat([context, x], dim=1)  # [n, S+T, h]
        num_keys = source.shape[1]
        q = self.q_proj(x).view(n, num_queries, self.num_heads, self.head_dim)
        k = self.k_proj(source).view(n, num_keys, self.num_kv_heads, self.head_dim)
        v = self.v_proj(source).view(n, num_keys, self.num_kv_heads, self.head_dim)
        # The queries are the last T of the keys, and so are their positions.
        cos, sin = constants.key_cos, constants.key_sin  # [S+T, d]
        query_cos, query_sin = cos[..., -num_queries:, :], sin[..., -num_queries:, :]
        q = rotate(self.q_norm(q).transpose(1, 2), query_cos, query_sin)
        k = rotate(self.k_norm(k).transpose(1, 2), cos, sin)  # [n, Hkv, S+T, d]
        out = F.scaled_dot_product_attention(
            q,
            k,
            v.transpose(1, 2),
            attn_mask=constants.key_mask,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )  # [n, Hq, T, d]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One Qwen3-style layer. The context joins as keys and values, unnormed by the layer."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Tensor, constants: Any) -> Tensor:
        """x [n, T, h], context [n, S, h] -> [n, T, h]."""
        x = x + self.self_attn(self.input_layernorm(x), context, constants)
        return x + self.mlp(self.post_attention_layernorm(x))
