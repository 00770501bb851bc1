"""Chat requests whose replies follow a script, and what a client makes of the replies.

The script is a logit processor's: it makes the token at its place the likeliest one, and a grammar
still forbids what it forbids. So the end of thinking, or of a call, stands where a case wants it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

MAX_TOKENS = 180
END = "$"  # in a script: the end-of-text token


class Script(CustomLogitProcessor):
    """Adds 1000 to the logit of `script[len(output)]`; sleeps for the longest `pause_s`."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        assert custom_param_list is not None
        for row, params in zip(logits, custom_param_list, strict=True):
            place = len(params["__req__"].output_ids)
            if place < len(params["script"]):
                row[params["script"][place]] += 1000.0
        time.sleep(max(params["pause_s"] for params in custom_param_list))
        return logits


@dataclass(frozen=True)
class Case:
    """One chat request: what the reply is scripted to be, and the body beside that."""

    name: str
    script: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False


def tool(name: str, *, strict: bool = False) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 22]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "parameters": schema, "strict": strict},
    }


def call(name: str, arguments: str) -> str:
    """As `--tool-call-parser qwen25` expects it, and as its grammar writes it."""
    return f'<tool_call>\n{{"name":"{name}", "arguments":{arguments}}}\n</tool_call>'


TOOLS = [tool("weather"), tool("other")]
STRICT = [tool("weather", strict=True), tool("other", strict=True)]
NAMED = {"type": "function", "function": {"name": "other"}}
ROME = '{"city": "Rome", "days": 22}'
GOOD = call("weather", ROME)
TWO = f"{GOOD}\n{call('other', '{}')}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}
JSON = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def tool_cases() -> list[Case]:
    """Every tool_choice, with and without a grammar, whole, cut and wrong calls."""

    def case(name: str, script: str, **body: Any) -> Case:
        return Case(name, script, {"tools": TOOLS, **body})

    found = [
        case("auto: no call", f"It is cold.{END}"),
        case("auto: a call", GOOD + END),
        case("auto: text and a call", f"Well then: {GOOD}{END}"),
        case("auto: text and two calls", f"Ok.{TWO}{END}"),
        case("auto: text after a call", f"{GOOD} Done.{END}"),
        case("auto: no arguments", call("other", "{}") + END),
        case("auto: unknown function", call("third", "{}") + END),
        case("auto: broken JSON", call("weather", '{"city": Rome') + END),
        case("auto: cut", f"Well then: {GOOD}", max_tokens=50),
        case("auto: an open tag", f"a <b> <tool_cal{END}"),
        case("auto: stop string", f"Well then: {GOOD}{END}", stop=["Rome"]),
        case("auto: not scripted", ""),
        case("auto, strict: a call", f"Well: {GOOD}{END}", tools=STRICT),
        case("auto, strict: wrong", f"{call('other', '[1, 2]')}{END}", tools=STRICT),
        case("required: a call", GOOD + END, tool_choice="required"),
        case("required: two calls", TWO + END, tool_choice="required"),
        case("required: text", f"I would rather talk.{END}", tool_choice="required"),
        case("required: not scripted", "", tool_choice="required"),
        case("required, strict: two calls", TWO + END, tools=STRICT, tool_choice="required"),
        case("required, strict: not scripted", "", tools=STRICT, tool_choice="required"),
        case("required: one only", TWO + END, tool_choice="required", parallel_tool_calls=False),
        case("named: a call", call("other", ROME) + END, tool_choice=NAMED),
        case("named: another", GOOD + END, tool_choice=NAMED),
        case("named, strict: not scripted", "", tools=STRICT, tool_choice=NAMED),
        case("named: cut", call("other", ROME), tool_choice=NAMED, max_tokens=45),
        case("none", GOOD + END, tool_choice="none"),
    ]
    # Text before a call, of every length: the call begins at every place of a block.
    found += [case(f"auto: call at {n}", f"{'so it is'[:n]}{GOOD}{END}") for n in range(1, 9)]
    return found


