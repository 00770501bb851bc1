"""The DLite drafter: backbone and sequential head in one module, named as in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dlite.drafter.backbone import DecoderLayer, RMSNorm, build_constants
from sglang_dlite.drafter.config import DLiteConfig
from sglang_dlite.drafter.sampling import draw, temperature_law
from sglang_dlite.drafter.sequential_head import SequentialHead

# The target's input embedding: ids [...] int64 -> [..., h]. Frozen, never part of the drafter.
Embed = Callable[[Tensor], Tensor]

_INIT_STD = 0.02  # as Qwen3 initialises its matrices


class DraftBlock(NamedTuple):
    """The K tokens after the anchor; softmax(draft_logits(u_k)) is the drafter's law of token k."""

    token_ids: Tensor  # [n, K] int64
    head_vectors: Tensor  # [n, K, R], the drafter's dtype


class DLiteDrafter(nn.Module):
    """Drafts K tokens from the S pivot states and the G last real tokens; sees no other history.

    `DLiteDrafter(config)` has fresh weights; under `torch.device("meta")` it allocates none. Its
    state dict is exactly the checkpoint's tensors. Inputs of another floating dtype are cast to
    the parameters'.
    """

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layer_depth_embedding = nn.Embedding(config.num_target_layers, config.hidden_size)
        self.context_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.sequential_head = SequentialHead(config)
        self.constants = build_constants(config)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=_INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    def backbone(self, pivot_states: Tensor, token_group: Tensor, embed: Embed) -> Tensor:
        """Prediction hiddens [n, K, h] of the K mask queries, after the final norm. Differentiable.

        pivot_states [n, S, h]: target layer outputs at the pivot, in the order of
        `target_layer_ids`; the state for id L-1 is the one after the target's final norm.
        token_group [n, G] int64: the real tokens ending in the anchor. Raises ValueError on other
        shapes or dtypes.
        """
        context = self.context_slots(pivot_states, token_group)
        return self.run_layers(context, token_group, embed, self.constants)

    def context_slots(self, pivot_states: Tensor, token_group: Tensor) -> Tensor:
        """The S context slots [n, S, h] of `backbone`, whose arguments these are."""
        config, n = self.config, token_group.shape[0]
        _check("pivot_states", pivot_states, (n, config.num_pivot_states, config.hidden_size))
        self._check_token_group(token_group, n)
        depth = self.layer_depth_embedding(self.constants.layer_ids)  # [S, h]
        return self.context_norm(pivot_states.to(self.dtype) + depth)

    def run_layers(
        self, context: Tensor, token_group: Tensor, embed: Embed, constants: Any
    ) -> Tensor:
        """Prediction hiddens [n, K, h] over context [n, C, h]; `constants` place its C+T keys."""
        config, n = self.config, token_group.shape[0]
        masks = token_group.new_full((n, config.num_drafts), config.mask_token_id)  # [n, K]
        x = embed(torch.cat([token_group, masks], dim=1)).to(self.dtype)  # [n, T, h], T = G+K
        for layer in self.layers:
            x = layer(x, context, constants)
        return self.norm(x[:, -config.num_drafts :])

    def head_vectors(
        self, prediction_hidden: Tensor, previous_tokens: Tensor, token_group: Tensor
    ) -> Tensor:
        """Teacher-forced head vectors u_k [n, K, R], for training. Differentiable.

        prediction_hidden [n, K, h]; previous_tokens [n, K] int64: the token before each draft, so
        column 0 is the anchor; token_group [n, G] int64. Raises ValueError on other shapes or
        dtypes.
        """
        config, head = self.config, self.sequential_head
        n = token_group.shape[0]
        _check("prediction_hidden", prediction_hidden, (n, config.num_drafts, config.hidden_size))
        _check("previous_tokens", previous_tokens, (n, config.num_drafts), torch.int64)
        self._check_token_group(token_group, n)
        projected = head.project_hidden(prediction_hidden)  # [n, K, R]
        state = head.initial_state(token_group)  # [n, R]
        vectors = []
        for k in range(config.num_drafts):
            state = head.advance(state, previous_tokens[:, k])
            vectors.append(head.combine(state, projected[:, k]))
        return torch.stack(vectors, dim=1)

    def draft_logits(self, head_vectors: Tensor) -> Tensor:
        """Logits [..., V] of head vectors [..., R]. The target's lm_head plays no part here."""
        return self.sequential_head.output_proj(head_vectors)

    @torch.no_grad()
    def draft(self, pivot_states: Tensor, token_group: Tensor, embed: Embed) -> DraftBlock:
        """Draft one block greedily; arguments as in `backbone`, n = 0 included.

        Shapes depend on n only and nothing is read back to the host, so that one CUDA graph can
        hold it all, if `embed` can be captured. On a tie the lowest id is taken: torch does not
        promise it, its CPU and CUDA reductions do it, and a test holds the CPU to it.
        """
        return self.draft_from(self.backbone(pivot_states, token_group, embed), token_group)

    @torch.no_grad()
    def draft_from(self, prediction_hidden: Tensor, token_group: Tensor) -> DraftBlock:
        """The greedy block from the backbone's hiddens [n, K, h]: the serial half of `draft`."""
        # Not argmax, which is the slower of the two over a bf16 row on a CPU.
        return self._chain(
            prediction_hidden,
            token_group,
            lambda _, vector: self.draft_logits(vector).max(dim=-1).indices,
        )

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
        """Draft one block, each token drawn from the law at the request's temperature.

        The first arguments as in `draft`; temperatures [n] fp32 > 0; greedy [n] bool: these rows
        take the most likely token; uniforms [n, K] fp64 in [0, 1). Token k has the law
        `temperature_law(law_logits(u_k), temperatures)`. Shapes depend on n only and nothing is
        read back, as in `draft`.
        """

        def choose(k: int, vector: Tensor) -> Tensor:
            logits = self.law_logits(vector)  # [n, V]
            drawn = draw(temperature_law(logits, temperatures), uniforms[:, k])
            return torch.where(greedy, logits.argmax(dim=-1), drawn)

        return self._chain(self.backbone(pivot_states, token_group, embed), token_group, choose)

    def law_logits(self, head_vectors: Tensor) -> Tensor:
        """`draft_logits` [..., V] in fp32, whatever the weights are: the law that is drawn from.

        Rejection sampling computes it twice, one row at a time and for a block at once. In bf16
        the two would round to different laws, and the output would follow neither; in fp32 they
        differ by 1e-6 or so. TF32 matmuls change nothing for bf16 weights: it holds them exactly.
        """
        return F.linear(head_vectors.float(), self._output_weight_fp32)

    @cached_property
    def _output_weight_fp32(self) -> Tensor:
        # A copy of V * R * 4 bytes unless the weights are fp32; they are frozen where this is used.
        return self.sequential_head.output_proj.weight.detach().float()

    def _chain(
        self,
        prediction_hidden: Tensor,
        token_group: Tensor,
        choose: Callable[[int, Tensor], Tensor],
    ) -> DraftBlock:
        """The serial loop; choose(k, u_k [n, R]) gives token k [n] int64, k from 0."""
        head = self.sequential_head
        projected = head.project_hidden(prediction_hidden)
        state = head.initial_state(token_group)
        token = token_group[:, -1]  # the anchor
        tokens, vectors = [], []
        for k in range(self.config.num_drafts):
            state = head.advance(state, token)
            vectors.append(head.combine(state, projected[:, k]))
            token = choose(k, vectors[-1])
            tokens.append(token)
        return DraftBlock(torch.stack(tokens, dim=1), torch.stack(vectors, dim=1))

    def _check_token_group(self, token_group: Tensor, n: int) -> None:
        _check("token_group", token_group, (n, self.config.anchor_group_size), torch.int64)


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, must be {list(shape)}")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, must be {dtype}")
