"""Streamed replies whose text a parser reads: tool calls and reasoning, token by token.

Upstream's streaming parsers are written for chunks of one token: of a chunk that holds more they
report one event, and drop or forget the others (the text before a call, a call's arguments, a
second call). A verify pass outputs a block at once, so its text is handed to them in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang_dlite.speculative import serves_dlite

# Like tokens: tags in one piece, which some parsers need, words, and single characters. Digits are
# single: upstream sends the common beginning of a number and a longer one.
PIECE = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|[^\W\d]+|.", re.DOTALL)


def pieces(text: str) -> list[str]:
    """Non-empty parts of `text`, in order; the text itself where it is one, or empty.

    Also without DLITE a slow reader gets chunks of several tokens: nothing is changed there.
    """
    if not serves_dlite():
        return [text]
    return PIECE.findall(text) or [text]


def calls_by_pieces(
    original: Callable[..., tuple[str, list[Any]]], parser: Any, chunk_text: str
) -> tuple[str, list[Any]]:
    """AROUND `FunctionCallParser.parse_stream_chunk`: normal text, and calls in order."""
    texts, calls = [], []
    for piece in pieces(chunk_text):
        text, found = original(parser, piece)
        texts.append(text or "")
        calls.extend(found)
    return "".join(texts), calls


def array_by_pieces(
    original: Callable[..., Any], parser: Any, new_text: str, tools: list[Any]
) -> Any:
    """AROUND `JsonArrayParser.parse_streaming_increment`: upstream's StreamingParseResult."""
    first, *others = pieces(new_text)
    result = original(parser, first, tools)
    for piece in others:
        more = original(parser, piece, tools)
        result.normal_text = (result.normal_text or "") + (more.normal_text or "")
        result.calls = [*result.calls, *more.calls]
    return result


def reasoning_by_pieces(
    original: Callable[..., tuple[str | None, str | None]], parser: Any, chunk_text: str
) -> tuple[str, str]:
    """AROUND `ReasoningParser.parse_stream_chunk`: reasoning and normal text."""
    parts = [original(parser, piece) for piece in pieces(chunk_text)]
    reasoning, normal = zip(*parts, strict=True)
    return "".join(text or "" for text in reasoning), "".join(text or "" for text in normal)
