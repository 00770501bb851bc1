"""The one table of upstream functions that DLITE changes, and the proof that they took.

Everything else joins SGLang through its extension points. SGLang only logs a hook that failed, so
`problems()` compares the installed functions with ours, and start-up refuses to go on without
them (`require_hooks`).
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from sglang_dlite import SGLANG_VERSION
from sglang_dlite.platforms import has_accelerator, sampling
from sglang_dlite.platforms import hooks as cpu
from sglang_dlite.speculative import (
    cuda_graph,
    is_dlite,
    kv_room,
    ollama_streams,
    request_validation,
    sessions,
    stop_strings,
    stream_parsers,
)


class Hook(NamedTuple):
    """One changed upstream function."""

    target: str
    kind: str  # a name of upstream's HookType
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    """The upstream signature that the hook was written for."""
    cpu_only: bool
    reason: str


def check_lora(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND `check_lora_speculative_compatibility`: a list of names that DLITE is not on.

    What the names on it share, and what LoRA's segments need, is one verify width for all
    requests; DLITE's verify input is upstream's DFLASH one. The drafter runs without adapters.
    (Adaptive width, which LoRA's decode graphs do not follow, is refused wherever LoRA is not.)
    """
    from sglang.srt.arg_groups.overrides import resolving_view

    if not is_dlite(resolving_view(server_args)):
        original(server_args)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner._decode_cuda_graph_runner_cls",
        "AROUND",
        cuda_graph.decode_graph_runner_class,
        ("self",),
        False,
        "H1: decode graphs must be captured with a verify input of width D",
    ),
    Hook(
        "sglang.srt.speculative.spec_info.create_dummy_verify_input",
        "AROUND",
        cuda_graph.dummy_verify_input,
        ("spec_algorithm", "custom_mask", "num_tokens_per_req", "is_draft_worker"),
        False,
        "H2: warm-up and autotuning need the same verify input",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        "AROUND",
        kv_room.wider_rows,
        (),
        False,
        "H4: rows too short for the decode reserve when D > 8 and page size is 1",
    ),
    Hook(
        "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.max_new_tokens_for_memory",
        "AROUND",
        kv_room.reachable_length,
        (
            "self",
            "input_tokens",
            "max_new_tokens",
            "token_capacity",
            "sliding_window_size",
            "chunk_size",
        ),
        False,
        "the decode reserve does not fit at the end of the pool, and requests are aborted there",
    ),
    Hook(
        "sglang.srt.session.session_controller.Session.create_req",
        "AROUND",
        sessions.continue_what_was_returned,
        (
            "self",
            "req",
            "tokenizer",
            "vocab_size",
            "eos_token_ids",
            "disagg_mode",
            "req_factory",
        ),
        False,
        "a turn would go on from tokens that were accepted behind the end of the one before",
    ),
    Hook(
        "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        "AROUND",
        sessions.keep_what_was_computed,
        ("self", "req"),
        False,
        "a turn would find its prefix one token longer than the K/V that was written",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "AROUND",
        request_validation.check_request,
        (
            "self",
            "obj",
            "input_text",
            "input_ids",
            "input_embeds",
            "mm_inputs",
            "token_type_ids",
        ),
        False,
        "requests that DLITE does not serve, or that would end the scheduler, get a 400",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController._validate_accept_threshold",
        "AROUND",
        request_validation.check_threshold,
        ("self", "key", "value"),
        False,
        "a threshold of acceptance would be taken, and do nothing",
    ),
    *(
        Hook(
            f"sglang.srt.entrypoints.ollama.serving.OllamaServing.{name}",
            "AROUND",
            ollama_streams.send_the_last_text,
            ("self", "gen_request", "raw_request", "model_name"),
            False,
            "the last chunk of an Ollama stream loses its text, a whole block",
        )
        for name in ("_stream_chat_response", "_stream_generate_response")
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        "AROUND",
        stop_strings.check_token_by_token,
        ("self", "new_accepted_len"),
        False,
        "of the stop strings and tokens in one block, the first one does not always win",
    ),
    *(
        Hook(
            f"sglang.srt.{name}",
            "AROUND",
            function,
            parameters,
            False,
            "of a chunk of several tokens the streaming parsers report one event and drop others",
        )
        for name, function, parameters in (
            (
                "function_call.function_call_parser.FunctionCallParser.parse_stream_chunk",
                stream_parsers.calls_by_pieces,
                ("self", "chunk_text"),
            ),
            (
                "function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
                stream_parsers.array_by_pieces,
                ("self", "new_text", "tools"),
            ),
            (
                "parser.reasoning_parser.ReasoningParser.parse_stream_chunk",
                stream_parsers.reasoning_by_pieces,
                ("self", "chunk_text"),
            ),
        )
    ),
    Hook(
        "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility",
        "AROUND",
        check_lora,
        ("server_args",),
        False,
        "H9: LoRA is refused for algorithms that upstream does not know by name",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "AROUND",
        cpu.write_reserved_slots,
        (
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "out_cache_loc",
            "batch_size",
        ),
        True,
        "H6: the writer of reserved slots is a Triton kernel",
    ),
    Hook(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        "AROUND",
        sampling.sample_rows,
        (
            "probs",
            "top_ks",
            "top_ps",
            "min_ps",
            "need_min_p_sampling",
            "sampling_seed",
            "positions",
            "return_filtered_probs",
            "max_top_k",
        ),
        True,
        "one sampled request makes the vocabulary be sorted for every row of its batch",
    ),
    *(
        Hook(
            f"sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.{name}",
            "AFTER",
            cpu.repack_after_update,
            parameters,
            True,
            "packed weights do not follow a weight update by themselves",
        )
        for name, parameters in (
            (
                "update_weights_from_disk",
                (
                    "self",
                    "model_path",
                    "load_format",
                    "weight_name_filter",
                    "recapture_cuda_graph",
                ),
            ),
            ("load_weights_from_distributed", ("self", "named_tensors")),
            ("update_weights_from_tensor", ("self", "named_tensors", "load_format")),
            ("update_weights_from_ipc", ("self", "recv_req")),
        )
    ),
    *(
        Hook(
            f"sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.{name}",
            "AROUND",
            cpu.refuse_memory_release,
            ("self", "obj", "request"),
            True,
            "the scheduler would synchronize a CUDA device, and end with its error",
        )
        for name in ("release_memory_occupation", "resume_memory_occupation")
    ),
)

