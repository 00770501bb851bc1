"""Coding-agent sessions made from the running interpreter's standard library: no data needed.

Each turn shows the agent what its tools returned (definitions, outlines and excerpts of real
files) and asks for a short piece of work, so that the history grows and replies stay short. By
default only those files are read that the shipped drafter was not trained on.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from sglang_dlite.bench.workloads.sessions import Loaded, Session, Turn
from sglang_dlite.demo.session import SYSTEM_PROMPT
from sglang_dlite.demo.stdlib_source import definitions
from sglang_dlite.training.stdlib_prompts import HELD_OUT

_TASKS = (
    "Explain to a colleague what {name} does, in at most five sentences.",
    "Show {name} again with a comment on every step.",
    "Write a unittest class with two cases for {name}.",
    "Give {name} type hints and show only the new code.",
    "Rename {name} to {name}_checked, raise ValueError for an empty first argument, show the code.",
    "What does {name} return, and which exceptions can it raise? Quote the lines.",
    "Write a function that calls {name} twice with different arguments, with a docstring.",
    "Shorten the docstring of {name} to one line and show the whole definition.",
)
_CONTINUE = (
    "Now apply the same change to what you showed before, and show the result.",
    "Write the commit message: a title, and two sentences on the change.",
    "Show the code once more, complete, so that it can be pasted into the file.",
)


class _Definition(NamedTuple):
    """A function, class or method of the library, as a tool shows it."""

    module: str
    name: str
    source: str


@cache
def _library(held_out: bool) -> tuple[_Definition, ...]:
    """Definitions of a size that an agent would read whole."""
    if held_out:
        modules = sorted(name.removesuffix(".py") for name in HELD_OUT)
    else:
        modules = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    found = []
    for module in modules:
        try:
            sources = definitions(module)
        except (FileNotFoundError, SyntaxError, ValueError):
            continue  # built in, or not part of this interpreter
        found += [_Definition(module, name, source) for name, source in sources.items()]
    return tuple(
        item for item in found if 150 <= len(item.source) <= 4000 and "__" not in item.name
    )


def generated(
    sessions: int, turns: int, *, seed: int = 0, read_chars: int = 1500, held_out: bool = True
) -> Loaded:
    """`sessions` sessions of `turns` turns; about `read_chars` characters of source per turn.

    The same arguments and interpreter give the same text.
    """
    pool = _library(held_out)
    made = []
    for number in range(sessions):
        rng = random.Random(f"{seed}-{number}")
        made.append(Session(f"agent/{seed}/{number}", tuple(_turns(rng, turns, read_chars, pool))))
    which = "held out of the shipped drafter's training" if held_out else "of the whole library"
    return Loaded(made, note=f"tool output: {len(pool)} definitions {which}")


def _turns(
    rng: random.Random, count: int, read_chars: int, pool: Sequence[_Definition]
) -> Iterator[Turn]:
    deck = rng.sample(pool, len(pool))
    for number in range(count):
        shown: list[_Definition] = []
        size = 0
        while not shown or size < read_chars:
            if not deck:  # a long session reads a file again, as agents do
                deck = rng.sample(pool, len(pool))
            item = deck.pop()
            if shown and size + len(item.source) > 1.5 * read_chars:
                break
            shown.append(item)
            size += len(item.source)
        task = rng.choice(_TASKS).format(name=shown[-1].name)
        if number and rng.random() < 0.25:
            task = f"{task} {rng.choice(_CONTINUE)}"
        text = "\n\n".join([*(_tool_result(rng, item) for item in shown), task])
        user = {"role": "user", "content": text}
        head = {"role": "system", "content": SYSTEM_PROMPT}
        yield Turn((head, user) if number == 0 else (user,))


def _tool_result(rng: random.Random, item: _Definition) -> str:
    path = f"/workspace/Lib/{item.module}.py"
    command = rng.choice(
        (f"show-definition {path} {item.name}", f"grep -n -A 80 {item.name} {path}")
    )
    return f"<tool_result>\n$ {command}\n{item.source}\n</tool_result>"
