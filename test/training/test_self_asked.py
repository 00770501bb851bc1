"""Questions that the target asks itself: whole, new and wanted, in either turn."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from sglang_dlite.training import generate as command
from sglang_dlite.training.answering import Answer, Answering
from sglang_dlite.training.dataset import ReplyWriter
from sglang_dlite.training.exclusion import normalised, overlaps
from sglang_dlite.training.prompts import Prompt, Turn
from transformers import AutoTokenizer

from .fake_engine import FakeEngine, Killed, arguments, by_id


def test_the_target_asks_itself(target: Path, tmp_path: Path, serve) -> None:
    more = ("--builtin", "self-instruct=6")
    fake = serve(FakeEngine(lives=7))
    with pytest.raises(Killed):
        command.run(arguments(target, tmp_path / "out", *more))
    tokenizer = AutoTokenizer.from_pretrained(target)
    header, params = fake.asked[0]
    assert tokenizer.decode(header) == "u:" and params["temperature"] == 1.0
    before = by_id(tmp_path / "out")
    serve(FakeEngine())
    assert command.run(arguments(target, tmp_path / "out", *more)) == 0
    found = by_id(tmp_path / "out")
    assert len(found) == 6 and before.items() <= found.items()
    lines = (tmp_path / "out/part-0-00000.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    assert len(set(questions)) == 6 and all(len(q) >= 15 for q in questions)
    for line in lines:
        record = json.loads(line)
        assert tokenizer.decode(record["prompt_ids"]) == f"u:{record['question']}<eos>a:"


def _self_asked(
    target: Path, out: Path, said: list[tuple[str, str]], count: int, turns: int = 1, **more
) -> tuple[Answering, list[dict]]:
    """Answer self-asked prompts; said: (text, finish) of the questions in turn, then of the last
    for ever."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    waiting = list(said)

    async def ask(ids: list[int], params: dict) -> Answer:
        text, finish = "an answer", "stop"
        if params["temperature"]:
            text, finish = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return Answer(tokenizer.encode(text), finish, {}, 0.0)

    writer = ReplyWriter(out, "part-0")
    prompts = [Prompt(f"q/{i}", "q", (Turn(()),) * turns, asks_itself=True) for i in range(count)]
    answering = Answering(
        ask, tokenizer, writer, {"temperature": 0}, 200, lambda *_: None, lambda _: None, **more
    )
    asyncio.run(answering.run(prompts, 1))
    writer.close()
    lines = (out / "part-0-00000.jsonl").read_text().splitlines()
    return answering, [json.loads(line) for line in lines]


def test_repeated_cut_and_unwanted_questions_are_asked_again(target: Path, tmp_path: Path) -> None:
    said = [
        ("the same question?", "stop"),
        ("the same question?", "stop"),
        ("short", "stop"),
        ("a question that was cut by its len", "length"),
        ("an evaluation question?", "stop"),
        ("another question?", "stop"),
    ]
    excluded = {normalised("An evaluation question")}
    _, records = _self_asked(
        target, tmp_path, said, 2, unwanted=lambda text: overlaps(text, excluded)
    )
    assert [r["question"] for r in records] == ["the same question?", "another question?"]


def test_a_target_that_only_repeats_itself_is_given_up_and_counted(
    target: Path, tmp_path: Path
) -> None:
    answering, records = _self_asked(target, tmp_path, [("the same question?", "stop")], 3)
    assert [record["id"] for record in records] == ["q/0#0"]
    assert answering.skipped == {"the target asked nothing usable": 2}


def test_a_self_chat_follows_up_on_its_own_answer(target: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    said = [(f"is this question {i}?", "stop") for i in range(4)]
    _, records = _self_asked(target, tmp_path, said, 2, turns=2)
    assert [record["id"] for record in records] == ["q/0#0", "q/0#1", "q/1#0", "q/1#1"]
    prompts = [tokenizer.decode(record["prompt_ids"]) for record in records[:2]]
    first = "u:is this question 0?<eos>a:"
    assert prompts == [first, f"{first}an answer<eos>u:is this question 1?<eos>a:"]


def test_a_self_chat_goes_on_after_a_kill(target: Path, tmp_path: Path, serve) -> None:
    more = ("--builtin", "self-chat=4")
    serve(FakeEngine(lives=9))
    with pytest.raises(Killed):
        command.run(arguments(target, tmp_path / "out", *more))
    before = by_id(tmp_path / "out")
    fake = serve(FakeEngine())
    assert command.run(arguments(target, tmp_path / "out", *more)) == 0
    found = by_id(tmp_path / "out")
    assert sorted(found) == [f"self-chat-0/{i}#{turn}" for i in range(4) for turn in (0, 1)]
    assert 0 < len(before) < 8 and before.items() <= found.items()
    tokenizer = AutoTokenizer.from_pretrained(target)
    asked = [tokenizer.decode(ids) for ids, params in fake.asked if params["temperature"]]
    assert all(text.endswith("u:") for text in asked) and any("<eos>a:" in text for text in asked)
    for i in range(4):  # the second prompt is the first chat, and what the user then says
        first, second = (found[f"self-chat-0/{i}#{turn}"] for turn in (0, 1))
        said = tokenizer.decode(first[1], skip_special_tokens=True)
        begin = f"{tokenizer.decode(first[0])}{said}<eos>u:"
        assert tokenizer.decode(second[0]).startswith(begin)
