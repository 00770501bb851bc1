"""Opaque identifiers come back unchanged from servers as users start them: one width each.

Neighbouring widths take turns with the schedulers, the default width is served by both. All widths
of one scheduler in one engine: here without overlap, in test_shipped_drafter.py with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import engine, flush_when_idle
from identifiers import CONCURRENCY, WIDTHS, Echo
from recorded_drafts import RecordedEngine, recording_environment
from sglang_dlite.assets import shipped_drafter_dir

pytestmark = [pytest.mark.server, pytest.mark.slow]

NO_OVERLAP, OVERLAP = "0", "1"
SERVERS = [
    *((width, OVERLAP if width % 2 == 0 else NO_OVERLAP) for width in WIDTHS),
    (WIDTHS[-1], NO_OVERLAP),
]


@pytest.mark.parametrize("width,overlap", SERVERS)
def test_fixed_widths(
    embedded_model: Path, exact_dtype: str, echo: Echo, overlap: str, width: int
) -> None:
    """Cold, then with all prompts in the prefix cache."""
    with engine(
        embedded_model,
        shipped_drafter_dir(),
        env={"DLITE_CPU_OVERLAP": overlap},
        dtype=exact_dtype,
        max_running_requests=CONCURRENCY,
        speculative_num_draft_tokens=width,
    ) as running:
        info = running.get_server_info()
        assert info["speculative_num_draft_tokens"] == width
        assert info["disable_overlap_schedule"] == (overlap == NO_OVERLAP)
        for _ in range(2):
            echo.check(echo.play(running))


def test_every_width_without_overlap(
    embedded_model: Path, exact_dtype: str, echo: Echo, tmp_path: Path
) -> None:
    """Cold and cached, each."""
    with engine(
        embedded_model,
        shipped_drafter_dir(),
        env={"DLITE_CPU_OVERLAP": NO_OVERLAP, **recording_environment(tmp_path, WIDTHS[-1])},
        dtype=exact_dtype,
        max_running_requests=CONCURRENCY,
        speculative_adaptive=True,
    ) as running:
        assert running.get_server_info()["disable_overlap_schedule"]
        recorded = RecordedEngine(running, tmp_path)
        for width in WIDTHS:
            assert flush_when_idle(running)
            recorded.set_width(width)
            echo.check(cold := echo.play(running))
            echo.check(warm := echo.play(running))
            assert min(cached_tokens(cold)) == 0
            assert cached_tokens(warm) == [len(prompt) - 1 for prompt in echo.prompts]
            assert recorded.widths() == {width}


def cached_tokens(answers: list[dict[str, Any]]) -> list[int]:
    """How much of each prompt was found in the prefix cache."""
    return [answer["meta_info"]["cached_tokens"] for answer in answers]
