"""An engine whose drafter is the oracle, and the controls of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from engines import flush_when_idle, play
from oracle import LOG_VARIABLE, PATTERN_VARIABLE, TABLE_VARIABLE, predict_histogram
from workloads import Request


def oracle_environment(table: Path, folder: Path) -> dict[str, str]:
    """Variables that put the oracle in the drafter's place in a spawned scheduler."""
    (folder / "pattern").write_text("right")
    return {
        "DLITE_DRAFTER_FACTORY": "oracle:make",
        TABLE_VARIABLE: str(table),
        PATTERN_VARIABLE: str(folder / "pattern"),
        LOG_VARIABLE: str(folder / "log"),
    }


class OracleEngine:
    """A running engine with the oracle in `folder`."""

    def __init__(self, running: Any, folder: Path, drafter: Path) -> None:
        self.engine = running
        self.folder = folder
        self.drafter = drafter
        self.info: dict[str, Any] = running.get_server_info()
        self.num_drafts: int = json.loads((drafter / "config.json").read_text())["block_size"] - 1
        self.width: int = self.info["speculative_num_draft_tokens"]

    def play(
        self, requests: Sequence[Request], pattern: str, *, flush: bool = True
    ) -> list[dict[str, Any]]:
        """Play requests with the drafter's pattern; `flush` empties the prefix cache before."""
        self.prepare(pattern, flush=flush)
        return play(self.engine, requests)

    def prepare(self, pattern: str, *, flush: bool = True) -> None:
        """What `play` does before it plays."""
        if flush:
            assert self.flush_when_idle()
        (self.folder / "pattern").write_text(pattern)
        (self.folder / "log").write_text("")

    def flush_when_idle(self) -> bool:
        """Empty the prefix cache; False if something of a request stays."""
        return flush_when_idle(self.engine)

    def predicted(self, requests: Sequence[Request], pattern: str) -> list[list[int]]:
        """Each request's verify passes by accepted drafts, from arithmetic alone."""
        return [
            predict_histogram(pattern, r.sequence, r.max_new_tokens, self.num_drafts, self.width)
            for r in requests
        ]

    def log(self) -> list[dict[str, Any]]:
        """What the drafter saw since `play` began: one entry per draft call."""
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]


LaunchOracle = Callable[..., AbstractContextManager[OracleEngine]]


def output_ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def histograms(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["meta_info"].get("spec_correct_drafts_histogram", []) for answer in answers]
