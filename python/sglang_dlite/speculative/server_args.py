"""DLITE's start-up checks and defaults, on SGLang's server arguments."""

from __future__ import annotations

from typing import Any

from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.speculative.drafter_files import read_drafter_config
from sglang_dlite.speculative.drafting import check_pair
from sglang_dlite.speculative.option_values import ATTENTION_FIELDS
from sglang_dlite.speculative.pivot_capture import WINDOWED_TARGETS, require_supported_target
from sglang_dlite.speculative.refusals import REFUSALS


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
    config = read_drafter_config(drafter_path(args), args.speculative_draft_model_revision)
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
            f"{config.anchor_group_size}: allowed are 1 and 2, since the host does not know the "
            "newest tokens of a decoding request in a mixed batch yet. Drop --enable-mixed-chunk."
        )
    _check_target(args, config)


def _check_target(args: Any, drafter: DLiteConfig) -> None:
    """Refuse a target before its weights are read; the worker checks again what it has loaded."""
    from sglang.srt.arg_groups.model_override_base import model_config_of

    target = model_config_of(args)  # with the overrides of the command line
    architectures = getattr(target.hf_config, "architectures", None) or ["unknown"]
    require_supported_target(architectures[0])
    check_window(args, architectures[0])
    check_pair(drafter, target.hf_text_config)


def check_window(args: Any, target: str) -> None:
    """Refuse FlashInfer for a target with sliding windows.

    Its plan of a verify pass has no window (`window_left` is -1 beside a spec_info): row j would
    see up to j keys that are older than the window.
    """
    if args.device != "cuda" or target not in WINDOWED_TARGETS:
        return
    for field in ATTENTION_FIELDS:
        if getattr(args, field, None) == "flashinfer":
            raise ValueError(
                f"--{field.replace('_', '-')} = 'flashinfer' is not supported with "
                f"--speculative-algorithm DLITE and {target}: its verify passes look beyond the "
                "sliding window. What to do: use --attention-backend triton, or fa3 on Hopper."
            )


def apply_defaults(args: Any) -> None:
    """Pin what upstream's code reads of a drafter of one chain and one step."""
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
