"""The configuration of a DLite drafter, read from and written to the official `config.json`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ARCHITECTURE = "DLiteDraftModel"
ARCHITECTURE_VERSIONS = ("dlite_v1", "dlite_v2")
MODEL_ROLES = ("pivot_q_student",)
SEQUENTIAL_HEADS = ("rnn",)

# Fields that config.json keeps in its "dlite_config" object, all others are at its top level.
_DLITE_FIELDS = (
    "architecture_version",
    "model_role",
    "anchor_group_size",
    "target_layer_ids",
    "sequential_head",
    "sequential_rank",
    "mask_token_id",
)
_POSITIVE_INTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_target_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "anchor_group_size",
    "sequential_rank",
)


class DrafterConfigError(ValueError):
    """A drafter configuration is absent, unreadable or holds a value that cannot be served."""


def _fail(field: str, value: object, allowed: str) -> DrafterConfigError:
    name = f"dlite_config.{field}" if field in _DLITE_FIELDS else field
    return DrafterConfigError(f"drafter config: {name} = {value!r}: must be {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class DLiteConfig:
    """Shape and constants of one drafter. Symbols as in the design: D, L, B, K, S, G, R.

    Checks itself: `DrafterConfigError` names the field, its value and what is allowed.
    """

    hidden_size: int  # h, equal to the target's
    num_hidden_layers: int  # D, layers of the drafter
    num_target_layers: int  # L, layers of the target
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # V
    rms_norm_eps: float
    rope_theta: float
    block_size: int  # B, anchor included
    architecture_version: str
    model_role: str
    anchor_group_size: int  # G, real tokens given as queries, the last one is the anchor
    target_layer_ids: tuple[int, ...]  # zero-based target layers, in the order of the pivot states
    sequential_head: str
    sequential_rank: int  # R
    mask_token_id: int

    @property
    def num_drafts(self) -> int:
        """K, the tokens drafted per block."""
        return self.block_size - 1

    @property
    def num_pivot_states(self) -> int:
        """S, the target layer outputs that condition the drafter; `chs_num_layers` in JSON."""
        return len(self.target_layer_ids)

    def __post_init__(self) -> None:
        for name in _POSITIVE_INTS:
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise _fail(name, value, "an integer >= 1")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _fail(name, value, "a finite number > 0")
            if not (0 < value <= sys.float_info.max):
                raise _fail(name, value, "a finite number > 0")
            object.__setattr__(self, name, float(value))
        if not _is_int(self.block_size) or self.block_size < 2:
            raise _fail("block_size", self.block_size, "an integer >= 2 (the anchor and a draft)")
        if self.head_dim % 2:
            raise _fail("head_dim", self.head_dim, "even (RoPE rotates pairs)")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _fail(
                "num_attention_heads",
                self.num_attention_heads,
                f"a multiple of num_key_value_heads = {self.num_key_value_heads}",
            )
        for name, allowed in (
            ("architecture_version", ARCHITECTURE_VERSIONS),
            ("model_role", MODEL_ROLES),
            ("sequential_head", SEQUENTIAL_HEADS),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise _fail(name, value, " or ".join(map(repr, allowed)))
        if not _is_int(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise _fail(
                "mask_token_id", self.mask_token_id, f"an integer in [0, {self.vocab_size - 1}]"
            )
        self._check_layer_ids()

    def _check_layer_ids(self) -> None:
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        allowed = f"a non-empty list of distinct integers in [0, {last}]"
        if not isinstance(ids, list | tuple) or not ids:
            raise _fail("target_layer_ids", ids, allowed)
        for layer_id in ids:
            if not _is_int(layer_id) or not 0 <= layer_id <= last:
                raise _fail("target_layer_ids", ids, f"{allowed}; {layer_id!r} is not")
        duplicates = sorted({i for i in ids if ids.count(i) > 1})
        if duplicates:
            raise _fail("target_layer_ids", ids, f"{allowed}; repeated: {duplicates}")
        object.__setattr__(self, "target_layer_ids", tuple(ids))

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> DLiteConfig:
        """Read `<path>/config.json`. Raises `DrafterConfigError` where that is no DLite config."""
        file = Path(path) / "config.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise DrafterConfigError(
                f"cannot read {file}: {error.strerror or error}. "
                "Give the local folder of a DLite checkpoint (config.json and model.safetensors)."
            ) from error
        except ValueError as error:
            raise DrafterConfigError(f"{file} is not valid JSON: {error}") from error
        try:
            return cls.from_dict(data)
        except DrafterConfigError as error:
            raise DrafterConfigError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DLiteConfig:
        """Build from the parsed official `config.json`. Keys the drafter does not use are ignored.

        Raises `DrafterConfigError` for missing, mistyped, out-of-range or contradicting values.
        """
        if not isinstance(data, dict):
            raise DrafterConfigError(f"drafter config: must be a JSON object, not {data!r}")
        dlite = data.get("dlite_config")
        if not isinstance(dlite, dict):
            raise DrafterConfigError(
                f"drafter config: dlite_config = {dlite!r}: must be an object. "
                "Without it this is no DLite drafter; was the target model given by mistake?"
            )
        architectures = data.get("architectures", [ARCHITECTURE])
        if not isinstance(architectures, list) or ARCHITECTURE not in architectures:
            raise _fail("architectures", architectures, f"{[ARCHITECTURE]!r}")
        if data.get("hidden_act", "silu") != "silu":
            raise _fail("hidden_act", data["hidden_act"], "'silu'")
        if data.get("attention_bias", False) is not False:
            raise _fail("attention_bias", data["attention_bias"], "false")

        found: dict[str, Any] = {"rope_theta": _read_rope_theta(data)}
        missing = []
        for name in (f.name for f in fields(cls) if f.name != "rope_theta"):
            source = dlite if name in _DLITE_FIELDS else data
            if name in source:
                found[name] = source[name]
            else:
                missing.append(f"dlite_config.{name}" if source is dlite else name)
        if found["rope_theta"] is None:
            missing.append("rope_theta")
        if "chs_num_layers" not in dlite:
            missing.append("dlite_config.chs_num_layers")
        if missing:
            raise DrafterConfigError(f"drafter config: missing field(s): {', '.join(missing)}")
        config = cls(**found)
        count = dlite["chs_num_layers"]
        if not _is_int(count) or count != config.num_pivot_states:
            raise _fail(
                "chs_num_layers",
                count,
                f"{config.num_pivot_states}, the length of target_layer_ids",
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """The official `config.json`, which transformers' AutoConfig reads as a Qwen3 config."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_target_layers": self.num_target_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "block_size": self.block_size,
            "attention_bias": False,
            "hidden_act": "silu",
            # Meaningless to the drafter: its positions are below G+B at any context length.
            "max_position_embeddings": 4096,
            "dlite_config": {
                "architecture_version": self.architecture_version,
                "model_role": self.model_role,
                "anchor_group_size": self.anchor_group_size,
                "chs_num_layers": self.num_pivot_states,
                "target_layer_ids": list(self.target_layer_ids),
                "sequential_head": self.sequential_head,
                "sequential_rank": self.sequential_rank,
                "mask_token_id": self.mask_token_id,
            },
        }


def _read_rope_theta(data: dict[str, Any]) -> Any:
    """`rope_theta` from its old place (top level) or the new one (`rope_parameters`); else None.

    Positions are constant and tiny, so long-context scaling would not pay. A scaled type changes
    even small angles, however, and is refused rather than ignored.
    """
    theta = data.get("rope_theta")
    for key in ("rope_parameters", "rope_scaling"):
        rope = data.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _fail(key, rope, "an object or null")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise _fail(
                f"{key}.rope_type",
                rope_type,
                "'default': the drafter's positions are constant and tiny, it needs no scaling",
            )
        nested = rope.get("rope_theta")
        if nested is not None and theta is not None and nested != theta:
            raise _fail(
                f"{key}.rope_theta", nested, f"equal to the rope_theta given elsewhere, {theta!r}"
            )
        theta = nested if theta is None else theta
    return theta
