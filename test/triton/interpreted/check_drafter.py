"""The whole fused step under Triton's interpreter (run by test_triton_interpreter.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafters import SMALL, assert_block_is_the_modules, draw_inputs, random_drafter
from kernel_cases import ALL_DTYPES
from safetensors.torch import load_file
from sglang_dlite.drafter import load_drafter
from sglang_dlite.kernels.fused_drafter import FusedDrafter
from sglang_dlite.kernels.projection import Sampling, project_reference
from sglang_dlite.kernels.recurrence import pick_reference

GOLDEN = Path(__file__).resolve().parents[4] / "shared" / "golden"


@pytest.mark.parametrize("folder", ["g1", "g2"])
def test_golden_vectors(folder: str) -> None:
    if not (GOLDEN / folder).is_dir():
        pytest.skip(f"no reference vectors at {GOLDEN / folder}")
    vectors = load_file(GOLDEN / folder / "vectors.safetensors")
    drafter = FusedDrafter(load_drafter(GOLDEN / folder, dtype=torch.float32))
    table = vectors["embed_tokens"]
    block = drafter.draft(vectors["pivot_hidden"], vectors["token_group"], lambda ids: table[ids])
    assert torch.equal(block.token_ids, vectors["draft_tokens"])
    logits = drafter.law_logits(block.head_vectors)
    torch.testing.assert_close(logits, vectors["draft_logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("n,group", [(0, 1), (1, 1), (3, 2), (2, 4)])
def test_against_the_module(n: int, group: int, dtype: str) -> None:
    config = SMALL.config(anchor_group_size=group)
    states, tokens, table = draw_inputs(config, n, ALL_DTYPES[dtype])
    fused = FusedDrafter(random_drafter(config, ALL_DTYPES[dtype]))
    block = fused.draft(states, tokens, lambda ids: table[ids])
    module = random_drafter(config, ALL_DTYPES[dtype]).float()
    assert_block_is_the_modules(block, module, states, tokens, table)


def test_sampled_drafts() -> None:
    """Greedy where asked; else the tokens that the references draw."""
    config, n = SMALL.config(block_size=3), 4
    states, tokens, table = draw_inputs(config, n, torch.float32)
    fused = FusedDrafter(random_drafter(config, torch.float32))
    embed = lambda ids: table[ids]  # noqa: E731
    temperatures, greedy_rows = torch.tensor([1.0, 0.8, 2.0, 0.5]), torch.arange(n) % 3 == 0
    uniforms = torch.rand(
        n, config.num_drafts, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    block = fused.draft_sampled(states, tokens, embed, temperatures, greedy_rows, uniforms)
    greedy = fused.draft(states, tokens, embed)
    assert torch.equal(block.token_ids[::3], greedy.token_ids[::3])
    output = random_drafter(config, torch.float32).sequential_head.output_proj.weight
    for k in range(config.num_drafts):
        seeds = uniforms.view(torch.int64)[:, k]
        sampling = Sampling(temperatures.masked_fill(greedy_rows, 0), seeds)
        candidates = project_reference(block.head_vectors[:, k], output, sampling)
        assert torch.equal(block.token_ids[:, k], pick_reference(*candidates))
    assert not torch.equal(block.token_ids, greedy.token_ids)
