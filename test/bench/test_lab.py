"""The lab: walking replies, looking up n-grams, taking states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sglang_dlite.bench.lab import figures, layer_outputs, walk
from sglang_dlite.bench.lab_drafters import (
    DLiteProposer,
    LabReply,
    LayerOutputs,
    NgramLookup,
    TeacherProposer,
)


def reply(prompt: Sequence[int], ids: Sequence[int]) -> LabReply:
    return LabReply(list(prompt), list(ids), LayerOutputs({}, 0))


class Oracle:
    """Knows the text, and errs at every position that `wrong` divides."""

    name = "oracle"

    def __init__(self, num_drafts: int, wrong: int = 10**9) -> None:
        self.num_drafts, self.wrong = num_drafts, wrong

    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        ids = reply.ids
        return [
            [
                -1 if place % self.wrong == 0 else (ids[place] if place < len(ids) else 0)
                for place in range(anchor + 1, anchor + 1 + self.num_drafts)
            ]
            for anchor in anchors
        ]


def serve(reply: LabReply, proposer: Oracle) -> tuple[int, int]:
    """Token by token, as a server would: an independent count."""
    ids, produced = reply.ids, len(reply.prompt_ids) + 1
    passes = accepted = 0
    while produced < len(ids):
        (drafts,) = proposer.propose(reply, [produced - 1])
        passes += 1
        for draft in drafts:
            if produced == len(ids) or draft != ids[produced]:
                break
            accepted += 1
            produced += 1
        if produced < len(ids):
            produced += 1  # the target's own
    return passes, accepted


@pytest.mark.parametrize("wrong", [2, 3, 7, 10**9])
@pytest.mark.parametrize("length", [1, 2, 5, 23])
def test_walk_counts_as_a_server_does(wrong: int, length: int) -> None:
    text = reply(range(4), range(100, 100 + length))
    oracle = Oracle(3, wrong)
    assert walk(text, oracle) == serve(text, oracle)


def test_a_perfect_drafter_has_the_longest_tau() -> None:
    found = figures([reply(range(600), range(33))], Oracle(3))
    # 32 tokens after the first, 4 per pass.
    assert found["tau"][0] == 4.0 and found["passes"] == 8
    assert [point["at"] for point in found["by_context"]] == [512]


def test_ngram_lookup_copies_what_followed() -> None:
    lookup = NgramLookup(3)
    assert lookup._behind([1, 2, 3, 4, 9, 1, 2]) == [3, 4, 9]
    # The latest occurrence of the longest suffix wins over a later one of a shorter suffix.
    assert lookup._behind([5, 1, 2, 7, 8, 2, 6, 6, 1, 2]) == [7, 8, 2]
    assert lookup._behind([1, 2, 3]) == []
    assert lookup._behind([1]) == []
    assert lookup._behind([4, 4]) == [4]


def test_ngram_lookup_sees_nothing_after_the_anchor() -> None:
    ids = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    text, lookup = reply(ids[:3], ids[3:]), NgramLookup(3)
    proposals = lookup.propose(text, [3, 4])
    assert proposals == [lookup._behind(ids[:4]), lookup._behind(ids[:5])]
    passes, accepted = walk(text, lookup)
    assert (passes, accepted) == (2, 4)


@pytest.fixture(scope="module")
def target() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_layer_outputs_are_the_models(target: torch.nn.Module) -> None:
    ids = list(range(10))
    with torch.inference_mode():
        hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
    found = layer_outputs(target, ids, [0, 2, 3], first=4).at([0, 2, 3], torch.arange(4, 10))
    assert found.shape == (6, 3, 32)
    for column, layer in enumerate((0, 2, 3)):  # the last entry is after the final norm
        torch.testing.assert_close(found[:, column], hidden[layer + 1][0, 4:])


def test_dlite_gets_the_pivot_and_the_last_tokens(target: torch.nn.Module) -> None:
    from types import SimpleNamespace

    asked = {}

    class Drafter:
        config = SimpleNamespace(anchor_group_size=2, target_layer_ids=[0, 3])

        def draft(self, states: torch.Tensor, group: torch.Tensor, embed: object) -> object:
            asked.update(states=states, group=group)
            return SimpleNamespace(token_ids=torch.zeros(len(group), 3, dtype=torch.long))

    ids = [3, 1, 4, 1, 5, 9, 2]
    text = LabReply(ids[:3], ids[3:], layer_outputs(target, ids, [0, 3], first=2))
    drafts = DLiteProposer(Drafter(), target.get_input_embeddings()).propose(text, [3, 5])
    assert drafts == [[0, 0, 0]] * 2
    assert asked["group"].tolist() == [[4, 1], [5, 9]]
    whole = layer_outputs(target, ids, [0, 3], first=0)
    torch.testing.assert_close(asked["states"], whole.at([0, 3], torch.tensor([2, 4])))


def test_the_teacher_gets_its_window(target: torch.nn.Module) -> None:
    from types import SimpleNamespace

    pytest.importorskip("sglang_dlite.drafter.history")
    asked = {}

    class Teacher:
        window = 4
        config = SimpleNamespace(anchor_group_size=1, target_layer_ids=[0, 3], num_target_layers=4)

        def draft_with_history(
            self, states: torch.Tensor, group: torch.Tensor, embed: object, history: Any
        ) -> object:
            asked.update(history=history)
            return SimpleNamespace(token_ids=torch.ones(len(group), 2, dtype=torch.long))

    ids = [3, 1, 4, 1, 5, 9, 2]
    layers = [0, 2, 3]
    text = LabReply(ids[:2], ids[2:], layer_outputs(target, ids, layers, first=0))
    teacher = TeacherProposer(Teacher(), target.get_input_embeddings())
    assert teacher.propose(text, [2, 5]) == [[1, 1]] * 2
    history = asked["history"]
    assert history.position.tolist() == [2, 5]
    assert history.valid.tolist() == [[False, False, True], [True, True, True]]
    assert history.index[1].tolist() == [1, 2, 3] and history.index[0, 2] == 0
    whole = layer_outputs(target, ids, layers, first=0)
    torch.testing.assert_close(history.features, whole.at(layers, torch.arange(7)))
