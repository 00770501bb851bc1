"""The server options that DLITE refuses by name: one table, each with its reason and remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_dlite.speculative.option_values import (
    CUDA_ATTENTION,
    OTHER_ALGORITHMS,
    above_one,
    adaptive_with_lora,
    adaptive_with_rejection,
    attention_backend,
    changed,
    device,
    disaggregation,
    environment_flag,
    given,
    graph_backend,
    moe_a2a_backend,
    on_a_cpu,
    simulated_acceptance,
    truthy,
)


class Refusal(NamedTuple):
    """An option that DLITE does not serve: refused at start-up, never ignored."""

    option: str
    value: Callable[[Any], Any]
    """The offending value, or None where the option is fine."""
    reason: str
    remedy: str


NO_SPECULATION = "drop the option, or serve without speculation"
DROP = "drop the option"

REFUSALS: tuple[Refusal, ...] = (
    # -- deployment -----------------------------------------------------------------------------
    Refusal(
        "--device",
        device,
        "DLITE runs on cuda, and on cpu where no accelerator exists",
        "leave --device out; to use the CPU of a GPU machine, hide the GPU "
        "(CUDA_VISIBLE_DEVICES='')",
    ),
    Refusal(
        "--pp-size", above_one("pp_size"), "a stage sees only its own layers", "use --pp-size 1"
    ),
    Refusal(
        # Upstream has turned `--dp-size N --enable-dp-attention` into this one by now.
        "--attn-dp-size (--enable-dp-attention)",
        above_one("attn_dp_size"),
        "idle ranks are not handled",
        NO_SPECULATION,
    ),
    Refusal(
        "--attn-cp-size",
        above_one("attn_cp_size"),
        "a rank does not hold every request's last row",
        "use --attn-cp-size 1",
    ),
    Refusal(
        "--dcp-size",
        above_one("dcp_size"),
        "SGLang's verify passes do not divide K/V between ranks",
        "use --dcp-size 1",
    ),
    Refusal(
        "--enable-prefill-cp",
        truthy("enable_prefill_cp"),
        "a rank does not hold every request's last row",
        DROP,
    ),
    Refusal(
        "--tokenizer-worker-num",
        above_one("tokenizer_worker_num"),
        "its processes load no plugins: streamed tool calls and reasoning would lose text",
        "use --tokenizer-worker-num 1",
    ),
    *(
        Refusal(
            option,
            value,
            "its front end loads no plugins: requests would not be checked, and streamed tool "
            "calls and reasoning would lose text",
            remedy,
        )
        for option, value, remedy in (
            ("SGLANG_RUST_SERVER", environment_flag("SGLANG_RUST_SERVER"), "unset the variable"),
            ("--smg-grpc-mode", truthy("smg_grpc_mode"), "use --grpc-port"),
            ("--grpc-mode", truthy("grpc_mode"), "use --grpc-port"),
        )
    ),
    Refusal("--enable-pdmux", truthy("enable_pdmux"), "a split prefill has no pivot states", DROP),
    Refusal(
        "--disaggregation-mode",
        disaggregation,
        "the pivot states do not travel with the K/V",
        "use one server for prefill and decode (--disaggregation-mode null)",
    ),
    *(
        Refusal(
            f"--{field.replace('_', '-')}",
            on_a_cpu(field),
            "SGLang's LoRA backends need a GPU (Triton kernels, pinned memory)",
            "merge the adapter into the model, or serve on a GPU",
        )
        for field in ("enable_lora", "lora_paths")
    ),
    Refusal(
        "--enable-memory-saver",
        on_a_cpu("enable_memory_saver"),
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
            ("moe_a2a_backend", moe_a2a_backend),
            ("enable_attn_tp_input_scattered", truthy("enable_attn_tp_input_scattered")),
            ("enable_layernorm_sp", truthy("enable_layernorm_sp")),
        )
    ),
    Refusal(
        "--enable-two-batch-overlap",
        truthy("enable_two_batch_overlap"),
        "the layers of two half batches run interleaved, without the hooks that capture the pivot "
        "states",
        DROP,
    ),
    # -- what a request would get ---------------------------------------------------------------
    Refusal(
        "--enable-return-hidden-states",
        given("enable_return_hidden_states"),
        "the hidden-state slot carries the pivot states",
        NO_SPECULATION,
    ),
    Refusal(
        "--return-hidden-states-mode",
        given("return_hidden_states_mode"),
        "the hidden-state slot carries the pivot states",
        NO_SPECULATION,
    ),
    Refusal(
        "--enable-mis",
        truthy("enable_mis"),
        "SGLang reads scores at chosen positions only without speculation",
        NO_SPECULATION,
    ),
    Refusal(
        "--enable-watermark",
        truthy("enable_watermark"),
        "the tokens that verify rows choose would carry no watermark",
        NO_SPECULATION,
    ),
    Refusal(
        "--enable-return-routed-experts",
        truthy("enable_return_routed_experts"),
        "SGLang's buffer for them has no room for verify rows",
        NO_SPECULATION,
    ),
    *(
        Refusal(
            name,
            environment_flag(name),
            "logits of verify rows are not looked at for NaN",
            "unset the variable, or serve without speculation",
        )
        for name in ("SGLANG_SANITIZE_NAN_LOGITS", "SGLANG_ENABLE_NAN_LOGITS_CHECK")
    ),
    Refusal(
        "--enable-strict-thinking",
        truthy("enable_strict_thinking"),
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
        truthy("rl_on_policy_target"),
        "its bf16 log-softmax law is not the one that verify rows are sampled from",
        NO_SPECULATION,
    ),
    # -- graphs ---------------------------------------------------------------------------------
    Refusal(
        "--enable-torch-compile",
        truthy("enable_torch_compile"),
        "pivot states are captured by module hooks",
        DROP,
    ),
    Refusal(
        "--cuda-graph-backend-prefill",
        given("cuda_graph_backend_prefill", "disabled"),
        "a replayed prefill runs without the hooks that capture the pivot states",
        "drop the option; decode graphs are used",
    ),
    Refusal(
        "--cuda-graph-config (prefill.backend)",
        graph_backend("prefill", "disabled"),
        "a replayed prefill runs without the hooks that capture the pivot states",
        'leave "prefill" out; decode graphs are used',
    ),
    Refusal(
        "--cuda-graph-backend-decode",
        graph_backend("decode", "full", "disabled"),
        "its segments hand outputs over by request, and a verify pass has several rows of each",
        "use full (the default) or disabled",
    ),
    Refusal(
        "--attention-backend",
        attention_backend,
        "its verify metadata has not been checked with DLITE",
        f"use one of {', '.join(CUDA_ATTENTION)}",
    ),
    Refusal(
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        environment_flag("SGLANG_ENABLE_METADATA_GLUE_GRAPH"),
        "its frozen plans would be stale at the next verify pass",
        "unset the variable",
    ),
    # -- speculation ----------------------------------------------------------------------------
    Refusal(
        "--speculative-num-steps",
        given("speculative_num_steps", 1),
        "a block is one step",
        "drop the option and choose --speculative-num-draft-tokens",
    ),
    Refusal(
        "--speculative-eagle-topk",
        given("speculative_eagle_topk", 1),
        "a block is one chain, not a tree",
        DROP,
    ),
    Refusal(
        "--speculative-adaptive",
        adaptive_with_lora,
        "the adapters' segments in decode graphs are made for one width",
        "drop the option and choose --speculative-num-draft-tokens, or merge the adapter",
    ),
    Refusal(
        "--speculative-adaptive",
        adaptive_with_rejection,
        "rejection sampling needs drawn drafts for every request, and adaptive width skips some",
        "drop --speculative-use-rejection-sampling; the output law is the target's either way",
    ),
    *(
        Refusal(f"--{field.replace('_', '-')}", given(field, 1.0), "acceptance is exact", DROP)
        for field in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    ),
    *(
        Refusal(f"--{field.replace('_', '-')}", given(field), reason, DROP)
        for field, reason in (
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
            changed(field),
            "it is another algorithm's option",
            DROP,
        )
        for field in OTHER_ALGORITHMS
    ),
    Refusal(
        "SGLANG_SIMULATE_ACC_LEN",
        simulated_acceptance,
        "simulated acceptance would break the output",
        "unset the variable",
    ),
)
