"""A run's `checkpoint.pt`: the latest state, to resume from or to start another run with."""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from sglang_dlite.training.config import TrainConfigError
from sglang_dlite.training.identity import as_kept_now
from sglang_dlite.training.storage import write_atomically

_FILE = "checkpoint.pt"


def has_checkpoint(folder: Path) -> bool:
    return (folder / _FILE).exists()


def write_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replace the folder's checkpoint atomically. Raises `StorageError`, leaving the old one."""
    write_atomically(folder / _FILE, lambda file: torch.save(state, file))


def read_checkpoint(folder: Path, device: torch.device) -> dict[str, Any]:
    """The state that `write_checkpoint` wrote. Raises `TrainConfigError` for a damaged file."""
    path = folder / _FILE
    try:
        return torch.load(path, weights_only=True, map_location=device)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise TrainConfigError(
            f"cannot read {path}: {error}. It is damaged; remove it and start anew, or set "
            "run.init_from to <run.folder>/best in a new run.folder"
        ) from error


def require_same_settings(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `TrainConfigError` naming what differs between the checkpoint's settings and ours."""
    before = as_kept_now(before, now)
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        changes = "; ".join(f"{k} was {before.get(k)!r}, is {now[k]!r}" for k in differing)
        raise TrainConfigError(
            f"{folder / _FILE} was made with other settings: {changes}. Set run.folder to a new "
            "folder, or restore the settings; run.init_from goes on from that run with new ones."
        )
