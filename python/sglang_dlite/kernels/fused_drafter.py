"""The drafter's step on the Triton kernels: the same drafter, few launches, one read of a weight.

Nothing here has run on a GPU yet (docs/gpu.md).
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, DraftBlock
from sglang_dlite.drafter.model import Embed
from sglang_dlite.kernels.attention import MAX_HEAD_DIM, MAX_KEYS
from sglang_dlite.kernels.launch import unsupported_gpu
from sglang_dlite.kernels.ops import ops

logger = logging.getLogger(__name__)

SWITCH = "DLITE_GPU_KERNELS"

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WARM_UP_SIZES = (1, 17, 33)  # one per block size of the projection


class _Layer(NamedTuple):
    """One layer's weights, as the step reads them; qkv is fused, and apart (`FusedDrafter`)."""

    input_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    output: Tensor  # [h, Hq d]
    mlp_norm: Tensor
    gate_up: Tensor  # [2 I, h]
    down: Tensor  # [h, I]


def prepare_drafter(drafter: DLiteDrafter) -> DLiteDrafter | FusedDrafter:
    """The form of a loaded drafter that serves on this GPU; the argument is used up.

    The module itself where DLITE_GPU_KERNELS=0, or where the kernels do not cover it or this GPU.
    Compiles them (seconds, once per machine): nothing is compiled in a graph capture or while
    serving.

    Raises:
        RuntimeError: the kernels do not compile or run on this GPU; says how to serve without.
    """
    if os.environ.get(SWITCH, "1") == "0":
        return drafter
    device = drafter.norm.weight.device
    reason = unsupported(drafter.config, drafter.dtype) or unsupported_gpu(device)
    if reason is not None:
        logger.warning("DLITE: the drafter runs on torch operators: %s.", reason)
        return drafter
    fused = FusedDrafter(drafter)
    try:
        fused.warm_up()
    except Exception as error:
        raise RuntimeError(
            f"the drafter's Triton kernels failed on this GPU ({error!r}). Set {SWITCH}=0 to serve "
            "with torch operators, and report the failure."
        ) from error
    return fused


