"""A drafter for the server that drafts as always and writes down what it saw and said.

It enters the scheduler process through DLITE_DRAFTER_FACTORY=parity_probe:make.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from sglang_dlite.drafter import DraftBlock, load_drafter

FOLDER_VARIABLE = "DLITE_PARITY_FOLDER"


class Probe:
    def __init__(self, path: str, device: str, dtype: torch.dtype) -> None:
        self.drafter = load_drafter(path, device=device, dtype=dtype)
        self.config = self.drafter.config
        self.folder = Path(os.environ[FOLDER_VARIABLE])
        self.calls = 0

    def draft(self, pivot_states, token_group, embed) -> DraftBlock:
        block = self.drafter.draft(pivot_states, token_group, embed)
        if len(token_group):
            seen = {
                "states": pivot_states,
                "group": token_group,
                "tokens": block.token_ids,
                "logits": self.drafter.draft_logits(block.head_vectors),
            }
            seen = {name: tensor.clone().contiguous() for name, tensor in seen.items()}
            save_file(seen, str(self.folder / f"{self.calls:05d}.safetensors"))
            self.calls += 1
        return block


def make(path: str, device: str, dtype: torch.dtype) -> Probe:
    """The factory that DLITE_DRAFTER_FACTORY names."""
    return Probe(path, device, dtype)
