"""Requests with options whose effect depends on the output so far."""

from __future__ import annotations

import json
from typing import Any

from logit_processor import PrefixHash
from tiny_models import NUM_PRINTABLE
from workloads import random_prompts

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{3,6}$"},
            "kind": {"enum": ["one", "two", "three"]},
            "size": {"type": "integer", "minimum": 10, "maximum": 99},
        },
        "required": ["name", "kind", "size"],
        "additionalProperties": False,
    }
)
STRUCTURAL_TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "regex", "pattern": "[0-9]{2,5}"},
            "end": "</f>",
        },
    }
)
BIAS = {str(token): 4.0 for token in range(0, NUM_PRINTABLE, 9)}
HALF = list(range(0, NUM_PRINTABLE, 2))  # as stop tokens: about every second one is a stop

# Seeds are the prompts' own: two workloads that shared a prompt would confuse the oracle.
# A repetition penalty stands beside no other one: without overlap, as the references are made,
# upstream applies them in an order that differs from process to process (a set of classes).
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "penalties": [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.6},
        {"frequency_penalty": -1.2},
        {"repetition_penalty": 0.7},
        {"frequency_penalty": 0.9, "presence_penalty": -0.8, "logit_bias": BIAS},
        {"repetition_penalty": 1.4, "logit_bias": BIAS},
    ],
    "min_new_tokens": [
        {"min_new_tokens": least, "stop_token_ids": HALF, "ignore_eos": False}
        for least in range(1, 19)
    ],
    "processors": [
        {"custom_params": {"strength": 30.0}},
        {"custom_params": {"strength": 6.0}, "presence_penalty": 1.0},
    ],
    "grammars": [
        {"json_schema": SCHEMA},
        {"regex": "(ab|cde){2,6}f[0-9]{1,9}x"},
        {"regex": "[a-d]{17}", "frequency_penalty": 1.5},
        {"ebnf": 'root ::= ("let " [a-z]{1,6} "=" [0-9] ";\\n"){1,4} "end"'},
        {"structural_tag": STRUCTURAL_TAG},
        {"json_schema": SCHEMA, "logit_bias": BIAS},
    ],
}
SEEDS = {"penalties": 21, "min_new_tokens": 22, "processors": 23, "grammars": 24}
PROCESSOR = PrefixHash.to_str()


def option_prompts(name: str) -> list[tuple[int, ...]]:
    count = len(OPTIONS[name])
    return random_prompts(SEEDS[name], [5 + 7 * (i % 6) for i in range(count)])


def option_params(name: str) -> list[dict[str, Any]]:
    """Grammars end by themselves: their end-of-text is not ignored."""
    ends = {"ignore_eos": False} if name == "grammars" else {}
    return [{**ends, **params} for params in OPTIONS[name]]
