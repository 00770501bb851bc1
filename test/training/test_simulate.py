"""Simulated acceptance against a walk reply by reply, and n-gram lookup against a plain search."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from sglang_dlite.drafter import HistoryAwareDrafter
from sglang_dlite.training.anchors import AnchorSpec, Reply
from sglang_dlite.training.dataset import load_replies
from sglang_dlite.training.reply_kinds import LOOKUP_NGRAM, is_looping, lookup_walk, repeated_share
from sglang_dlite.training.simulate import (
    EvalSet,
    choose_evenly,
    context_bucket,
    selection_score,
    simulate_greedy,
    simulated_tau,
)
from sglang_dlite.training.states import OnlineStates
from sglang_dlite.training.targets import drafter_config
from torch import nn

from .conftest import VOCAB, model_section


@pytest.fixture
def data(data_folder: Path, frozen) -> EvalSet:
    replies = load_replies([data_folder], VOCAB)
    spec = AnchorSpec((0, 1, 3), 2, 4, 1, 6)
    return EvalSet(OnlineStates(frozen, replies), range(len(replies)), spec)


def test_simulated_acceptance_equals_a_walk_reply_by_reply(data: EvalSet) -> None:
    torch.manual_seed(0)
    drafts = torch.randint(0, VOCAB, (data.num_rows, 4))
    everything = data.rows(np.arange(data.num_rows))
    for row in range(data.num_rows):  # make many drafts right
        right = int(torch.randint(0, 5, ()))
        drafts[row, :right] = everything.next_tokens[row, :right]

    class Oracle:
        def draft(self, states, group, embed):
            flat = everything.pivot_states.flatten(1)
            rows = torch.cdist(states.flatten(1), flat).argmin(1)
            return type("Block", (), {"token_ids": drafts[rows]})

    counts = simulate_greedy(Oracle(), None, data)
    for reply, first, count in zip(data.replies, data.first, counts, strict=True):
        place = passes = accepted = 0
        while place < reply.length - 1:
            n = 0
            while n < 4 and place + n + 1 < reply.length:
                if drafts[first + place, n] != reply.reply_ids[place + n + 1]:
                    break
                n += 1
            passes, accepted, place = passes + 1, accepted + n, place + n + 1
        assert (count.passes, count.accepted) == (passes, accepted)
    assert sum(count.accepted for count in counts) > 50


def test_the_teacher_can_be_played_as_a_drafter(data: EvalSet, frozen) -> None:
    """One reply at a time, anchor by anchor, gives the same tau."""
    torch.manual_seed(1)
    teacher = HistoryAwareDrafter(drafter_config(frozen.shape, model_section()), 6)
    nn.init.normal_(teacher.sequential_head.output_proj.weight)
    embed = nn.Embedding.from_pretrained(frozen.embedding)
    counts = simulate_greedy(teacher, embed, data)
    reply, first = data.replies[2], data.first[2]
    place = passes = 0
    while place < reply.length - 1:
        batch = data.rows(np.array([first + place]))
        block = teacher.draft_with_history(
            batch.pivot_states, batch.token_group, embed, batch.window
        )
        agree = (block.token_ids == batch.next_tokens) & batch.labelled
        place += int(agree.cumprod(-1).sum()) + 1
        passes += 1
    assert counts[2].passes == passes
    assert 1 <= simulated_tau(teacher, embed, data)["mean"] < 5


def _reply(prompt: int, ids: list[int]) -> Reply:
    return Reply("x#0", "s", 0, np.arange(prompt), np.array(ids))


def test_replies_to_evaluate_are_of_all_sources_alike() -> None:
    sources = ["a"] * 20 + ["b"] * 2 + ["c"] * 9
    indices = range(1, 31)  # 19 of a
    assert choose_evenly(indices, sources, 30) == list(indices)
    chosen = choose_evenly(indices, sources, 12)
    assert [sum(sources[i] == s for i in chosen) for s in "abc"] == [5, 2, 5]
    assert chosen == sorted(chosen) and chosen[0] == 1 and chosen[-1] == 30
    assert len(choose_evenly(indices, sources, 2)) == 2
    assert choose_evenly([], sources, 3) == choose_evenly(indices, sources, 0) == []


def test_the_score_weighs_sources_by_the_root_of_their_tokens() -> None:
    def replies(source: str, *lengths: int) -> list[Reply]:
        return [Reply("x#0", source, 0, np.arange(2), np.arange(n)) for n in lengths]

    loop = Reply("x#0", "a", 0, np.arange(2), np.array([5, 6, 7] * 40))
    some = [*replies("a", 10), *replies("b", 21, 17), loop]  # 9 and 36 places
    taus = {"a": 1.5, "b": 2.0, "mean": 1.75, "looping": 4.0}
    assert selection_score(taus, some) == pytest.approx((3 * 1.5 + 6 * 2.0) / 9)
    assert np.isnan(selection_score({"looping": 4.0}, [loop]))
    assert np.isnan(selection_score({}, []))


def test_looping_replies_are_reported_apart(data: EvalSet, monkeypatch) -> None:
    loop = [5, 6, 7] * 12
    assert is_looping(loop) and not is_looping(list(range(36))) and not is_looping([5] * 20)
    assert repeated_share(loop) == pytest.approx(30 / 33)
    data.replies[0] = Reply("x#0", "source-0", 0, np.arange(3), np.array(loop))
    from sglang_dlite.training import simulate

    counts = [simulate.Acceptance(10, 30), *[simulate.Acceptance(10, 5)] * (len(data.replies) - 1)]
    monkeypatch.setattr(simulate, "simulate_greedy", lambda *_: counts)
    taus = simulated_tau(None, None, data)
    assert taus == {"source-0": 1.5, "source-1": 1.5, "mean": 1.5, "looping": 4.0}


def test_context_lengths_fall_into_their_buckets() -> None:
    for length, bucket in ((10, "00000-00255"), (256, "00256-00511"), (6144, "06144-")):
        assert context_bucket(_reply(length, [1, 2])) == bucket


def _naive_lookup(prompt: list[int], reply: list[int], drafts: int) -> tuple[int, int]:
    text = prompt + reply
    at, passes, accepted = len(prompt) + 1, 0, 0
    while at < len(text):
        start = None
        for length in range(min(LOOKUP_NGRAM, at), 0, -1):
            suffix = text[at - length : at]
            ends = [e for e in range(length, at) if text[e - length : e] == suffix]
            if ends:
                start = ends[-1]
                break
        known, n = text[:at], 0
        if start is not None:
            for offset in range(drafts):
                known.append(known[start + offset])
            while n < drafts and at + n < len(text) and known[at + n] == text[at + n]:
                n += 1
        passes, accepted, at = passes + 1, accepted + n, at + n + 1
    return passes, accepted


@pytest.mark.parametrize("letters", [2, 4, 30])
def test_ngram_lookup_equals_a_plain_search(letters: int) -> None:
    rng = random.Random(letters)
    for _ in range(30):
        prompt = [rng.randrange(letters) for _ in range(rng.randrange(1, 40))]
        reply = [rng.randrange(letters) for _ in range(rng.randrange(1, 40))]
        assert lookup_walk(prompt, reply, 5) == _naive_lookup(prompt, reply, 5)
    assert lookup_walk([9], [1, 2, 3] * 10, 7) == (7, 23)
