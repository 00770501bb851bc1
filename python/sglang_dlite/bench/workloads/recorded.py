"""Recorded sessions: OpenAI messages, SWE-agent trajectories, SGLang's agentic traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_dlite.bench.workloads.rows import Row, collect, file_rows
from sglang_dlite.bench.workloads.sessions import (
    Loaded,
    RowError,
    Session,
    WorkloadError,
    from_messages,
    from_turn_messages,
    require,
)


def openai_messages(path: Path) -> Loaded:
    """JSONL with a `messages` list per row; `session_id` or `id` names the session."""

    def make(where: str, row: Any) -> Session:
        messages = require(row, "messages")
        return from_messages(str(row.get("session_id") or row.get("id") or where), messages)

    return collect(file_rows(path), make)


def swe_agent(path: Path) -> Loaded:
    """SWE-agent's `.traj` files: one file, or all below a folder.

    A trajectory holds `history` (older releases) or `messages` (mini-swe-agent) of role and
    content, with `tool_calls` where the agent called functions; entries of demonstrations
    (`is_demo`) are part of what the model was sent, so they stay.
    """
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.name.endswith((".traj", ".traj.json")))
        if not files:
            raise WorkloadError(f"{path}: no .traj file below it")
    else:
        files = [path]

    def rows() -> Iterator[Row]:
        for file in files:
            try:
                value: Any = json.loads(file.read_text(encoding="utf-8", errors="replace"))
            except FileNotFoundError as error:
                raise WorkloadError(f"{file}: no such file") from error
            except ValueError as error:
                value = RowError(f"not JSON: {error}")
            yield Row(str(file), value)

    def make(where: str, row: Any) -> Session:
        if not isinstance(row, dict):
            raise RowError("not an object")
        return from_messages(Path(where).name, row.get("history") or require(row, "messages"))

    return collect(rows(), make)


def agentic_trace(path: Path) -> Loaded:
    """The JSON that `sglang.bench_serving --dataset-name agentic-trace` reads.

    Raises:
        WorkloadError: the file as a whole is not of that shape.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WorkloadError(f"{path}: no such file") from error
    except ValueError as error:
        raise WorkloadError(f"{path}: not JSON: {error}") from error
    conversations = data.get("conversations") if isinstance(data, dict) else None
    if not isinstance(conversations, list):
        raise WorkloadError(f"{path}: no 'conversations' list, which an agentic trace has")

    def make(where: str, turns: Any) -> Session:
        if not isinstance(turns, list):
            raise RowError("not a list of turns")
        return from_turn_messages(where, [require(turn, "messages") for turn in turns])

    rows = (Row(f"{path.name}[{i}]", turns) for i, turns in enumerate(conversations))
    return collect(rows, make)


def write_agentic_trace(path: Path, sessions: list[Session]) -> None:
    """The reverse of `agentic_trace`: sessions as SGLang's own benchmark reads them."""
    from sglang_dlite.files import write_atomic

    conversations = [
        [{"messages": list(turn.messages)} for turn in session.turns] for session in sessions
    ]
    trace = {"metadata": {"made_by": "sglang-dlite bench"}, "conversations": conversations}
    write_atomic(path, json.dumps(trace, ensure_ascii=False))
