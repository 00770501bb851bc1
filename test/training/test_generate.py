"""Generation with a stand-in for the engine: right prompts, right records, resumable."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from sglang_dlite.training import generate as command
from sglang_dlite.training.dataset import Description
from sglang_dlite.training.sessions import session_turns
from sglang_dlite.training.storage import locked
from transformers import AutoTokenizer

from .fake_engine import FakeEngine, Killed, arguments, by_id, prompt_file
from .test_sessions import MESSAGES


def test_a_killed_run_is_completed_without_loss_or_duplicates(
    target: Path, tmp_path: Path, serve
) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl")
    fake = serve(FakeEngine())
    assert command.run(arguments(target, tmp_path / "whole", "--prompts", prompts)) == 0
    whole = by_id(tmp_path / "whole")
    assert sorted(whole) == sorted(
        f"prompts/{i}#{t}" for i, turns in enumerate((1, 3, 1, 2)) for t in range(turns)
    )
    assert 1 < fake.most <= 3
    broken = arguments(target, tmp_path / "broken", "--prompts", prompts)
    serve(FakeEngine(lives=4))
    with pytest.raises(Killed):
        command.run(broken)
    kept = by_id(tmp_path / "broken")
    assert 0 < len(kept) < 7 and kept.items() <= whole.items()
    again = serve(FakeEngine())
    assert command.run(broken) == 0
    assert by_id(tmp_path / "broken") == whole
    assert len(again.asked) == 7 - len(kept)


@pytest.mark.parametrize("limit", ["0", "-1", "x"])
def test_a_limit_that_leaves_nothing_is_named(target: Path, tmp_path: Path, limit, capsys) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl")
    with pytest.raises(SystemExit):
        arguments(target, tmp_path / "out", "--prompts", prompts, "--limit", limit)
    assert f"--limit: '{limit}' must be a whole number of 1" in capsys.readouterr().err


def test_the_targets_own_reply_is_the_history(target: Path, tmp_path: Path, serve) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl")
    serve(FakeEngine())
    assert command.run(arguments(target, tmp_path / "out", "--prompts", prompts)) == 0
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = by_id(tmp_path / "out")
    for _, reply in found.values():
        assert len(reply) == 21 and reply[-1] == 0  # the end-of-text token is a label too
    first, second = found["prompts/1#0"], found["prompts/1#1"]
    said = tokenizer.decode(first[1], skip_special_tokens=True)
    assert tokenizer.decode(second[0]) == f"u:one<eos>a:{said}<eos>u:two<eos>a:"


def test_sessions_keep_the_recorded_history(target: Path, tmp_path: Path, serve) -> None:
    path = tmp_path / "agents.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "source": {"repo": "r"}}) + "\n")
    serve(FakeEngine())
    assert command.run(arguments(target, tmp_path / "out", "--sessions", str(path))) == 0
    tokenizer = AutoTokenizer.from_pretrained(target)
    found = by_id(tmp_path / "out")
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
    assert command.run(arguments(target, tmp_path / "out", *more)) == 0
    assert list(by_id(tmp_path / "out")) == ["agents/0#0"]


def test_shares_divide_the_prompts(target: Path, tmp_path: Path, serve) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl")
    for share in ("0/2", "1/2"):
        serve(FakeEngine())
        more = ("--prompts", prompts, "--share", share, "--format", "parquet", "--shard-size", "2")
        assert command.run(arguments(target, tmp_path / "out", *more)) == 0
    assert len(by_id(tmp_path / "out")) == 7
    idle = serve(FakeEngine())  # another number of shares: nothing is left to do
    more = ("--prompts", prompts, "--share", "0/1", "--format", "parquet")
    assert command.run(arguments(target, tmp_path / "out", *more)) == 0 and not idle.asked
    assert list((tmp_path / "out").glob("*.parquet"))
    runs = Description.read(tmp_path / "out").provenance
    assert [run["arguments"]["share"] for run in runs] == ["0/2", "1/2", "0/1"]


def test_evaluation_prompts_are_left_out(target: Path, tmp_path: Path, serve) -> None:
    prompts = prompt_file(tmp_path / "prompts.jsonl")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": ["HI, there!"]}) + "\n")
    serve(FakeEngine())
    more = ("--prompts", prompts, "--exclude", str(tmp_path / "eval.jsonl"))
    assert command.run(arguments(target, tmp_path / "out", *more)) == 0
    assert not any(name.startswith("prompts/0#") for name in by_id(tmp_path / "out"))


def test_the_chat_template_gets_its_arguments(target: Path, tmp_path: Path, serve) -> None:
    thinking = shutil.copytree(target, tmp_path / "thinking")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% if not think %}quietly {% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(thinking)
    prompts = prompt_file(tmp_path / "prompts.jsonl")
    said = {}
    for name in ("true", "false"):
        serve(FakeEngine())
        args = ("--prompts", prompts, "--chat-template-kwargs", f'{{"think": {name}}}')
        assert command.run(arguments(thinking, tmp_path / name, *args)) == 0
        said[name] = tokenizer.decode(by_id(tmp_path / name)["prompts/0#0"][0])
    assert said["false"] == "quietly " + said["true"]
    args = arguments(thinking, tmp_path / "true", "--prompts", prompts)
    assert command.run(args) == 1  # a data set holds one kind


@pytest.mark.parametrize("text", ["think", "[1]"])
def test_template_arguments_are_a_json_object(target: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(SystemExit):
        arguments(target, tmp_path, "--chat-template-kwargs", text)


def test_bad_arguments_are_reported(target: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    for more, message in (
        (("--prompts", "nowhere.jsonl"), "'nowhere.jsonl' does not exist"),
        (("--builtin", "poems=3"), "--builtin poems=3"),
        (("--builtin", "chat=3", "--share", "2/2"), "must be I/N"),
        ((), "no prompts"),
    ):
        assert command.run(arguments(target, out, *more)) == 1
        assert message in capsys.readouterr().err
    assert not out.exists()


def test_two_runs_do_not_write_one_part(target: Path, tmp_path: Path, serve, capsys) -> None:
    prompts, out = prompt_file(tmp_path / "prompts.jsonl"), tmp_path / "out"
    idle = serve(FakeEngine())
    with locked(out, "part-0"):
        assert command.run(arguments(target, out, "--prompts", prompts)) == 1
    assert "generate: another process is writing part-0" in capsys.readouterr().err
    assert not idle.asked and not list(out.glob("*.json*"))


def test_an_engine_that_refuses_a_prompt_is_reported(
    target: Path, tmp_path: Path, serve, capsys
) -> None:
    class Refusing(FakeEngine):
        async def async_generate(self, input_ids, sampling_params):
            raise ValueError("too long")

    serve(Refusing())
    assert command.run(arguments(target, tmp_path / "out", "--builtin", "chat=3")) == 1
    assert "the engine refused a prompt: too long" in capsys.readouterr().err


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
    assert 0 < len(by_id(out)) < 5000


@pytest.mark.slow
@pytest.mark.server
def test_a_real_engine_gives_the_greedy_replies_of_transformers(
    target: Path, hf_model, tmp_path: Path
) -> None:
    from .conftest import greedy

    prompts = prompt_file(tmp_path / "prompts.jsonl")
    more = ("--prompts", prompts, "--max-total-tokens", "4096", "--context-length", "1024")
    assert command.run(arguments(target, tmp_path / "out", *more)) == 0
    found = by_id(tmp_path / "out")
    assert len(found) == 7
    for prompt, reply in found.values():
        assert reply == greedy(hf_model, prompt, 20)
