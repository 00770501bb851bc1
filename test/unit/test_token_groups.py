"""The token group after a prefill: the prompt's last tokens, cached or not, then the anchor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang_dlite.speculative.token_groups import prefill_token_group


def batch(prompts: list[list[int]], cached: list[int], outputs: list[list[int]]) -> SimpleNamespace:
    """An extend batch of full prompts (and of earlier output, after a retraction)."""
    whole = [p + o for p, o in zip(prompts, outputs, strict=True)]
    return SimpleNamespace(
        reqs=[
            SimpleNamespace(origin_input_ids=p, output_ids=o)
            for p, o in zip(prompts, outputs, strict=True)
        ],
        prefix_lens=cached,
        extend_lens=[len(ids) - c for ids, c in zip(whole, cached, strict=True)],
        input_ids=torch.tensor([t for ids, c in zip(whole, cached, strict=True) for t in ids[c:]]),
    )


@pytest.mark.parametrize("group_size", range(1, 6))
@pytest.mark.parametrize("cached", [[0, 0, 0], [0, 3, 5]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_group_against_slicing(group_size: int, cached: list[int], dtype: torch.dtype) -> None:
    """A sampled anchor comes as int32; the drafter takes int64 only."""
    prompts, outputs = [[11], [21, 22, 23, 24], [31, 32, 33, 34, 35]], [[], [], [36]]
    anchors = torch.tensor([90, 91, 92], dtype=dtype)
    group = prefill_token_group(batch(prompts, cached, outputs), anchors, group_size)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = prompt + output
        padded = ids[:1] * group_size + ids + [int(anchors[row])]
        assert group[row].tolist() == padded[-group_size:]
    assert group.dtype == torch.int64


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_a_middle_chunk_ends_at_its_own_last_token(group_size: int) -> None:
    """Chunked prefill: what follows the chunk is known to the request, but not yet verified."""
    request = SimpleNamespace(origin_input_ids=list(range(10, 20)), output_ids=[])
    chunk = SimpleNamespace(
        reqs=[request], prefix_lens=[2], extend_lens=[4], input_ids=torch.arange(12, 16)
    )
    group = prefill_token_group(chunk, torch.tensor([99]), group_size)
    assert group[0].tolist() == [12, 13, 14, 15, 99][-group_size:]
