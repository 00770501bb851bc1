"""Anchors, labels and masks against loops written from the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_dlite.training.anchors import AnchorSet, is_held_out, split
from sglang_dlite.training.replies import read_parts


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("drafts", [1, 4, 7])
def test_batches_equal_naive_loops(data_folder: Path, group: int, drafts: int) -> None:
    anchors = AnchorSet([data_folder], group, drafts)
    rows = anchors.rows_of(anchors.replies)
    batch = anchors.batch(rows)
    at = 0
    base = 0
    for part in read_parts(data_folder):
        for record in part.records:
            reply, tail = record["reply_ids"], record["prompt_tail"]
            tokens = tail + reply  # the reply starts at index len(tail)
            for r in range(len(reply) - 1):  # an anchor needs a label
                assert rows[at] == base + record["row"] + r
                a = len(tail) + r
                own = record["row"] + r
                states = torch.from_numpy(np.array(part.states[own])).view(torch.bfloat16)
                assert torch.equal(batch.pivot_states[at], states)
                assert batch.token_group[at].tolist() == tokens[a - group + 1 : a + 1]
                for j in range(drafts):
                    has = r + 1 + j < len(reply)
                    assert batch.labelled[at, j].item() == has
                    if not has:
                        continue
                    assert batch.labels[at, j] == reply[r + 1 + j]
                    assert batch.previous_tokens[at, j] == reply[r + j]
                    law = part.top_ids[own + j + 1]
                    assert batch.top_ids[at, j].tolist() == law.tolist()
                    assert np.array_equal(
                        batch.top_logprobs[at, j].numpy(), part.top_logprobs[own + j + 1]
                    )
                at += 1
        base += len(part.states)
    assert at == len(rows)


def test_rows_can_be_asked_for_in_any_order(data_folder: Path) -> None:
    anchors = AnchorSet([data_folder], 2, 3)
    rows = anchors.rows_of(anchors.replies)
    shuffled = np.random.default_rng(0).permutation(rows)
    straight, mixed = anchors.batch(np.sort(shuffled)), anchors.batch(shuffled)
    order = np.argsort(shuffled)
    for a, b in zip(straight, mixed, strict=True):
        assert torch.equal(a, b[torch.from_numpy(order)])


def test_turns_of_one_session_are_held_out_together(data_folder: Path) -> None:
    for index in range(200):
        assert is_held_out(f"x/{index}#0", 30) == is_held_out(f"x/{index}#2", 30)
    share = sum(is_held_out(f"x/{index}#0", 30) for index in range(4000)) / 4000
    assert 0.27 < share < 0.33
    replies = AnchorSet([data_folder], 1, 2).replies
    training, held = split(replies, 30)
    assert len(training) + len(held) == len(replies)
