"""How a refused option is found in the server's arguments: each function gives the offending
value, or None where the option is fine. The table that uses them is refusals.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def above_one(field: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, field) if (getattr(args, field, None) or 1) > 1 else None


def truthy(field: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, field, None) or None


def given(field: str, *harmless: Any) -> Callable[[Any], Any]:
    """What the user typed (DLITE and upstream set some fields themselves), but for `harmless`."""

    def value(args: Any) -> Any:
        typed = (getattr(args, "_raw_input", None) or {}).get(field)
        # 0 is a value, although it equals False.
        return None if typed is None or typed is False or typed in harmless else typed

    return value


def changed(field: str) -> Callable[[Any], Any]:
    """What the user typed in place of upstream's default."""

    def value(args: Any) -> Any:
        from sglang.srt.arg_groups.arg_utils import record_fields
        from sglang.srt.server_args import ServerArgs

        (default,) = (f.default for f in record_fields(ServerArgs) if f.name == field)
        return given(field, default)(args)

    return value


def on_a_cpu(field: str) -> Callable[[Any], Any]:
    return lambda args: (getattr(args, field, None) or None) if args.device == "cpu" else None


def moe_a2a_backend(args: Any) -> Any:
    backend = getattr(args, "moe_a2a_backend", "none")
    return backend if backend not in (None, "none") else None


def disaggregation(args: Any) -> Any:
    mode = getattr(args, "disaggregation_mode", "null")
    return mode if mode not in (None, "null") else None


def device(args: Any) -> Any:
    from sglang.srt.platforms import current_platform

    if args.device == "cpu":
        return None if current_platform.is_out_of_tree() else "cpu"
    return None if args.device == "cuda" else args.device


def adaptive_with_lora(args: Any) -> Any:
    lora = args.enable_lora or args.lora_paths
    return lora and given("speculative_adaptive")(args)


def adaptive_with_rejection(args: Any) -> Any:
    rejection = given("speculative_use_rejection_sampling")(args)
    return rejection and given("speculative_adaptive")(args)


# Those whose metadata for a verify pass has been read, with and without graphs (docs/cuda.md).
CUDA_ATTENTION = ("flashinfer", "fa3", "fa4", "triton", "trtllm_mha")
ATTENTION_FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def attention_backend(args: Any) -> Any:
    if args.device != "cuda":
        return None
    names = [getattr(args, field, None) for field in ATTENTION_FIELDS]
    return next((name for name in names if name not in (None, *CUDA_ATTENTION)), None)


def graph_backend(phase: str, *served: str) -> Callable[[Any], Any]:
    """The backend of CUDA graphs as resolved: flags, legacy flags and JSON all lead there."""

    def value(args: Any) -> Any:
        config = getattr(getattr(args, "cuda_graph_config", None), phase, None)
        backend = getattr(config, "backend", None)
        return None if backend in (None, *served) else backend

    return value


def environment_flag(name: str) -> Callable[[Any], Any]:
    """A variable of SGLang's that is switched on."""

    def value(args: Any) -> Any:
        from sglang.srt.environ import envs

        return getattr(envs, name).get() or None

    return value


def simulated_acceptance(args: Any) -> Any:
    from sglang.srt.environ import envs

    length = envs.SGLANG_SIMULATE_ACC_LEN.get()
    return length if length > 0 else None


# Upstream ignores these silently where the algorithm is not theirs.
OTHER_ALGORITHMS = (
    "decoupled_spec_role",
    "enable_draft_weights_cpu_backup",
    "enable_multi_layer_eagle",
    "spec_trace_dir",
    "speculative_dflash_block_size",
    "speculative_domino_candidate_pool_size",
    "speculative_dsa_topk_backend",
    "speculative_dspark_align_verify_tokens_to_graph_tier",
    "speculative_dspark_block_size",
    "speculative_dspark_confidence_sts_path",
    "speculative_dspark_sps_table_path",
    "speculative_enable_w4a4_mxfp4_megamoe",
    "speculative_moe_a2a_backend",
    "speculative_moe_runner_backend",
    "speculative_ngram_capacity",
    "speculative_ngram_external_corpus_max_tokens",
    "speculative_ngram_external_corpus_path",
    "speculative_ngram_external_sam_budget",
    "speculative_ngram_match_type",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_min_bfs_breadth",
    "uno_lora_path",
)
