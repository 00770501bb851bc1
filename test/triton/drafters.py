"""Random drafters for the tests of the fused step, and the comparison with the module."""

from __future__ import annotations

import torch
from kernel_cases import Size
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, DraftBlock
from torch import Tensor

SMALL = Size(48, 4, 2, 8, 40, 3, 1, 4, 20, 150)


def random_drafter(config: DLiteConfig, dtype: torch.dtype) -> DLiteDrafter:
    """Weights large enough that every part of the step matters; the same ones at every call."""
    torch.manual_seed(3)
    drafter = DLiteDrafter(config)
    for name, parameter in drafter.named_parameters():
        if "prev_token_embedding" in name:  # each token leads to others
            torch.nn.init.normal_(parameter, std=2)
        elif "state_hidden_mlp.weight" in name:
            torch.nn.init.normal_(parameter, std=2 / config.sequential_rank**0.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter.to(dtype).requires_grad_(False)


def draw_inputs(config: DLiteConfig, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Pivot states, token group and an embedding table."""
    generator = torch.Generator().manual_seed(n)
    states = torch.randn(n, config.num_pivot_states, config.hidden_size, generator=generator)
    group = torch.randint(config.vocab_size, (n, config.anchor_group_size), generator=generator)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    return states.to(dtype), group, table.to(dtype)


def assert_block_is_the_modules(
    block: DraftBlock, module: DLiteDrafter, states: Tensor, group: Tensor, table: Tensor
) -> None:
    """`block` against the module in fp32 (of the same, perhaps rounded, weights).

    The module is led along the block's own tokens, so that a near tie cannot hide an error.
    """
    config, n = module.config, len(group)
    assert block.token_ids.shape == (n, config.num_drafts)
    assert block.token_ids.dtype == torch.int64
    assert block.head_vectors.shape == (n, config.num_drafts, config.sequential_rank)
    if n == 0:
        return
    hidden = module.backbone(states.float(), group, lambda ids: table[ids].float())
    previous = torch.cat([group[:, -1:], block.token_ids[:, :-1]], dim=1)
    vectors = module.head_vectors(hidden, previous, group)
    tolerance = 1e-5 if block.head_vectors.dtype == torch.float32 else 0.03
    scale = vectors.abs().max().item()
    torch.testing.assert_close(block.head_vectors.float(), vectors, rtol=0, atol=tolerance * scale)
    logits = module.draft_logits(vectors)
    chosen = logits.gather(-1, block.token_ids[..., None])[..., 0]
    assert (chosen >= logits.amax(-1) - tolerance * logits.abs().amax()).all()
