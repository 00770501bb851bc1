"""The gated low-rank recurrence that turns the backbone's K parallel vectors into a causal block.

Equations: DLite's release, `dlite/modeling/sequential_head.py` (arXiv 2610.23787). With e_k the
embedding of the previous token and h_k the prediction hidden of draft k = 1..K:

    gate, candidate = split(W_state [s_{k-1} ; e_k] + b_state)
    s_k = sigmoid(gate) * s_{k-1} + (1 - sigmoid(gate)) * tanh(candidate)
    u_k = W_s s_k + W_h h_k + b           (the head vector; [W_s, W_h] = state_hidden_mlp.weight)
    logits_k = output_proj u_k
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_dlite.drafter.config import DLiteConfig


class SequentialHead(nn.Module):
    """`advance` and `combine` are the halves of a step; training and drafting both use them."""

    def __init__(self, config: DLiteConfig) -> None:
        super().__init__()
        rank, vocab = config.sequential_rank, config.vocab_size
        self.rank = rank
        self.prev_token_embedding = nn.Embedding(vocab, rank)
        self.state_proj = nn.Linear(2 * rank, 2 * rank)
        self.state_hidden_mlp = nn.Linear(rank + config.hidden_size, rank)
        self.output_proj = nn.Linear(rank, vocab, bias=False)

    def initial_state(self, token_group: Tensor) -> Tensor:
        """s_0 [n, R] from token_group [n, G]: zero, for G > 1 advanced by the last but one."""
        weight = self.state_proj.weight
        state = torch.zeros(
            token_group.shape[0], self.rank, dtype=weight.dtype, device=weight.device
        )
        return state if token_group.shape[1] == 1 else self.advance(state, token_group[:, -2])

    def project_hidden(self, prediction_hidden: Tensor) -> Tensor:
        """W_h h_k + b for all k at once: [n, K, h] -> [n, K, R].

        It does not depend on the recurrence, so one matmul outside the loop replaces K inside it.
        Equal to the release's fused form up to rounding.
        """
        return F.linear(
            prediction_hidden,
            self.state_hidden_mlp.weight[:, self.rank :],
            self.state_hidden_mlp.bias,
        )

    def advance(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """The next state [n, R] from the state [n, R] and the token just emitted [n] int64."""
        previous = self.prev_token_embedding(token_ids)  # [n, R]
        gate, candidate = self.state_proj(torch.cat([state, previous], dim=-1)).chunk(2, dim=-1)
        keep = torch.sigmoid(gate)
        return keep * state + (1 - keep) * torch.tanh(candidate)

    def combine(self, state: Tensor, projected_hidden: Tensor) -> Tensor:
        """Head vector u_k [n, R] from the state s_k [n, R] and `project_hidden`'s row k [n, R]."""
        return F.linear(state, self.state_hidden_mlp.weight[:, : self.rank]) + projected_hidden
