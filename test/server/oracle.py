"""A drafter that knows the future: it replays recorded continuations.

It recognises where a request stands by its pivot states (all S of them, the nearest recorded
ones) and by its token group, so that a wrong pivot row, a layer out of order, a stale state, a
mixed-up request or a wrong group shows at once as lost acceptance. It enters the scheduler
process through DLITE_DRAFTER_FACTORY=oracle:make. The pattern is read from a file at every call,
so that one server can play all of them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang_dlite.drafter import DLiteConfig, DraftBlock

TABLE_VARIABLE = "DLITE_ORACLE_TABLE"
PATTERN_VARIABLE = "DLITE_ORACLE_PATTERN"  # a file that holds right, wrong, cycle, mixed or a count
LOG_VARIABLE = "DLITE_ORACLE_LOG"
# Largest |difference| of any state's element from the recording. HF's and SGLang's fp32 differ by
# rounding (seen: below 2e-4, with elements of magnitude 1 to 100); other prefixes by whole units.
TOLERANCE = 5e-3
MAX_GROUP = 4
RECORDED = 16  # following tokens per pivot: the largest K is 15


def record(
    path: Path, target_dir: Path, sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]
) -> Path:
    """Write the table of prompt + output sequences: HF's states, the group, the tokens to come."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    states, groups, following, places = [], [], [], []
    for index, (ids, prompt_len) in enumerate(zip(sequences, prompt_lens, strict=True)):
        with torch.no_grad():
            output = model.model(torch.tensor([list(ids)]), output_hidden_states=True)
        # hidden_states[k + 1] is layer k's output, and the last one is after the final norm.
        hidden = torch.cat(output.hidden_states[1:], dim=0).transpose(0, 1)  # [len, L, h]
        pivots = range(prompt_len - 1, len(ids) - 1)
        states.append(hidden[prompt_len - 1 : len(ids) - 1])
        for pivot in pivots:
            # The group ends in the anchor; a prompt shorter than it repeats its first token.
            groups.append([ids[max(pivot + 1 - back, 0)] for back in range(MAX_GROUP)][::-1])
            tail = list(ids[pivot + 2 : pivot + 2 + RECORDED])
            following.append(tail + [-1] * (RECORDED - len(tail)))
            places.append((index, pivot - prompt_len + 1))
    save_file(
        {
            "states": torch.cat(states).contiguous(),
            "groups": torch.tensor(groups, dtype=torch.int64),
            "following": torch.tensor(following, dtype=torch.int64),
            "places": torch.tensor(places, dtype=torch.int64),
        },
        str(path),
    )
    return path


def correct_count(pattern: str, sequence: int, step: int, num_drafts: int) -> int:
    """How many of the K drafts are right where `step` + 1 tokens of `sequence` are output."""
    if pattern == "mixed":
        pattern = ("right", "cycle", "wrong")[sequence % 3]
    if pattern == "cycle":
        return step % (num_drafts + 1)
    return {"right": num_drafts, "wrong": 0}[pattern]


def predict_histogram(
    pattern: str, sequence: int, num_tokens: int, num_drafts: int, width: int
) -> list[int]:
    """Verify passes by accepted drafts, for a request of `num_tokens` output tokens."""
    counts: Counter[int] = Counter()
    step = 0  # the prefill gives the first token
    while step + 1 < num_tokens:
        accepted = min(correct_count(pattern, sequence, step, num_drafts), width - 1)
        counts[accepted] += 1
        step += accepted + 1
    return [counts[n] for n in range(max(counts, default=-1) + 1)]


class OracleDrafter:
    """Drafts the recorded future as far as the pattern allows, then tokens that are not it."""

    def __init__(self, path: str) -> None:
        self.config = DLiteConfig.from_pretrained(path)
        table = load_file(os.environ[TABLE_VARIABLE])
        self.states = table["states"][:, list(self.config.target_layer_ids)]  # [M, S, h]
        self.groups = table["groups"][:, MAX_GROUP - self.config.anchor_group_size :]  # [M, G]
        self.following = table["following"]  # [M, RECORDED]
        self.places = table["places"]  # [M, 2]: sequence, step
        self.pattern_file = Path(os.environ[PATTERN_VARIABLE])
        self.log = os.environ.get(LOG_VARIABLE)

    def draft(self, pivot_states, token_group, embed) -> DraftBlock:
        """pivot_states [n, S, h], token_group [n, G] -> K tokens each."""
        n, num_drafts = pivot_states.shape[0], self.config.num_drafts
        if n == 0:
            return DraftBlock(torch.zeros(0, num_drafts, dtype=torch.int64), torch.zeros(0, 0, 0))
        states = pivot_states.float()
        rows = torch.cdist(states.flatten(1), self.states.flatten(1)).argmin(dim=1)  # [n]
        errors = (states - self.states[rows]).abs().amax(dim=(1, 2))  # [n]
        known = (errors < TOLERANCE) & (token_group == self.groups[rows]).all(dim=1)  # [n]
        future = self.following[rows, :num_drafts]  # [n, K]
        pattern = self.pattern_file.read_text().strip()
        counts = torch.tensor(
            [correct_count(pattern, *place, num_drafts) for place in self.places[rows].tolist()]
        )
        right = known[:, None] & (future >= 0) & (torch.arange(num_drafts) < counts[:, None])
        wrong = (future.clamp(min=0) + 1) % self.config.vocab_size
        if self.log:
            entry = {
                "errors": errors.tolist(),
                "known": known.tolist(),
                "steps": self.places[rows, 1].tolist(),
                "group_right": (token_group == self.groups[rows]).all(dim=1).tolist(),
            }
            with open(self.log, "a") as log:
                log.write(json.dumps(entry) + "\n")
        return DraftBlock(torch.where(right, future, wrong), torch.zeros(n, num_drafts, 1))


def make(path: str, device: str, dtype: torch.dtype) -> OracleDrafter:
    """The factory that DLITE_DRAFTER_FACTORY names."""
    return OracleDrafter(path)
