"""Request options that DLITE does not serve yet: refused with a 400, never approximated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_dlite import ALGORITHM

# Options that a server adds to requests by itself: upstream reads them from generation_config.json.
_SERVER_DEFAULTED = ("repetition_penalty",)
_SERVER_DEFAULT = (
    " If the request did not set it, it is a default of the model's generation_config.json or of "
    "--preferred-sampling-params: start the server with --sampling-defaults openai, without the "
    "latter."
)


def request_error(req: Any) -> str | None:
    """Why `req` (upstream's Req) is refused, or None.

    Names the option, the value, what is allowed and what to do.
    """
    params = req.sampling_params
    refused: list[tuple[str, Any, bool, str]] = [
        ("frequency_penalty", params.frequency_penalty, params.frequency_penalty != 0.0, "0"),
        ("presence_penalty", params.presence_penalty, params.presence_penalty != 0.0, "0"),
        ("repetition_penalty", params.repetition_penalty, params.repetition_penalty != 1.0, "1"),
        ("min_new_tokens", params.min_new_tokens, params.min_new_tokens > 0, "0"),
        ("custom_logit_processor", "...", bool(req.custom_logit_processor), "none"),
        (
            "return_hidden_states",
            True,
            req.return_hidden_states_mode.need_capture(),
            "false",
        ),
    ]
    refused += [
        (name, "...", getattr(params, name, None) is not None, "none")
        for name in ("json_schema", "regex", "ebnf", "structural_tag")
    ]
    for name, value, is_refused, allowed in refused:
        if is_refused:
            return (
                f"{name} = {value!r} is not supported with --speculative-algorithm DLITE in this "
                f"version; allowed is {allowed}. Leave it out, or serve the model without "
                f"speculation.{_SERVER_DEFAULT if name in _SERVER_DEFAULTED else ''}"
            )
    return None


def token_error(token_ids: Sequence[int], vocab_size: int) -> str | None:
    """Why a prompt given as token ids is refused, or None.

    Upstream hands any id to the embedding table, where one beyond its end ends the scheduler.
    """
    for token in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token < vocab_size:
            return (
                f"input_ids holds {token}; allowed are 0..{vocab_size - 1}, the model's "
                "vocabulary. Tokenize the prompt with the model's own tokenizer."
            )
    return None


def check_request(original: Callable[..., str | None], scheduler: Any, req: Any) -> str | None:
    """AROUND `Scheduler.validate_dllm_request`: the one place whose answer becomes a 400."""
    error = original(scheduler, req)
    if error is None and getattr(scheduler.spec_algorithm, "name", None) == ALGORITHM:
        error = request_error(req) or token_error(
            req.origin_input_ids, scheduler.model_config.vocab_size
        )
    return error
