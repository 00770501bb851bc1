"""The DLite drafter: config, model and checkpoint I/O.

The only definition of the model, for training and serving alike. Depends on torch, safetensors and
the standard library only.
"""

from __future__ import annotations

from sglang_dlite.drafter.checkpoint import CheckpointError, load_drafter, save_drafter
from sglang_dlite.drafter.config import DLiteConfig, DrafterConfigError
from sglang_dlite.drafter.history import HistoryAwareDrafter, HistoryWindow
from sglang_dlite.drafter.model import DLiteDrafter, DraftBlock
from sglang_dlite.drafter.sampling import temperature_law

__all__ = [
    "CheckpointError",
    "DLiteConfig",
    "DLiteDrafter",
    "DraftBlock",
    "DrafterConfigError",
    "HistoryAwareDrafter",
    "HistoryWindow",
    "load_drafter",
    "save_drafter",
    "temperature_law",
]
