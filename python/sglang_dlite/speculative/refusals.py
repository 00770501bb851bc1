"""The server options that DLITE refuses by name: one table, each with its reason and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


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


def _given(field: str, *harmless: Any) -> Callable[[Any], Any]:
    """What the user typed (DLITE and upstream set some fields themselves), but for `harmless`."""

    def value(args: Any) -> Any:
        typed = (getattr(args, "_raw_input", None) or {}).get(field)
        return None if typed in (None, False, *harmless) else typed

    return value


def _changed(field: str) -> Callable[[Any], Any]:
    """What the user typed in place of upstream's default."""

    def value(args: Any) -> Any:
        from sglang.srt.arg_groups.arg_utils import record_fields
        from sglang.srt.server_args import ServerArgs

        (default,) = (f.default for f in record_fields(ServerArgs) if f.name == field)
        return _given(field, default)(args)

    return value


def _on_a_cpu(field: str) -> Callable[[Any], Any]:
    return lambda args: (getattr(args, field, None) or None) if args.device == "cpu" else None


def _moe_a2a_backend(args: Any) -> Any:
    backend = getattr(args, "moe_a2a_backend", "none")
    return backend if backend not in (None, "none") else None


def _disaggregation(args: Any) -> Any:
    mode = getattr(args, "disaggregation_mode", "null")
    return mode if mode not in (None, "null") else None


def _device(args: Any) -> Any:
    from sglang.srt.platforms import current_platform

    if args.device == "cpu":
        return None if current_platform.is_out_of_tree() else "cpu"
    return None if args.device == "cuda" else args.device


def _adaptive_on_cuda(args: Any) -> Any:
    return None if args.device == "cpu" else _given("speculative_adaptive")(args)


def _adaptive_with_rejection(args: Any) -> Any:
    rejection = _given("speculative_use_rejection_sampling")(args)
    return rejection and _given("speculative_adaptive")(args)


# Those whose metadata for a verify pass has been read, with and without graphs (docs/cuda.md).
CUDA_ATTENTION = ("flashinfer", "fa3", "fa4", "triton", "trtllm_mha")


def _attention_backend(args: Any) -> Any:
    if args.device != "cuda":
        return None
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    names = [getattr(args, field, None) for field in fields]
    return next((name for name in names if name not in (None, *CUDA_ATTENTION)), None)


def _graph_backend(phase: str, *served: str) -> Callable[[Any], Any]:
    """The backend of CUDA graphs as resolved: flags, legacy flags and JSON all lead there."""

    def value(args: Any) -> Any:
        config = getattr(getattr(args, "cuda_graph_config", None), phase, None)
        backend = getattr(config, "backend", None)
        return None if backend in (None, *served) else backend

    return value


def _metadata_glue_graph(args: Any) -> Any:
    from sglang.srt.environ import envs

    return envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get() or None


def _simulated_acceptance(args: Any) -> Any:
    from sglang.srt.environ import envs

    length = envs.SGLANG_SIMULATE_ACC_LEN.get()
    return length if length > 0 else None


NO_SPECULATION = "drop the option, or serve without speculation"
DROP = "drop the option"

# Upstream ignores these silently where the algorithm is not theirs.
OTHER_ALGORITHMS = (
    "enable_multi_layer_eagle",
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
)

