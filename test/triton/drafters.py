"""Small random drafters for the tests of the fused step, and the comparison with the module."""

from __future__ import annotations

import torch
from kernel_cases import Size
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, DraftBlock
from sglang_dlite.gpu_check import drafters
from sglang_dlite.gpu_check.parity import block_error
from torch import Tensor

SMALL = Size(48, 4, 2, 8, 40, 3, 1, 4, 20, 150)


def random_drafter(config: DLiteConfig, dtype: torch.dtype) -> DLiteDrafter:
    return drafters.random_drafter(config, "cpu", dtype)


def draw_inputs(config: DLiteConfig, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Pivot states, token group and an embedding table."""
    states, group = drafters.random_inputs(config, n, "cpu", dtype)
    return states, group, drafters.random_table(config, "cpu", dtype)


def assert_block_is_the_modules(
    block: DraftBlock, module: DLiteDrafter, states: Tensor, group: Tensor, table: Tensor
) -> None:
    """`block` against the module in fp32 of the same, perhaps rounded, weights."""
    config, n = module.config, len(group)
    assert block.token_ids.shape == (n, config.num_drafts)
    assert block.token_ids.dtype == torch.int64
    assert block.head_vectors.shape == (n, config.num_drafts, config.sequential_rank)
    tolerance = 1e-5 if block.head_vectors.dtype == torch.float32 else 0.02
    assert block_error(block, module, states, group, table) <= tolerance
