"""A tiny random Qwen3 and a drafter that is right about it now and then; imports no sglang.

The target mostly follows a random table (token -> next token) that its embedding and output
matrices share; attention and MLPs make it stray from the table, by history. The drafter's head
holds the same table, disturbed by its backbone, so that drafts depend on the pivot states too.
Acceptance is then neither nothing nor everything, and a wrong state shows in it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, save_drafter

VOCAB, HIDDEN, LAYERS, RANK = 512, 256, 4, 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
BLOCK_SIZE = 6
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2  # in 16 bits
STRAY, DISTURB = 0.018, 0.12  # 3 of 5 drafts are right; it strays from the table in half the texts


def make_pair(folder: Path, dtype: torch.dtype) -> tuple[Path, Path]:
    """Write both checkpoints under `folder` -> (target, drafter)."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(VOCAB, generator=generator)  # [V]
    return (
        _make_target(folder / "target", table, generator, dtype),
        _make_drafter(folder / "drafter", table, generator, dtype),
    )


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def _make_target(path: Path, table: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Path:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCAB - 1,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(_normal(generator, *parameter.shape) * STRAY * 4)
        embedding = _normal(generator, VOCAB, HIDDEN)
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight[table] = embedding / HIDDEN**0.5
    model.to(dtype).save_pretrained(path)
    return path


def _make_drafter(
    path: Path, table: Tensor, generator: torch.Generator, dtype: torch.dtype
) -> Path:
    config = DLiteConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_target_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=HIDDEN,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        block_size=BLOCK_SIZE,
        architecture_version="dlite_v2",
        model_role="pivot_q_student",
        anchor_group_size=2,
        target_layer_ids=(0, 1, LAYERS - 1),
        sequential_head="rnn",
        sequential_rank=RANK,
        mask_token_id=VOCAB - 2,
    )
    drafter = DLiteDrafter(config)
    head = drafter.sequential_head
    codes = _normal(generator, VOCAB, RANK).sign()  # [V, R]
    identity = torch.eye(RANK)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.copy_(_normal(generator, *parameter.shape) * 0.1)
        # The gate forgets, the candidate is the previous token's code, u_k adds the backbone.
        head.state_proj.weight.zero_()
        head.state_proj.weight[RANK:, RANK:] = 3 * identity
        head.state_proj.bias.zero_()
        head.state_proj.bias[:RANK] = -20
        head.prev_token_embedding.weight.copy_(codes)
        head.state_hidden_mlp.weight[:, :RANK] = identity
        head.state_hidden_mlp.weight[:, RANK:] = _normal(generator, RANK, HIDDEN) * DISTURB
        head.state_hidden_mlp.bias.zero_()
        head.output_proj.weight[table] = codes
    save_drafter(drafter.to(dtype), path)
    return path
