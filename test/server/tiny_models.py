"""Tiny random targets and drafters, written as checkpoint directories."""

from __future__ import annotations

from pathlib import Path

import torch

VOCAB_SIZE = 384
NUM_PRINTABLE = 94  # ids 0..93 are the characters '!' to '~'
MAX_POSITIONS = 1024
EOS_ID = VOCAB_SIZE - 1
NUM_LAYERS = 6
HIDDEN_SIZE = 64

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": 0,
}


def target_config(kind: str, **changes: object) -> object:
    """An HF config by model type, of the classes that DLITE serves, and of one that it refuses."""
    import transformers

    config_class = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "gemma2": transformers.Gemma2Config,
        "gemma3": transformers.Gemma3TextConfig,
    }[kind]
    extra: dict[str, object] = {
        "mistral": {"sliding_window": None},
        "qwen3": {"head_dim": 32},
        "qwen3_moe": {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
        "gemma2": {"head_dim": 32},
        # Upstream always ties; every third layer sees the whole context, the others 16 tokens.
        "gemma3": {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": True,
            "sliding_window": 16,
            "layer_types": [
                "full_attention" if i % 3 == 2 else "sliding_attention" for i in range(NUM_LAYERS)
            ],
        },
    }.get(kind, {})
    return config_class(**{**_SHAPE, **extra, **changes})


def make_target(path: Path, kind: str = "llama", seed: int = 0, **changes: object) -> Path:
    """A random fp32 target whose greedy text varies; returns `path`.

    It speaks printable ASCII and, now and then, its end-of-text token: every output is valid text
    of one character per token, so that stop strings and streamed text can be checked exactly.
    """
    import transformers

    # Gemma3 scales its embeddings by sqrt(h) = 8, and normalises what each block adds.
    embedding_std = 0.1 if kind == "gemma3" else 1.0
    torch.manual_seed(seed)
    config = target_config(kind, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Large enough that attention and MLPs matter, so that text depends on history.
                parameter.normal_(0.0, embedding_std if "embed" in name else 0.25)
        if kind == "gemma3":
            # Tied embeddings echo the last token, unless the final norm turns the state.
            model.model.norm.weight.normal_(-1.0, 1.0)
        if not config.tie_word_embeddings:
            model.lm_head.weight[NUM_PRINTABLE : VOCAB_SIZE - 1] = 0.0
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def byte_tokenizer() -> object:
    """One token per byte, then padding tokens up to VOCAB_SIZE; the last is end-of-text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    for index in range(len(alphabet), VOCAB_SIZE):
        vocabulary[f"<x{index}>"] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=f"<x{VOCAB_SIZE - 1}>",
        pad_token="<x256>",
        chat_template="{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}",
    )


def make_drafter(path: Path, seed: int = 1, **changes: object) -> Path:
    """A random drafter for `make_target`'s shape; returns `path`."""
    from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, save_drafter

    layer_ids = changes.pop("target_layer_ids", (0, 2, 3, NUM_LAYERS - 1))
    group = changes.pop("anchor_group_size", 2)
    fields = {
        "architectures": ["DLiteDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 1,
        "num_target_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 8,
        "attention_bias": False,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "dlite_config": {
            "architecture_version": "dlite_v2" if group > 1 else "dlite_v1",
            "model_role": "pivot_q_student",
            "anchor_group_size": group,
            "chs_num_layers": len(layer_ids),
            "target_layer_ids": list(layer_ids),
            "sequential_head": "rnn",
            "sequential_rank": 16,
            "mask_token_id": VOCAB_SIZE - 2,
        },
    }
    fields["dlite_config"] |= changes.pop("dlite_config", {})
    torch.manual_seed(seed)
    drafter = DLiteDrafter(DLiteConfig.from_dict({**fields, **changes}))
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.2)
    save_drafter(drafter, path)
    return path
