"""A drafter that knows the future: it replays recorded continuations.

It recognises where a request stands by its pivot state (the final-norm state of the pivot, nearest
recorded one), so that a wrong pivot row, a stale state or a mixed-up request shows at once as lost
acceptance. It enters the scheduler process through DLITE_DRAFTER_FACTORY=oracle:make.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang_dlite.drafter import DLiteConfig, DraftBlock

TABLE_VARIABLE = "DLITE_ORACLE_TABLE"
PATTERN_VARIABLE = "DLITE_ORACLE_PATTERN"
TOLERANCE = 1e-3  # states of the same prefix differ by rounding only; others by whole units


def record(
    path: Path, target_dir: Path, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]
) -> Path:
    """Write the table: final-norm states and following tokens of prompt + output sequences."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    states, following, steps = [], [], []
    width = 16
    for ids, prompt_len in zip(sequences, prompt_lens, strict=True):
        with torch.no_grad():
            hidden = model.model(torch.tensor([list(ids)])).last_hidden_state[0]  # [len, h]
        for pivot in range(prompt_len - 1, len(ids) - 1):
            states.append(hidden[pivot])
            tail = list(ids[pivot + 2 : pivot + 2 + width])
            following.append(tail + [-1] * (width - len(tail)))
            steps.append(pivot - prompt_len + 1)
    save_file(
        {
            "states": torch.stack(states),
            "following": torch.tensor(following, dtype=torch.int64),
            "steps": torch.tensor(steps, dtype=torch.int64),
        },
        str(path),
    )
    return path


class OracleDrafter:
    """Patterns: right (all K), wrong (none), cycle (0, 1, .., K by output position), or a number."""

    def __init__(self, path: str) -> None:
        self.config = DLiteConfig.from_pretrained(path)
        table = load_file(os.environ[TABLE_VARIABLE])
        self.states = table["states"]  # [M, h]
        self.following = table["following"]  # [M, >= K]
        self.steps = table["steps"]  # [M]
        self.pattern = os.environ.get(PATTERN_VARIABLE, "right")
        self.log = os.environ.get("DLITE_ORACLE_LOG")

    def _correct_counts(self, rows: torch.Tensor) -> torch.Tensor:
        num_drafts = self.config.num_drafts
        if self.pattern == "cycle":
            return self.steps[rows] % (num_drafts + 1)
        fixed = {"right": num_drafts, "wrong": 0}.get(self.pattern)
        return torch.full_like(rows, int(self.pattern) if fixed is None else fixed)

    def draft(self, pivot_states, token_group, embed) -> DraftBlock:
        """pivot_states [n, S, h] -> K tokens of the recorded future, spoilt after the pattern."""
        n, num_drafts = pivot_states.shape[0], self.config.num_drafts
        last = self.config.target_layer_ids.index(self.config.num_target_layers - 1)
        if n == 0:
            return DraftBlock(torch.zeros(0, num_drafts, dtype=torch.int64), torch.zeros(0, 0, 0))
        distances = torch.cdist(pivot_states[:, last].float(), self.states)  # [n, M]
        nearest, rows = distances.min(dim=1)  # [n]
        future = self.following[rows, :num_drafts]  # [n, K]
        known = (nearest[:, None] < TOLERANCE) & (future >= 0)
        position = torch.arange(num_drafts)  # [K]
        right = known & (position < self._correct_counts(rows)[:, None])
        wrong = (future.clamp(min=0) + 1) % self.config.vocab_size
        if self.log:
            with open(self.log, "a") as log:
                log.write(json.dumps({"n": n, "known": known[:, 0].tolist()}) + "\n")
        return DraftBlock(torch.where(right, future, wrong), torch.zeros(n, num_drafts, 1))


def make(path: str, device: str, dtype: torch.dtype) -> OracleDrafter:
    """The factory that DLITE_DRAFTER_FACTORY names."""
    return OracleDrafter(path)
