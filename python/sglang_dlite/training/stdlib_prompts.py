"""Coding prompts made from the running interpreter's standard library: no data set needed.

Two kinds: `complete this function` (a real signature and docstring, body left out) and coding-agent
sessions of one to three turns, in which tool outputs show excerpts of real files.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sglang_dlite.training.prompts import Prompt, conversation, single_turn

# The demo's session reads these files; its acceptance length must be that of unseen text.
HELD_OUT = frozenset(
    f"{name}.py"
    for name in ("textwrap", "bisect", "heapq", "shlex", "fnmatch", "colorsys", "string", "queue")
)
_SKIP_DIRS = {"test", "tests", "idlelib", "site-packages", "__pycache__", "pydoc_data", "lib2to3"}


@dataclass(frozen=True)
class Definition:
    """One function or class of the standard library."""

    file: str  # relative to the library, e.g. "json/decoder.py"
    name: str
    source: str
    head: str  # signature and docstring, "" without docstring


def library_files() -> list[Path]:
    """The library's Python files, without tests, generated tables and what is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        held_out = (
            path.name in HELD_OUT or f"{parts[0]}.py" in HELD_OUT
        )  # `string` may be a package
        if held_out or _SKIP_DIRS.intersection(parts) or parts[0] == "encodings":
            continue
        if path.stat().st_size < 400_000:
            files.append(path)
    return files


