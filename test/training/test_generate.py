"""Generation with a stand-in for the engine: right prompts, right records, resumable."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sglang_dlite.training import generate as command
from sglang_dlite.training.answering import Answer, Answering
from sglang_dlite.training.dataset import Description, ReplyWriter, load_replies
from sglang_dlite.training.exclusion import normalised, overlaps
from sglang_dlite.training.prompts import Prompt, Turn
from sglang_dlite.training.sessions import session_turns
from sglang_dlite.training.stdlib_prompts import completion_prompts
from sglang_dlite.training.storage import locked
from transformers import AutoTokenizer

from .conftest import VOCAB
from .test_sessions import MESSAGES


class Killed(Exception):
    """Whatever ends a run."""


class FakeEngine:
    """Answers with a function of the prompt; dies after `lives` answers."""

    def __init__(self, lives: int = 10**9) -> None:
        self.lives, self.asked, self.together, self.most = lives, [], 0, 0
        self.loop = asyncio.new_event_loop()

    async def async_generate(self, input_ids: list[int], sampling_params: dict) -> dict:
        self.asked.append((input_ids, sampling_params))
        number = len(self.asked)
        self.together += 1
        self.most = max(self.most, self.together)
        for _ in range(len(input_ids) % 5 + 1):  # answers come in another order
            await asyncio.sleep(0)
        self.together -= 1
        if len(self.asked) > self.lives:
            raise Killed
        ids = [65 + (sum(input_ids) + i) % 26 for i in range(20)]
        if sampling_params["temperature"]:
            ids[0] = 65 + number % 26
        return {"output_ids": ids, "meta_info": {"finish_reason": {"type": "stop", "matched": 0}}}


def _args(target: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    fixed = ["--target", str(target), "--out", str(out), "--max-new-tokens", "20"]
    return parser.parse_args([*fixed, "--concurrency", "3", *more])


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch):
    """serve(fake): `generate` gets it in place of an engine."""

    def use(fake: FakeEngine) -> FakeEngine:
        @contextmanager
        def engine(args, drafter=None):
            yield fake

        monkeypatch.setattr(command, "engine", engine)
        return fake

    return use


def _prompt_file(path: Path) -> str:
    turns = [["hi there"], ["one", "two", "three"], ["x" * 30], ["what?", "why?"]]
    rows = [{"messages": [{"role": "user", "content": t} for t in session]} for session in turns]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _by_id(out: Path) -> dict[str, tuple]:
    replies = load_replies([out], VOCAB)
    return {r.id: (r.prompt_ids.tolist(), r.reply_ids.tolist()) for r in replies}


def test_a_killed_run_is_completed_without_loss_or_duplicates(
    target: Path, tmp_path: Path, serve
) -> None:
    prompts = _prompt_file(tmp_path / "prompts.jsonl")
    fake = serve(FakeEngine())
    assert command.run(_args(target, tmp_path / "whole", "--prompts", prompts)) == 0
    whole = _by_id(tmp_path / "whole")
    assert sorted(whole) == sorted(
        f"prompts/{i}#{t}" for i, turns in enumerate((1, 3, 1, 2)) for t in range(turns)
    )
    assert 1 < fake.most <= 3
    broken = _args(target, tmp_path / "broken", "--prompts", prompts)
    serve(FakeEngine(lives=4))
    with pytest.raises(Killed):
        command.run(broken)
    kept = _by_id(tmp_path / "broken")
    assert 0 < len(kept) < 7 and kept.items() <= whole.items()
    again = serve(FakeEngine())
    assert command.run(broken) == 0
    assert _by_id(tmp_path / "broken") == whole
    assert len(again.asked) == 7 - len(kept)


def test_the_targets_own_reply_is_the_history(target: Path, tmp_path: Path, serve) -> None:
    prompts = _prompt_file(tmp_path / "prompts.jsonl")
    serve(FakeEngine())
    assert command.run(_args(target, tmp_path / "out", "--prompts", prompts)) == 0
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = _by_id(tmp_path / "out")
    for _, reply in found.values():
        assert len(reply) == 21 and reply[-1] == 0  # the end-of-text token is a label too
    first, second = found["prompts/1#0"], found["prompts/1#1"]
    said = tokenizer.decode(first[1], skip_special_tokens=True)
    assert tokenizer.decode(second[0]) == f"u:one<eos>a:{said}<eos>u:two<eos>a:"


def test_sessions_keep_the_recorded_history(target: Path, tmp_path: Path, serve) -> None:
    path = tmp_path / "agents.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "source": {"repo": "r"}}) + "\n")
    serve(FakeEngine())
    assert command.run(_args(target, tmp_path / "out", "--sessions", str(path))) == 0
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = _by_id(tmp_path / "out")
    assert sorted(found) == ["agents/0#0", "agents/0#1"]
    history = tokenizer.decode(found["agents/0#1"][0])
    assert "a:I look." in history and history.endswith("</tool_response><eos>a:")
    recorded = [turn.recorded for turn in session_turns(MESSAGES)]
    for _, reply in found.values():
        assert tokenizer.decode(reply, skip_special_tokens=True) not in recorded
    (line,) = [
        json.loads(x)
        for x in (tmp_path / "out/part-0-00000.jsonl").read_text().splitlines()
        if json.loads(x)["turn"] == 1
    ]
    assert line["category"] == "r" and "Done." not in line["text"]


def test_a_session_ends_where_its_history_is_too_long(target: Path, tmp_path: Path, serve) -> None:
    path = tmp_path / "agents.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n")
    serve(FakeEngine())
    more = ("--sessions", str(path), "--max-prompt-tokens", "60")
    assert command.run(_args(target, tmp_path / "out", *more)) == 0
    assert list(_by_id(tmp_path / "out")) == ["agents/0#0"]


def test_the_target_asks_itself(target: Path, tmp_path: Path, serve) -> None:
    more = ("--builtin", "self-instruct=6")
    fake = serve(FakeEngine(lives=7))
    with pytest.raises(Killed):
        command.run(_args(target, tmp_path / "out", *more))
    tokenizer = AutoTokenizer.from_pretrained(target)
    header, params = fake.asked[0]
    assert tokenizer.decode(header) == "u:" and params["temperature"] == 1.0
    before = _by_id(tmp_path / "out")
    serve(FakeEngine())
    assert command.run(_args(target, tmp_path / "out", *more)) == 0
    found = _by_id(tmp_path / "out")
    assert len(found) == 6 and before.items() <= found.items()
    lines = (tmp_path / "out/part-0-00000.jsonl").read_text().splitlines()
    questions = [json.loads(line)["question"] for line in lines]
    assert len(set(questions)) == 6 and all(len(q) >= 15 for q in questions)
    for line in lines:
        record = json.loads(line)
        assert tokenizer.decode(record["prompt_ids"]) == f"u:{record['question']}<eos>a:"


def test_shares_divide_the_prompts(target: Path, tmp_path: Path, serve) -> None:
    prompts = _prompt_file(tmp_path / "prompts.jsonl")
    for share in ("0/2", "1/2"):
        serve(FakeEngine())
        more = ("--prompts", prompts, "--share", share, "--format", "parquet", "--shard-size", "2")
        assert command.run(_args(target, tmp_path / "out", *more)) == 0
    assert len(_by_id(tmp_path / "out")) == 7
    idle = serve(FakeEngine())  # another number of shares: nothing is left to do
    more = ("--prompts", prompts, "--share", "0/1", "--format", "parquet")
    assert command.run(_args(target, tmp_path / "out", *more)) == 0 and not idle.asked
    assert list((tmp_path / "out").glob("*.parquet"))
    runs = Description.read(tmp_path / "out").provenance
    assert [run["arguments"]["share"] for run in runs] == ["0/2", "1/2", "0/1"]


def test_evaluation_prompts_are_left_out(target: Path, tmp_path: Path, serve) -> None:
    prompts = _prompt_file(tmp_path / "prompts.jsonl")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": ["HI, there!"]}) + "\n")
    serve(FakeEngine())
    more = ("--prompts", prompts, "--exclude", str(tmp_path / "eval.jsonl"))
    assert command.run(_args(target, tmp_path / "out", *more)) == 0
    assert not any(name.startswith("prompts/0#") for name in _by_id(tmp_path / "out"))


def _asked(target: Path, serve, out: Path, *more: str) -> list[str]:
    """The prompts that a run sends to the engine."""
    fake = serve(FakeEngine())
    assert command.run(_args(target, out, *more)) == 0
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [tokenizer.decode(ids) for ids, _ in fake.asked]


def _questions(path: Path, *texts: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"q": text}) + "\n" for text in texts))
    return f"{path}:q"


@pytest.mark.parametrize("hashed", [True, False])
def test_an_edited_prompt_is_answered_anew(
    target: Path, tmp_path: Path, serve, hashed: bool
) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    before = _questions(path, "one", "two", "three")
    assert len(_asked(target, serve, out, "--prompts", before)) == 3
    if not hashed:  # a data set of before prompts had a hash
        part = out / "part-0-00000.jsonl"
        records = [json.loads(line) for line in part.read_text().splitlines()]
        for record in records:
            del record["prompt_hash"]
        part.write_text("".join(json.dumps(record) + "\n" for record in records))
    after = _questions(path, "zero", "one", "two, edited", "three")
    asked = _asked(target, serve, out, "--prompts", after)
    assert sorted(asked) == ["u:two, edited<eos>a:", "u:zero<eos>a:"]
    tokenizer = AutoTokenizer.from_pretrained(target)
    kept = {tokenizer.decode(prompt) for prompt, _ in _by_id(out).values()}
    texts = ("one", "two", "three", "zero", "two, edited")
    assert kept == {f"u:{text}<eos>a:" for text in texts}


def test_another_count_of_a_builtin_source_keeps_its_replies(
    target: Path, tmp_path: Path, serve
) -> None:
    out = tmp_path / "out"
    answered: set[str] = set()
    for count in (20, 30):  # another count gives another text to most ids
        asked = _asked(target, serve, out, "--builtin", f"stdlib-code={count}")
        wanted = {f"u:{prompt.user_text()}<eos>a:" for prompt in completion_prompts(count)}
        assert sorted(asked) == sorted(wanted - answered)
        answered |= wanted
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert {tokenizer.decode(prompt) for prompt, _ in _by_id(out).values()} == answered


def test_files_of_the_same_name_do_not_mix(target: Path, tmp_path: Path, serve, capsys) -> None:
    a = _questions(tmp_path / "a" / "test.jsonl", "one", "two", "one")
    b = _questions(tmp_path / "b" / "test.jsonl", "three", "two")
    out = tmp_path / "out"
    asked = _asked(target, serve, out, "--prompts", a, "--prompts", b)
    assert sorted(asked) == [f"u:{text}<eos>a:" for text in ("one", "three", "two")]
    assert sorted(_by_id(out)) == ["test-2/0#0", "test/0#0", "test/1#0"]
    assert "2 prompts occur more than once, made once" in capsys.readouterr().err


def test_the_prompts_of_a_data_set_can_be_left_out(
    target: Path, tmp_path: Path, serve, capsys
) -> None:
    training, more = tmp_path / "training", ("--builtin", "self-instruct=3")
    train = _questions(tmp_path / "train.jsonl", "one", "two")
    _asked(target, serve, training, "--prompts", train, *more)
    both = _questions(tmp_path / "both.jsonl", "two", "three")
    exclude = ("--exclude", str(training))
    asked = _asked(target, serve, tmp_path / "out", "--prompts", both, *more, *exclude)
    assert "u:three<eos>a:" in asked and "u:two<eos>a:" not in asked
    assert "1 prompts overlap with --exclude" in capsys.readouterr().err
    known, found = ({tuple(p) for p, _ in _by_id(f).values()} for f in (training, tmp_path / "out"))
    assert len(known) == 5 and len(found) == 4 and not known & found
    part = training / "part-0-00000.jsonl"
    part.write_text(part.read_text().replace("prompt_hash", "no_hash"))
    args = _args(target, tmp_path / "other", "--prompts", both, *exclude)
    assert command.run(args) == 1
    assert "exclude its prompt files instead" in capsys.readouterr().err


def test_the_chat_template_gets_its_arguments(target: Path, tmp_path: Path, serve) -> None:
    thinking = shutil.copytree(target, tmp_path / "thinking")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% if not think %}quietly {% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(thinking)
    prompts = _prompt_file(tmp_path / "prompts.jsonl")
    said = {}
    for name in ("true", "false"):
        serve(FakeEngine())
        args = ("--prompts", prompts, "--chat-template-kwargs", f'{{"think": {name}}}')
        assert command.run(_args(thinking, tmp_path / name, *args)) == 0
        said[name] = tokenizer.decode(_by_id(tmp_path / name)["prompts/0#0"][0])
    assert said["false"] == "quietly " + said["true"]
    args = _args(thinking, tmp_path / "true", "--prompts", prompts)
    assert command.run(args) == 1  # a data set holds one kind


@pytest.mark.parametrize("text", ["think", "[1]"])
def test_template_arguments_are_a_json_object(target: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit):
        _args(target, tmp_path, "--chat-template-kwargs", text)


def test_bad_arguments_are_reported(target: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    for more, message in (
        (("--prompts", "nowhere.jsonl"), "'nowhere.jsonl' does not exist"),
        (("--builtin", "poems=3"), "--builtin poems=3"),
        (("--builtin", "chat=3", "--share", "2/2"), "must be I/N"),
        ((), "no prompts"),
    ):
        assert command.run(_args(target, out, *more)) == 1
        assert message in capsys.readouterr().err
    assert not out.exists()


def test_two_runs_do_not_write_one_part(target: Path, tmp_path: Path, serve, capsys) -> None:
    prompts, out = _prompt_file(tmp_path / "prompts.jsonl"), tmp_path / "out"
    idle = serve(FakeEngine())
    with locked(out, "part-0"):
        assert command.run(_args(target, out, "--prompts", prompts)) == 1
    assert "generate: another process is writing part-0" in capsys.readouterr().err
    assert not idle.asked and not list(out.glob("*.json*"))


def test_an_engine_that_refuses_a_prompt_is_reported(
    target: Path, tmp_path: Path, serve, capsys
) -> None:
    class Refusing(FakeEngine):
        async def async_generate(self, input_ids, sampling_params):
            raise ValueError("too long")

    serve(Refusing())
    assert command.run(_args(target, tmp_path / "out", "--builtin", "chat=3")) == 1
    assert "the engine refused a prompt: too long" in capsys.readouterr().err


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
        command.run(_args(target, tmp_path / "out", *more))
    before = _by_id(tmp_path / "out")
    fake = serve(FakeEngine())
    assert command.run(_args(target, tmp_path / "out", *more)) == 0
    found = _by_id(tmp_path / "out")
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


@pytest.mark.slow
@pytest.mark.server
def test_sigterm_ends_a_run_and_its_engine_at_once(target: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"q": f"question {i}"}) + "\n" for i in range(5000)))
    options = ["--target", str(target), "--out", str(out), "--prompts", f"{prompts}:q"]
    options += ["--max-new-tokens", "20", "--max-total-tokens", "4096", "--context-length", "1024"]
    with subprocess.Popen([sys.executable, "-m", "sglang_dlite.cli", "generate", *options]) as run:
        process = psutil.Process(run.pid)
        deadline = time.monotonic() + 240
        try:
            while not any(part.stat().st_size for part in out.glob("part-*")):
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            engine = process.children(recursive=True)
        finally:
            run.terminate()  # with thousands of requests to come
        assert run.wait(60) == 143
    assert engine and not psutil.wait_procs(engine, timeout=30)[1]
    assert 0 < len(_by_id(out)) < 5000


@pytest.mark.slow
@pytest.mark.server
def test_a_real_engine_gives_the_greedy_replies_of_transformers(
    target: Path, hf_model, tmp_path: Path
) -> None:
    from .conftest import greedy

    prompts = _prompt_file(tmp_path / "prompts.jsonl")
    more = ("--prompts", prompts, "--max-total-tokens", "4096", "--context-length", "1024")
    assert command.run(_args(target, tmp_path / "out", *more)) == 0
    found = _by_id(tmp_path / "out")
    assert len(found) == 7
    for prompt, reply in found.values():
        assert reply == greedy(hf_model, prompt, 20)
