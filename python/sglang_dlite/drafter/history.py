"""The history-aware teacher: the drafter, which also sees a window of the target's states.

Isomorphic to the drafter (same layers, head, shapes), so that the drafter can take over its head
and learn its law. For the anchor at position a, the positions a-W..a-2 each give one more key and
value, `history_norm(history_fuse([h_first ; h_mid ; h_last]))` of the target's layers 0, L//2 and
L-1, before the S context slots of the pivot a-1. RoPE positions are the tokens' own (global).
Equations: DLite's development repository (`swa_teacher`), arXiv 2610.23787. Never served.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from sglang_dlite.drafter.backbone import RMSNorm
from sglang_dlite.drafter.config import DLiteConfig
from sglang_dlite.drafter.model import DLiteDrafter, DraftBlock, Embed


def history_layer_ids(num_target_layers: int) -> tuple[int, int, int]:
    """The target layers that are fused into a history key: first, middle, last."""
    return 0, num_target_layers // 2, num_target_layers - 1


class HistoryWindow(NamedTuple):
    """The history of n anchors. Anchors of one sequence share its tokens, hence the index."""

    features: Tensor  # [t, 3, h] states of layers `history_layer_ids` at t tokens
    index: Tensor  # [n, W-1] int64 into features: positions a-W..a-2; anything where not valid
    valid: Tensor  # [n, W-1] bool: the position exists
    position: Tensor  # [n] int64: a


class Geometry(NamedTuple):
    """What `Attention` asks of its constants, per request."""

    key_cos: Tensor  # [n, 1, W-1+S+T, d]
    key_sin: Tensor
    key_mask: Tensor  # [n, 1, 1, W-1+S+T] bool


class HistoryAwareDrafter(DLiteDrafter):
    """`DLiteDrafter` plus the history projection; `window` is W >= 2."""

    def __init__(self, config: DLiteConfig, window: int) -> None:
        if window < 2:
            raise ValueError(f"window = {window}: must be at least 2 (a window of one is empty)")
        super().__init__(config)
        self.window = window
        self.history_fuse = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.history_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        nn.init.normal_(self.history_fuse.weight, std=(3 * config.hidden_size) ** -0.5)

    def backbone_with_history(
        self, pivot_states: Tensor, token_group: Tensor, embed: Embed, history: HistoryWindow
    ) -> Tensor:
        """As `backbone`, with the window before the context slots. -> [n, K, h]."""
        slots = self.context_slots(pivot_states, token_group)  # [n, S, h]
        features = history.features.to(self.dtype).flatten(1)  # [t, 3h]
        # Fused once per token, not once per anchor that sees it.
        fused = self.history_norm(self.history_fuse(features))[history.index]  # [n, W-1, h]
        context = torch.cat([fused, slots.to(fused.dtype)], dim=1)
        return self.run_layers(context, token_group, embed, self._geometry(history))

    @torch.no_grad()
    def draft_with_history(
        self, pivot_states: Tensor, token_group: Tensor, embed: Embed, history: HistoryWindow
    ) -> DraftBlock:
        """As `draft`, for the teacher evaluated as a drafter."""
        hidden = self.backbone_with_history(pivot_states, token_group, embed, history)
        return self.draft_from(hidden, token_group)

    def _geometry(self, history: HistoryWindow) -> Geometry:
        config, anchor = self.config, history.position[:, None]  # [n, 1]
        device = anchor.device
        before = torch.arange(-self.window, -1, device=device)  # a-W..a-2
        slots = torch.full((config.num_pivot_states,), -1, device=device)  # the pivot
        queries = torch.arange(
            1 - config.anchor_group_size, config.num_drafts + 1, device=device
        )  # real tokens end at a, mask j is at a+j
        positions = anchor + torch.cat([before, slots, queries])  # [n, W-1+S+T]
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        angles = positions.float()[..., None] / config.rope_theta ** (exponents / config.head_dim)
        angles = torch.cat([angles, angles], dim=-1)[:, None]  # [n, 1, P, d]
        seen = history.valid.new_ones(len(anchor), positions.shape[1] - history.valid.shape[1])
        mask = torch.cat([history.valid, seen], dim=1)[:, None, None]
        return Geometry(angles.cos(), angles.sin(), mask)
