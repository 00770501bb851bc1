"""The served part of gpu_check on a CPU: overlap, adaptive width, no graphs. Four engine starts."""

from __future__ import annotations

from typing import Any

import pytest
from sglang_dlite.gpu_check.serving import run_serving_checks

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_all_checks_pass() -> None:
    results: dict[str, bool] = {}

    class Report:
        def add(self, name: str, passed: bool, detail: dict[str, Any]) -> None:
            results[name] = passed

    run_serving_checks(Report(), "cpu")
    assert len(results) == 9 and all(results.values()), results
