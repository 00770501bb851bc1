"""`provenance.json` beside exported weights: what they were made with and what they reach."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dlite.training.anchors import Reply
from sglang_dlite.training.config import TrainConfig
from sglang_dlite.training.dataset import Description, fingerprint
from sglang_dlite.training.storage import write_json


def write_provenance(
    export: Path, config: TrainConfig, replies: Sequence[Reply], metrics: dict[str, Any]
) -> None:
    """Command, settings, versions, data with hashes, and metrics. Atomic."""
    counts: dict[str, dict[str, int]] = {}
    for reply in replies:
        entry = counts.setdefault(reply.source, {"replies": 0, "tokens": 0})
        entry["replies"] += 1
        entry["tokens"] += reply.length
    folders = [Path(folder) for folder in config.data.replies]
    names = ("sglang-dlite", "sglang", "torch", "transformers", "safetensors", "numpy")
    value = {
        "command": ["sglang-dlite", *sys.argv[1:]],
        "config": config.to_dict(),
        "versions": {name: version(name) for name in names},
        "data": {
            "sources": counts,
            "sha256": _shard_hashes(folders),
            "generated_by": [run for f in folders for run in Description.read(f).provenance],
        },
        "metrics": metrics,
    }
    write_json(export / "provenance.json", without_folders(value))


def _shard_hashes(folders: Sequence[Path]) -> dict[str, str]:
    """sha256 by shard, each under a name of its own: shards of all folders are called alike."""
    hashes: dict[str, str] = {}
    for folder in folders:
        name = without_folders(str(folder))
        for path, digest in fingerprint([folder]).items():
            shard, number = f"{name}/{Path(path).name}", 1
            while shard in hashes:
                number += 1
                shard = f"{name} ({number})/{Path(path).name}"
            hashes[shard] = digest
    return hashes


def read_metrics(export: Path) -> dict[str, Any]:
    """The metrics of an exported drafter or a trained teacher; none where it has no provenance."""
    path = export / "provenance.json"
    return dict(json.loads(path.read_text())["metrics"]) if path.exists() else {}


_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^/\s:,\]]+/)+")


def without_folders(value: Any) -> Any:
    """A JSON value with absolute folders shortened: they are a machine's, not the result's."""
    if isinstance(value, str):
        return _FOLDERS.sub(".../", value)
    if isinstance(value, dict):
        return {without_folders(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    return value
