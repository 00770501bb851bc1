"""What a report consists of, apart from how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Row = Sequence[str]


class Text(NamedTuple):
    """A paragraph of plain text."""

    text: str


class Items(NamedTuple):
    """A list of plain texts, folded away in HTML where it is long."""

    heading: str
    items: Sequence[str]


class Table(NamedTuple):
    """A table of texts; all columns but the first `left` are numbers."""

    headings: Row
    rows: Sequence[Row]
    left: int = 1


class Code(NamedTuple):
    text: str


class Figure(NamedTuple):
    """A drawing; `name` is its file's."""

    name: str
    caption: str
    drawing: Any  # matplotlib's Figure


class Token(NamedTuple):
    """One output token: kind is `prefill`, `draft` or `target`; `hint` is shown on hovering."""

    text: str
    kind: str
    hint: str


class TokenRun(NamedTuple):
    """One reply, token by token."""

    heading: str
    prompt: str
    tokens: Sequence[Token]


Block = Text | Items | Table | Code | Figure | TokenRun


@dataclass
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Document:
    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)
