"""What a soak plays: requests with all kinds of options, and the target's own replies to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines import engine, play
from logit_processor import PrefixHash
from option_workloads import SCHEMA
from oracle import record
from tiny_models import NUM_PRINTABLE
from workloads import Request

Params = dict[str, Any]
NUM_CASES = 120
LONG_PROMPT = 240  # several chunks
FEWEST = 16  # tokens that a request asks for, at least
PREFIX_LEN = 70  # of the prompts that share one
# SGLang takes prompt and grammar from a request that is aborted while its grammar compiles, and
# runs one prefill of this instead (`Req.set_finish_with_abort`), whose token it sends.
EMPTIED_PROMPT = (0,)


@dataclass(frozen=True)
class Case:
    """A greedy request, its kind, and the reply of the target alone."""

    kind: str
    request: Request
    answer: dict[str, Any]
    emptied: tuple[int, ...] = ()
    """The target's reply to EMPTIED_PROMPT, `output_ids`."""


def _penalties(rng: random.Random) -> Params:
    # One of the two sorts: with both, SGLang's order differs from process to process.
    if rng.random() < 0.5:
        return {"repetition_penalty": rng.choice([0.7, 1.3, 1.6])}
    return {
        "frequency_penalty": rng.choice([-1.2, 0.9, 1.5]),
        "presence_penalty": rng.choice([-0.8, 0.0, 2.0]),
    }


def _bias(rng: random.Random) -> Params:
    tokens = rng.sample(range(NUM_PRINTABLE), 12)
    return {"logit_bias": {str(t): rng.choice([-100.0, -3.0, 4.0]) for t in tokens}}


def _least(rng: random.Random) -> Params:
    stops = rng.sample(range(NUM_PRINTABLE), NUM_PRINTABLE // 2)
    return {
        "min_new_tokens": rng.randrange(1, FEWEST + 1),
        "stop_token_ids": stops,
        "ignore_eos": False,
    }


def _stop_tokens(rng: random.Random) -> Params:
    return {"stop_token_ids": rng.sample(range(NUM_PRINTABLE), 3), "ignore_eos": False}


def _stop_strings(rng: random.Random) -> Params:
    # The tiny target's token i is the character chr(33 + i).
    return {"stop": [chr(33 + t) for t in rng.sample(range(NUM_PRINTABLE), 3)]}


def _schema(rng: random.Random) -> Params:
    return {"json_schema": SCHEMA, "ignore_eos": False}


def _regex(rng: random.Random) -> Params:
    least = rng.randrange(1, 5)
    pattern = rng.choice(["(ab|cde){%d,9}f[0-9]{1,9}x", "[a-d]{%d}", "([a-z]{2,4}-){%d,6}end"])
    return {"regex": pattern % least, "ignore_eos": False}


def _ebnf(rng: random.Random) -> Params:
    return {
        "ebnf": 'root ::= ("let " [a-z]{1,6} "=" [0-9] ";"){1,4} "end"',
        "ignore_eos": False,
    }


def _processor(rng: random.Random) -> Params:
    return {"custom_params": {"strength": rng.choice([6.0, 30.0])}}


KINDS: dict[str, Callable[[random.Random], Params]] = {
    "plain": lambda rng: {},
    "eos": lambda rng: {"ignore_eos": False},
    "prefix": lambda rng: {},
    "long": lambda rng: {},
    "logprobs": lambda rng: {},
    "penalties": _penalties,
    "bias": _bias,
    "min_new_tokens": _least,
    "stop_tokens": _stop_tokens,
    "stop_strings": _stop_strings,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "processor": _processor,
}


def make_requests(seed: int, count: int = NUM_CASES) -> list[tuple[str, Request]]:
    """`count` greedy requests, all kinds in turn; no two share a prompt.

    The oracle knows a request by the states and tokens of its prompt.
    """
    rng = random.Random(seed)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(NUM_PRINTABLE) for _ in range(length))

    prefix = prompt(PREFIX_LEN)
    kinds = list(KINDS)
    made = []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        length = LONG_PROMPT if kind == "long" else 1
        own = prompt(rng.randrange(max(length // 2, 3), max(length, 90)))
        made.append(
            (
                kind,
                Request(
                    prompt=(*prefix, *own[:20]) if kind == "prefix" else own,
                    sequence=index,
                    max_new_tokens=rng.randrange(FEWEST, 60),
                    params=KINDS[kind](rng),
                    logprobs=kind == "logprobs",
                    processor=PrefixHash.to_str() if kind == "processor" else None,
                ),
            )
        )
    return made


def record_cases(target: Path, seed: int, table: Path) -> list[Case]:
    """The target's replies, by an engine without DLITE, and the oracle's table of them.

    Without DLITE there is no overlap on a CPU, and the pool is large: nothing is retracted.
    """
    made = make_requests(seed)
    with engine(target, enable_custom_logit_processor=True, log_level="error") as running:
        emptied, *answers = play(
            running, [Request(EMPTIED_PROMPT, 0, 1), *(request for _, request in made)]
        )
    cases = [
        Case(kind, replace(request, sequence=i), answer, tuple(emptied["output_ids"]))
        for i, ((kind, request), answer) in enumerate(zip(made, answers, strict=True))
    ]
    sequences = [[*case.request.prompt, *case.answer["output_ids"]] for case in cases]
    record(table, target, sequences, [len(case.request.prompt) for case in cases])
    return cases
