"""What every workload becomes: sessions of turns, and how messages are made fit for any target."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_dlite.chat_api import Message


class WorkloadError(ValueError):
    """A workload cannot be used at all; the message names the file or field and the remedy."""


class RowError(ValueError):
    """One row of a file cannot be used; it is counted and named, the others are played."""


@dataclass(frozen=True)
class Turn:
    """What is new since the last reply, and the reply that was recorded, if one was."""

    messages: tuple[Message, ...]  # system, user; never assistant
    recorded: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(str(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Session:
    id: str
    turns: tuple[Turn, ...]

    def first(self, count: int | None) -> Session:
        """The session without the turns after `count`."""
        return self if count is None else replace(self, turns=self.turns[:count])


@dataclass
class Loaded:
    """The sessions of a workload, and what could not be used, by name."""

    sessions: list[Session] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)  # "where: why"
    note: str = ""  # what a reader of the report should know of the text


def history(session: Session, replies: Sequence[str]) -> list[Message]:
    """All messages up to the turn that is to be answered next."""
    messages: list[Message] = []
    for turn, reply in zip(session.turns, replies, strict=False):
        messages.extend(turn.messages)
        messages.append({"role": "assistant", "content": reply})
    messages.extend(session.turns[len(replies)].messages)
    return messages


def from_messages(id: str, messages: object) -> Session:
    """A session from a recorded list of OpenAI messages.

    Tool calls and tool results become text of assistant and user messages, so that one prompt
    fits every chat template; neighbours of one role are joined, since many templates demand that
    roles alternate. What follows the last assistant message was never answered and is left out.

    Raises:
        RowError: no list of messages, a message without role, or nothing to answer.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError("no list of messages")
    turns: list[Turn] = []
    pending: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"message {number} is not an object with a role")
        text, role = message_text(message), message["role"]
        if role != "assistant":
            role = "system" if role in ("system", "developer") else "user"
            if text:
                _append(pending, role, text)
        elif any(item["role"] == "user" for item in pending):
            turns.append(Turn(tuple(pending), text))
            pending = []
        elif turns and not pending:  # two assistant messages in a row are one reply
            turns[-1] = replace(turns[-1], recorded=f"{turns[-1].recorded}\n\n{text}".strip())
    if not turns:
        raise RowError("no user message is followed by an assistant message")
    return Session(id, tuple(turns))


def from_user_texts(id: str, texts: Iterable[str], system: str | None = None) -> Session:
    """A session of user messages, whose replies are the server's own."""
    turns = [Turn(({"role": "user", "content": text},)) for text in texts if text.strip()]
    if not turns:
        raise RowError("no text to send")
    if system is not None:
        head = {"role": "system", "content": system}
        turns[0] = Turn((head, *turns[0].messages))
    return Session(id, tuple(turns))


def from_turn_messages(id: str, turns: Iterable[object]) -> Session:
    """A session from lists of new, non-assistant messages, one list per turn."""
    made = []
    for number, messages in enumerate(turns):
        if not isinstance(messages, list):
            raise RowError(f"turn {number} is not a list of messages")
        new: list[Message] = []
        for message in messages:
            if not isinstance(message, dict) or "role" not in message:
                raise RowError(f"turn {number}: a message is not an object with a role")
            if message["role"] == "assistant":
                raise RowError(f"turn {number} holds an assistant message; it must be new input")
            role = "system" if message["role"] in ("system", "developer") else "user"
            if text := message_text(message):
                _append(new, role, text)
        if new:
            made.append(Turn(tuple(new)))
    if not made:
        raise RowError("no turn has a message")
    return Session(id, tuple(made))


def message_text(message: Message) -> str:
    """The text of an OpenAI message: content parts joined, tool calls and results as text."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content if isinstance(part, dict))
    if not isinstance(content, str):
        raise RowError(f"content is of type {type(content).__name__}, not text or parts")
    parts = [content.strip()]
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, dict) else {}
        shown = {"name": function.get("name"), "arguments": function.get("arguments")}
        parts.append(f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>")
    if message["role"] in ("tool", "function"):
        return f"<tool_result>\n{parts[0]}\n</tool_result>"
    return "\n".join(part for part in parts if part)


def _append(messages: list[Message], role: str, text: str) -> None:
    if messages and messages[-1]["role"] == role:
        messages[-1]["content"] += f"\n\n{text}"
    else:
        messages.append({"role": role, "content": text})


def require(row: Any, field_name: str) -> Any:
    """A field of a row.

    Raises:
        RowError: names the field and what the row has.
    """
    if not isinstance(row, dict):
        raise RowError(f"a {type(row).__name__}, not an object")
    if row.get(field_name) in (None, "", []):
        raise RowError(f"no field {field_name!r}; it has {sorted(map(str, row))[:12]}")
    return row[field_name]
