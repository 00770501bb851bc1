"""The session that the demo plays: what the user asks, and what the agent's tools return.

Tool output travels in user messages, as many agents do: the chat template of the embedded
target knows no `tool` role. The files read here are held out of the drafter's training.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dlite.demo.stdlib_source import definition, outline

SYSTEM_PROMPT = """\
You are a coding agent. You work on a checkout of the Python standard library in /workspace/Lib.
Tool results are given to you between <tool_result> and </tool_result>.
Read them carefully, answer the request that follows, and stay with the code that was shown.
Put code into ```python blocks. Keep answers short."""


@dataclass(frozen=True)
class ToolCall:
    """One read of a standard-library file: a definition, or the file's outline."""

    module: str
    symbol: str | None = None

    def render(self) -> str:
        path = f"/workspace/Lib/{self.module}.py"
        if self.symbol is None:
            command, output = f"grep -nE '^(def|class) ' {path}", outline(self.module)
        else:
            command = f"show-definition {path} {self.symbol}"
            output = definition(self.module, self.symbol)
        return f"<tool_result>\n$ {command}\n{output}\n</tool_result>"


@dataclass(frozen=True)
class Turn:
    """One user message: tool output, if any, and then the request."""

    request: str
    tools: tuple[ToolCall, ...] = ()

    def message(self) -> str:
        return "\n\n".join([*(tool.render() for tool in self.tools), self.request])


SESSION: tuple[Turn, ...] = (
    Turn(
        "Explain what rgb_to_hsv does, step by step, and then repeat the function with a "
        "docstring.",
        (ToolCall("colorsys"), ToolCall("colorsys", "rgb_to_hsv")),
    ),
    Turn(
        "Now read hsv_to_rgb as well. Write a small unittest class TestRoundTrip which checks that "
        "hsv_to_rgb(*rgb_to_hsv(r, g, b)) gives back the same values for red, green and blue.",
        (ToolCall("colorsys", "hsv_to_rgb"),),
    ),
    Turn(
        "Rewrite bisect_right with type hints: a is a list of int, x is an int, and the result is "
        "an int. Leave out the key argument. Show only the code.",
        (ToolCall("bisect", "bisect_right"), ToolCall("bisect", "insort_right")),
    ),
    Turn(
        "Rename the function nsmallest to smallest_items, shorten its docstring, and show the new "
        "code of the function.",
        (ToolCall("heapq", "heappushpop"), ToolCall("heapq", "nsmallest")),
    ),
    Turn(
        "What do quote and join do? Give two examples of calls with their results, then write a "
        "function quote_all(args) which returns a list of quoted arguments.",
        (ToolCall("shlex", "join"), ToolCall("shlex", "quote"), ToolCall("fnmatch", "filter")),
    ),
    Turn(
        "Write a function dedent_and_indent(text, prefix) that calls dedent and then indent, "
        "with a docstring, and a unittest for it.",
        (ToolCall("textwrap", "dedent"), ToolCall("textwrap", "indent")),
    ),
    Turn(
        "Explain in a few sentences what Queue.put does when the queue is full: with block=False, "
        "with a timeout, and without one. Which exception does it raise?",
        (ToolCall("queue", "Queue.put"),),
    ),
    Turn(
        "Write the commit message for dedent_and_indent: a title, and two sentences on what the "
        "function does.",
        (ToolCall("string", "capwords"),),
    ),
)
