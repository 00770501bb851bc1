"""The checkpoint's own drafter in the scheduler process, with all its drafts written down.

DLITE_DRAFTER_FACTORY=recorded_drafts:make. With --speculative-adaptive the width of each verify
pass is the test's as well (scripted_widths.py), so that one engine plays every D.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scripted_widths import FOLDER_VARIABLE, script_widths, settled_widths, write_script
from sglang_dlite.drafter import DraftBlock
from sglang_dlite.speculative.drafting import FACTORY_VARIABLE, Drafter, build_drafter

LOG = "drafts"


def recording_environment(folder: Path, width: int) -> dict[str, str]:
    """Variables for an engine whose drafts go to `folder`; an adaptive one starts at `width`."""
    write_script(folder, (width,))
    (folder / LOG).write_text("")
    return {FACTORY_VARIABLE: "recorded_drafts:make", FOLDER_VARIABLE: str(folder)}


class RecordedDrafter:
    """What the wrapped drafter drafts, and a line per request of it in the log."""

    def __init__(self, drafter: Drafter, log: Path) -> None:
        self.drafter, self.config, self.log = drafter, drafter.config, log

    def draft(self, pivot_states, token_group, embed) -> DraftBlock:
        """pivot_states [n, S, h], token_group [n, G] -> K tokens each."""
        block = self.drafter.draft(pivot_states, token_group, embed)
        with open(self.log, "a") as log:
            for row in torch.cat([token_group, block.token_ids], dim=1).tolist():
                log.write(json.dumps(row) + "\n")
        return block


def make(path: str, device: str, dtype: torch.dtype) -> RecordedDrafter:
    """The factory that DLITE_DRAFTER_FACTORY names."""
    script_widths()
    del os.environ[FACTORY_VARIABLE]
    drafter = build_drafter(path, None, device, dtype)
    return RecordedDrafter(drafter, Path(os.environ[FOLDER_VARIABLE]) / LOG)


class RecordedEngine:
    """A running engine with the recorded drafter."""

    def __init__(self, running: Any, folder: Path) -> None:
        self.engine, self.folder = running, folder

    def set_width(self, width: int) -> None:
        """All verify passes that are planned from now on have this D (adaptive engines only)."""
        self.settle()
        write_script(self.folder, (width,))

    def widths(self) -> set[int]:
        """Those that were taken since."""
        return set(settled_widths(self.folder))

    def settle(self) -> None:
        """With the overlap scheduler the last request's last step may still be on its way."""
        self.engine.get_server_info()

    def ask(
        self, prompt: Sequence[int], max_new_tokens: int
    ) -> tuple[dict[str, Any], list[list[int]]]:
        """One greedy request alone: its answer, and [G + K] token group and drafts per step.

        The drafts are those that were verified, in order: the first are the prefill's.
        """
        self.settle()
        (self.folder / LOG).write_text("")
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        answer = self.engine.generate(input_ids=list(prompt), sampling_params=params)
        lines = (self.folder / LOG).read_text().splitlines()
        return answer, [
            json.loads(line) for line in lines[: answer["meta_info"].get("spec_verify_ct", 0)]
        ]
