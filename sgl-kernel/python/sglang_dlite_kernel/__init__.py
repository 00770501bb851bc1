"""Compiled CPU kernels of sglang-dlite, as PyTorch operators `torch.ops.sglang_dlite_kernel.*`.

All sums are in fp32 and rounded once. A row's result does not depend on the other rows of the
call, so that one row and eight rows over the same context agree bit for bit. The instruction set
(amx, avx512_bf16, avx512, avx2) is chosen at run time; `DLITE_CPU_ISA` names a lesser one.
`DLITE_CPU_THREADS` sets the threads of a call, by default one per usable core.

The names below are operator overloads: calling one skips the overload resolution of `torch.ops`.
A bad shape or dtype raises RuntimeError with the argument's name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_dlite_kernel import _C  # noqa: F401  (registers the operators)

_ops = torch.ops.sglang_dlite_kernel

isa = _ops.isa.default
"""() -> the name of the instruction set in use."""

use_isa = _ops.use_isa.default
"""(name) -> None: use another instruction set from here on, in all threads; for comparisons."""

has_matrix_unit = _ops.has_matrix_unit.default
"""() -> whether `linear` is at full speed for any number of rows (else up to about 64)."""

num_threads = _ops.num_threads.default
"""() -> threads of a call, the caller included."""

take_seconds = _ops.take_seconds.default
"""() -> seconds spent in linear, attention and other kernels since the last call of this."""

linear = _ops.linear.default
"""(x [..., in] bf16, packed, out_features, bias [out] bf16 or None) -> [..., out] bf16."""

rms_norm = _ops.rms_norm.default
"""(x [..., size] fp32 or bf16, weight [size], eps) -> x / sqrt(mean(x^2) + eps) * weight."""

add_rms_norm = _ops.add_rms_norm.default
"""(x, residual, weight, eps) -> (rms_norm of the unrounded x + residual, x + residual rounded)."""

rotary_ = _ops.rotary_.default
"""(positions [n] int64, query [n, Hq * d], key [n, Hkv * d], d, cos_sin [positions, r], neox).

Rotates the first r elements of each head in place; cos_sin holds r / 2 cosines, then r / 2 sines.
"""

silu_and_mul = _ops.silu_and_mul.default
"""(x [..., 2 * size]) -> silu(x[..., :size]) * x[..., size:]."""

store_kv = _ops.store_kv.default
"""(key [n, Hkv, d], value [n, Hkv, dv], slots [n] int64, key_cache, value_cache): write rows."""

attention = _ops.attention.default
"""Causal attention of each request's last rows over its paged context.

(query [rows, Hq, d], key_cache [slots, Hkv, d], value_cache [slots, Hkv, dv], req_to_token int32
[*, positions], req_pool_indices [n] int64, seq_lens [n] int64 with the new rows included,
query_starts [n + 1] int64, scale, window or -1) -> [rows, Hq, dv]. With a window w, a row sees the
w keys before itself and itself.
"""

mlp = _ops.mlp.default
"""down(silu(gate x) * up x) in one call.

(x [rows, in] bf16, gate_up packed, its bias or None, its outputs, and the same three of down)
"""

attention_block = _ops.attention_block.default
"""o_proj(attention(rotary(norm(qkv_proj x)))) in one call; K and V are written to their slots.

(x [rows, in] bf16, qkv packed, its bias or None, Hq, query and key norm [d] or None, eps, positions
[rows] int64, cos_sin, neox, slots [rows] int64, key_cache, value_cache, req_to_token,
req_pool_indices, seq_lens, query_starts, scale, window, o packed, bias or None, outputs)
"""


def runnable_isas() -> list[str]:
    """The instruction sets that this CPU can run, best first."""
    return _ops.runnable_isas.default().split(", ")


def pack_linear_weights(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Packed copies of weights [out, in] bf16, for `linear`, in one block of memory.

    Layers that run one after the other lie one after the other, on huge pages where the system
    has them: both help the bandwidth at which they are read.
    """
    sizes = [_ops.packed_size(*weight.shape) for weight in weights]
    block = torch.empty(sum(sizes), dtype=torch.bfloat16)
    _ops.advise_huge_pages(block)
    packed = list(block.split(sizes))
    for weight, target in zip(weights, packed, strict=True):
        repack_linear_weight(weight, target)
    return packed


def repack_linear_weight(weight: torch.Tensor, packed: torch.Tensor) -> None:
    """Overwrite a packed copy after its weight [out, in] has changed."""
    _ops.pack_linear(weight, packed)


DraftStep = torch.classes.sglang_dlite_kernel.DraftStep
"""The draft step of a DLite drafter, in bf16 with fp32 sums, as one call.

DraftStep(layers, head, cos, sin, num_heads, num_kv_heads, num_drafts, eps): `layers` is a flat list
of 11 tensors per layer: input_layernorm, q_proj, k_proj, v_proj, q_norm, k_norm, o_proj,
post_attention_layernorm, gate_proj, up_proj, down_proj; `head` is norm, prev_token_embedding,
state_proj weight and bias, state_hidden_mlp weight and bias, output_proj; cos and sin are
[S + T, head_dim] fp32. Weights are copied.

.draft(context [n, S, h] bf16 after context_norm, x [n, T, h] bf16 embeddings, token_group [n, G]
int64) -> (token_ids [n, K] int64, head_vectors [n, K, R] bf16).
"""
