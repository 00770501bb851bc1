"""A drafter for several ranks: each writes down what it was given, and only rank 0 drafts right.

It enters the schedulers through DLITE_DRAFTER_FACTORY=rank_drafter:make. What a rank other than 0
proposes is never right, so that a draft that did not come from rank 0 shows as lost acceptance,
or as ranks that part. The module's own draft, with the served target's sharded embedding table, is
written down as well: a lookup there is a collective, which every rank must reach.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from oracle import OracleDrafter
from sglang_dlite.drafter import DraftBlock, load_drafter

FOLDER_VARIABLE = "DLITE_RANK_DRAFTER_FOLDER"


class RankDrafter(OracleDrafter):
    """The oracle on rank 0, its opposite elsewhere."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.rank = torch.distributed.get_rank()
        if self.rank:
            self.log = None
        self.module = load_drafter(path, device="cpu", dtype=torch.float32)
        self.calls = 0

    def draft(
        self,
        pivot_states: torch.Tensor,
        token_group: torch.Tensor,
        embed: Callable[[torch.Tensor], torch.Tensor],
    ) -> DraftBlock:
        """As the oracle's; saves the call to FOLDER/<call>.rank<rank>.pt."""
        seen = {
            "states": pivot_states.clone(),
            "group": token_group.clone(),
            "drafts": self.module.draft(pivot_states, token_group, embed).token_ids.clone(),
        }
        path = Path(os.environ[FOLDER_VARIABLE]) / f"{self.calls}.rank{self.rank}.pt"
        torch.save(seen, path)
        self.calls += 1
        block = super().draft(pivot_states, token_group, embed)
        if self.rank:
            return block._replace(token_ids=(block.token_ids + 7) % self.config.vocab_size)
        return block


def make(path: str, device: str, dtype: torch.dtype) -> RankDrafter:
    """The factory that DLITE_DRAFTER_FACTORY names."""
    return RankDrafter(path)
