"""Memory by arithmetic: K/V bytes per token of target and drafter, and how many sessions fit."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dlite.bench.arms import Arm, cached_snapshot, resolve_drafter
from sglang_dlite.bench.config import BenchConfig

SESSION_LENGTHS = (32 * 1024, 128 * 1024)
_BYTES = 2  # bf16 and fp16, which K/V and weights are kept in
_GIB = 1024**3


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    """K and V of one token: 2 x layers x KV heads x head size x 2 bytes."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * _BYTES)


def dlite_state_bytes(config: dict[str, Any]) -> int:
    """What a DLITE request holds beyond its target K/V: S pivot states, and the block's ids.

    The pivot states live inside one step only; they are counted as if they stayed.
    """
    selected = config.get("num_pivot_states") or len(config["dlite_config"]["target_layer_ids"])
    return int(selected) * config["hidden_size"] * _BYTES + config["block_size"] * 8


@dataclass(frozen=True)
class Memory:
    """What one method needs; None where a config or size is not at hand."""

    arm: str
    target_kv: int  # bytes per token
    draft_kv: int  # bytes per token
    state: int  # bytes per request
    drafter_bytes: int | None
    sessions: dict[int, int | None]  # length -> how many fit
    source: str  # of the shape that tells the methods apart


def _weight_bytes(folder: Path | None) -> int | None:
    if folder is None:
        return None
    sizes = [f.stat().st_size for f in folder.glob("*.safetensors")]
    return sum(sizes) or None


def memory_of(config: BenchConfig, arm: Arm) -> Memory | str:
    """The arithmetic for one arm, or why it cannot be made."""
    try:
        return _reckon(config, arm)
    except KeyError as error:
        return f"the configuration of a model has no field {error}"


def _reckon(config: BenchConfig, arm: Arm) -> Memory | str:
    spec = arm.spec
    folder = cached_snapshot(arm.target)
    target, source = _shape(folder, config.target_shape)
    if target is None:
        return f"no config.json of {arm.target} on this machine"
    weights = _weight_bytes(folder) or _gb(config.assumed.target_gb)
    target_kv = kv_bytes_per_token(target)
    draft_kv, state, drafter_bytes = 0, 0, 0 if spec.drafter is None else _gb(spec.drafter_gb)
    if spec.drafter is not None:
        folder = cached_snapshot(resolve_drafter(spec.drafter))
        drafter, source = _shape(folder, spec.shape)
        if drafter is None:
            return f"no config.json of {spec.drafter} on this machine"
        drafter_bytes = _weight_bytes(folder) or drafter_bytes
        if spec.algorithm == "DLITE":
            state = dlite_state_bytes(drafter)
        else:
            draft_kv = kv_bytes_per_token(drafter)
    sessions: dict[int, int | None] = {}
    for length in SESSION_LENGTHS:
        if weights is None or drafter_bytes is None:
            sessions[length] = None
            continue
        free = config.memory_gib * _GIB - weights - drafter_bytes
        sessions[length] = max(0, int(free // (length * (target_kv + draft_kv) + state)))
    return Memory(arm.name, target_kv, draft_kv, state, drafter_bytes, sessions, source)


def _shape(
    folder: Path | None, declared: dict[str, int] | None
) -> tuple[dict[str, Any] | None, str]:
    """A model's dimensions, and where they come from."""
    if folder is None:
        return declared, "the benchmark's configuration"
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values.get("text_config", values), "config.json"


def _gb(size: float | None) -> int | None:
    return None if size is None else int(size * 1e9)
