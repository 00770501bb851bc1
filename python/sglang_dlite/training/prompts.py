"""Prompts: reading them from files, keeping evaluation prompts out, mixing the sources."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, str]  # {"role": ..., "content": ...}


class PromptError(ValueError):
    """A prompt file cannot be used; the message names the file and line."""


class Turn(NamedTuple):
    """What is said before one reply of the target, and what then stands for that reply."""

    messages: tuple[Message, ...]
    # Recorded text of some other model: it goes on in the history, it is never a label. None: the
    # target's own reply does.
    recorded: str | None = None


@dataclass(frozen=True)
class Prompt:
    """One conversation; the target replies after each turn."""

    id: str
    source: str
    turns: tuple[Turn, ...]
    category: str = ""
    asks_itself: bool = False  # the user message, too, is written by the target

    def user_text(self) -> str:
        messages = [message for turn in self.turns for message in turn.messages]
        return "\n".join(m["content"] for m in messages if m["role"] == "user")


def conversation(
    id: str,
    source: str,
    messages: Iterable[Message],
    followups: Iterable[str] = (),
    category: str = "",
) -> Prompt:
    """Messages to reply to, then further user messages: earlier replies are the target's own."""
    later = (Turn(({"role": "user", "content": text},)) for text in followups)
    return Prompt(id, source, (Turn(tuple(messages)), *later), category)


def conversation_hash(messages: Iterable[Message]) -> str:
    """What a reply is bound to: ids come back with another text, after an edit or a new count.

    Of the text, not of its tokens: a chat template may put the day's date in.
    """
    text = json.dumps([[m["role"], m["content"]] for m in messages])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def single_turn(id: str, source: str, text: str) -> Prompt:
    """A prompt of one user message (the chat template adds the target's default system prompt)."""
    return conversation(id, source, [{"role": "user", "content": text}])


@dataclass
class BadRows:
    """Counts what cannot be used; refused or, only if asked for, skipped."""

    skip: bool = False
    remedy: str = "Mend them, or pass --skip-bad-rows."
    found: list[str] = field(default_factory=list)

    def add(self, where: str, problem: str) -> None:
        self.found.append(f"{where}: {problem}")

    def settle(self, name: str, total: int) -> None:
        """Report what was found in a file. Raises `PromptError` unless it is to be skipped."""
        if not self.found:
            return
        shown = "; ".join(self.found[:3]) + ("; ..." if len(self.found) > 3 else "")
        message = f"{name}: {len(self.found)} of {total} rows cannot be used: {shown}"
        self.found = []
        if not self.skip:
            raise PromptError(f"{message}. {self.remedy}")
        print(f"{message}. Skipped.", file=sys.stderr)


Row = tuple[int, dict[str, Any]]  # (row number from 0, object)


def read_jsonl(path: Path, bad: BadRows) -> list[Row]:
    """The objects of a JSONL file, gzip-compressed if it is named `.gz`. Empty and malformed lines
    are added to `bad`, and what lies behind damage of the compression, as one."""
    if not path.is_file():
        raise PromptError(f"prompt file '{path}' does not exist")
    rows: list[Row] = []
    opener: Any = gzip.open if path.suffix == ".gz" else open
    number = -1
    with opener(path, "rb") as lines:
        try:
            for number, line in enumerate(lines):
                _read_line(number, line, rows, bad)
        except (OSError, EOFError, zlib.error) as error:  # BadGzipFile is an OSError
            bad.add(f"from line {number + 2} on", f"the file cannot be read ({error})")
    return rows


def _read_line(number: int, line: bytes, rows: list[Row], bad: BadRows) -> None:
    where = f"line {number + 1}"
    if not line.strip():
        bad.add(where, "empty")
        return
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        bad.add(where, f"not UTF-8 ({error})")
    except ValueError as error:
        bad.add(where, f"not JSON ({error})")
    else:
        if isinstance(value, dict):
            rows.append((number, value))
        else:
            bad.add(where, "no JSON object")


