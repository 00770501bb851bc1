"""Requests that DLITE does not serve: refused with a 400, never approximated or let crash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_dlite import ALGORITHM
from sglang_dlite.speculative import serves_dlite
from sglang_dlite.speculative.sessions import forget_refused


def request_error(req: Any) -> str | None:
    """Why `req` (upstream's Req) is refused, or None.

    Names the option, the value, what is allowed and what to do.
    """
    if req.return_hidden_states_mode.need_capture():
        return (
            "return_hidden_states = True is not supported with --speculative-algorithm DLITE in "
            "this version; allowed is false. Leave it out, or serve the model without speculation."
        )
    if req.token_indices_to_pool is not None:
        return (
            f"token_indices_to_pool = {req.token_indices_to_pool} is not supported with "
            "--speculative-algorithm DLITE: SGLang reads scores at chosen positions only without "
            "speculation. Leave it out, or serve the model without speculation."
        )
    return processor_error(req.custom_logit_processor)


def processor_error(serialized: str | None) -> str | None:
    """Why a custom_logit_processor is refused, or None.

    Upstream reads it when the batch is formed, where a failure ends the scheduler.
    """
    if not serialized:
        return None
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        processor = CustomLogitProcessor.from_str(serialized)
    except Exception as error:  # whatever user code raises while it is unpickled
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(processor, CustomLogitProcessor):
            return None
        problem = f"it is a {type(processor).__name__}"
    return (
        f"custom_logit_processor = {serialized[:40]!r} cannot be used ({problem}); allowed is the "
        "to_str() of a subclass of sglang's CustomLogitProcessor. Send what that returns."
    )


def drop_impossible_stops(params: Any, vocab_size: int) -> None:
    """Take stop_token_ids out that no output can hold; they stop nothing, with or without DLITE.

    Upstream masks these tokens by id as soon as any request of a batch has min_new_tokens: one
    beyond the vocabulary then ends the scheduler.
    """
    stops = params.stop_token_ids or ()
    params.stop_token_ids = {token for token in stops if 0 <= token < vocab_size} or None


LARGEST_INT32 = 2**31 - 1
LARGEST = 1e30  # finite in fp32 beside a logit, and after division by the least temperature
LEAST = 1e-30  # a logit divided by it is finite in fp32


def number_error(params: Any, top_logprobs_num: Any, vocab_size: int) -> str | None:
    """Why a number that upstream does not check is refused, or None.

    Upstream makes int32 tensors of some when it forms the batch, and ends the scheduler over one
    that does not fit; or over probabilities that are not numbers; or over a length that is no
    whole number.
    """
    integers = (
        ("top_k", params.top_k, LARGEST_INT32, "Leave it out for no limit"),
        ("min_new_tokens", params.min_new_tokens, LARGEST_INT32, "Use a smaller one"),
        ("max_new_tokens", params.max_new_tokens or 0, LARGEST_INT32, "Use a smaller one"),
        ("top_logprobs_num", top_logprobs_num, vocab_size, "The vocabulary has no more tokens"),
    )
    for name, value, largest, remedy in integers:
        if not isinstance(value, (int, np.integer)):
            return f"{name} = {value!r}; allowed are whole numbers. Give one, not {value!r}."
        if value > largest:
            return f"{name} = {value}; allowed are numbers up to {largest}. {remedy}."
    for name, least in (("temperature", 0.0), ("repetition_penalty", LEAST)):
        value = getattr(params, name)
        if not isinstance(value, (int, float, np.number)) or not least <= value <= LARGEST:
            return (
                f"{name} = {value!r}; allowed are numbers from {least} to {LARGEST}. Beyond them "
                "probabilities are no numbers in fp32."
            )
    for token, bias in (params.logit_bias or {}).items():
        if not isinstance(bias, (int, float, np.number)) or not bias <= LARGEST:  # NaN is not
            return (
                f"logit_bias of token {token} is {bias!r}; allowed are numbers up to {LARGEST}. "
                "100 forces a token already."
            )
    return None


def token_error(token_ids: Sequence[int], vocab_size: int) -> str | None:
    """Why a prompt given as token ids is refused, or None.

    Upstream hands any id to the embedding table, where one beyond its end ends the scheduler.
    """
    ids = np.asarray(token_ids, dtype=np.int64)  # a view of upstream's array: no loop over it
    for token in (int(ids.min(initial=0)), int(ids.max(initial=0))):
        if not 0 <= token < vocab_size:
            return (
                f"input_ids holds {token}; allowed are 0..{vocab_size - 1}, the model's "
                "vocabulary. Tokenize the prompt with the model's own tokenizer."
            )
    return None


def _is_dlites(scheduler: Any) -> bool:
    return getattr(scheduler.spec_algorithm, "name", None) == ALGORITHM


def check_request(original: Callable[..., str | None], scheduler: Any, req: Any) -> str | None:
    """AROUND `Scheduler.validate_dllm_request`: the one place whose answer becomes a 400."""
    error = original(scheduler, req)
    if error is None and _is_dlites(scheduler):
        vocab_size = scheduler.model_config.vocab_size
        drop_impossible_stops(req.sampling_params, vocab_size)
        error = (
            request_error(req)
            or number_error(req.sampling_params, req.logprob.top_logprobs_num, vocab_size)
            or token_error(req.origin_input_ids, vocab_size)
        )
        if error is not None:
            forget_refused(req)
    return error


def check_threshold(
    original: Callable[[Any, str, Any], None], controller: Any, key: str, value: Any
) -> None:
    """AROUND `_validate_accept_threshold` of /set_internal_state: as at start-up."""
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    if _is_dlites(controller.scheduler) and float(value) != 1.0:
        raise UpdateRejected(
            f"{key} = {value} is not supported with --speculative-algorithm DLITE: acceptance is "
            "exact; allowed is 1.0."
        )
    original(controller, key, value)


def check_logprob_start(original: Callable[[Any, Any], None], manager: Any, obj: Any) -> None:
    """AROUND `TokenizerManager._validate_token_ids_logprob`: the scheduler's Req lacks this field.

    Upstream counts the prompt's log-probabilities from it, and ends the scheduler over the count.

    Raises:
        ValueError: becomes a 400.
    """
    original(manager, obj)
    if serves_dlite() and obj.return_logprob and obj.logprob_start_len < -1:
        raise ValueError(
            f"logprob_start_len = {obj.logprob_start_len}; allowed are positions in the prompt, "
            "from 0, and -1 for output tokens only. Leave it out for those."
        )
