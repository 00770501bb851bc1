"""Keeping evaluation prompts and repetitions out, and mixing the sources evenly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dlite.training.dataset import answered_prompts
from sglang_dlite.training.prompts import (
    BadRows,
    Prompt,
    checked_messages,
    content_text,
    conversation_hash,
    read_jsonl,
    single_turn,
)


def normalised(text: str) -> str:
    """Lower case, letters and digits of any script only: what counts as the same prompt."""
    return re.sub(r"[\W_]+", " ", text.lower()).strip()


def excluded_texts(specs: Iterable[str]) -> set[str]:
    """The normalised user texts of evaluation files: `FILE` (`turns`, or `messages`), or
    `FILE:FIELD`. Raises `PromptError` for a row without any: it would keep nothing out."""
    texts: set[str] = set()
    for spec in specs:
        path, _, column = spec.partition(":")
        bad = BadRows(remedy="Mend them, or name their FIELD.")
        rows = read_jsonl(Path(path), bad)
        total = len(rows) + len(bad.found)
        for number, row in rows:
            try:
                found = {normalised(text) for text in _user_texts(row, column)} - {""}
            except ValueError as error:
                bad.add(f"row {number}", str(error))
                continue
            if not found:
                bad.add(
                    f"row {number}",
                    f"no user text in {column or 'turns or messages'}; has {sorted(row)}",
                )
            texts |= found
        bad.settle(f"--exclude {spec}", total)
    return texts


def _user_texts(row: dict[str, Any], column: str) -> list[str]:
    value = row.get(column or "turns")
    if value is None and not column:
        messages = checked_messages(row["messages"]) if "messages" in row else []
        value = [content_text(m) for m in messages if m.get("role") == "user"]
    return [str(text) for text in value] if isinstance(value, list) else [str(value or "")]


# A shorter text (a phrase such as "explain this") may occur in other prompts by chance.
_MIN_CONTAINED = 40


def overlaps(text: str, excluded: set[str]) -> bool:
    """Whether what a user says equals, contains or is contained in an evaluation prompt."""
    text = normalised(text)
    if text in excluded:
        return True
    return any(
        (len(other) >= _MIN_CONTAINED and other in text)
        or (len(text) >= _MIN_CONTAINED and text in other)
        for other in excluded
    )


class Exclusion(NamedTuple):
    """What must not be answered."""

    texts: set[str]  # normalised, of evaluation files
    prompts: set[str]  # `conversation_hash`, of other data sets

    @classmethod
    def read(cls, specs: Sequence[str]) -> Exclusion:
        """Of `--exclude`: `FILE[:FIELD]`, or the folder of a data set. Raises `PromptError` or
        `DatasetError` for what would keep nothing out."""
        files = [spec for spec in specs if not Path(spec).is_dir()]
        folders = [Path(spec) for spec in specs if Path(spec).is_dir()]
        return cls(excluded_texts(files), set().union(*map(answered_prompts, folders)))

    def covers(self, prompt: Prompt) -> bool:
        first = conversation_hash(prompt.turns[0].messages)
        return first in self.prompts or overlaps(prompt.user_text(), self.texts)

    def covers_question(self, text: str) -> bool:
        """The same of what the target asks itself."""
        return self.covers(single_turn("", "", text))


def without_repetitions(groups: Sequence[Sequence[Prompt]]) -> tuple[list[list[Prompt]], int]:
    """The groups with each conversation once, under its first id, and how many were left out."""
    seen: set[object] = set()
    kept: list[list[Prompt]] = []
    left_out = 0
    for group in groups:
        kept.append([])
        for prompt in group:
            turns = tuple((t.recorded, conversation_hash(t.messages)) for t in prompt.turns)
            if turns in seen and not prompt.asks_itself:  # those have nothing to compare yet
                left_out += 1
                continue
            seen.add(turns)
            kept[-1].append(prompt)
    return kept, left_out


def interleave(groups: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """Mix sources so that every prefix holds each in the proportion of the whole."""
    placed = [
        ((index + 0.5) / len(group), rank, prompt)
        for rank, group in enumerate(groups)
        for index, prompt in enumerate(group)
    ]
    return [prompt for _, _, prompt in sorted(placed, key=lambda item: item[:2])]
