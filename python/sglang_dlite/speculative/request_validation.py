"""Requests that DLITE does not serve: refused with a 400, never approximated or let crash."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from sglang_dlite import ALGORITHM
from sglang_dlite.speculative import serves_dlite


def request_error(obj: Any) -> str | None:
    """Why a request (upstream's TokenizedGenerateReqInput) is refused, or None.

    Names the option, the value, what is allowed and what to do.
    """
    if obj.token_indices_to_pool is not None:
        return (
            f"token_indices_to_pool = {obj.token_indices_to_pool} is not supported with "
            "--speculative-algorithm DLITE: SGLang reads scores at chosen positions only without "
            "speculation. Leave it out, or serve the model without speculation."
        )
    for name in ("input_embeds", "positional_embed_overrides"):
        if getattr(obj, name) is not None:
            return (
                f"{name} is not supported with --speculative-algorithm DLITE: the drafter reads "
                "the ids of the last tokens. Send text or input_ids, or serve the model without "
                "speculation."
            )
    return processor_error(obj.custom_logit_processor)


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


# Checked below, or by the processors that read them.
_NOT_BY_TYPE = ("logit_bias", "custom_params", "watermark")


def type_error(options: Any) -> str | None:
    """Why an option of another type than upstream declares is refused, or None.

    options: SamplingParams or SessionParams. Over HTTP they are free-form objects, and upstream
    ends the scheduler or the detokenizer where it compares, hashes or slices by such a value.
    """
    for name, declared in _declared_types(type(options)):  # type: ignore[arg-type]
        value = getattr(options, name)
        if isinstance(value, np.generic):
            value = value.item()
        if declared is bool and value in (0, 1):
            continue
        try:
            msgspec.convert(value, declared)
        except msgspec.ValidationError as error:
            return f"{name} = {value!r:.80}: {error}. Give it as that type, or leave it out."
    return None


@functools.cache
def _declared_types(struct: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    fields = msgspec.structs.fields(struct)
    return [(field.name, field.type) for field in fields if field.name not in _NOT_BY_TYPE]


LARGEST_INT32 = 2**31 - 1
LARGEST = 1e30  # finite in fp32 beside a logit, and after division by the least temperature
LEAST = 1e-30  # a logit divided by it is finite in fp32


def number_error(params: Any, top_logprobs_num: Any, vocab_size: int) -> str | None:
    """Why a number that upstream does not check is refused, or None.

    Upstream makes int32 tensors of some when it forms the batch, and ends the scheduler over one
    that does not fit; or over probabilities that are not numbers. params: types checked.
    """
    if not isinstance(top_logprobs_num, int):
        return f"top_logprobs_num = {top_logprobs_num!r}; allowed are whole numbers. Give one."
    integers = (
        ("top_k", params.top_k, LARGEST_INT32, "Leave it out for no limit"),
        ("min_new_tokens", params.min_new_tokens, LARGEST_INT32, "Use a smaller one"),
        ("max_new_tokens", params.max_new_tokens or 0, LARGEST_INT32, "Use a smaller one"),
        ("top_logprobs_num", top_logprobs_num, vocab_size, "The vocabulary has no more tokens"),
    )
    for name, value, largest, remedy in integers:
        if value > largest:
            return f"{name} = {value}; allowed are numbers up to {largest}. {remedy}."
    for name, least in (("temperature", 0.0), ("repetition_penalty", LEAST)):
        value = getattr(params, name)
        if not least <= value <= LARGEST:
            return (
                f"{name} = {value!r}; allowed are numbers from {least} to {LARGEST}. Beyond them "
                "probabilities are no numbers in fp32."
            )
    for token, bias in (params.logit_bias or {}).items():
        # NaN is not below anything; a whole number beyond a float's range is no float at all.
        served = isinstance(bias, (int, float, np.number)) and (
            bias == -math.inf or -sys.float_info.max <= bias <= LARGEST
        )
        if not served:
            return (
                f"logit_bias of token {token} is {bias!r:.40}; allowed are numbers up to "
                f"{LARGEST}. 100 forces a token already, -100 forbids it."
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


def check_threshold(
    original: Callable[[Any, str, Any], None], controller: Any, key: str, value: Any
) -> None:
    """AROUND `_validate_accept_threshold` of /set_internal_state: as at start-up."""
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected

    served = isinstance(value, (int, float)) and value == 1
    if getattr(controller.scheduler.spec_algorithm, "name", None) == ALGORITHM and not served:
        raise UpdateRejected(
            f"{key} = {value!r} is not supported with --speculative-algorithm DLITE: acceptance is "
            "exact; allowed is 1.0."
        )
    original(controller, key, value)


def check_request(
    original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **options: Any
) -> Any:
    """AROUND `TokenizerManager._create_tokenized_object`: what every request becomes before it goes
    to the scheduler, where a turn changes its session and an exception ends the server.

    Raises:
        ValueError: becomes a 400.
    """
    if not serves_dlite():
        return original(manager, obj, *args, **options)
    if obj.sampling_params.get("is_normalized"):
        raise ValueError(
            "is_normalized is SGLang's own mark on sampling_params; allowed is false. Leave it out."
        )
    made = original(manager, obj, *args, **options)
    params, vocab_size = made.sampling_params, manager.model_config.vocab_size
    error = (
        type_error(params)
        or (made.session_params and type_error(made.session_params))
        or request_error(made)
        or number_error(params, made.top_logprobs_num, vocab_size)
        or token_error(made.input_ids or (), vocab_size)
        or (made.return_logprob and logprob_start_error(made.logprob_start_len))
    )
    if error:
        raise ValueError(error)
    drop_impossible_stops(params, vocab_size)
    return made


def logprob_start_error(start: Any) -> str | None:
    """Why the place where log-probabilities begin is refused, or None.

    Upstream counts the prompt's from it, and ends the scheduler over the count.
    """
    if isinstance(start, int) and start >= -1:
        return None
    return (
        f"logprob_start_len = {start!r}; allowed are positions in the prompt, from 0, and -1 for "
        "output tokens only. Leave it out for those."
    )
