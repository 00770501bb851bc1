"""Start-up options through SGLang's own argument resolution: defaults and refusals, no server."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.speculative.drafter_files import read_drafter_config
from sglang_dlite.speculative.drafting import build_drafter, check_pair
from sglang_dlite.speculative.refusals import REFUSALS
from sglang_dlite.speculative.server_args import check_window

Resolve = Callable[..., Any]
CUDA = ("--device", "cuda", "--attention-backend", "triton")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_drafter(tmp_path_factory.mktemp("drafters") / "drafter")


@pytest.fixture
def resolve(target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """resolve(*options) -> the resolved arguments of a DLITE server on the CPU platform."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    # Resolution writes variables for the processes it would start.
    for name, value in dict(os.environ).items():
        monkeypatch.setenv(name, value)
    read_drafter_config.cache_clear()

    def call(*options: str, path: Path | None = drafter) -> Any:
        arguments = ["--model-path", str(target), "--speculative-algorithm", "DLITE"]
        if path is not None:
            arguments += ["--speculative-draft-model-path", str(path)]
        args = prepare_server_args([*arguments, "--dtype", "float32", *options])
        args.resolve_once()
        return SimpleNamespace(**args.resolved_dict())

    return call


def test_defaults(resolve: Resolve) -> None:
    args = resolve()
    assert args.speculative_num_draft_tokens == 8  # the drafter's block size
    assert args.speculative_num_steps == args.speculative_eagle_topk == 1


def test_the_name_is_case_insensitive_and_a_width_is_kept(resolve: Resolve) -> None:
    args = resolve("--speculative-algorithm", "dlite", "--speculative-num-draft-tokens", "3")
    assert args.speculative_num_draft_tokens == 3


def test_on_cuda_decode_graphs_are_on_and_prefill_graphs_off(resolve: Resolve) -> None:
    graphs = resolve(*CUDA).cuda_graph_config
    assert (graphs["decode"]["backend"], graphs["prefill"]["backend"]) == ("full", "disabled")