RESOLUTION_STEP = "handle_missing_default_values"


def active_hooks() -> tuple[Hook, ...]:
    """The hooks that this machine needs."""
    return tuple(hook for hook in HOOKS if not hook.cpu_only or not has_accelerator())


def _resolution_steps() -> tuple[Callable[[Any, Callable[[Any], None]], None], ...]:
    """What runs around upstream's resolution step RESOLUTION_STEP."""
    from sglang_dlite.speculative.algorithm import resolve_early

    return resolve_early, cpu.default_device


def install() -> None:
    """Register every active hook; SGLang applies them after all plugins have run."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS, register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in active_hooks():
        registered = [entry[1] for entry in HookRegistry._hooks.get(hook.target, ())]
        if hook.function not in registered:
            HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    for step in _resolution_steps():
        if step not in _HOOKS.get(RESOLUTION_STEP, ()):
            register_resolution_hook(RESOLUTION_STEP)(step)


def _misfit(hook: Hook) -> str | None:
    """Why the installed sglang is not what the hook was written for; None where it is."""
    try:
        installed = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return f"{hook.target}: not in the installed sglang ({error})"
    parameters = tuple(inspect.signature(inspect.unwrap(installed)).parameters)
    if parameters == hook.parameters:
        return None
    return (
        f"{hook.target}: takes {parameters} in the installed sglang, the hook was written for "
        f"{hook.parameters}"
    )


def misfits() -> list[str]:
    """The active hooks that the installed sglang has no place for, applied or not."""
    return [problem for hook in active_hooks() if (problem := _misfit(hook)) is not None]


def problems() -> list[str]:
    """What is wrong with the installed hooks; empty when all took."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = misfits()
    for hook in active_hooks():
        if _misfit(hook) is not None:
            continue
        installed = pkgutil.resolve_name(hook.target)
        if hook.target not in HookRegistry._patched or inspect.unwrap(installed) is installed:
            found.append(f"{hook.target}: registered but not applied ({hook.reason})")
    for step in _resolution_steps():
        if step not in _HOOKS.get(RESOLUTION_STEP, ()):
            found.append(f"{RESOLUTION_STEP}: without {step.__name__}")
    return found


def require_hooks() -> None:
    """Stop start-up when a hook did not take.

    Raises:
        RuntimeError: lists the hooks, and both sglang versions.
    """
    found = problems()
    if found:
        raise RuntimeError(
            f"sglang-dlite is made for sglang {SGLANG_VERSION} and found {version('sglang')}; "
            "these hooks are not in place:\n  "
            + "\n  ".join(found)
            + f"\nInstall sglang=={SGLANG_VERSION}, then run `sglang-dlite check`."
        )
