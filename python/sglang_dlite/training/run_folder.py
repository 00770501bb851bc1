"""Models in a run's folder: drafters in the official format, teachers beside their window."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, HistoryAwareDrafter, save_drafter
from sglang_dlite.drafter.checkpoint import load_drafter
from sglang_dlite.training.config import TrainConfigError
from sglang_dlite.training.storage import StorageError, write_atomically, write_json

_TEACHER_CONFIG, _TEACHER_WEIGHTS = "teacher.json", "teacher.safetensors"


def copy_for_serving(
    model: DLiteDrafter, weights: Mapping[str, Tensor] | None = None
) -> DLiteDrafter:
    """A frozen bf16 copy, on the same device; `weights` instead of the model's own, if given."""
    with torch.device("meta"):
        copy = new_like(model)
    source = model.state_dict() if weights is None else weights
    copy.load_state_dict(
        {name: value.detach().bfloat16() for name, value in source.items()}, assign=True
    )
    return copy.to(model.norm.weight.device).requires_grad_(False).eval()


def new_like(model: DLiteDrafter) -> DLiteDrafter:
    """A fresh model of the same kind and shape."""
    if isinstance(model, HistoryAwareDrafter):
        return HistoryAwareDrafter(model.config, model.window)
    return DLiteDrafter(model.config)


def save_model(model: DLiteDrafter, folder: Path) -> None:
    """A drafter in the official format, a teacher as `teacher.json` and its weights.

    Raises `StorageError` where the disk refuses; what was there is intact.
    """
    if not isinstance(model, HistoryAwareDrafter):
        try:
            save_drafter(model, folder)
        except OSError as error:
            raise StorageError(
                f"cannot write {folder}: {error}. Free some space and run the same command again."
            ) from error
        return
    weights = save({n: t.detach().cpu().contiguous() for n, t in model.state_dict().items()})
    write_atomically(folder / _TEACHER_WEIGHTS, lambda file: file.write(weights))
    value = {"window": model.window, "drafter": model.config.to_dict()}
    write_json(folder / _TEACHER_CONFIG, value)


def is_teacher(folder: Path) -> bool:
    return (folder / _TEACHER_CONFIG).exists()


def load_teacher(folder: Path, dtype: torch.dtype | None = None) -> HistoryAwareDrafter:
    """A teacher that `save_model` wrote. Raises `TrainConfigError` where there is none."""
    try:
        value: dict[str, Any] = json.loads((folder / _TEACHER_CONFIG).read_text())
        weights = load_file(folder / _TEACHER_WEIGHTS)
    except OSError as error:
        raise TrainConfigError(
            f"{folder} holds no teacher ({error.strerror or error}): give the folder with "
            f"{_TEACHER_CONFIG} and {_TEACHER_WEIGHTS}, <run.folder>/teacher/best"
        ) from error
    with torch.device("meta"):
        teacher = HistoryAwareDrafter(DLiteConfig.from_dict(value["drafter"]), value["window"])
    teacher.load_state_dict({name: t.to(dtype) for name, t in weights.items()}, assign=True)
    return teacher.to("cpu").requires_grad_(False).eval()


def load_any(folder: Path) -> DLiteDrafter:
    """The drafter or the teacher in a folder."""
    return load_teacher(folder) if is_teacher(folder) else load_drafter(folder)
