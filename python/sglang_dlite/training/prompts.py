"""Prompts: reading them from files, keeping evaluation prompts out, mixing the sources."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, str]  # {"role": ..., "content": ...}


class PromptError(ValueError):
    """A prompt file cannot be used; the message names the file and line."""


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered by the target.

    `messages` ends with a user message. After the reply to it, each of `followups` is sent as a
    further user message, so that earlier assistant turns are always the target's own.
    """

    id: str
    source: str
    messages: tuple[Message, ...]
    followups: tuple[str, ...] = field(default=())

    def user_text(self) -> str:
        parts = [m["content"] for m in self.messages if m["role"] == "user"]
        return "\n".join([*parts, *self.followups])


def single_turn(id: str, source: str, text: str) -> Prompt:
    """A prompt of one user message (the chat template adds the target's default system prompt)."""
    return Prompt(id, source, ({"role": "user", "content": text},))


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, gzip-compressed if it is named `.gz`."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise PromptError(f"{path}:{number}: not JSON: {error}") from error


def load_prompts(spec: str) -> list[Prompt]:
    """Read `FILE` (OpenAI-style messages) or `FILE:FIELD` (a text field as the user message).

    Recorded assistant text is dropped, since it is some other model's: only user and system
    messages are kept, and the target answers each user message in its turn.
    """
    path_text, _, column = spec.partition(":")
    path = Path(path_text)
    if not path.is_file():
        raise PromptError(f"prompt file {path_text!r} does not exist")
    source = path.name.split(".")[0]
    prompts = []
    for number, row in enumerate(read_jsonl(path)):
        name = f"{source}/{number}"
        if column:
            if column not in row:
                raise PromptError(f"{path} row {number}: no field {column!r}; has {sorted(row)}")
            prompts.append(single_turn(name, source, _text(row[column])))
        else:
            prompts.append(_from_messages(name, source, row, f"{path} row {number}"))
    return prompts


def _text(value: Any) -> str:
    """A field's text; of a list (`turns`) the first; without the quotes of a docstring prompt."""
    if isinstance(value, list):
        return str(value[0])  # evaluation questions: as they are
    text = str(value).strip()
    if text.startswith('"""') and text.endswith('"""'):
        text = text[3:-3].strip()
    return text


def _from_messages(name: str, source: str, row: dict[str, Any], where: str) -> Prompt:
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise PromptError(f"{where}: no 'messages' list; give FILE:FIELD to use a text field")
    system = [m for m in messages if m.get("role") == "system"][:1]
    users = [_content(m) for m in messages if m.get("role") in ("user", "tool")]
    users = [text for text in users if text]
    if not users:
        raise PromptError(f"{where}: no user message")
    first = [{"role": "system", "content": _content(m)} for m in system]
    first.append({"role": "user", "content": users[0]})
    return Prompt(name, source, tuple(first), tuple(users[1:]))


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):  # OpenAI's content parts
        content = "\n".join(part.get("text", "") for part in content)
    return str(content).strip()


def normalised(text: str) -> str:
    """Lower case, letters and digits only: what counts as the same prompt."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def excluded_texts(paths: Iterable[Path]) -> set[str]:
    """The normalised user texts of evaluation files (`turns`, or `messages`)."""
    texts: set[str] = set()
    for path in paths:
        for row in read_jsonl(path):
            turns = row.get("turns") or [
                _content(m) for m in row.get("messages", []) if m.get("role") == "user"
            ]
            texts.update(normalised(turn) for turn in turns)
    return {text for text in texts if text}


# A shorter text (a phrase such as "explain this") may occur in other prompts by chance.
_MIN_CONTAINED = 40


def overlaps(prompt: Prompt, excluded: set[str]) -> bool:
    """Whether a prompt equals, contains or is contained in an evaluation prompt."""
    text = normalised(prompt.user_text())
    if text in excluded:
        return True
    return any(
        (len(other) >= _MIN_CONTAINED and other in text)
        or (len(text) >= _MIN_CONTAINED and text in other)
        for other in excluded
    )


def interleave(groups: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """Mix sources so that every prefix holds each in the proportion of the whole."""
    placed = [
        ((index + 0.5) / len(group), rank, prompt)
        for rank, group in enumerate(groups)
        for index, prompt in enumerate(group)
    ]
    return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]