def load_prompts(spec: str, skip_bad: bool = False) -> list[Prompt]:
    """Read `FILE` (OpenAI-style messages) or `FILE:FIELD` (a text field, or a list of user turns).

    Recorded assistant text is dropped, since it is some other model's: only user and system
    messages are kept, and the target answers each user message in its turn.
    """
    path_text, _, column = spec.partition(":")
    path, bad = Path(path_text), BadRows(skip_bad)
    return parse_rows(read_jsonl(path, bad), path.name.split(".")[0], column, str(path), bad)


def load_hf_prompts(spec: str, skip_bad: bool = False) -> list[Prompt]:
    """As `load_prompts`, of a HF data set: `NAME[@SPLIT][:FIELD]`, the split `train` by default."""
    import datasets

    name_split, _, column = spec.partition(":")
    name, _, split = name_split.partition("@")
    try:
        found = datasets.load_dataset(name, split=split or "train")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise PromptError(f"--hf-dataset {spec}: {error}") from error
    source = name.rstrip("/").split("/")[-1]
    return parse_rows(list(enumerate(found)), source, column, name, BadRows(skip_bad))


def parse_rows(rows: list[Row], source: str, column: str, name: str, bad: BadRows) -> list[Prompt]:
    """Prompts of rows; those that cannot be used are settled by `bad`."""
    total = len(rows) + len(bad.found)
    prompts = []
    for number, row in rows:
        try:
            prompts.append(_parse(f"{source}/{number}", source, row, column))
        except ValueError as error:
            bad.add(f"row {number}", str(error))
    bad.settle(name, total)
    return prompts


def _parse(name: str, source: str, row: dict[str, Any], column: str) -> Prompt:
    category = str(row.get("category", ""))
    if column:
        if column not in row:
            raise ValueError(f"no field {column!r}; has {sorted(row)}")
        first, *followups = _texts(row[column])
        return conversation(name, source, [{"role": "user", "content": first}], followups, category)
    if "messages" not in row:
        raise ValueError("no 'messages' list; give FILE:FIELD to use a text field")
    messages = checked_messages(row["messages"])
    system = [m for m in messages if m.get("role") == "system"][:1]
    users = [content_text(m) for m in messages if m.get("role") in ("user", "tool")]
    users = [text for text in users if text]
    if not users:
        raise ValueError("no user message")
    start = [{"role": "system", "content": content_text(m)} for m in system]
    start.append({"role": "user", "content": users[0]})
    return conversation(name, source, start, users[1:], category)


def _texts(value: Any) -> list[str]:
    """A field's user turns; a docstring prompt loses its quotes."""
    if isinstance(value, list):
        if not value or not all(isinstance(text, str) and text for text in value):
            raise ValueError("the field must hold user turns: non-empty strings")
        return value
    if not isinstance(value, str):
        raise ValueError(f"the field holds {value!r:.40}; must be text, or a list of user turns")
    text = value.strip()
    if text.startswith('"""') and text.endswith('"""'):
        text = text[3:-3].strip()
    if not text:
        raise ValueError("the field is empty")
    return [text]


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """A row's OpenAI-style messages. Raises ValueError for what are none."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("no 'messages' list")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"the message {message!r:.40} is no object with role and content")
    return messages


def content_text(message: dict[str, Any]) -> str:
    """A message's text; of OpenAI's content parts the text ones. Raises ValueError for others."""
    content = message.get("content") or ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text") or "", str):
                raise ValueError(f"the content part {part!r:.40} is no object with a type and text")
        content = "\n".join(part.get("text") or "" for part in content)
    return str(content).strip()


def parse_share(text: str) -> tuple[int, int]:
    """`I/N` as (I, N). Raises `PromptError` unless 0 <= I < N."""
    first, slash, second = text.partition("/")
    if slash and first.isdigit() and second.isdigit() and int(first) < int(second):
        return int(first), int(second)
    raise PromptError(f"share {text!r}: must be I/N with 0 <= I < N")
