"""Recorded agent sessions as prompts: each assistant turn is answered anew by the target.

The recorded history, other models' text included, is the context; what the target writes there is
what it would say at that point, at long and growing context. Messages are brought to the roles
that every chat template knows: system first, then user and assistant in turn.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_dlite.training.prompts import (
    BadRows,
    Message,
    Prompt,
    Turn,
    checked_messages,
    content_text,
    parse_share,
    read_jsonl,
)


def load_sessions(path: Path, rows: str | None = None, skip_bad: bool = False) -> list[Prompt]:
    """One prompt per session of a JSONL file of OpenAI-style message lists.

    rows: `I/N` takes the rows whose number modulo N is I, `!I/N` the others; None takes all.
    Raises `PromptError` for rows that cannot be used, and for a malformed `rows`.
    """
    bad = BadRows(skip_bad)
    found = read_jsonl(path, bad)
    total = len(found) + len(bad.found)
    source = path.name.split(".")[0]
    prompts = []
    for number, row in found:
        if not _wanted(number, rows):
            continue
        try:
            turns = session_turns(row.get("messages"), row.get("tools"))
        except (ValueError, AttributeError, TypeError) as error:
            bad.add(f"row {number}", str(error))
            continue
        prompts.append(Prompt(f"{source}/{number}", source, turns, _category(row)))
    bad.settle(str(path), total)
    return prompts


def _wanted(number: int, rows: str | None) -> bool:
    if rows is None:
        return True
    share, shares = parse_share(rows.removeprefix("!"))
    return (number % shares == share) != rows.startswith("!")


def _category(row: dict[str, Any]) -> str:
    source = row.get("source")
    return str(source.get("repo", "")) if isinstance(source, dict) else str(source or "")


def session_turns(messages: Any, tools: Any = None) -> tuple[Turn, ...]:
    """The turns of one session: what is new before each assistant message, and its text.

    Raises ValueError where there is no assistant message after a user's.
    """
    turns: list[Turn] = []
    waiting: list[Message] = []
    for message in checked_messages(messages):
        plain = _plain(message, bool(turns or waiting))
        if plain["role"] != "assistant":
            _join(waiting, plain)
        elif any(m["role"] == "user" for m in waiting):
            turns.append(Turn(tuple(waiting), plain["content"]))
            waiting = []
        elif turns:  # two assistant messages in a row are one
            text = f"{turns[-1].recorded}\n{plain['content']}"
            turns[-1] = turns[-1]._replace(recorded=text)
    if not turns:
        raise ValueError("no assistant message that answers a user")
    if tools:
        turns[0] = turns[0]._replace(messages=_with_tools(turns[0].messages, tools))
    return tuple(turns)


def _plain(message: dict[str, Any], later: bool) -> Message:
    role, text = message.get("role"), content_text(message)
    if role == "assistant":
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)
            value = {"name": function.get("name"), "arguments": function.get("arguments")}
            text += f"\n<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"
        return {"role": "assistant", "content": text.strip()}
    if role in ("tool", "function"):
        return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}
    if role in ("system", "developer") and not later:
        return {"role": "system", "content": text}
    if role in ("user", "system", "developer"):
        return {"role": "user", "content": text}
    raise ValueError(f"role {role!r} is not known")


def _join(waiting: list[Message], message: Message) -> None:
    if waiting and waiting[-1]["role"] == message["role"] == "user":
        joined = f"{waiting[-1]['content']}\n\n{message['content']}"
        waiting[-1] = {"role": "user", "content": joined}
    else:
        waiting.append(message)


def _with_tools(messages: Sequence[Message], tools: Any) -> tuple[Message, ...]:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = f"Tools:\n{listed}"
    first, *rest = messages
    if first["role"] == "system":
        return ({"role": "system", "content": f"{first['content']}\n\n{text}"}, *rest)
    return ({"role": "system", "content": text}, *messages)
