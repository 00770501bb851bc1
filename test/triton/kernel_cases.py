"""Shapes and inputs that the tests of the Triton kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.drafter.backbone import build_constants
from torch import Tensor


@dataclass(frozen=True)
class Size:
    """The shapes of one drafter that its kernels see; V is cut (its rows are independent)."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    slots: int
    group: int
    drafts: int
    rank: int
    vocab: int

    @property
    def queries(self) -> int:
        return self.group + self.drafts

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def config(self, **changes: Any) -> DLiteConfig:
        values: dict[str, Any] = {
            "hidden_size": self.hidden,
            "num_hidden_layers": 2,
            "num_target_layers": 2 * self.slots,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "block_size": self.drafts + 1,
            "architecture_version": "dlite_v1",
            "model_role": "pivot_q_student",
            "anchor_group_size": self.group,
            "target_layer_ids": tuple(range(0, 2 * self.slots, 2)),
            "sequential_head": "rnn",
            "sequential_rank": self.rank,
            "mask_token_id": self.vocab - 1,
        }
        return DLiteConfig(**(values | changes))


SIZES = {
    "4b": Size(2560, 32, 8, 128, 9728, 14, 1, 7, 256, 1000),
    "8b": Size(4096, 32, 8, 128, 12288, 14, 1, 7, 320, 1000),
    "odd": Size(17, 6, 2, 10, 29, 3, 2, 4, 7, 131),
    "one-head": Size(48, 1, 1, 48, 33, 1, 1, 1, 40, 128),
    "wide-group": Size(96, 14, 1, 6, 50, 5, 4, 9, 33, 127),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALL_DTYPES = DTYPES | {"fp16": torch.float16}  # for the checks of everything at once


def filled(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(hash(shape) % 1000 + seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def attention_inputs(size: Size, n: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of `plan_attention`."""
    constants = build_constants(size.config())
    return (
        filled(n, size.queries, size.qkv_width, dtype=dtype),
        filled(n, size.slots, 2 * size.kv_heads * size.head_dim, dtype=dtype, seed=1),
        filled(size.head_dim, dtype=dtype, seed=2) + 1,
        filled(size.head_dim, dtype=dtype, seed=3) + 1,
        constants.key_cos,
        constants.key_sin,
        size.heads,
        size.kv_heads,
        1e-6,
    )


def recurrence_weights(size: Size, dtype: torch.dtype) -> dict[str, Tensor]:
    rank = size.rank
    return {
        "embedding": filled(size.vocab, rank, dtype=dtype),
        "state": filled(2 * rank, 2 * rank, dtype=dtype, scale=rank**-0.5),
        "bias": filled(2 * rank, dtype=dtype, scale=0.3),
        "mix": filled(rank, rank + size.hidden, dtype=dtype, scale=rank**-0.5),
        "output": filled(size.vocab, rank, dtype=dtype, seed=4, scale=rank**-0.5),
    }
