"""What a checkpoint must agree on to be continued: all that changes the weights' path or scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from torch import Tensor

from sglang_dlite.training.config import TrainConfig
from sglang_dlite.training.schedule import Stage
from sglang_dlite.training.targets import FrozenTarget


def run_identity(
    config: TrainConfig,
    name: str,
    stages: Sequence[Stage],
    target: FrozenTarget,
    content: dict[str, Any],
) -> dict[str, Any]:
    """Of the trainer `name`, as JSON has it; content: digests of what the config only names."""
    data = asdict(config.data)
    for key in ("replies", "cache", "cached_layer_ids"):  # where, not what
        del data[key]
    value = {
        # Not its name: a fine-tuned copy may have the same one, and a copy elsewhere another.
        "target": {
            "weights": target.fingerprint,
            "dtype": config.target.dtype,
            **asdict(target.shape),
        },
        "model": asdict(config.model),
        "loss": asdict(config.teacher_loss if name == "teacher" else config.loss),
        "distill": asdict(config.distill),
        "optim": asdict(config.optim),
        "stages": [asdict(stage) for stage in stages],
        "stages.unit": "minutes" if config.stages.unit == "minutes" else "steps",
        "bf16": config.run.bf16,
        "compile": config.run.compile,
        "data": data,
        **content,
    }
    return json.loads(json.dumps(value))


def as_kept_now(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's identity to compare with ours. Older ones have the target's name instead of
    its weights, which are then not compared."""
    target = dict(before["target"])
    if target.pop("name", None) is not None:
        target["weights"] = now["target"]["weights"]
    return before | {"target": target}


def digest_of_texts(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def digest_of_places(places: Sequence[np.ndarray]) -> str:
    """Which anchors there are, by reply."""
    found = hashlib.sha256()
    for some in places:
        found.update(np.array([len(some), *some], dtype=np.int64).tobytes())
    return found.hexdigest()


def digest_of_weights(state: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().float().contiguous().numpy().data)
    return found.hexdigest()
