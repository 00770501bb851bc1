"""Agent sessions: the recorded history is the prompt, recorded replies are never labels."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from sglang_dlite.training.prompts import PromptError
from sglang_dlite.training.sessions import load_sessions, session_turns

SESSIONS = Path("../shared/data/sessions/agent_sessions.jsonl")

MESSAGES = [
    {"role": "system", "content": "be an agent"},
    {"role": "user", "content": "fix it"},
    {"role": "user", "content": "please"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"function": {"name": "ls", "arguments": '{"path": "."}'}}],
    },
    {"role": "tool", "content": "a.py"},
    {"role": "assistant", "content": "Done."},
    {"role": "assistant", "content": "Really."},
    {"role": "user", "content": "thanks"},
]


def test_each_assistant_message_is_a_turn() -> None:
    first, second = session_turns(MESSAGES)
    system = {"role": "system", "content": "be an agent"}
    assert first.messages == (system, {"role": "user", "content": "fix it\n\nplease"})
    call = '<tool_call>\n{"name": "ls", "arguments": "{\\"path\\": \\".\\"}"}\n</tool_call>'
    assert first.recorded == f"I look.\n{call}"
    answer = "<tool_response>\na.py\n</tool_response>"
    assert second.messages == ({"role": "user", "content": answer},)
    assert second.recorded == "Done.\nReally."


def test_tools_are_told_in_the_system_message() -> None:
    tools = [{"name": "ls"}]
    first, _ = session_turns(MESSAGES, tools)
    assert first.messages[0]["content"] == 'be an agent\n\nTools:\n{"name": "ls"}'
    first, _ = session_turns(MESSAGES[1:], tools)
    assert first.messages[0] == {"role": "system", "content": 'Tools:\n{"name": "ls"}'}


def test_bad_sessions_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    bad = [{"messages": []}, {"messages": MESSAGES[:2]}, {"messages": [{"role": "alien"}]}, {}]
    rows = [{"messages": MESSAGES}, *bad]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(PromptError, match="4 of 5 rows cannot be used: row 1: no 'messages'"):
        load_sessions(path)
    (prompt,) = load_sessions(path, skip_bad=True)
    assert prompt.id == "s/0" and len(prompt.turns) == 2


def test_rows_split_sessions_without_overlap(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) * 0 + "")
    path.write_text("".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(10)))
    chosen = {p.id for p in load_sessions(path, "1/4")}
    others = {p.id for p in load_sessions(path, "!1/4")}
    assert chosen == {"s/1", "s/5", "s/9"} and len(others) == 7 and not chosen & others


@pytest.mark.skipif(not SESSIONS.exists(), reason="the recorded sessions are not at hand")
def test_real_sessions_alternate_and_keep_their_text() -> None:
    prompts = load_sessions(SESSIONS)
    assert len(prompts) == 64
    for prompt, line in zip(prompts, SESSIONS.read_text().splitlines(), strict=True):
        roles = [m["role"] for turn in prompt.turns for m in (*turn.messages, {"role": "reply"})]
        for before, after in itertools.pairwise(roles):
            assert (before, after) in {
                ("system", "user"), ("user", "reply"), ("reply", "user"),
            }  # fmt: skip
        recorded = [m for m in json.loads(line)["messages"] if m["role"] == "assistant"]
        text = "".join(turn.recorded or "" for turn in prompt.turns)
        assert all(str(m.get("content") or "").strip() in text for m in recorded[1:])