def thinking_cases() -> list[Case]:
    """Thinking of every length, with each kind of grammar behind it and without one."""
    grammars: dict[str, tuple[dict[str, Any], str]] = {
        "free": ({}, "So it is."),
        "json": ({"response_format": JSON}, '{"a": "yy"}'),
        "regex": ({"regex": "(ab|cd){2,5}e"}, "abcdab"),
        "ebnf": ({"ebnf": 'root ::= ("let " [a-z] ";"){1,3} "end"'}, "let x;let y;"),
        "required": ({"tools": STRICT, "tool_choice": "required"}, GOOD),
    }
    found = []
    for length in range(10):
        for kind, (body, answer) in grammars.items():
            script = f"{'it may be'[:length]}</think>{answer}{END}"
            found.append(Case(f"{kind}: {length} characters", script, body, True))
    regex, _ = grammars["regex"]
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "never ends": ("so and so and so", {**regex, "max_tokens": 20}),
        "ends the text": (f"so and{END}", {**regex}),
        "ends at the last token": ("hm</think>", {**regex, "max_tokens": 10}),
        "ends behind the last token": ("hmm</think>", {**regex, "max_tokens": 10}),
        "answer that is forbidden": ("so</think>zzzzz<zzzzzzz", {**regex}),
        "false starts": ("a</thin</</think>abcd", {**regex}),
        "twice": (f"a</think>b</think>c{END}", {}),
        "opened": (f"<think>a</think>b{END}", {}),
        "interrupted by a call": (f"so {GOOD}{END}", {"tools": TOOLS}),
        "then text and a call": (f"so</think>Ok.{TWO}{END}", {"tools": TOOLS}),
        "then a named call": ("so</think>", {"tools": STRICT, "tool_choice": NAMED}),
        "a stop string": (f"so be it</think>ab{END}", {"stop": ["be"]}),
        "not streamed apart": (f"so be it</think>ab{END}", {"stream_reasoning": False}),
        "not separated": ("so be it</think>", {**regex, "separate_reasoning": False}),
        "two samples": ("so be it</think>", {**regex, "n": 2}),
        "not scripted": ("", {**regex, "max_tokens": 30}),
    }
    return found + [Case(name, script, body, True) for name, (script, body) in others.items()]


def chat_tokenizer(*, whole_tags: bool) -> Any:
    """The tiny models' one; with `whole_tags` thinking ends in a single token, as usual."""
    from tiny_models import byte_tokenizer

    tokenizer: Any = byte_tokenizer()
    if whole_tags:
        text = tokenizer.backend_tokenizer.to_str()
        for tag, spare in (("<think>", "<x300>"), ("</think>", "<x301>")):
            text = text.replace(json.dumps(spare), json.dumps(tag))
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(text)
        tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def body_of(case: Case, tokenizer: Any, *, always_thinks: bool) -> dict[str, Any]:
    """The request, but for `stream`. Whoever always thinks does so shortly where a case does not.

    The prompt is the case's own, so that the oracle can tell the cases apart.
    """
    script = case.script if case.thinks or not always_thinks else f"ok</think>{case.script}"
    text, ends, _ = script.partition(END)
    ids = tokenizer.encode(text) + ([tokenizer.eos_token_id] if ends else [])
    return {
        "model": "default",
        "messages": [{"role": "user", "content": f"{case.name}, {case.thinks}"}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "chat_template_kwargs": {"enable_thinking": case.thinks},
        "custom_logit_processor": Script.to_str(),
        "custom_params": {"script": ids, "pause_s": 0.0},
        "logprobs": True,
        "return_input_ids_in_sglext": True,
        "return_output_ids_in_sglext": True,
        **case.body,
    }


def _choice() -> dict[str, Any]:
    return {"content": "", "reasoning": "", "calls": {}, "logprobs": [], "finish": None}


def _add(choice: dict[str, Any], piece: dict[str, Any], part: dict[str, Any]) -> None:
    """A whole choice, or one chunk's part of it."""
    choice["content"] += part.get("content") or ""
    choice["reasoning"] += part.get("reasoning_content") or ""
    for found in part.get("tool_calls") or []:
        name, arguments = choice["calls"].get(found["index"], ("", ""))
        function = found["function"]
        choice["calls"][found["index"]] = (
            name + (function["name"] or ""),
            arguments + (function["arguments"] or ""),
        )
    choice["logprobs"] += (piece.get("logprobs") or {}).get("content") or []
    if piece.get("finish_reason"):
        choice["finish"] = (piece["finish_reason"], piece.get("matched_stop"))


def _reply(choices: dict[int, dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    usage = last["usage"]
    return {
        "choices": [choices[index] for index in sorted(choices)],
        "usage": {name: usage[name] for name in ("completion_tokens", "reasoning_tokens")},
        "ids": last["sglext"],
    }


def ask(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The reply as a client sees it: choices, usage, ids, and `meta` of the first choice."""
    answer = http.post("/v1/chat/completions", json={**body, "return_meta_info": True})
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    choices: dict[int, dict[str, Any]] = {}
    for piece in whole["choices"]:
        _add(choices.setdefault(piece["index"], _choice()), piece, piece["message"])
    return {**_reply(choices, whole), "meta": whole["choices"][0]["meta_info"]}


def ask_streamed(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The same put together from chunks, and the number of tokens of each, `chunks`."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, dict[str, Any]] = {}
    last: dict[str, Any] = {}
    chunks = []
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            last |= {name: event[name] for name in ("usage", "sglext") if event.get(name)}
            for piece in event["choices"]:
                _add(choices.setdefault(piece["index"], _choice()), piece, piece["delta"])
                if piece.get("logprobs"):
                    chunks.append(len(piece["logprobs"]["content"]))
    return {**_reply(choices, last), "chunks": chunks}


def save_chat_target(path: Path, *, whole_tags: bool) -> Any:
    """A tiny target with that tokenizer at `path`; returns the tokenizer."""
    from tiny_models import make_target

    make_target(path)
    tokenizer = chat_tokenizer(whole_tags=whole_tags)
    tokenizer.save_pretrained(path)
    return tokenizer
