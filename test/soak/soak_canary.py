"""Requests sung at a soak's start and end: same replies, same acceptance, pools whole."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from engines import scheduler_memory_mb
from oracle import predict_histogram
from soak_cases import Case
from soak_checks import WIDTH, greedy_error
from soak_report import Leg

IDLE_S = 2.0  # the idle scheduler checks its pools


class Canary:
    """Plain cases, one at a time, with a drafter whose acceptance is known in advance."""

    def __init__(self, base_url: str, cases: Sequence[Case], pattern_file: Path) -> None:
        self.http = httpx.Client(base_url=base_url, timeout=120.0, trust_env=False)
        self.cases = [case for case in cases if case.kind in ("plain", "prefix", "long")][:12]
        self.pattern_file = pattern_file

    def sing(self, when: str, leg: Leg) -> None:
        """Play all cases cold and from the cache; `when` is start or end."""
        time.sleep(IDLE_S)
        self.pattern_file.write_text("cycle")
        tokens = passes = 0
        for cold in (True, False):
            if cold and self.http.post("/flush_cache").status_code != 200:
                leg.problem("failure", f"the {when}'s flush is refused: the server is not idle")
            for case in self.cases:
                answer = self._play(case)
                error = self._error(case, answer)
                if error is not None:
                    leg.problem("mismatch", f"canary at the {when} ({case.kind}): {error}")
                tokens += len(answer["output_ids"])
                passes += answer["meta_info"]["spec_verify_ct"]
        leg.canary[when] = round(tokens / passes, 4)
        leg.memory_mb[when] = round(scheduler_memory_mb(), 1)
        self.pattern_file.write_text("mixed")

    def _play(self, case: Case) -> dict[str, Any]:
        params = {**case.request.sampling_params, "max_new_tokens": length(case)}
        body = {"input_ids": list(case.request.prompt), "sampling_params": params}
        reply = self.http.post("/generate", json=body)
        reply.raise_for_status()
        return reply.json()

    def _error(self, case: Case, answer: dict[str, Any]) -> str | None:
        error = greedy_error(case, answer, length(case))
        known = predict_histogram("cycle", case.request.sequence, length(case), WIDTH - 1, WIDTH)
        histogram = answer["meta_info"]["spec_correct_drafts_histogram"]
        if error is None and histogram != known:
            error = f"verify passes by accepted drafts {histogram}, must be {known}"
        return error


def length(case: Case) -> int:
    """Tokens to ask for: the oracle must know those of a block beyond the last."""
    return len(case.answer["output_ids"]) - WIDTH
