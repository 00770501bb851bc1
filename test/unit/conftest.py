from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Upstream's sampler on its torch backend, without a server around it."""
    from sglang.srt.layers import sampler as module

    backend = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(module, "get_exec", lambda: backend)
    sampler = module.Sampler.__new__(module.Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = None
    sampler.use_log_softmax_logprob = sampler.use_ascend_backend = False
    sampler.enable_deterministic = True  # torch's softmax; upstream's own kernel is CUDA's
    return sampler


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for upstream's hash, which is a CUDA kernel: same arguments, shape and dtype."""

    def hashed(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        assert seed.shape == positions.shape and seed.dim() == columns.dim() == 1
        rows = [
            [hash((int(s), int(p), int(c))) % 2**32 for c in columns]
            for s, p in zip(seed, positions, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), len(columns)).to(torch.uint32)

    for user in ("sglang.srt.layers.sampler", "sglang_dlite.speculative.rejection"):
        monkeypatch.setattr(f"{user}.murmur_hash32", hashed)
