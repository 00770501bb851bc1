"""Streamed tool calls and reasoning: a block of tokens at once reads as one token at a time."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang_dlite.speculative import stream_parsers

# Tokens as vocabularies have them: tags, words with their space, runs of punctuation.
TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]| ?\w+|\s+|[^\w\s<\[]+|.", re.DOTALL)
WIDTHS = (2, 3, 5, 8, 16)

TOOLS = [
    Tool(type="function", function={"name": name, "parameters": {"type": "object"}})
    for name in ("weather", "other")
]
A = '{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}'
B = '{"name": "other", "arguments": {}}'
CALLS = [
    ("qwen25", f"<tool_call>\n{A}\n</tool_call>"),
    ("qwen25", f"Sure.<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>"),
    ("qwen25", f"<tool_call>\n{B}\n</tool_call> done"),
    ("qwen25", 'a <b> "text" [X] without calls'),
    ("hermes", f"Sure. <tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>"),
    ("llama3", f"<|python_tag|>{A}"),
    ("mistral", f"[TOOL_CALLS] [{A}]"),
    ("pythonic", '[weather(city="Rome", days=[1, 2]), other()]'),
    (
        "qwen3_coder",
        "Sure.<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    (
        "deepseekv3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
]
THOUGHTS = [
    "abc</think>def",
    "<think>abc</think>def",
    "x <think>abc</think>def",
    "ab</thi",
    "a </think> b </think> c",
    "ab\n<tool_call>c</think>d",
    "neither",
]


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    spec = SimpleNamespace(speculative_algorithm="DLITE")
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    return spec


def chunkings(text: str) -> list[list[str]]:
    """The tokens of a text, so many to a chunk, from every first chunk on; and all in one."""
    tokens = TOKEN.findall(text)
    assert "".join(tokens) == text
    found = [[text]]
    for width in WIDTHS:
        for first in range(width):
            cuts = [0, *range(first or width, len(tokens), width), len(tokens)]
            parts = pairwise(cuts)
            found.append(["".join(tokens[start:end]) for start, end in parts])
    return found


Calls = dict[int, tuple[str, str]]


def message(steps: Sequence[tuple[str | None, Sequence[Any]]]) -> tuple[str, Calls]:
    """Text, and name and arguments by call, as a client puts them together."""
    text, calls = "", {}
    for normal, found in steps:
        text += normal or ""
        for call in found:
            name, arguments = calls.get(call.tool_index, ("", ""))
            calls[call.tool_index] = (name + (call.name or ""), arguments + call.parameters)
    return text, calls


def upstream(function: Callable[..., Any]) -> Callable[..., Any]:
    return inspect.unwrap(function)


@pytest.mark.parametrize("name,text", CALLS)
def test_calls(name: str, text: str) -> None:
    original = upstream(FunctionCallParser.parse_stream_chunk)

    def read(chunks: list[str], step: Callable[..., Any]) -> tuple[str, Calls]:
        parser = FunctionCallParser(TOOLS, name)
        return message([*(step(parser, chunk) for chunk in chunks), parser.parse_stream_end()])

    # Plain decoding ends with a token that has no text.
    expected = read([*TOKEN.findall(text), ""], original)
    assert bool(expected[1]) == ("without calls" not in text)
    for chunks in chunkings(text):
        by_pieces = read(chunks, lambda *args: stream_parsers.calls_by_pieces(original, *args))
        assert by_pieces == expected, chunks


def test_calls_in_a_json_array() -> None:
    original = upstream(JsonArrayParser.parse_streaming_increment)
    calls = [{"name": "weather", "parameters": {"city": "Ro]m[e"}}, {"name": "other"}]
    calls[1]["parameters"] = {}
    text = json.dumps(calls)

    def read(chunks: list[str], by_pieces: bool) -> tuple[str, Calls]:
        parser = JsonArrayParser()
        steps = []
        for chunk in chunks:
            if by_pieces:
                step = stream_parsers.array_by_pieces(original, parser, chunk, TOOLS)
            else:
                step = original(parser, chunk, TOOLS)
            steps.append((step.normal_text, step.calls))
        end = parser.finish(TOOLS)
        return message([*steps, (end.normal_text, end.calls)])

    expected = read([*TOKEN.findall(text), ""], False)
    assert [name for name, _ in expected[1].values()] == ["weather", "other"]
    for chunks in chunkings(text):
        assert read(chunks, True) == expected, chunks


@pytest.mark.parametrize("text", THOUGHTS)
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
def test_reasoning(name: str, forced: bool, text: str) -> None:
    original = upstream(ReasoningParser.parse_stream_chunk)

    def read(chunks: list[str], step: Callable[..., Any]) -> tuple[str, str]:
        parser = ReasoningParser(name, True, forced)
        steps = [*(step(parser, chunk) for chunk in chunks), parser.parse_stream_end()]
        return "".join(r or "" for r, _ in steps), "".join(n or "" for _, n in steps)

    expected = read([*TOKEN.findall(text), ""], original)
    for chunks in chunkings(text):
        by_pieces = read(chunks, lambda *args: stream_parsers.reasoning_by_pieces(original, *args))
        assert by_pieces == expected, chunks


def test_upstream_still_needs_it() -> None:
    """What is lost of one chunk without the pieces; if nothing is, the hooks can go."""
    text = f"Sure.<tool_call>\n{A}\n</tool_call>"
    parser = FunctionCallParser(TOOLS, "qwen25")
    step = upstream(FunctionCallParser.parse_stream_chunk)(parser, text)
    assert message([step, parser.parse_stream_end()]) == ("", {0: ("weather", "")})


def test_a_server_without_dlite_is_left_alone(served: SimpleNamespace) -> None:
    seen: list[str] = []

    def original(parser: Any, chunk: str) -> tuple[str, list[Any]]:
        seen.append(chunk)
        return chunk, []

    text = "two words"
    assert stream_parsers.calls_by_pieces(original, None, text) == (text, [])
    assert seen == ["two", " ", "words"]
    served.speculative_algorithm = None
    assert stream_parsers.calls_by_pieces(original, None, text) == (text, [])
    assert seen[3:] == [text]
    assert stream_parsers.pieces("") == [""]