REFUSALS: tuple[Refusal, ...] = (
    # -- deployment -----------------------------------------------------------------------------
    Refusal(
        "--device",
        _device,
        "DLITE runs on cuda, and on cpu where no accelerator exists",
        "leave --device out; to use the CPU of a GPU machine, hide the GPU "
        "(CUDA_VISIBLE_DEVICES='')",
    ),
    Refusal(
        "--pp-size", _above_one("pp_size"), "a stage sees only its own layers", "use --pp-size 1"
    ),
    Refusal(
        # Upstream has turned `--dp-size N --enable-dp-attention` into this one by now.
        "--attn-dp-size (--enable-dp-attention)",
        _above_one("attn_dp_size"),
        "idle ranks are not handled",
        NO_SPECULATION,
    ),
    Refusal(
        "--attn-cp-size",
        _above_one("attn_cp_size"),
        "a rank does not hold every request's last row",
        "use --attn-cp-size 1",
    ),
    Refusal(
        "--enable-prefill-cp",
        _truthy("enable_prefill_cp"),
        "a rank does not hold every request's last row",
        DROP,
    ),
    Refusal(
        "--tokenizer-worker-num",
        _above_one("tokenizer_worker_num"),
        "its processes load no plugins: streamed tool calls and reasoning would lose text",
        "use --tokenizer-worker-num 1",
    ),
    Refusal("--enable-pdmux", _truthy("enable_pdmux"), "a split prefill has no pivot states", DROP),
    Refusal(
        "--disaggregation-mode",
        _disaggregation,
        "the pivot states do not travel with the K/V",
        "use one server for prefill and decode (--disaggregation-mode null)",
    ),
    *(
        Refusal(
            f"--{field.replace('_', '-')}",
            _on_a_cpu(field),
            "SGLang's LoRA backends need a GPU (Triton kernels, pinned memory)",
            "merge the adapter into the model, or serve on a GPU",
        )
        for field in ("enable_lora", "lora_paths")
    ),
    Refusal(
        "--enable-memory-saver",
        _on_a_cpu("enable_memory_saver"),
        "torch_memory_saver replaces CUDA's allocator",
        DROP,
    ),
    *(
        Refusal(
            f"--{field.replace('_', '-')}",
            value,
            "a rank does not hold every request's last row between the layers",
            DROP,
        )
        for field, value in (
            ("moe_a2a_backend", _moe_a2a_backend),
            ("enable_attn_tp_input_scattered", _truthy("enable_attn_tp_input_scattered")),
            ("enable_layernorm_sp", _truthy("enable_layernorm_sp")),
        )
    ),
    Refusal(
        "--enable-two-batch-overlap",
        _truthy("enable_two_batch_overlap"),
        "the layers of two half batches run interleaved, without the hooks that capture the pivot "
        "states",
        DROP,
    ),
    # -- what a request would get ---------------------------------------------------------------
    Refusal(
        "--enable-return-hidden-states",
        _given("enable_return_hidden_states"),
        "the hidden-state slot carries the pivot states",
        NO_SPECULATION,
    ),
    Refusal(
        "--return-hidden-states-mode",
        _given("return_hidden_states_mode"),
        "the hidden-state slot carries the pivot states",
        NO_SPECULATION,
    ),
    Refusal(
        "--enable-mis",
        _truthy("enable_mis"),
        "SGLang reads scores at chosen positions only without speculation",
        NO_SPECULATION,
    ),
    Refusal(
        "--enable-watermark",
        _truthy("enable_watermark"),
        "the tokens that verify rows choose would carry no watermark",
        NO_SPECULATION,
    ),
    Refusal(
        "--enable-strict-thinking",
        _truthy("enable_strict_thinking"),
        "its limits on the thinking part are not tested on verify rows",
        NO_SPECULATION,
    ),
    Refusal(
        "--grammar-backend",
        lambda args: args.grammar_backend if args.grammar_backend == "outlines" else None,
        "a grammar takes rejected drafts back, which outlines cannot",
        "use xgrammar (the default) or llguidance",
    ),
    Refusal(
        "--rl-on-policy-target",
        _truthy("rl_on_policy_target"),
        "its bf16 log-softmax law is not the one that verify rows are sampled from",
        NO_SPECULATION,
    ),
    # -- graphs ---------------------------------------------------------------------------------
    Refusal(
        "--enable-torch-compile",
        _truthy("enable_torch_compile"),
        "pivot states are captured by module hooks",
        DROP,
    ),
    Refusal(
        "--cuda-graph-backend-prefill",
        _given("cuda_graph_backend_prefill", "disabled"),
        "a replayed prefill runs without the hooks that capture the pivot states",
        "drop the option; decode graphs are used",
    ),
    Refusal(
        "--cuda-graph-config (prefill.backend)",
        _graph_backend("prefill", "disabled"),
        "a replayed prefill runs without the hooks that capture the pivot states",
        'leave "prefill" out; decode graphs are used',
    ),
    Refusal(
        "--cuda-graph-backend-decode",
        _graph_backend("decode", "full", "disabled"),
        "its segments hand outputs over by request, and a verify pass has several rows of each",
        "use full (the default) or disabled",
    ),
    Refusal(
        "--attention-backend",
        _attention_backend,
        "its verify metadata has not been checked with DLITE",
        f"use one of {', '.join(CUDA_ATTENTION)}",
    ),
    Refusal(
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        _metadata_glue_graph,
        "its frozen plans would be stale at the next verify pass",
        "unset the variable",
    ),
    # -- speculation ----------------------------------------------------------------------------
    Refusal(
        "--speculative-num-steps",
        _given("speculative_num_steps", 1),
        "a block is one step",
        "drop the option and choose --speculative-num-draft-tokens",
    ),
    Refusal(
        "--speculative-eagle-topk",
        _given("speculative_eagle_topk", 1),
        "a block is one chain, not a tree",
        DROP,
    ),
    Refusal(
        "--speculative-adaptive",
        _adaptive_on_cuda,
        "verify graphs and attention plans are made for one width; it is served on a CPU only",
        "drop the option and choose --speculative-num-draft-tokens",
    ),
    Refusal(
        "--speculative-adaptive",
        _adaptive_with_rejection,
        "rejection sampling needs drawn drafts for every request, and adaptive width skips some",
        "drop --speculative-use-rejection-sampling; the output law is the target's either way",
    ),
    *(
        Refusal(f"--{field.replace('_', '-')}", _given(field, 1.0), reason, DROP)
        for field, reason in (
            ("speculative_accept_threshold_single", "acceptance is exact"),
            ("speculative_accept_threshold_acc", "acceptance is exact"),
            ("speculative_adaptive_config", "the policy measures and has no settings"),
            ("speculative_token_map", "the drafter has its own head"),
            ("speculative_draft_attention_backend", "the drafter has no attention backend"),
            ("speculative_draft_kv_cache_dtype", "the drafter has no KV cache"),
            ("speculative_draft_window_size", "the drafter has no KV cache"),
            ("speculative_draft_load_format", "the drafter is read from safetensors"),
            ("speculative_draft_model_quantization", "the drafter is not quantized"),
        )
    ),
    *(
        Refusal(
            f"--{field.replace('_', '-')}",
            _changed(field),
            "it is another algorithm's option",
            DROP,
        )
        for field in OTHER_ALGORITHMS
    ),
    Refusal(
        "SGLANG_SIMULATE_ACC_LEN",
        _simulated_acceptance,
        "simulated acceptance would break the output",
        "unset the variable",
    ),
)
