"""The part of SGLang's `/v1/chat/completions` that our clients use: request, usage, acceptance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]  # OpenAI: {"role": ..., "content": ...}


class RequestError(RuntimeError):
    """A server answered a request with an error, or did not answer."""


class Usage(NamedTuple):
    """Token counts of one reply."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int


class Acceptance(NamedTuple):
    """What the verify passes of one reply accepted; zeros and () without speculation."""

    correct_drafts: int = 0
    verify_passes: int = 0
    histogram: tuple[int, ...] = ()  # [i]: passes that accepted exactly i drafts


def chat_request(messages: Sequence[Message], max_tokens: int, temperature: float) -> Message:
    """A request body that asks for acceptance counts as well."""
    return {
        "model": "default",
        "messages": list(messages),
        "temperature": temperature,
        "max_tokens": max_tokens,
        "return_spec_tokens_details": True,
    }


def read_usage(usage: Mapping[str, Any]) -> Usage:
    """The `usage` object; cached tokens are there if the server has --enable-cache-report."""
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        usage["prompt_tokens"], details.get("cached_tokens") or 0, usage["completion_tokens"]
    )


def read_acceptance(body: Mapping[str, Any]) -> Acceptance:
    """The counts in `sglext.spec_tokens_details`."""
    details = (body.get("sglext") or {}).get("spec_tokens_details") or {}
    return Acceptance(
        details.get("spec_num_correct_drafts", 0),
        details.get("spec_verify_ct", 0),
        tuple(details.get("spec_correct_drafts_histogram") or ()),
    )