def _definitions(path: Path) -> Iterator[Definition]:
    root = Path(sysconfig.get_paths()["stdlib"])
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return
    lines = text.splitlines()
    nodes = list(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            nodes.extend(node.body)
    for node in nodes:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        head = ""
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            indent = " " * node.col_offset
            kept = lines[node.lineno - 1 : node.body[0].end_lineno]
            head = "\n".join(line.removeprefix(indent) for line in kept)
        yield Definition(str(path.relative_to(root)), node.name, source, head)


@cache
def all_definitions() -> tuple[Definition, ...]:
    """Every top-level function, class and method of the library that is not held out."""
    return tuple(found for path in library_files() for found in _definitions(path))


_COMPLETE = (
    "Complete the following function.\n\n{code}\n",
    "Complete this Python function:\n```python\n{code}\n```",
    "Finish the code below.\n\n{code}\n",
    "Write the body of this function.\n\n{code}\n",
    "Implement the function described by the docstring.\n\n{code}\n",
    "Here is the start of a Python function. Complete it.\n{code}\n",
    "{code}\n",
)


def completion_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """`complete this function` prompts: of the library, at most half of them small exercises."""
    rng = random.Random(f"completion-{seed}")
    library = [
        d for d in all_definitions() if 80 <= len(d.head) <= 1200 and not d.name.startswith("__")
    ]
    rng.shuffle(library)
    small = list(_small_tasks())
    rng.shuffle(small)
    small = small[: count // 2]
    heads = small + [d.head for d in library[: count - len(small)]]
    rng.shuffle(heads)
    return [
        single_turn(f"stdlib-code/{index}", "stdlib-code", rng.choice(_COMPLETE).format(code=head))
        for index, head in enumerate(heads)
    ]


_FILTERS = (
    ("even numbers", "x % 2 == 0"),
    ("odd numbers", "x % 2 == 1"),
    ("positive numbers", "x > 0"),
    ("negative numbers", "x < 0"),
    ("numbers divisible by {n}", "x % {n} == 0"),
    ("numbers greater than {n}", "x > {n}"),
    ("numbers smaller than {n}", "x < {n}"),
    ("elements at positions divisible by {n}", ""),
    ("perfect squares", "x >= 0 and int(x ** 0.5) ** 2 == x"),
    ("numbers with two digits", "10 <= abs(x) <= 99"),
)
_REDUCE = (
    ("the sum", "sum(v)"),
    ("the number", "len(v)"),
    ("the largest", "max(v, default=None)"),
    ("the smallest", "min(v, default=None)"),
    ("the sorted list", "sorted(v)"),
    ("the reversed list", "v[::-1]"),
    ("the list of squares", "[x * x for x in v]"),
    ("the product", "__import__('math').prod(v)"),
    ("the list without duplicates", "list(dict.fromkeys(v))"),
    ("the average", "sum(v) / len(v) if v else None"),
)
_STRINGS = (
    ("count_vowels", "Return the number of vowels in {a}.", "sum(c in 'aeiouAEIOU' for c in s)"),
    (
        "reverse_words",
        "Return {a} with the order of its words reversed.",
        "' '.join(s.split()[::-1])",
    ),
    ("is_palindrome", "Check whether {a} reads the same backwards.", "s == s[::-1]"),
    ("swap_case", "Return {a} with upper and lower case exchanged.", "s.swapcase()"),
    ("longest_word", "Return the longest word of {a}.", "max(s.split(), key=len, default='')"),
    ("char_counts", "Count how often each letter occurs in {a}.", "{c: s.count(c) for c in s}"),
    (
        "initials",
        "Return the first letters of the words in {a}.",
        "''.join(w[0] for w in s.split())",
    ),
    ("every_second", "Return every second character of {a}.", "s[::2]"),
    ("remove_spaces", "Remove all spaces from {a}.", "s.replace(' ', '')"),
    ("sorted_words", "Return the words of {a} in alphabetical order.", "sorted(s.split())"),
)
_WORDS = ("hello world", "Python is fun", "level", "the quick brown fox", "ab cd ef", "Racecar")


def _small_tasks() -> Iterator[str]:
    """Small functions with a docstring and computed examples, as beginners' exercises have them."""
    rng = random.Random("small-tasks")
    quotes = ('"""', "'''")
    for what, test in _FILTERS:
        for goal, reduce in _REDUCE:
            for n in (2, 3, 5, 10) if "{n}" in what else (2,):
                arg = rng.choice(("numbers", "lst", "values", "nums", "arr"))
                typed = rng.choice((f"{arg}: list[int]", arg, f"{arg}: list"))
                verb = rng.choice(("Return", "Compute", "Find", "Given a list, return"))
                name = (
                    f"{goal.split()[-1]}_{what.split()[0]}_{rng.choice(('in_list', 'of', 'only'))}"
                )
                doc = f"{verb} {goal} of the {what.format(n=n)} in {arg}."
                examples = []
                for _ in range(rng.randint(1, 3)):
                    data = [rng.randint(-20, 60) for _ in range(rng.randint(3, 7))]
                    kept = (
                        eval(f"[x for x in d if {test.format(n=n)}]", {"d": data})
                        if test
                        else data[::n]
                    )
                    examples.append((f"{name}({data})", repr(eval(reduce, {"v": kept}))))
                yield _with_examples(
                    f"def {name}({typed}):", doc, examples, rng.choice(quotes), rng
                )
    for name, doc, code in _STRINGS:
        for arg in ("text", "s", "string", "sentence"):
            chosen = rng.sample(_WORDS, 2)
            examples = [(f"{name}({w!r})", repr(eval(code, {"s": w}))) for w in chosen]
            text = doc.format(a=rng.choice((arg, "the given string", "a string")))
            yield _with_examples(
                f"def {name}({arg}: str):", text, examples, rng.choice(quotes), rng
            )


def _with_examples(
    head: str, doc: str, examples: list[tuple[str, str]], quote: str, rng: random.Random
) -> str:
    style = rng.randrange(3)
    lines = [head, f"    {quote}{doc}" if style else f"    {quote}\n    {doc}"]
    for call, value in examples:
        if style == 1:
            lines += [f"    >>> {call}", f"    {value}"]
        else:
            lines.append(
                f"    {call} == {value}" if style else f"    For example {call} returns {value}"
            )
    lines.append(f"    {quote}")
    return "\n".join(lines)


_SYSTEMS = (
    "You are a coding agent that works in a checkout of the Python standard library.",
    "You are a careful software engineer. You are shown files and command output; answer briefly.",
    "You are an assistant for programmers. Tool results come in the user messages.",
    "You are a coding agent. Use the tool output you are given and keep to the code shown.",
    "",
)
_WRAP = (
    "<tool_result>\n$ {cmd}\n{out}\n</tool_result>",
    "Output of `{cmd}`:\n```\n{out}\n```",
    "OBSERVATION:\n$ {cmd}\n{out}",
    "```python\n# {path}\n{out}\n```",
    '<file path="{path}">\n{out}\n</file>',
)
_ASK = (
    "Explain what {name} does.",
    "Explain {name} step by step.",
    "Summarise this excerpt in three sentences.",
    "Write a unittest class for {name}.",
    "Write pytest tests for {name}.",
    "Is there a bug in {name}? Point to the line and suggest a fix.",
    "Rewrite {name} with type hints. Show only the code.",
    "Add a docstring to {name} and show the whole function.",
    "Rename {name} to {name}_v2 and show the new code.",
    "Show {name} again with short comments on each step.",
    "Simplify {name} and show the result.",
    "List the functions and classes that you see, one line for each.",
    "Which arguments does {name} take, and what does it return?",
    "Give two examples of how to call {name}, with their results.",
    "What happens in {name} if its first argument is empty or None?",
    "Write a small function that uses {name}, with a docstring.",
)
_NEXT = (
    "Now write a test for it.",
    "Can you make that shorter?",
    "Show the final code once more, with type hints.",
    "What could go wrong with this code?",
    "Write a commit message for this change.",
    "Explain the most important line.",
    "Now handle invalid input by raising ValueError, and show the code.",
)


def agent_prompts(count: int, seed: int = 0) -> list[Prompt]:
    """Coding-agent sessions: tool output from real files, then a request, one to three turns."""
    rng = random.Random(f"agent-{seed}")
    usable = [d for d in all_definitions() if 200 <= len(d.source) <= 3500]
    usable = [d for d in usable if not d.name.startswith("__")]
    rng.shuffle(usable)
    prompts: list[Prompt] = []
    for index in range(count):
        first = _agent_turn(usable[(2 * index) % len(usable)], usable, rng)
        system = rng.choice(_SYSTEMS)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": first})
        followups = []
        for turn in range(rng.choice((0, 0, 1, 2))):
            reads_on = rng.random() < 0.5
            other = usable[(2 * index + 1 + turn) % len(usable)]
            followups.append(_agent_turn(other, usable, rng) if reads_on else rng.choice(_NEXT))
        prompts.append(conversation(f"stdlib-agent/{index}", "stdlib-agent", messages, followups))
    return prompts


def _agent_turn(shown: Definition, pool: Sequence[Definition], rng: random.Random) -> str:
    wrap = rng.choice(_WRAP)
    path = f"/workspace/Lib/{shown.file}"
    parts = []
    if rng.random() < 0.3:
        extra = rng.choice(pool)
        extra_path = f"/workspace/Lib/{extra.file}"
        command = rng.choice(("cat", "sed -n '1,80p'", "show-definition"))
        parts.append(wrap.format(cmd=f"{command} {extra_path}", out=extra.source, path=extra_path))
    command = rng.choice(("cat", "sed -n '20,120p'", "show-definition", "grep -n -A 60"))
    parts.append(wrap.format(cmd=f"{command} {path}", out=shown.source, path=path))
    parts.append(rng.choice(_ASK).format(name=shown.name))
    if rng.random() < 0.15:
        parts.reverse()
    return "\n\n".join(parts)
