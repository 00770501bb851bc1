from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_dlite.drafter import DLiteConfig

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(params=["g1", "g2"])
def golden(request: pytest.FixtureRequest) -> Path:
    """Folder of one set of reference vectors; skips where the checkout has none beside it."""
    folder = SHARED / "golden" / request.param
    if not folder.is_dir():
        pytest.skip(f"no reference vectors at {folder}")
    return folder


@pytest.fixture(scope="session")
def make_drafter_config() -> Callable[..., DLiteConfig]:
    """A tiny valid DLiteConfig; keyword arguments replace fields."""

    def make(**changes: Any) -> DLiteConfig:
        values: dict[str, Any] = {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_target_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 24,
            "vocab_size": 50,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "block_size": 5,
            "architecture_version": "dlite_v1",
            "model_role": "pivot_q_student",
            "anchor_group_size": 1,
            "target_layer_ids": (0, 2, 5),
            "sequential_head": "rnn",
            "sequential_rank": 7,
            "mask_token_id": 49,
        }
        return DLiteConfig(**(values | changes))

    return make
