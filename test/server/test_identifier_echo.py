"""Opaque identifiers come back unchanged from servers as users start them: one width each.

test_shipped_drafter.py asks the same of all widths in one engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import engine
from identifiers import CONCURRENCY, WIDTHS, Echo
from sglang_dlite.assets import shipped_drafter_dir

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_fixed_widths_and_both_schedulers(
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
        assert info["disable_overlap_schedule"] == (overlap == "0")
        for _ in range(2):
            echo.check(echo.play(running))
