"""Initial drafter weights taken from the target, so that little data goes a long way.

- The head starts as the best rank-R stand-in for the target's lm_head on hiddens it really sees:
  output_proj [V, R] times the h-part of state_hidden_mlp [R, h] minimises the mean squared error of
  the logits (up to a constant per row, which softmax ignores) over sample hiddens.
- The layers are copies of the target's last D layers, the final norm is the target's.
- The token memory embeds tokens by the principal components of the target's embedding.
- The depth embedding takes most of each slot's constant part away. It is added before the context's
  RMSNorm, and a state's mean over all positions is 22 to 63 % of its energy (SmolLM2-135M; in one
  layer a single dimension has 58 %): left in, the norm scales down what tells positions apart.
  Learning alone does not do it, AdamW moves an entry by the learning rate and states are 2 to 30.
- A teacher's history projection passes the post-final-norm state on, as the pivot's slot has it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dlite.drafter import DLiteDrafter, HistoryAwareDrafter

# Not all of it: what is left of the mean still says which layer a slot is of.
_CENTRING = 0.8


def factorise_head(lm_head: Tensor, hiddens: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Rank-R factors (A [V, R], B [R, h]) of lm_head [V, h], weighted by hiddens [N, h].

    Minimises the mean of |(E - AB) x|^2 over the hiddens x, E centred over the vocabulary: with
    C = mean(x x^T), A B = svd_R(E C^1/2) C^-1/2. Scaled so that B x has about unit variance.
    """
    head = lm_head.float() - lm_head.float().mean(0)
    x = hiddens.float().to(head.device)
    second = x.T @ x / len(x)
    second += 1e-3 * second.diagonal().mean() * torch.eye(len(second), device=x.device)
    values, vectors = torch.linalg.eigh(second)
    root = vectors * values.sqrt() @ vectors.T
    inverse = vectors / values.sqrt() @ vectors.T
    # The right singular vectors of E C^1/2 from a small h x h problem.
    weighted = head @ root
    _, right = torch.linalg.eigh(weighted.T @ weighted)
    basis = right[:, -rank:].flip(-1)  # [h, R], largest first
    return weighted @ basis, basis.T @ inverse


@torch.no_grad()
def warm_start(drafter: DLiteDrafter, target: Any, hiddens: Tensor, slot_means: Tensor) -> None:
    """Overwrite the weights of a fresh drafter or teacher.

    target: a transformers model; hiddens [N, h]: post-final-norm states of it; slot_means [S, h]
    fp32: the pivot states' means. A drafter with more layers than the target takes all of the
    target's, its first ones stay fresh.
    """
    config = drafter.config
    rank = config.sequential_rank
    head = drafter.sequential_head
    lm_head = target.get_output_embeddings().weight
    if rank <= config.hidden_size:
        left, right = factorise_head(lm_head, hiddens, rank)
        head.output_proj.weight.copy_(left)
        head.state_hidden_mlp.weight[:, rank:].copy_(right)
        head.prev_token_embedding.weight.copy_(_token_memory(target, rank))
        # A fresh state leans to the newest token: candidate = its embedding, gate mostly open.
        head.state_proj.weight[rank:, rank:].add_(torch.eye(rank))
        head.state_proj.bias[:rank].fill_(-1.0)
    layers = target.model.layers[-config.num_hidden_layers :]
    for mine, theirs in zip(drafter.layers[-len(layers) :], layers, strict=True):
        source = theirs.state_dict()
        for name, weight in mine.state_dict().items():
            # q_norm and k_norm stay at one where the target has none, a narrower MLP stays fresh.
            if name in source and source[name].shape == weight.shape:
                weight.copy_(source[name])
    drafter.norm.weight.copy_(target.model.norm.weight)
    drafter.context_norm.weight.copy_(
        torch.stack([layer.input_layernorm.weight.float() for layer in layers]).mean(0)
    )
    ids = drafter.constants.layer_ids
    drafter.layer_depth_embedding.weight[ids] = -_CENTRING * slot_means
    if isinstance(drafter, HistoryAwareDrafter):
        drafter.history_fuse.weight.zero_()
        last = drafter.history_fuse.weight[:, -config.hidden_size :]  # h_last's part
        last.copy_(torch.eye(config.hidden_size))
        drafter.history_norm.weight.copy_(drafter.context_norm.weight)


def _token_memory(target: Any, rank: int) -> Tensor:
    embedding = target.get_input_embeddings().weight.float()
    centred = embedding - embedding.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    scores = centred @ vectors[:, -rank:]
    return scores / scores.std(0) * 0.5