@pytest.mark.parametrize("width", ["1", "0", "9", "64"])
def test_a_width_outside_the_block(resolve: Resolve, width: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve("--speculative-num-draft-tokens", width)
    message = str(error.value)
    assert f"--speculative-num-draft-tokens = {width}" in message
    assert "2..8" in message and "Leave it out" in message


@pytest.mark.parametrize(
    "options,value",
    [
        (("--pp-size", "2"), "2"),
        (("--attn-dp-size", "2", "--tp-size", "2"), "2"),
        (("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"), "2"),
        (("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "all"), "True"),
        (
            ("--lora-paths", "name=path"),
            "[",
        ),
        (("--enable-memory-saver",), "True"),
        (("--enable-attn-tp-input-scattered",), "True"),
        (("--enable-layernorm-sp", "--tp-size", "2"), "True"),
        (("--disaggregation-mode", "prefill"), "'prefill'"),
        (("--enable-return-hidden-states",), "True"),
        (("--return-hidden-states-mode", "last"), "'last'"),
        (("--speculative-adaptive", "--speculative-use-rejection-sampling"), "True"),
        (("--speculative-adaptive-config", "config.json"), "'config.json'"),
        (("--speculative-token-map", "map.pt"), "'map.pt'"),
        (("--tokenizer-worker-num", "2"), "2"),
        (("--speculative-ngram-capacity", "99"), "99"),
        (("--speculative-dflash-block-size", "4"), "4"),
        (("--enable-torch-compile",), "True"),
        (("--enable-strict-thinking", "--reasoning-parser", "qwen3"), "True"),
        (("--grammar-backend", "outlines"), "'outlines'"),
        (("--speculative-num-steps", "5"), "5"),
        (("--speculative-eagle-topk", "4"), "4"),
        (("--speculative-accept-threshold-acc", "0.5"), "0.5"),
        (("--speculative-draft-window-size", "128"), "128"),
        (("--speculative-draft-window-size", "1"), "1"),
        (("--speculative-accept-threshold-single", "0"), "0.0"),
        (("--speculative-num-steps", "0"), "0"),
        (("--speculative-domino-candidate-pool-size", "0"), "0"),
        (("--uno-lora-path", "adapter"), "'adapter'"),
        (("--decoupled-spec-role", "verifier"), "'verifier'"),
        (("--dcp-size", "2", "--tp-size", "2"), "2"),
        (("--smg-grpc-mode",), "True"),
        (("--enable-return-routed-experts",), "True"),
        (("--cuda-graph-backend-prefill", "breakable"), "'breakable'"),
        (("--cuda-graph-config", '{"prefill":{"backend":"full"}}', *CUDA), "'full'"),
        (("--cuda-graph-backend-decode", "breakable", *CUDA), "'breakable'"),
        (("--attention-backend", "torch_native", "--device", "cuda"), "'torch_native'"),
    ],
)
def test_refused_options(resolve: Resolve, options: tuple[str, ...], value: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve(*options)
    message = str(error.value)
    assert options[0] in message and f" = {value}" in message and "is not supported" in message
    assert "DLITE" in message and "What to do: " in message


def test_every_speculative_option_is_served_or_refused() -> None:
    from sglang.srt.server_args import ServerArgs

    served = {
        "speculative_algorithm",
        "speculative_draft_model_path",
        "speculative_draft_model_revision",
        "speculative_num_draft_tokens",
        "speculative_use_rejection_sampling",
        "speculative_attention_mode",  # which of two attention backends verifies
        "speculative_boundary_reduction",  # no option of the command line
    }
    refused = {refusal.option.lstrip("-").replace("-", "_") for refusal in REFUSALS}
    # Refused by upstream: the first for all but its own algorithms, the other by itself.
    upstreams = {"speculative_use_block_verification", "speculative_draft_sink_size"}
    options = {name for name in vars(ServerArgs) if name.startswith("speculative_")}
    assert options - served - refused - upstreams == set()


def test_rejection_sampling_is_served(resolve: Resolve) -> None:
    assert resolve("--speculative-use-rejection-sampling").speculative_use_rejection_sampling


def test_no_seeds_on_a_cpu(resolve: Resolve) -> None:
    """Upstream's seeded sampling hashes on CUDA only; without its flag it ignores seeds."""
    with pytest.raises(ValueError, match=r"eterministic"):
        resolve("--enable-deterministic-inference")


@pytest.mark.parametrize(
    "option,fields",
    [
        ("--moe-a2a-backend", {"moe_a2a_backend": "deepep"}),
        ("--enable-two-batch-overlap", {"enable_two_batch_overlap": True}),
        ("--rl-on-policy-target", {"rl_on_policy_target": "fsdp"}),
        ("--enable-watermark", {"enable_watermark": True}),
        ("--enable-mis", {"enable_mis": True}),
    ],
)
def test_options_that_upstream_takes_on_a_gpu_only(option: str, fields: dict[str, Any]) -> None:
    (refusal,) = (refusal for refusal in REFUSALS if refusal.option == option)
    assert refusal.value(SimpleNamespace(device="cuda", **fields)) == next(iter(fields.values()))
    assert refusal.value(SimpleNamespace(device="cuda")) is None


def test_lora_is_refused_on_a_cpu_only() -> None:
    for refusal in REFUSALS:
        if refusal.option in ("--enable-lora", "--lora-paths"):
            given = {"enable_lora": True, "lora_paths": ["a=b"]}
            assert refusal.value(SimpleNamespace(device="cuda", **given)) is None
            assert refusal.value(SimpleNamespace(device="cpu", **given)) is not None


@pytest.mark.parametrize(
    "algorithm,words",
    [("DLITE", None), ("NGRAM", None), ("UNO", "LoRA is only compatible with")],
)
def test_lora_passes_upstreams_check(algorithm: str, words: str | None) -> None:
    from sglang.srt.arg_groups import lora_hook
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    args = ServerArgs(model_path="", speculative_algorithm=algorithm)
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        lora_hook.check_lora_speculative_compatibility(args)


@pytest.mark.parametrize("option", ["attention", "prefill_attention", "decode_attention"])
@pytest.mark.parametrize(
    "target,windowed", [("Gemma3ForCausalLM", True), ("Qwen3ForCausalLM", False)]
)
def test_flashinfer_meets_no_sliding_window(option: str, target: str, windowed: bool) -> None:
    """Upstream plans its verify passes without one: the block's later rows would see too much."""
    backends = {f"{option}_backend": "flashinfer"}
    check_window(SimpleNamespace(device="cpu", **backends), target)
    args = SimpleNamespace(device="cuda", **backends)
    with pytest.raises(ValueError, match="-backend triton") if windowed else nullcontext():
        check_window(args, target)
    check_window(SimpleNamespace(device="cuda", attention_backend="triton"), target)


def test_a_gemma3_server_on_flashinfer_is_refused(resolve: Resolve, tmp_path: Path) -> None:
    gemma = tiny_models.make_target(tmp_path / "gemma", "gemma3")
    options = ("--model-path", str(gemma), "--device", "cuda")
    with pytest.raises(ValueError, match=r"'flashinfer' is not supported .* sliding window"):
        resolve(*options, "--attention-backend", "flashinfer")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lora_never_meets_an_adaptive_width(device: str) -> None:
    """Its decode graphs are made for one width."""
    given = {"enable_lora": True, "_raw_input": {"speculative_adaptive": True}}
    args = SimpleNamespace(device=device, disaggregation_mode="null", **given)
    refused = {
        refusal.option
        for refusal in REFUSALS
        if refusal.option in ("--enable-lora", "--speculative-adaptive") and refusal.value(args)
    }
    assert refused


def test_prefill_graphs_are_off(resolve: Resolve) -> None:
    """A replayed prefill would run without the hooks that capture the pivot states."""
    assert resolve().disable_prefill_cuda_graph is True


@pytest.mark.parametrize(
    "architecture,reason",
    [("PhiForCausalLM", ""), ("Qwen3NextForCausalLM", r" \(a hybrid: .*\)")],
)
def test_an_unsupported_target_is_refused_before_it_is_read(
    resolve: Resolve, architecture: str, reason: str
) -> None:
    overrides = json.dumps({"architectures": [architecture]})
    with pytest.raises(
        ValueError, match=f"{architecture!r} is not supported{reason}; supported are "
    ):
        resolve("--json-model-override-args", overrides)


def test_the_target_is_checked_with_its_overrides(
    resolve: Resolve, target: Path, tmp_path: Path
) -> None:
    renamed = shutil.copytree(target, tmp_path / "renamed")
    config = json.loads((target / "config.json").read_text())
    (renamed / "config.json").write_text(json.dumps({**config, "architectures": ["MyLlama"]}))
    options = ("--model-path", str(renamed))
    with pytest.raises(ValueError, match="'MyLlama' is not supported"):
        resolve(*options)
    resolve(*options, "--json-model-override-args", '{"architectures": ["LlamaForCausalLM"]}')


def test_a_drafter_of_another_depth_is_refused_before_the_target_is_read(
    resolve: Resolve, tmp_path: Path
) -> None:
    deeper = tiny_models.make_drafter(tmp_path / "deeper", num_target_layers=9)
    with pytest.raises(ValueError, match=r"num_target_layers is 9, the target has 6"):
        resolve(path=deeper)


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_ENABLE_METADATA_GLUE_GRAPH",
        "SGLANG_RUST_SERVER",
        "SGLANG_SANITIZE_NAN_LOGITS",
        "SGLANG_ENABLE_NAN_LOGITS_CHECK",
    ],
)
def test_a_refused_variable(resolve: Resolve, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=rf"{name}.*unset"):
        resolve()


def test_mixed_chunks_need_a_small_token_group(resolve: Resolve, tmp_path: Path) -> None:
    wide = tiny_models.make_drafter(tmp_path / "g3", anchor_group_size=3)
    with pytest.raises(ValueError, match=r"--enable-mixed-chunk.*anchor_group_size = 3.*1 and 2"):
        resolve("--enable-mixed-chunk", path=wide)


def test_no_drafter(resolve: Resolve) -> None:
    with pytest.raises(ValueError, match=r"needs --speculative-draft-model-path"):
        resolve(path=None)


def test_a_drafter_that_is_not_there(
    resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = tmp_path / "no-such-drafter"
    with pytest.raises(ValueError) as error:
        resolve(path=missing)
    assert str(missing) in str(error.value)
    assert "--speculative-draft-model-path" in str(error.value)


def test_a_target_in_the_drafters_place(resolve: Resolve, target: Path) -> None:
    with pytest.raises(ValueError, match=r"dlite_config.*target model given by mistake"):
        resolve(path=target)


def test_a_drafter_of_another_architecture(resolve: Resolve, drafter: Path, tmp_path: Path) -> None:
    config = json.loads((drafter / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Eagle3Model"]}))
    with pytest.raises(ValueError, match=r"architectures.*Eagle3Model.*DLiteDraftModel"):
        resolve(path=tmp_path)


@pytest.mark.parametrize(
    "changes,rows,field",
    [
        ({"hidden_size": 32}, 50, "hidden_size"),
        ({"num_hidden_layers": 7}, 50, "num_target_layers"),
        ({"vocab_size": 51}, 64, "vocab_size"),
        ({"vocab_size": 40}, 49, "vocab_size"),
    ],
)
def test_a_drafter_of_another_target(
    make_drafter_config: Callable[..., DLiteConfig],
    changes: dict[str, int],
    rows: int,
    field: str,
) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 6, "vocab_size": 50} | changes
    with pytest.raises(ValueError) as error:
        check_pair(make_drafter_config(mask_token_id=3), SimpleNamespace(**shape), rows)
    message = str(error.value)
    assert field in message and "trained for this target" in message
    assert str(next(iter(changes.values()))) in message


@pytest.mark.parametrize("vocab_size,rows", [(50, 50), (50, 64), (48, 50), (48, 64)])
def test_padded_vocabularies_are_allowed(
    make_drafter_config: Callable[..., DLiteConfig], vocab_size: int, rows: int
) -> None:
    """The target's table is padded past its tokens, or the drafter's head is."""
    shape = {"hidden_size": 16, "num_hidden_layers": 6, "vocab_size": vocab_size}
    check_pair(make_drafter_config(), SimpleNamespace(**shape), rows)


def test_a_mask_token_without_an_embedding_row(
    make_drafter_config: Callable[..., DLiteConfig],
) -> None:
    shape = SimpleNamespace(hidden_size=16, num_hidden_layers=6, vocab_size=50)
    with pytest.raises(ValueError, match=r"mask_token_id is 49.*48 rows"):
        check_pair(make_drafter_config(mask_token_id=49), shape, 48)


def test_a_factory_that_cannot_be_imported(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("DLITE_DRAFTER_FACTORY", "no_such_module:make")
    with pytest.raises(ValueError, match=r"DLITE_DRAFTER_FACTORY.*no_such_module.*module:function"):
        build_drafter(str(drafter), None, "cpu", torch.float32)