def unsupported(config: DLiteConfig, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve this drafter; None where they can."""
    num_keys = config.num_pivot_states + config.anchor_group_size + config.num_drafts
    if num_keys > MAX_KEYS:
        return f"{num_keys} keys (pivot states, real tokens, drafts), at most {MAX_KEYS} fit"
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim is {config.head_dim}, at most {MAX_HEAD_DIM} fits"
    if dtype not in _DTYPES:
        return f"its dtype is {dtype}, not one of {', '.join(map(str, _DTYPES))}"
    return None


class FusedDrafter:
    """A frozen `DLiteDrafter` with fused weights; `draft` can be captured in a CUDA graph.

    It drafts what the module drafts, up to rounding: the recurrent state and the logits stay in
    fp32 here. Shapes depend on n only, nothing is read back to the host.

    The context slots are the same for all layers, so that their keys and values are one batched
    matmul of D layers. It reads the k and v rows inside the fused qkv weights: no copy.
    """

    def __init__(self, drafter: DLiteDrafter) -> None:
        config = self.config = drafter.config
        head, constants, dtype = drafter.sequential_head, drafter.constants, drafter.dtype
        self.dtype = dtype
        self._eps = config.rms_norm_eps
        self._cos, self._sin = constants.key_cos, constants.key_sin  # [S+T, d] fp32
        self._depth = drafter.layer_depth_embedding.weight.data[constants.layer_ids]  # [S, h]
        self._context_norm = drafter.context_norm.weight.data
        self._final_norm = drafter.norm.weight.data
        self._embedding = head.prev_token_embedding.weight.data  # [V, R]
        self._state_weight = head.state_proj.weight.data
        self._state_bias = head.state_proj.bias.data
        self._mix_weight = head.state_hidden_mlp.weight.data  # [R, R+h]
        self._mix_bias = head.state_hidden_mlp.bias.data
        self._output = head.output_proj.weight.data  # [V, R]
        d = config.head_dim
        self._q_size = config.num_attention_heads * d
        width = self._q_size + 2 * config.num_key_value_heads * d
        self._qkv = self._output.new_empty(
            config.num_hidden_layers, width, config.hidden_size
        )  # [D, (Hq + 2 Hkv) d, h]
        self._layers = []
        for fused, layer in zip(self._qkv, drafter.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            torch.cat([projection.weight.data for projection in projections], out=fused)
            gate_up = torch.cat([mlp.gate_proj.weight.data, mlp.up_proj.weight.data])
            self._layers.append(
                _Layer(
                    layer.input_layernorm.weight.data,
                    attention.q_norm.weight.data,
                    attention.k_norm.weight.data,
                    attention.o_proj.weight.data,
                    layer.post_attention_layernorm.weight.data,
                    gate_up,
                    mlp.down_proj.weight.data,
                )
            )
            # Freed as we go: two copies of all layers would be taken from the KV pool.
            for linear in (*projections, mlp.gate_proj, mlp.up_proj):
                linear.weight = None

    @torch.no_grad()
    def draft(self, pivot_states: Tensor, token_group: Tensor, embed: Embed) -> DraftBlock:
        """As `DLiteDrafter.draft`: pivot_states [n, S, h], token_group [n, G] int64."""
        hidden = self._backbone(pivot_states, token_group, embed)
        return self._serial_loop(hidden, token_group, None, None)

    @torch.no_grad()
    def draft_sampled(
        self,
        pivot_states: Tensor,
        token_group: Tensor,
        embed: Embed,
        temperatures: Tensor,
        greedy: Tensor,
        uniforms: Tensor,
    ) -> DraftBlock:
        """As `draft`, each token drawn from softmax(`law_logits` / T).

        temperatures [n] fp32 > 0; greedy [n] bool: these rows draft greedily; uniforms [n, K] fp64
        in [0, 1): the 64 bits of each seed one draw (noise.py), so that equal numbers give equal
        draws, in any batch.
        """
        hidden = self._backbone(pivot_states, token_group, embed)
        seeds = uniforms.double().contiguous().view(torch.int64)  # [n, K]
        temperatures = torch.where(greedy, 0.0, temperatures.float())
        return self._serial_loop(hidden, token_group, temperatures, seeds)

    def law_logits(self, head_vectors: Tensor) -> Tensor:
        """Logits [..., V] fp32 of head vectors [..., R] of a `DraftBlock`, in any dtype.

        Not rounded to the weights' dtype, as the tokens were not drawn from rounded ones.
        """
        rows = head_vectors.reshape(-1, head_vectors.shape[-1])
        if rows.is_cuda and self.dtype != torch.float32:
            # Exact: they were of this dtype when they were drafted.
            rows = rows.to(self.dtype)
            logits = torch.mm(rows, self._output.t(), out_dtype=torch.float32)
        else:
            logits = rows.float() @ self._output.float().t()
        return logits.view(*head_vectors.shape[:-1], -1)

    def warm_up(self) -> None:
        """Compile every kernel of `draft` and `draft_sampled`."""
        config = self.config
        zeros, ones = self._output.new_zeros, self._output.new_ones
        embed = lambda ids: zeros(*ids.shape, config.hidden_size)  # noqa: E731
        for n in _WARM_UP_SIZES:
            states = zeros(n, config.num_pivot_states, config.hidden_size)
            group = zeros(n, config.anchor_group_size, dtype=torch.int64)
            self.draft(states, group, embed)
        n = _WARM_UP_SIZES[-1]  # sampling has one block size
        draws = (ones(n), zeros(n, dtype=torch.bool), zeros(n, config.num_drafts))
        self.draft_sampled(states, group, embed, *draws)

    def _backbone(self, pivot_states: Tensor, token_group: Tensor, embed: Embed) -> Tensor:
        """Prediction hiddens [n, K, h] after the final norm."""
        config, eps, n = self.config, self._eps, token_group.shape[0]
        heads = (config.num_attention_heads, config.num_key_value_heads)
        slots = ops.context_norm(pivot_states.contiguous(), self._depth, self._context_norm, eps)
        kv_weight = self._qkv[:, self._q_size :]  # [D, 2 Hkv d, h]
        rows = slots.view(1, -1, config.hidden_size).expand(len(self._layers), -1, -1)
        context = torch.bmm(rows, kv_weight.transpose(1, 2))  # [D, n S, 2 Hkv d]
        context = context.unflatten(1, (n, config.num_pivot_states))

        masks = token_group.new_full((n, config.num_drafts), config.mask_token_id)  # [n, K]
        x = embed(torch.cat([token_group, masks], dim=1)).to(self.dtype).contiguous()  # [n, T, h]
        normed = ops.norm(x, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            qkv = F.linear(normed, self._qkv[i])  # [n, T, (Hq + 2 Hkv) d]
            mixed = ops.attention(
                qkv, context[i], layer.q_norm, layer.k_norm, self._cos, self._sin, *heads, eps
            )
            x, normed = ops.add_norm(x, F.linear(mixed, layer.output), layer.mlp_norm, eps)
            inner = ops.silu_mul(F.linear(normed, layer.gate_up))  # [n, T, I]
            down = F.linear(inner, layer.down)
            if i + 1 < len(self._layers):
                x, normed = ops.add_norm(x, down, self._layers[i + 1].input_norm, eps)
        return ops.final_norm(x, down, self._final_norm, eps, config.num_drafts)

    def _serial_loop(
        self,
        hidden: Tensor,
        token_group: Tensor,
        temperatures: Tensor | None,  # [n] fp32, 0 is greedy; None if all are
        seeds: Tensor | None,  # [n, K] int64
    ) -> DraftBlock:
        """Equations: drafter/sequential_head.py."""
        rank, num_drafts = self.config.sequential_rank, self.config.num_drafts
        projected = F.linear(hidden, self._mix_weight[:, rank:], self._mix_bias)  # [n, K, R]
        recurrent = (self._embedding, self._state_weight, self._state_bias)
        state = values = None
        if token_group.shape[1] > 1:
            _, state = ops.advance(None, token_group[:, -2:-1], None, *recurrent)
        ids = token_group[:, -1:]  # the anchor is known: one candidate
        tokens, vectors = [], []
        for k in range(num_drafts):
            token, state = ops.advance(values, ids, state, *recurrent)
            tokens.append(token)  # token k, the anchor at k = 0
            vectors.append(ops.combine(state, self._mix_weight, projected[:, k]))
            seed = None if seeds is None else seeds[:, k]
            values, ids = ops.project(vectors[-1], self._output, temperatures, seed)
        tokens.append(ops.pick(values, ids))
        return DraftBlock(torch.stack(tokens[1:], dim=1), torch.stack(vectors, dim=1))
