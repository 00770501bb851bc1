"""Anchors, labels, laws and windows against loops written from the definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_dlite.drafter.history import history_layer_ids
from sglang_dlite.training.anchors import (
    AnchorSpec,
    HiddenLaw,
    Pick,
    TopLaw,
    concatenate,
    is_held_out,
    select,
)
from sglang_dlite.training.dataset import load_replies
from sglang_dlite.training.states import OnlineStates
from sglang_dlite.training.targets import FrozenTarget, TargetError, TargetShape

from .conftest import LAYERS, VOCAB

IDS = (0, 2, LAYERS - 1)


def _naive(model, reply, place: int, spec: AnchorSpec) -> dict:
    """One anchor by its definition, from one plain forward pass."""
    tokens = [*reply.prompt_ids.tolist(), *reply.reply_ids.tolist()]
    a = len(reply.prompt_ids) + place
    with torch.no_grad():
        out = model(torch.tensor([tokens]), output_hidden_states=True)
    hidden = [h[0] for h in out.hidden_states[1:]]  # block outputs, the last one normed
    logits = out.logits[0]
    window = [p for p in range(a - spec.window, a - 1) if p >= 0]
    fused = history_layer_ids(LAYERS)
    return {
        "states": torch.stack([hidden[i][a - 1] for i in spec.layer_ids]),
        "group": [tokens[p] if p >= 0 else 0 for p in range(a - spec.group_size + 1, a + 1)],
        "next": [tokens[a + j] for j in range(1, spec.num_drafts + 1) if a + j < len(tokens)],
        "logits": [logits[a + j] for j in range(spec.num_drafts) if a + j + 1 < len(tokens)],
        "hidden": [hidden[-1][a + j] for j in range(spec.num_drafts) if a + j + 1 < len(tokens)],
        "window": [torch.stack([hidden[i][p] for i in fused]) for p in window],
        "position": a,
    }


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("group,drafts,window", [(1, 4, 0), (2, 7, 6), (3, 1, 3)])
def test_batches_equal_naive_loops(
    data_folder: Path, frozen: FrozenTarget, hf_model, group: int, drafts: int, window: int, top_k
) -> None:
    replies = load_replies([data_folder], VOCAB)
    spec = AnchorSpec(IDS, group, drafts, top_k, window)
    picks = [Pick(0, np.array([0, 3, 10])), Pick(3, replies[3].places), Pick(5, np.array([2]))]
    batch = OnlineStates(frozen, replies).batch(picks, spec)
    row = 0
    for pick in picks:
        for place in pick.places.tolist():
            naive = _naive(hf_model, replies[pick.reply], place, spec)
            close = {"atol": 1e-4, "rtol": 1e-4}
            torch.testing.assert_close(batch.pivot_states[row], naive["states"], **close)
            assert batch.token_group[row].tolist() == naive["group"]
            count = len(naive["next"])
            assert batch.labelled[row].tolist() == [j < count for j in range(drafts)]
            assert batch.next_tokens[row, :count].tolist() == naive["next"]
            previous = [naive["group"][-1], *naive["next"]][:drafts]
            assert batch.previous_tokens[row, : len(previous)].tolist() == previous
            for j, logits in enumerate(naive["logits"]):
                assert batch.labels[row, j] == logits.argmax()
                if isinstance(batch.law, TopLaw):
                    top = logits.log_softmax(-1).topk(5)
                    assert batch.law.ids[row, j].tolist() == top.indices.tolist()
                    torch.testing.assert_close(batch.law.logprobs[row, j], top.values, **close)
                else:
                    hidden = batch.law.hidden[row, j]
                    torch.testing.assert_close(hidden, naive["hidden"][j], **close)
            if window:
                valid = batch.window.valid[row]
                features = batch.window.features[batch.window.index[row][valid]]
                assert len(features) == len(naive["window"])
                assert valid.tolist() == sorted(valid.tolist())  # what is missing comes first
                for mine, theirs in zip(features, naive["window"], strict=True):
                    torch.testing.assert_close(mine, theirs, **close)
                assert batch.window.position[row] == naive["position"]
            row += 1
    assert row == len(batch.labels)
    assert isinstance(batch.law, TopLaw if top_k else HiddenLaw)


def test_labels_of_greedy_replies_are_their_tokens(data_folder: Path, frozen) -> None:
    replies = load_replies([data_folder], VOCAB)
    picks = [Pick(i, reply.places) for i, reply in enumerate(replies) if reply.length > 1]
    batch = OnlineStates(frozen, replies).batch(picks, AnchorSpec(IDS, 1, 6, 1))
    assert batch.labelled.sum() > 300
    assert torch.equal(batch.labels[batch.labelled], batch.next_tokens[batch.labelled])


def test_select_and_concatenate_keep_every_anchor_whole(data_folder: Path, frozen) -> None:
    replies = load_replies([data_folder], VOCAB)
    source, spec = OnlineStates(frozen, replies), AnchorSpec(IDS, 2, 4, 3, 5)
    picks = [Pick(0, replies[0].places), Pick(2, replies[2].places)]
    whole = source.batch(picks, spec)
    joined = concatenate([source.batch([pick], spec) for pick in picks])
    rows = torch.tensor([7, 0, 12, 7])
    for a, b in ((whole, joined), (select(whole, rows), select(joined, rows))):
        for name in ("token_group", "next_tokens", "labels", "labelled"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        torch.testing.assert_close(a.pivot_states, b.pivot_states, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            a.window.features[a.window.index], b.window.features[b.window.index],
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip
    chosen = select(whole, rows)
    assert torch.equal(chosen.pivot_states, whole.pivot_states[rows])
    assert torch.equal(
        chosen.window.features[chosen.window.index],
        whole.window.features[whole.window.index[rows]],
    )
    assert len(chosen.window.features) < len(whole.window.features)


def test_turns_of_one_session_are_held_out_together() -> None:
    for index in range(200):
        assert is_held_out(f"x/{index}#0", 30) == is_held_out(f"x/{index}#2", 30)
    share = sum(is_held_out(f"x/{index}#0", 30) for index in range(4000)) / 4000
    assert 0.27 < share < 0.33


def test_an_unsupported_target_is_named() -> None:
    from transformers import GPT2Config

    config = GPT2Config(architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        TargetError, match=r"'GPT2LMHeadModel' is not supported; .*Qwen3ForCausalLM"
    ):
        TargetShape.from_hf(config)


def test_the_supported_targets_can_be_served() -> None:
    from sglang_dlite.speculative import pivot_capture
    from sglang_dlite.training import targets

    assert set(targets.SUPPORTED_TARGETS) <= set(pivot_capture.SUPPORTED_TARGETS)
