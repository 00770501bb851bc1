"""What is drafted does not depend on how a request's history got into the cache.

The drafter sees the pivot states of one row. That row is the same whether the tokens before it
were prefilled just now, were found in the prefix cache, or were written there by the verify passes
of an earlier turn. So the drafts are compared, token for token, and not only their acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from recorded_drafts import RecordedEngine
from sglang_dlite.demo.session import SESSION

pytestmark = pytest.mark.server

NUM_TURNS = 3
NEW_TOKENS = 40


class Reply(NamedTuple):
    """What must not depend on the cache."""

    output_ids: list[int]
    histogram: list[int]
    drafts: list[list[int]]  # [verify passes, G + K]: the tokens each draft starts from, and it


def ask(running: RecordedEngine, prompt: Sequence[int]) -> tuple[Reply, int]:
    """The reply, and how many tokens of the prompt were found in the cache."""
    answer, drafts = running.ask(prompt, NEW_TOKENS)
    meta = answer["meta_info"]
    reply = Reply(answer["output_ids"], meta["spec_correct_drafts_histogram"], drafts)
    return reply, meta["cached_tokens"]


@pytest.fixture(scope="module")
def cold(recorded_engine: RecordedEngine, embedded_model: Path) -> list[tuple[list[int], Reply]]:
    """Prompt and reply of every turn of a session, each prefilled from its first token on."""
    import transformers

    recorded_engine.set_width(8)
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_model)
    turns: list[tuple[list[int], Reply]] = []
    history: list[int] = []
    for turn in SESSION[:NUM_TURNS]:
        message: list[dict[str, Any]] = [{"role": "user", "content": turn.message()}]
        prompt = [
            *history,
            *tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"],
        ]
        recorded_engine.engine.flush_cache()
        reply, cached = ask(recorded_engine, prompt)
        assert cached == 0
        assert len(reply.drafts) == sum(reply.histogram)
        turns.append((prompt, reply))
        history = [*prompt, *reply.output_ids, *tokenizer.encode("<|im_end|>\n")]
    return turns


def test_the_text_says_something(cold: list[tuple[list[int], Reply]]) -> None:
    """Else equality would say little: drafts that differ from step to step, many of them kept."""
    for prompt, reply in cold:
        assert len(prompt) > 300
        accepted = sum(n * count for n, count in enumerate(reply.histogram))
        assert accepted > len(reply.drafts) / 3
        assert len(set(map(tuple, reply.drafts))) > len(reply.drafts) / 2


def test_turn_by_turn(recorded_engine: RecordedEngine, cold: list[tuple[list[int], Reply]]) -> None:
    """The history is in the cache: prompts by prefills, replies by verify passes."""
    recorded_engine.engine.flush_cache()
    history = 0
    for prompt, expected in cold:
        reply, cached = ask(recorded_engine, prompt)
        assert cached >= history
        assert reply == expected
        history = len(prompt) + NEW_TOKENS - 1  # the last token's K/V is not written


def test_the_same_prompt_again(
    recorded_engine: RecordedEngine, cold: list[tuple[list[int], Reply]]
) -> None:
    """All of it is cached but the last token, whose row gives the anchor."""
    prompt, expected = cold[-1]
    ask(recorded_engine, prompt)
    reply, cached = ask(recorded_engine, prompt)
    assert cached == len(prompt) - 1
    assert reply == expected


@pytest.mark.parametrize("share", [0.03, 0.3, 0.97])
def test_any_part_of_the_prompt(
    recorded_engine: RecordedEngine, cold: list[tuple[list[int], Reply]], share: float
) -> None:
    prompt, expected = cold[-1]
    cut = int(share * len(prompt))
    recorded_engine.engine.flush_cache()
    recorded_engine.ask(prompt[:cut], 1)
    reply, cached = ask(recorded_engine, prompt)
    assert cached == cut
    assert reply == expected
