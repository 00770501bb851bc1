"""The carried state keeps each request's rows together through filter and merge."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang_dlite.speculative.inputs import (
    DLiteDraftInput,
    capture_verify_input,
    pack_vectors,
    unpack_vectors,
)


def draft_input(rows: list[int], relayed: bool = False) -> DLiteDraftInput:
    """Request i has anchor i and carried row [10 i, 10 i + 1]; its pool slot is 100 + i."""
    anchors = torch.tensor(rows, dtype=torch.int64)
    return DLiteDraftInput(
        bonus_tokens=anchors,
        hidden_states=torch.stack([anchors * 10, anchors * 10 + 1], dim=1),
        future_indices=anchors + 100 if relayed else None,
    )


def test_filter_and_merge_move_the_tensors() -> None:
    carried = draft_input([1, 2, 3, 4])
    carried.filter_batch(torch.tensor([3, 1]))
    carried.merge_batch(draft_input([7]))
    assert carried.bonus_tokens.tolist() == [4, 2, 7]
    assert carried.hidden_states.tolist() == [[40, 41], [20, 21], [70, 71]]
    assert carried.future_indices is None
    carried.filter_batch(torch.tensor([], dtype=torch.int64))
    assert carried.bonus_tokens.tolist() == [] and carried.hidden_states.shape == (0, 2)
    carried.merge_batch(draft_input([5]))
    assert carried.hidden_states.tolist() == [[50, 51]]


def test_under_overlap_only_the_indices_move() -> None:
    """The tensors are gathered from the relay by these indices at the next step."""
    carried = draft_input([1, 2, 3], relayed=True)
    carried.filter_batch(torch.tensor([2, 0]), [2, 0])
    carried.merge_batch(draft_input([9], relayed=True))
    assert carried.future_indices is not None
    assert carried.future_indices.tolist() == [103, 101, 109]
    assert carried.bonus_tokens.tolist() == [1, 2, 3]


def test_what_the_scheduler_reads() -> None:
    carried = draft_input([1])
    assert carried.is_draft_input() and not carried.is_verify_input()
    assert carried  # an empty-looking input would be skipped by the scheduler's filter and merge
    assert (carried.topk_p, carried.topk_index) == (None, None)


def test_verify_input_of_graph_capture() -> None:
    verify = capture_verify_input(5)
    assert verify.is_verify_input()
    assert verify.draft_token_num == 5
    assert verify.capture_hidden_mode == CaptureHiddenMode.FULL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n,num_drafts,rank", [(0, 3, 4), (1, 1, 1), (5, 7, 3), (2, 4, 16)])
def test_head_vectors_survive_the_relay(
    n: int, num_drafts: int, rank: int, dtype: torch.dtype
) -> None:
    """Bit for bit, through an int64 row that also holds ids; K * R may be odd."""
    vectors = torch.randn(n, num_drafts, rank, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = pack_vectors(vectors)
    assert packed.dtype == torch.int64 and packed.shape == (n, (num_drafts * rank + 1) // 2)
    row = torch.cat([torch.arange(n)[:, None].expand(-1, 3), packed], dim=1)
    relayed = torch.empty_like(row)
    relayed[torch.arange(n)] = row
    back = unpack_vectors(relayed[:, 3:], num_drafts, rank)
    assert back.dtype == torch.float32 and torch.equal(back, vectors.float())
