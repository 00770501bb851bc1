"""Whether a reply is what it must be: pure functions, each returns what is wrong or None."""

from __future__ import annotations

import json
import re
from typing import Any

from soak_cases import EMPTIED_PROMPT, Case
from tiny_models import EOS_ID, NUM_PRINTABLE, VOCAB_SIZE

WIDTH = 8  # verify width: the tiny drafter's block
LOGPROB_TOLERANCE = 1e-4


def greedy_error(
    case: Case, answer: dict[str, Any], max_new_tokens: int, aborted: bool = False
) -> str | None:
    """A greedy reply against the target's own; with `aborted`, its beginning will do."""
    expected: list[int] = case.answer["output_ids"]
    ids: list[int] = answer["output_ids"]
    whole = expected[:max_new_tokens]
    finish = answer["meta_info"]["finish_reason"]
    if finish["type"] == "abort":
        if not aborted:
            return f"finish_reason {finish}, nobody aborted it"
        # One that waited is answered without prompt_tokens; no case has so short a prompt.
        if answer["meta_info"].get("prompt_tokens") == len(EMPTIED_PROMPT):
            expected = list(case.emptied)
        # SGLang trims no block that is aborted: it may reach beyond the end.
        count = min(len(ids), len(expected))
        if ids[:count] == expected[:count] and len(ids) < len(whole) + WIDTH:
            return None
        return f"output_ids {ids} of an aborted reply, the target alone gives {expected}"
    if ids != whole:
        return f"output_ids {ids}, the target alone gives {whole}"
    if len(whole) < len(expected):
        if finish["type"] != "length":
            return f"finish_reason {finish} after max_new_tokens = {max_new_tokens}"
    elif max_new_tokens == case.request.max_new_tokens:
        theirs = case.answer["meta_info"]["finish_reason"]
        if finish != theirs:
            return f"finish_reason {finish}, the target alone gives {theirs}"
        if answer["text"] != case.answer["text"]:
            return f"text {answer['text']!r}, the target alone gives {case.answer['text']!r}"
    return logprob_error(case, answer)


def logprob_error(case: Case, answer: dict[str, Any]) -> str | None:
    """Chosen tokens' log-probabilities, where the case asks for them."""
    if not case.request.logprobs:
        return None
    ours = answer["meta_info"]["output_token_logprobs"]
    theirs = case.answer["meta_info"]["output_token_logprobs"][: len(ours)]
    if len(ours) != len(answer["output_ids"]):
        return f"{len(ours)} log-probabilities for {len(answer['output_ids'])} tokens"
    for place, (mine, plain) in enumerate(zip(ours, theirs, strict=True)):
        if mine[1] != plain[1] or abs(mine[0] - plain[0]) > LOGPROB_TOLERANCE:
            return f"log-probability {mine[:2]} at {place}, the target alone gives {plain[:2]}"
    return None


def sampled_error(
    case: Case, answer: dict[str, Any], max_new_tokens: int, aborted: bool = False
) -> str | None:
    """What holds for every sampled reply, whatever was drawn."""
    ids, params = answer["output_ids"], case.request.params
    finish = answer["meta_info"]["finish_reason"]["type"]
    if any(not 0 <= token < VOCAB_SIZE for token in ids):
        return f"output_ids {ids} beyond the vocabulary"
    if aborted and finish == "abort":
        return None
    if case.request.logprobs and len(answer["meta_info"]["output_token_logprobs"]) != len(ids):
        return "not one log-probability per token"
    if finish not in ("stop", "length") or (finish == "length") > (len(ids) == max_new_tokens):
        return f"finish_reason {finish} after {len(ids)} of {max_new_tokens} tokens"
    if not 0 < len(ids) <= max_new_tokens:
        return f"{len(ids)} tokens, max_new_tokens = {max_new_tokens}"
    least = params.get("min_new_tokens", 0)
    if len(ids) < min(least, max_new_tokens):
        return f"{len(ids)} tokens, min_new_tokens = {least}"
    stops = set(params.get("stop_token_ids", ()))
    if not params.get("ignore_eos", True):
        stops.add(EOS_ID)
    if stops & set(ids[:least]):
        return f"a stop token within min_new_tokens = {least}: {ids}"
    if stops & set(ids[:-1]):
        return f"goes on behind a stop token: {ids}"
    # A token like "<x379>" can hold two stop strings. SGLang cuts at the one that comes first in
    # the request, which may leave the other.
    text = answer["text"]
    if ids[-1] >= NUM_PRINTABLE:
        text = re.sub(r"<(x\d*)?$", "", text)
    for string in params.get("stop", ()):
        if string in text:
            return f"text {answer['text']!r} holds the stop string {string!r}"
    if finish == "stop":
        return grammar_error(params, answer["text"])
    return None


def grammar_error(params: dict[str, Any], text: str) -> str | None:
    """A finished text against its grammar."""
    if "regex" in params and not re.fullmatch(params["regex"], text):
        return f"text {text!r} is none of {params['regex']}"
    if "ebnf" in params and not re.fullmatch("(let [a-z]{1,6}=[0-9];){1,4}end", text):
        return f"text {text!r} is none of the EBNF's"
    if "json_schema" in params:
        try:
            value = json.loads(text)
        except ValueError:
            return f"text {text!r} is not JSON"
        if set(value) != set(json.loads(params["json_schema"])["required"]):
            return f"text {text!r} is none of the schema's"
    return None
