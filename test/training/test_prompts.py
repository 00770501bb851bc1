"""Prompt sources: formats, no evaluation prompt, no assistant text, balanced prefixes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from sglang_dlite.training.chat_prompts import chat_prompts
from sglang_dlite.training.prompts import (
    PromptError,
    excluded_texts,
    interleave,
    load_prompts,
    overlaps,
    single_turn,
)
from sglang_dlite.training.stdlib_prompts import (
    HELD_OUT,
    agent_prompts,
    completion_prompts,
    library_files,
)


def test_recorded_assistant_text_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.gz"
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "SECRET"},
        {"role": "tool", "content": [{"type": "text", "text": "second"}]},
        {"role": "assistant", "content": "SECRET"},
    ]
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    (prompt,) = load_prompts(str(path))
    assert [m["content"] for m in prompt.messages] == ["be brief", "first"]
    assert prompt.followups == ("second",)
    assert "SECRET" not in repr(prompt)


def test_a_field_can_be_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": '"""\nWrite f.\n"""\n', "turns": [" as it is ", "x"]}) + "\n")
    assert load_prompts(f"{path}:q")[0].user_text() == "Write f."
    assert load_prompts(f"{path}:turns")[0].user_text() == " as it is "
    with pytest.raises(PromptError, match="no field 'nope'"):
        load_prompts(f"{path}:nope")
    with pytest.raises(PromptError, match="FILE:FIELD"):
        load_prompts(str(path))
    path.write_text("{broken\n")
    with pytest.raises(PromptError, match=r"rows\.jsonl:1: not JSON"):
        load_prompts(f"{path}:q")


def test_evaluation_prompts_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    question = "What is the total price of three apples and four pears?"
    path.write_text(json.dumps({"turns": [question, "Explain."]}) + "\n")
    excluded = excluded_texts([path])
    for text in (
        question,
        question.upper().replace(" ", "  "),
        f"Please answer: {question} Thank you!",
        "the total price of three apples and four pears",
        "explain",
    ):
        assert overlaps(single_turn("x", "s", text), excluded), text
    for text in ("Explain gravity.", "What is the total price of two apples?"):
        assert not overlaps(single_turn("x", "s", text), excluded), text


def test_every_prefix_is_balanced() -> None:
    groups = [[single_turn(f"{s}{i}", s, "x") for i in range(n)] for s, n in (("a", 90), ("b", 30))]
    mixed = interleave(groups)
    assert len(mixed) == 120
    for end in range(8, 120, 4):
        share = sum(p.source == "b" for p in mixed[:end]) / end
        assert abs(share - 0.25) < 0.1
    assert [p.id for p in mixed if p.source == "a"] == [p.id for p in groups[0]]


def test_builtin_sources_are_repeatable_and_distinct() -> None:
    for make in (chat_prompts, completion_prompts, agent_prompts):
        prompts = make(40)
        assert prompts == make(40)
        assert len({p.id for p in prompts}) == 40
        assert all(p.messages[-1]["role"] == "user" for p in prompts)
    texts = [p.user_text() for p in chat_prompts(200)]
    assert len(set(texts)) == 200


def test_the_demo_files_are_held_out() -> None:
    assert not {path.name for path in library_files()} & HELD_OUT
    for prompt in agent_prompts(150):
        for name in HELD_OUT:
            assert f"/workspace/Lib/{name}" not in prompt.user_text()
