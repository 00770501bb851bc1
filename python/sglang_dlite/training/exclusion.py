"""Keeping evaluation prompts out of training, and mixing the sources evenly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang_dlite.training.prompts import BadRows, Prompt, content_text, read_jsonl


def normalised(text: str) -> str:
    """Lower case, letters and digits only: what counts as the same prompt."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def excluded_texts(paths: Iterable[Path]) -> set[str]:
    """The normalised user texts of evaluation files (`turns`, or `messages`)."""
    texts: set[str] = set()
    for path in paths:
        bad = BadRows()
        rows = read_jsonl(path, bad)
        bad.settle(str(path), len(rows) + len(bad.found))
        for _, row in rows:
            turns = row.get("turns") or [
                content_text(m) for m in row.get("messages", []) if m.get("role") == "user"
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
