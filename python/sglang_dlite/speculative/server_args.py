"""Which server options DLITE takes, which it fills, and which it refuses by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.speculative.drafter_files import read_drafter_config
from sglang_dlite.speculative.drafting import check_pair
from sglang_dlite.speculative.pivot_capture import require_supported_target


class Refusal(NamedTuple):
    """An option that DLITE does not serve: refused at start-up, never ignored."""

    option: str
    value: Callable[[Any], Any]
    """The offending value, or None where the option is fine."""
    reason: str
    remedy: str


def _above_one(field: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, field) if (getattr(args, field, None) or 1) > 1 else None


def _truthy(field: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, field, None) or None


def _disaggregation(args: Any) -> Any:
    mode = getattr(args, "disaggregation_mode", "null")
    return mode if mode not in (None, "null") else None


def _given(field: str) -> Callable[[Any], Any]:
    # What the user typed: DLITE and upstream set these fields by themselves.
    return lambda args: (getattr(args, "_raw_input", None) or {}).get(field) or None


def _torch_compile_on_cpu(args: Any) -> Any:
    return True if args.device == "cpu" and getattr(args, "enable_torch_compile", False) else None


def _metadata_glue_graph(args: Any) -> Any:
    return (
        os.environ.get("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "0") not in ("0", "", "false") or None
    )


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--pp-size", _above_one("pp_size"), "a stage sees only its own layers", "use --pp-size 1"
    ),
    Refusal(
        # Upstream has turned `--dp-size N --enable-dp-attention` into this one by now.
        "--attn-dp-size (--enable-dp-attention)",
        _above_one("attn_dp_size"),
        "idle ranks are not handled",
        "drop the option, or serve without speculation",
    ),
    Refusal(
        "--enable-lora",
        _truthy("enable_lora"),
        "a drafter is trained for the base weights",
        "drop LoRA, or serve without speculation",
    ),
    Refusal(
        "--lora-paths",
        _truthy("lora_paths"),
        "a drafter is trained for the base weights",
        "drop LoRA, or serve without speculation",
    ),
    Refusal(
        "--disaggregation-mode",
        _disaggregation,
        "the pivot states do not travel with the K/V",
        "use one server for prefill and decode (--disaggregation-mode null)",
    ),
    Refusal(
        "--enable-return-hidden-states",
        _given("enable_return_hidden_states"),
        "the hidden-state slot carries the pivot states",
        "drop the option, or serve without speculation",
    ),
    Refusal(
        "--return-hidden-states-mode",
        _given("return_hidden_states_mode"),
        "the hidden-state slot carries the pivot states",
        "drop the option, or serve without speculation",
    ),
    Refusal(
        "--enable-return-aux-hidden-states",
        _given("enable_return_aux_hidden_states"),
        "the hidden-state slot carries the pivot states",
        "drop the option, or serve without speculation",
    ),
    Refusal(
        "--speculative-adaptive",
        _truthy("speculative_adaptive"),
        "the width is fixed in this version",
        "drop the option and choose --speculative-num-draft-tokens",
    ),
    Refusal(
        "--speculative-use-rejection-sampling",
        _truthy("speculative_use_rejection_sampling"),
        "drafts are greedy in this version and are verified by sample-and-match",
        "drop the option; the output law is the target's either way",
    ),
    Refusal(
        "--speculative-token-map",
        _truthy("speculative_token_map"),
        "the drafter has its own head",
        "drop the option",
    ),
    Refusal(
        "--enable-torch-compile",
        _torch_compile_on_cpu,
        "upstream's CPU graphs exclude speculation",
        "drop the option",
    ),
    Refusal(
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        _metadata_glue_graph,
        "its frozen plans would be stale at the next verify pass",
        "unset the variable",
    ),
)


def drafter_path(args: Any) -> str:
    """--speculative-draft-model-path, which DLITE cannot do without.

    Raises:
        ValueError: the option is missing.
    """
    path = args.speculative_draft_model_path
    if not path:
        raise ValueError(
            "--speculative-algorithm DLITE needs --speculative-draft-model-path: a directory in "
            "the DLite checkpoint format, or a hub id such as SJTU-DAI-Sys/Qwen3-4B-DLite "
            "(`sglang-dlite drafter-path` prints the one shipped for SmolLM2-135M-Instruct)."
        )
    return str(path)


def check_server_args(args: Any) -> None:
    """Refuse what cannot be served exactly.

    Raises:
        ValueError: names the option, its value, the reason and the remedy.
    """
    for refusal in REFUSALS:
        value = refusal.value(args)
        if value is not None:
            raise ValueError(
                f"{refusal.option} = {value!r} is not supported with --speculative-algorithm "
                f"DLITE: {refusal.reason}. What to do: {refusal.remedy}."
            )
    config = read_drafter_config(
        drafter_path(args), getattr(args, "speculative_draft_model_revision", None)
    )
    width = args.speculative_num_draft_tokens
    if width is not None and not 2 <= width <= config.block_size:
        raise ValueError(
            f"--speculative-num-draft-tokens = {width}: allowed are 2..{config.block_size}, the "
            "drafter's block_size (the anchor and at most "
            f"{config.num_drafts} drafts). Leave it out to use {config.block_size}."
        )
    if config.anchor_group_size > 2 and getattr(args, "enable_mixed_chunk", False):
        raise ValueError(
            f"--enable-mixed-chunk with a drafter of anchor_group_size = "
            f"{config.anchor_group_size}: allowed are 1 and 2, since a mixed batch does not hold "
            "the older tokens. Drop --enable-mixed-chunk."
        )


def _check_target(args: Any, drafter: DLiteConfig) -> None:
    """Refuse a target before its weights are read; the worker checks again what it has loaded."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    target = get_config(
        args.model_path, trust_remote_code=args.trust_remote_code, revision=args.revision
    )
    architectures = getattr(target, "architectures", None) or ["unknown"]
    require_supported_target(architectures[0])
    check_pair(drafter, target)


def apply_defaults(args: Any) -> None:
    """Pin what upstream's code reads of a chain drafter (internals note, h.1-h.2)."""
    config = read_drafter_config(
        drafter_path(args), getattr(args, "speculative_draft_model_revision", None)
    )
    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = config.block_size
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    if args.device != "cpu" and not getattr(args, "return_hidden_states_mode", None):
        # Prefill CUDA graphs are captured at the server's hidden-state mode and are refused for
        # an extend that asks for more (hook H3); requests cannot ask for hidden states.
        args.enable_return_hidden_states = True
        args.return_hidden_states_mode = "last"
