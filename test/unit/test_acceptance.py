"""Acceptance rules against a naive loop, and free of host synchronisation."""

from __future__ import annotations

import pytest
import torch
from sglang_dlite.speculative.acceptance import (
    Acceptance,
    match_drafts,
    next_token_group,
    pivot_rows,
)
from torch._subclasses.fake_tensor import FakeTensorMode

WIDTHS = [2, 3, 8, 16]


def naive(candidates: list[int], target_ids: list[int]) -> tuple[int, int]:
    """(accepted drafts, new anchor) of one request, one token after the other."""
    accepted = 0
    while accepted + 1 < len(candidates) and candidates[accepted + 1] == target_ids[accepted]:
        accepted += 1
    return accepted, target_ids[accepted]


def chain(width: int, num_right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates and target tokens [1, width] with exactly `num_right` drafts accepted."""
    target = torch.arange(100, 100 + width)[None]
    candidates = torch.cat([torch.tensor([[7]]), target[:, :-1]], dim=1)
    if num_right < width - 1:
        candidates[0, num_right + 1] += 1
    return candidates, target


@pytest.mark.parametrize("width", WIDTHS)
def test_every_acceptance_count(width: int) -> None:
    pairs = [chain(width, n) for n in range(width)]
    accepted = match_drafts(*(torch.cat(parts) for parts in zip(*pairs, strict=True)))
    assert accepted.num_accepted.tolist() == list(range(width))
    for n, (candidates, target) in enumerate(pairs):
        assert naive(candidates[0].tolist(), target[0].tolist()) == (n, int(accepted.anchor[n]))
        output = accepted.output_ids[n, : n + 1].tolist()
        assert output == [*candidates[0, 1 : n + 1].tolist(), int(accepted.anchor[n])]


def test_a_match_after_a_mismatch_does_not_count() -> None:
    """A row behind a rejected draft has read a prefix that is not the output."""
    accepted = match_drafts(torch.tensor([[1, 9, 3, 4]]), torch.tensor([[2, 3, 4, 5]]))
    assert (accepted.num_accepted.tolist(), accepted.anchor.tolist()) == ([0], [2])


@pytest.mark.parametrize("width", WIDTHS)
def test_random_batches_against_the_loop(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    candidates, target = (torch.randint(0, 2, (200, width), generator=generator) for _ in "ab")
    accepted = match_drafts(candidates, target)
    expected = [naive(c, t) for c, t in zip(candidates.tolist(), target.tolist(), strict=True)]
    assert accepted.num_accepted.tolist() == [n for n, _ in expected]
    assert accepted.anchor.tolist() == [anchor for _, anchor in expected]
    assert len(set(accepted.num_accepted.tolist())) > 1


def test_an_empty_batch() -> None:
    empty = torch.zeros(0, 8, dtype=torch.int64)
    accepted = match_drafts(empty, empty)
    assert accepted.num_accepted.shape == accepted.anchor.shape == (0,)
    assert next_token_group(empty[:, :1], empty, accepted, 3).shape == (0, 3)
    assert pivot_rows(accepted.num_accepted, 8).shape == (0,)


def test_pivot_rows_are_the_last_kept_rows() -> None:
    assert pivot_rows(torch.tensor([0, 7, 3]), 8).tolist() == [0, 15, 19]


@pytest.mark.parametrize("group_size", range(1, 6))
@pytest.mark.parametrize("width", WIDTHS)
def test_token_group_is_the_end_of_the_verified_stream(group_size: int, width: int) -> None:
    """Against slicing the stream; the relayed tokens are just enough for any acceptance count."""
    num_earlier = max(group_size - 2, 0)
    histories = torch.arange(width * 10).view(width, 10) + 1000  # verified, before the old anchor
    pairs = [chain(width, n) for n in range(width)]
    candidates = torch.cat([c for c, _ in pairs])
    accepted = match_drafts(candidates, torch.cat([t for _, t in pairs]))
    group = next_token_group(histories[:, 10 - num_earlier :], candidates, accepted, group_size)
    for n in range(width):
        stream = histories[n].tolist() + candidates[n, : n + 1].tolist()
        stream.append(int(accepted.anchor[n]))
        assert group[n].tolist() == stream[-group_size:]


@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_accepting_needs_no_host_synchronisation(group_size: int) -> None:
    """Under fake tensors any `.item()`, boolean test or data-dependent shape raises."""
    with FakeTensorMode():
        candidates = torch.zeros(5, 8, dtype=torch.int64)
        accepted = match_drafts(candidates, torch.zeros(5, 8, dtype=torch.int64))
        assert isinstance(accepted, Acceptance)
        rows = pivot_rows(accepted.num_accepted, 8)
        assert torch.zeros(40, 12)[rows].shape == (5, 12)
        earlier = torch.zeros(5, max(group_size - 2, 0), dtype=torch.int64)
        group = next_token_group(earlier, candidates, accepted, group_size)
        assert group.shape == (5, group_size)
