"""Prompt sources: formats, bad rows, no evaluation prompt, no assistant text, balanced prefixes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from sglang_dlite.training.chat_prompts import chat_prompts
from sglang_dlite.training.exclusion import excluded_texts, interleave, overlaps
from sglang_dlite.training.prompts import (
    PromptError,
    Turn,
    load_hf_prompts,
    load_prompts,
    parse_share,
    single_turn,
)
from sglang_dlite.training.sessions import load_sessions
from sglang_dlite.training.stdlib_prompts import (
    HELD_OUT,
    agent_prompts,
    completion_prompts,
    library_files,
)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_recorded_assistant_text_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.gz"
    messages = [
        {"role": "system", "content": "be brief"},
        _user("first"),
        {"role": "assistant", "content": "SECRET"},
        {"role": "tool", "content": [{"type": "text", "text": "second"}]},
        {"role": "assistant", "content": "SECRET"},
    ]
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    (prompt,) = load_prompts(str(path))
    system = {"role": "system", "content": "be brief"}
    assert prompt.turns == (Turn((system, _user("first"))), Turn((_user("second"),)))
    assert "SECRET" not in repr(prompt)


def test_a_field_can_be_the_user_turns(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"q": '"""\nWrite f.\n"""\n', "turns": [" as it is ", "x"], "category": "code"}
    path.write_text(json.dumps(row) + "\n")
    assert load_prompts(f"{path}:q")[0].user_text() == "Write f."
    (prompt,) = load_prompts(f"{path}:turns")
    assert prompt.turns == (Turn((_user(" as it is "),)), Turn((_user("x"),)))
    assert prompt.category == "code" and prompt.id == "rows/0"


BAD = ["{broken", "", "[1]", '{"other": 1}', '{"q": " "}', '{"q": ["a", ""]}']


def test_bad_rows_are_counted_and_only_skipped_if_asked(tmp_path: Path, capsys) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(['{"q": "good"}', *BAD, '{"q": "fine"}']) + "\n")
    with pytest.raises(PromptError) as error:
        load_prompts(f"{path}:q")
    assert "6 of 8 rows cannot be used: line 2: not JSON" in str(error.value)
    assert "line 3: empty" in str(error.value) and "--skip-bad-rows" in str(error.value)
    prompts = load_prompts(f"{path}:q", skip_bad=True)
    assert [prompt.user_text() for prompt in prompts] == ["good", "fine"]
    assert [prompt.id for prompt in prompts] == ["rows/0", "rows/7"]  # line numbers stay
    assert "6 of 8 rows cannot be used" in capsys.readouterr().err


def _both(load, message: str) -> list:
    """`load(skip_bad)` refuses by name, and otherwise skips; returns what is left."""
    with pytest.raises(PromptError, match=message):
        load(False)
    return load(True)


def test_a_line_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"q": "good"}\n{"q": "caf\xe9"}\n{"q": "fine"}\n')
    left = _both(
        lambda skip: load_prompts(f"{path}:q", skip), "1 of 3 rows .* line 2: not UTF-8 .*--skip"
    )
    assert [(p.id, p.user_text()) for p in left] == [("rows/0", "good"), ("rows/2", "fine")]


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "rows.jsonl.gz"
    rows = "".join(json.dumps({"q": f"question {i * 7919 % 1000}"}) + "\n" for i in range(2000))
    data = bytearray(gzip.compress(rows.encode()))
    if damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "flipped":
        data[len(data) // 2] ^= 255
    else:
        data = bytearray(b"not compressed")
    path.write_bytes(data)
    left = _both(
        lambda skip: load_prompts(f"{path}:q", skip), r"from line \d+ on: the file cannot be read"
    )
    assert len(left) < 2000 and all(p.user_text().startswith("question") for p in left)


@pytest.mark.parametrize(
    "messages,message",
    [
        (["hi"], r"the message 'hi' is no object"),
        ([{"role": "user", "content": ["hi"]}], r"the content part 'hi' is no object"),
        ([{"role": "user", "content": [{"text": 3}]}], r"the content part \{'text': 3\} is no"),
        ("hi", "no 'messages' list"),
    ],
)
def test_malformed_messages_are_bad_rows(tmp_path: Path, messages, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = [_user("good"), {"role": "assistant", "content": "x"}]
    path.write_text("".join(json.dumps({"messages": m}) + "\n" for m in (messages, good)))
    (left,) = _both(lambda skip: load_prompts(str(path), skip), f"1 of 2 rows.*row 0: {message}")
    assert left.id == "rows/1"
    (left,) = _both(lambda skip: load_sessions(path, None, skip), f"row 0: {message}")
    assert left.id == "rows/1"
    with pytest.raises(PromptError, match=f"--exclude .*row 0: {message}"):
        excluded_texts([str(path)])


@pytest.mark.parametrize(
    "row,message",
    [
        ({"q": None}, "the field holds None; must be text"),
        ({"a": 1}, "no field 'q'; has"),
        ({"q": ""}, "the field is empty"),
        ({"q": []}, "non-empty strings"),
    ],
)
def test_a_row_without_prompt_is_named(tmp_path: Path, row: dict, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(PromptError, match=message):
        load_prompts(f"{path}:q")
    with pytest.raises(PromptError, match="FILE:FIELD"):
        load_prompts(str(path))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(PromptError, match=r"'nowhere\.jsonl' does not exist"):
        load_prompts("nowhere.jsonl:q")


def test_a_hugging_face_data_set_is_read_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"q": "one"}\n{"q": "two"}\n')
    prompts = load_hf_prompts(f"{folder}@train:q")
    assert [(p.id, p.user_text()) for p in prompts] == [("set/0", "one"), ("set/1", "two")]
    with pytest.raises(PromptError, match="--hf-dataset"):
        load_hf_prompts(f"{folder}@nosplit:q")


def test_shares_are_checked() -> None:
    assert parse_share("1/4") == (1, 4)
    for text in ("4/4", "1", "a/b", "-1/2"):
        with pytest.raises(PromptError, match="must be I/N"):
            parse_share(text)


def test_evaluation_prompts_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    question = "What is the total price of three apples and four pears?"
    path.write_text(json.dumps({"turns": [question, "Explain."]}) + "\n")
    excluded = excluded_texts([str(path)])
    for text in (
        question,
        question.upper().replace(" ", "  "),
        f"Please answer: {question} Thank you!",
        "the total price of three apples and four pears",
        "explain",
    ):
        assert overlaps(text, excluded), text
    for text in ("Explain gravity.", "What is the total price of two apples?"):
        assert not overlaps(text, excluded), text


def test_prompts_of_other_scripts_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"turns": ["用 Python 写快速排序"]}\n{"turns": ["什么是单子?"]}\n')
    excluded = excluded_texts([str(path)])
    assert overlaps("用 python 写快速排序!", excluded) and overlaps("什么是单子", excluded)
    assert not overlaps("解释 Python 装饰器", excluded)


def test_an_exclusion_that_would_keep_nothing_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text('{"question": "What is a monad?"}\n{"question": ["And why?"]}\n')
    assert excluded_texts([f"{path}:question"]) == {"what is a monad", "and why"}
    with pytest.raises(PromptError, match=r"2 of 2 rows.*no user text in turns or messages.*FIELD"):
        excluded_texts([str(path)])


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
        assert all(turn.messages[-1]["role"] == "user" for p in prompts for turn in p.turns)
    texts = [p.user_text() for p in chat_prompts(200)]
    assert len(set(texts)) == 200


def test_the_demo_files_are_held_out() -> None:
    assert not {path.name for path in library_files()} & HELD_OUT
    for prompt in agent_prompts(150):
        for name in HELD_OUT:
            assert f"/workspace/Lib/{name}" not in prompt.user_text()
