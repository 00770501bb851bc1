"""A reply belongs to the text of its prompt: no number, file or seed stands for another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_dlite.training import generate as command
from sglang_dlite.training.stdlib_prompts import completion_prompts
from transformers import AutoTokenizer

from .fake_engine import arguments, by_id, prompts_asked, question_file


@pytest.mark.parametrize("hashed", [True, False])
def test_an_edited_prompt_is_answered_anew(
    target: Path, tmp_path: Path, serve, hashed: bool
) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    before = question_file(path, "one", "two", "three")
    assert len(prompts_asked(target, serve, out, "--prompts", before)) == 3
    if not hashed:  # a data set of before prompts had a hash
        part = out / "part-0-00000.jsonl"
        records = [json.loads(line) for line in part.read_text().splitlines()]
        for record in records:
            del record["prompt_hash"]
        part.write_text("".join(json.dumps(record) + "\n" for record in records))
    after = question_file(path, "zero", "one", "two, edited", "three")
    asked = prompts_asked(target, serve, out, "--prompts", after)
    assert sorted(asked) == ["u:two, edited<eos>a:", "u:zero<eos>a:"]
    tokenizer = AutoTokenizer.from_pretrained(target)
    kept = {tokenizer.decode(prompt) for prompt, _ in by_id(out).values()}
    texts = ("one", "two", "three", "zero", "two, edited")
    assert kept == {f"u:{text}<eos>a:" for text in texts}


def test_another_count_of_a_builtin_source_keeps_its_replies(
    target: Path, tmp_path: Path, serve
) -> None:
    out = tmp_path / "out"
    answered: set[str] = set()
    for count in (20, 30):  # another count gives another text to most ids
        asked = prompts_asked(target, serve, out, "--builtin", f"stdlib-code={count}")
        wanted = {f"u:{prompt.user_text()}<eos>a:" for prompt in completion_prompts(count)}
        assert sorted(asked) == sorted(wanted - answered)
        answered |= wanted
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert {tokenizer.decode(prompt) for prompt, _ in by_id(out).values()} == answered


def test_files_of_the_same_name_do_not_mix(target: Path, tmp_path: Path, serve, capsys) -> None:
    a = question_file(tmp_path / "a" / "test.jsonl", "one", "two", "one")
    b = question_file(tmp_path / "b" / "test.jsonl", "three", "two")
    out = tmp_path / "out"
    asked = prompts_asked(target, serve, out, "--prompts", a, "--prompts", b)
    assert sorted(asked) == [f"u:{text}<eos>a:" for text in ("one", "three", "two")]
    assert sorted(by_id(out)) == ["test-2/0#0", "test/0#0", "test/1#0"]
    assert "2 prompts occur more than once, made once" in capsys.readouterr().err


def test_the_prompts_of_a_data_set_can_be_left_out(
    target: Path, tmp_path: Path, serve, capsys
) -> None:
    training, more = tmp_path / "training", ("--builtin", "self-instruct=3")
    train = question_file(tmp_path / "train.jsonl", "one", "two")
    prompts_asked(target, serve, training, "--prompts", train, *more)
    both = question_file(tmp_path / "both.jsonl", "two", "three")
    exclude = ("--exclude", str(training))
    asked = prompts_asked(target, serve, tmp_path / "out", "--prompts", both, *more, *exclude)
    assert "u:three<eos>a:" in asked and "u:two<eos>a:" not in asked
    assert "1 prompts overlap with --exclude" in capsys.readouterr().err
    known, found = ({tuple(p) for p, _ in by_id(f).values()} for f in (training, tmp_path / "out"))
    assert len(known) == 5 and len(found) == 4 and not known & found
    part = training / "part-0-00000.jsonl"
    part.write_text(part.read_text().replace("prompt_hash", "no_hash"))
    args = arguments(target, tmp_path / "other", "--prompts", both, *exclude)
    assert command.run(args) == 1
    assert "exclude its prompt files instead" in capsys.readouterr().err
