"""The drafter's step on the compiled kernels: the same drafter, without Python per operator."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from sglang_dlite.drafter import DLiteDrafter, DraftBlock
from sglang_dlite.platforms.kernels import compiled_kernels
from sglang_dlite.platforms.packed_linear import pack_drafter


def prepare_drafter(
    drafter: DLiteDrafter, sampled_drafts: bool = False
) -> DLiteDrafter | CompiledDrafter | SampledCompiledDrafter:
    """The form of a loaded drafter that serves on this CPU; the argument may be changed.

    bf16 is compiled where the kernels are, else its matrices are packed; fp32 stays as it is.
    The compiled step drafts greedily: with sampled_drafts the packed module serves beside it.
    """
    kernels = compiled_kernels()
    if kernels is not None and drafter.dtype == torch.bfloat16:
        compiled = CompiledDrafter(drafter, kernels)
        if not sampled_drafts:
            return compiled
        pack_drafter(drafter)
        return SampledCompiledDrafter(compiled, drafter)
    pack_drafter(drafter)
    return drafter


class CompiledDrafter:
    """A frozen `DLiteDrafter` in bf16 on a CPU, with `draft` as one call of the kernels.

    It drafts what the module drafts, up to rounding: sums, norms and the recurrent state stay in
    fp32 here. Memory: a packed copy of every matrix; the module itself is not kept, except for
    its embeddings and norms.
    """

    def __init__(self, drafter: DLiteDrafter, kernels: ModuleType) -> None:
        config = self.config = drafter.config
        head, constants = drafter.sequential_head, drafter.constants
        layers = []
        for layer in drafter.layers:
            attention, mlp = layer.self_attn, layer.mlp
            layers += [
                layer.input_layernorm.weight,
                attention.q_proj.weight,
                attention.k_proj.weight,
                attention.v_proj.weight,
                attention.q_norm.weight,
                attention.k_norm.weight,
                attention.o_proj.weight,
                layer.post_attention_layernorm.weight,
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                mlp.down_proj.weight,
            ]
        self._step = kernels.DraftStep(
            [weight.data for weight in layers],
            [
                drafter.norm.weight.data,
                head.prev_token_embedding.weight.data,
                head.state_proj.weight.data,
                head.state_proj.bias.data,
                head.state_hidden_mlp.weight.data,
                head.state_hidden_mlp.bias.data,
                head.output_proj.weight.data,
            ],
            constants.key_cos,
            constants.key_sin,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.num_drafts,
            config.rms_norm_eps,
        )
        self._rms_norm = kernels.rms_norm
        self._context_norm = drafter.context_norm.weight.data.to(torch.bfloat16)
        depth = drafter.layer_depth_embedding.weight.data[constants.layer_ids]
        self._depth = depth.to(torch.bfloat16)  # [S, h]
        self._masks = torch.full((1, config.num_drafts), config.mask_token_id)  # [1, K]

    def draft(
        self, pivot_states: Tensor, token_group: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> DraftBlock:
        """As `DLiteDrafter.draft`: pivot_states [n, S, h], token_group [n, G] int64."""
        n, config = token_group.shape[0], self.config
        context = self._rms_norm(
            pivot_states.to(torch.bfloat16) + self._depth, self._context_norm, config.rms_norm_eps
        )  # [n, S, h]
        queries = torch.cat([token_group, self._masks.expand(n, -1)], dim=1)  # [n, T]
        return DraftBlock(
            *self._step.draft(context, embed(queries).to(torch.bfloat16), token_group)
        )


class SampledCompiledDrafter:
    """Greedy drafts from the compiled step, drawn ones from the module (torch operators)."""

    def __init__(self, compiled: CompiledDrafter, drafter: DLiteDrafter) -> None:
        self.config = compiled.config
        self.draft = compiled.draft
        self.draft_sampled = drafter.draft_sampled
        self.law_logits = drafter.law_logits
