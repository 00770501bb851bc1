"""What is kept of a step whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_dlite.training.anchors import AnchorBatch, Pick, Reply
from sglang_dlite.training.storage import StorageError, write_atomically


class TrainingDiverged(RuntimeError):
    """A loss or gradient is not finite; the message names the file that holds the batch."""


def keep_evidence(
    path: Path,
    step: int,
    loss: float,
    norm: float,
    picks: Sequence[Pick],
    replies: Sequence[Reply],
    batch: AnchorBatch | None,
) -> str:
    """Write a step's anchors and this process's last batch; returns a sentence that says where."""
    tensors = None if batch is None else {
        **{name: getattr(batch, name) for name in AnchorBatch._fields},
        "law": tuple(batch.law),  # plain tuples: torch.load reads them without our classes
        "window": batch.window and tuple(batch.window),
    }  # fmt: skip
    report = {
        "step": step,
        "loss": loss,
        "norm": norm,
        "picks": [(replies[pick.reply].id, pick.places.tolist()) for pick in picks],
        "batch": tensors,
    }
    try:
        write_atomically(path, lambda file: torch.save(report, file))
    except StorageError as error:
        return f"The batch could not be saved: {error}"
    return f"The step's replies and its last batch are in {path}."
