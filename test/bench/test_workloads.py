"""Every adapter on a small file of its format, good rows and bad ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from sglang_dlite.bench.config import WorkloadSpec
from sglang_dlite.bench.context_limit import fit
from sglang_dlite.bench.workloads import load
from sglang_dlite.bench.workloads.recorded import write_agentic_trace
from sglang_dlite.bench.workloads.rows import HubSource, hub_rows
from sglang_dlite.bench.workloads.sessions import (
    RowError,
    Session,
    Turn,
    WorkloadError,
    from_messages,
    history,
)


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))
    return path


def loaded(kind: str, path: Path, **changes: Any) -> Any:
    return load(WorkloadSpec("w", kind, path=str(path), **changes))


def texts(session: Session) -> list[str]:
    return [turn.messages[-1]["content"] for turn in session.turns]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": [{"type": "text", "text": "two"}]},
    {"role": "assistant", "content": "second"},
]


def test_openai_messages_name_what_is_unusable(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "chats.jsonl",
        {"session_id": "good", "messages": CHAT},
        "{broken\n",
        {"messages": [{"role": "user", "content": "never answered"}]},
        {"text": "no messages"},
        {"messages": [{"content": "no role"}]},
    )
    found = loaded("messages", path)
    (session,) = found.sessions
    assert session.id == "good"
    assert [turn.recorded for turn in session.turns] == ["first", "second"]
    assert session.turns[0].messages[0] == CHAT[0]
    assert texts(session) == ["one", "two"]
    assert [reason.split(": ")[0] for reason in found.rejected] == [
        f"{path}:{line}" for line in (2, 3, 4, 5)
    ]
    assert "not JSON" in found.rejected[0] and "'messages'" in found.rejected[2]


def test_gzip_and_the_number_of_turns(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"messages": CHAT}).encode()))
    (session,) = loaded("messages", path, turns=1).sessions
    assert texts(session) == ["one"]


def test_tool_calls_become_text_and_roles_alternate() -> None:
    call = {"id": "c1", "function": {"name": "cat", "arguments": '{"path": "a.py"}'}}
    session = from_messages(
        "s",
        [
            {"role": "user", "content": "read"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "done"},
            {"role": "assistant", "content": "really"},
        ],
    )
    first, second = session.turns
    assert first.recorded is not None and '"name": "cat"' in first.recorded
    (joined,) = second.messages
    assert joined["role"] == "user"
    assert joined["content"] == "<tool_result>\nx = 1\n</tool_result>\n\nand?"
    assert second.recorded == "done\n\nreally"
    roles = [message["role"] for message in history(session, ["r1"])]
    assert roles == ["user", "assistant", "user"]


def test_content_of_another_type_is_refused() -> None:
    with pytest.raises(RowError, match="content is of type int"):
        from_messages("s", [{"role": "user", "content": 5}])


def test_swe_agent_trajectories_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.traj").write_text(json.dumps({"history": CHAT, "trajectory": []}))
    (tmp_path / "b.traj.json").write_text(json.dumps({"messages": CHAT}))
    (tmp_path / "c.traj").write_text("{")
    (tmp_path / "d.traj").write_text(json.dumps({"trajectory": []}))
    found = loaded("swe-agent", tmp_path)
    assert sorted(session.id for session in found.sessions) == ["a.traj", "b.traj.json"]
    assert len(found.rejected) == 2
    assert loaded("swe-agent", tmp_path / "deep" / "a.traj").sessions[0].turns[1].recorded


def test_agentic_trace_as_sglang_reads_it(tmp_path: Path) -> None:
    conversations = [
        [{"messages": CHAT[:2], "prompt_tokens": 9}, {"messages": [CHAT[3]]}],
        [{"messages": [CHAT[2]]}],
        "no list",
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"metadata": {}, "conversations": conversations}))
    found = loaded("agentic-trace", path)
    assert [texts(session) for session in found.sessions] == [["one", "two"]]
    assert len(found.rejected) == 2 and "assistant" in found.rejected[0]
    path.write_text(json.dumps([1]))
    with pytest.raises(WorkloadError, match="no 'conversations' list"):
        loaded("agentic-trace", path)


def test_agentic_trace_is_read_by_sglang_itself(tmp_path: Path) -> None:
    dataset = pytest.importorskip("sglang.benchmark.datasets.agentic_trace")
    session = Session("s", tuple(Turn(({"role": "user", "content": c},)) for c in "ab"))
    path = tmp_path / "trace.json"
    write_agentic_trace(path, [session])
    rows = dataset.AgenticTraceDataset(str(path), 4, 16, 0, None).load(None)
    assert [[m["content"] for m in turn] for turn in rows[0].prompt] == [["a"], ["b"]]
    assert loaded("agentic-trace", path).sessions[0].turns == session.turns


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("gsm8k", {"question": "1+1?", "answer": "2"}, "1+1?"),
        ("math-500", {"problem": "x=1"}, "x=1"),
        ("humaneval", {"prompt": "def f():"}, "def f():"),
        ("mbpp", {"text": "Add.", "test_list": ["assert add(1, 1) == 2"]}, "assert add(1, 1)"),
        ("alpaca", {"instruction": "Sort.", "input": "3 1"}, "Sort.\n\n3 1"),
        ("swe-bench", {"text": "issue and files", "instance_id": "i"}, "issue and files"),
        ("swe-bench", {"problem_statement": "it fails", "repo": "a/b"}, "it fails"),
    ],
)
def test_single_turn_sets(tmp_path: Path, kind: str, row: Any, expected: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", row, {"something": "else"}, "[]\n")
    found = loaded(kind, path)
    assert [expected in texts(session)[0] for session in found.sessions] == [True]
    assert len(found.rejected) == 2 and "no field" in found.rejected[0]


def test_json_array_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"question": "q"}, {"question": ""}]))
    found = loaded("gsm8k", path)
    assert len(found.sessions) == 1 and found.rejected[0].startswith(f"{path}[1]")


def test_mt_bench_has_two_turns(tmp_path: Path) -> None:
    rows = [{"prompt": ["a", "b"]}, {"turns": ["c", "d"]}, {"turns": "e"}]
    found = loaded("mt-bench", jsonl(tmp_path / "rows.jsonl", *rows))
    assert [texts(session) for session in found.sessions] == [["a", "b"], ["c", "d"]]
    assert len(found.rejected) == 1


def test_longbench_takes_one_subset(tmp_path: Path) -> None:
    row = {"_id": "x", "context": "long text", "question": "which?", "difficulty": "hard"}
    row |= {f"choice_{letter}": letter.lower() for letter in "ABCD"}
    path = jsonl(
        tmp_path / "rows.jsonl",
        row | {"domain": "Multi-Document QA"},
        row | {"domain": "Code Repository Understanding"},
        {"domain": "Multi-Document QA", "_id": "y"},
    )
    found = loaded("longbench-v2/multi-doc-qa", path)
    (session,) = found.sessions
    assert "long text" in texts(session)[0] and "D. d" in texts(session)[0]
    assert len(found.rejected) == 1


def test_bfcl_turns_are_user_messages(tmp_path: Path) -> None:
    row = {
        "id": "multi_turn_base_0",
        "question": [[{"role": "user", "content": "move it"}], [{"role": "user", "content": "b"}]],
        "involved_classes": ["GorillaFileSystem"],
    }
    path = jsonl(tmp_path / "rows.json", row, {"id": "n", "question": ["text"]})
    found = loaded("bfcl-multi-turn", path)
    assert texts(found.sessions[0]) == ["move it", "b"]
    assert "GorillaFileSystem" in found.sessions[0].turns[0].messages[0]["content"]
    assert len(found.rejected) == 1


def test_generated_sessions_are_the_same_each_time() -> None:
    spec = WorkloadSpec("w", "generated", sessions=3, turns=4, read_chars=800)
    first, second = load(spec).sessions, load(spec).sessions
    assert first == second and len({texts(session)[0] for session in first}) == 3
    assert all(len(session.turns) == 4 for session in first)
    held_out = {"textwrap", "bisect", "heapq", "shlex", "fnmatch", "colorsys", "string", "queue"}
    shown = [text for session in first for text in texts(session)]
    assert all("def " in text or "class " in text for text in shown)
    modules = {text.split("/workspace/Lib/")[1].split(".py")[0] for text in shown}
    assert modules <= held_out
    other = load(WorkloadSpec("w", "generated", sessions=1, seed=1, held_out=False))
    assert other.sessions[0].turns != first[0].turns


def test_absent_file_and_no_usable_row(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no such file"):
        loaded("messages", tmp_path / "absent.jsonl")
    with pytest.raises(WorkloadError, match="no usable session; the first of 1"):
        loaded("gsm8k", jsonl(tmp_path / "rows.jsonl", {"a": 1}))
    with pytest.raises(WorkloadError, match=r"no \.traj file"):
        loaded("swe-agent", tmp_path)


def test_hub_without_access_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(WorkloadError, match=r"owner/set .*ConnectionError.*`path:`"):
        list(hub_rows(HubSource("owner/set", "test")))


def test_fit_cuts_and_names() -> None:
    def session(name: str, *sizes: int) -> Session:
        turns = (Turn(({"role": "user", "content": "x" * n},), "y" * 10) for n in sizes)
        return Session(name, tuple(turns))

    spec = WorkloadSpec("w", "generated", sessions=2, max_tokens=20, max_context=200)
    sessions = [
        session("short", 20, 20),
        session("long", 300),
        session("grows", 60, 500),
        session("unread", 10),
    ]
    kept, cut = fit(sessions, spec, len)
    assert [(s.id, len(s.turns)) for s in kept] == [("short", 2), ("grows", 1)]
    assert [line.split(":")[0] for line in cut] == ["long", "grows"]
    longer = WorkloadSpec("w", "generated", max_context=200, max_tokens=20, min_chars=30)
    kept, cut = fit(sessions[:1] + sessions[3:], longer, len)
    assert [s.id for s in kept] == ["short"] and "min_chars" in cut[0]


def test_the_shared_sessions_are_read() -> None:
    path = Path(__file__).parents[3] / "shared/data/sessions/agent_sessions.jsonl"
    if not path.is_file():
        pytest.skip("no ../shared/data/sessions beside the repository")
    found = loaded("messages", path)
    assert len(found.sessions) + len(found.rejected) == 64
    assert not found.rejected
