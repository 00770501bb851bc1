"""Question sets by name: where each lives on the hub, and how a row becomes a prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dlite.bench.workloads.rows import HubSource, collect, file_rows, hub_rows
from sglang_dlite.bench.workloads.sessions import (
    Loaded,
    RowError,
    Session,
    from_user_texts,
    require,
)

_REASON = "{}\n\nThink step by step and put the final answer into \\boxed{{}}."


def _field(name: str, template: str = "{}") -> Callable[[Any], list[str]]:
    return lambda row: [template.format(str(require(row, name)).strip())]


def _mbpp(row: Any) -> list[str]:
    task = row.get("text") or require(row, "prompt")
    tests = row.get("test_list") or []
    shown = "\n".join(map(str, tests))
    return [f"{task}\nThe code must pass these tests:\n{shown}" if shown else str(task)]


def _mt_bench(row: Any) -> list[str]:
    turns = row.get("turns") or require(row, "prompt")
    if not isinstance(turns, list):
        raise RowError(f"turns are of type {type(turns).__name__}, not a list")
    return [str(turn) for turn in turns]


def _alpaca(row: Any) -> list[str]:
    text = str(require(row, "instruction"))
    return [f"{text}\n\n{row['input']}" if row.get("input") else text]


class QuestionSet(NamedTuple):
    source: HubSource
    texts: Callable[[Any], list[str]]  # the user messages of a row


QUESTION_SETS: dict[str, QuestionSet] = {
    "gsm8k": QuestionSet(HubSource("openai/gsm8k", "test", "main"), _field("question", _REASON)),
    "math-500": QuestionSet(
        HubSource("HuggingFaceH4/MATH-500", "test"), _field("problem", _REASON)
    ),
    "humaneval": QuestionSet(
        HubSource("openai/openai_humaneval", "test"),
        _field("prompt", "Complete this function.\n\n```python\n{}\n```"),
    ),
    "mbpp": QuestionSet(HubSource("google-research-datasets/mbpp", "test", "full"), _mbpp),
    "mt-bench": QuestionSet(HubSource("HuggingFaceH4/mt_bench_prompts", "train"), _mt_bench),
    "alpaca": QuestionSet(HubSource("tatsu-lab/alpaca", "train"), _alpaca),
}


def question_set(name: str, path: Path | None) -> Loaded:
    """Sessions of a set in `QUESTION_SETS`; rows from `path` instead of the hub, if given."""
    source, texts = QUESTION_SETS[name]

    def make(where: str, row: Any) -> Session:
        if not isinstance(row, dict):
            raise RowError("not an object")
        return from_user_texts(where, texts(row))

    return collect(file_rows(path) if path else hub_rows(source), make)


LONGBENCH_V2 = HubSource("THUDM/LongBench-v2", "train")
# The paper's four subsets, as LongBench v2 names them: (field, value).
LONGBENCH_SUBSETS: dict[str, tuple[str, str]] = {
    "multi-doc-qa": ("domain", "Multi-Document QA"),
    "long-icl": ("domain", "Long In-context Learning"),
    "code-repo": ("domain", "Code Repository Understanding"),
    "long-dialogue": ("domain", "Long-dialogue History Understanding"),
}


def longbench_v2(subset: str, path: Path | None) -> Loaded:
    """One subset of LongBench v2: the document, the question and its four choices."""
    field, wanted = LONGBENCH_SUBSETS[subset]

    def make(where: str, row: Any) -> Session | None:
        if require(row, field) != wanted:
            return None
        choices = "\n".join(f"{letter}. {require(row, f'choice_{letter}')}" for letter in "ABCD")
        text = (
            f"Read this text and answer the question below it.\n\n{require(row, 'context')}\n\n"
            f"Question: {require(row, 'question')}\n{choices}\n\nExplain your choice, then name "
            "the letter."
        )
        return from_user_texts(str(row.get("_id") or where), [text])

    return collect(file_rows(path) if path else hub_rows(LONGBENCH_V2), make)


SWE_BENCH = HubSource("princeton-nlp/SWE-bench_oracle", "test")


def swe_bench(path: Path | None) -> Loaded:
    """SWE-Bench prompts: `text` (issue with files, as the oracle and BM25 sets have it), or the
    `problem_statement` alone where a row has no `text`."""

    def make(where: str, row: Any) -> Session:
        text = row.get("text") if isinstance(row, dict) else None
        if not text:
            text = (
                f"Repository: {row.get('repo', 'unknown') if isinstance(row, dict) else ''}\n\n"
                f"{require(row, 'problem_statement')}\n\nWrite a patch that resolves this issue."
            )
        return from_user_texts(str(row.get("instance_id") or where), [text])

    return collect(file_rows(path) if path else hub_rows(SWE_BENCH), make)


BFCL_MULTI_TURN = HubSource(
    "gorilla-llm/Berkeley-Function-Calling-Leaderboard",
    "train",
    file="BFCL_v3_multi_turn_base.json",
)


def bfcl_multi_turn(path: Path | None) -> Loaded:
    """BFCL multi-turn: the user's requests of a row, one turn each.

    Only the conversation is replayed: calls are not executed, so no tool time is in the figures.
    """

    def make(where: str, row: Any) -> Session:
        turns = require(row, "question")
        texts = []
        for number, messages in enumerate(turns):
            if not isinstance(messages, list):
                raise RowError(f"question {number} is not a list of messages")
            texts.append("\n".join(str(require(message, "content")) for message in messages))
        classes = ", ".join(map(str, row.get("involved_classes") or ()))
        system = (
            "You call functions to carry out the user's requests. Answer with the calls as "
            f"Python code. Available classes: {classes or 'as the user names them'}."
        )
        return from_user_texts(str(row.get("id") or where), texts, system)

    return collect(file_rows(path) if path else hub_rows(BFCL_MULTI_TURN), make)
