"""The whole flow with real servers: minutes, hence slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.server]


def test_the_smoke_configuration(tmp_path: Path) -> None:
    from sglang_dlite.embedded_model import EmbeddedModelError, prepare_embedded_model

    try:
        prepare_embedded_model()
    except EmbeddedModelError as error:
        pytest.skip(f"no embedded model: {error}")
    out = tmp_path / "run"
    command = [sys.executable, "-m", "sglang_dlite.cli", "bench", "--config", "cpu-smoke"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["measured_arms"] == ["target-only", "DLITE"]
    assert summary["not_played"] == [] and summary["problems"] == []
    assert not any(load["failures"] for load in summary["loads"])
    assert summary["acceptance"]["DLITE"]["tau"][0] > 1.0
    assert summary["steps"]["DLITE"] and summary["steps"]["target-only"]
    assert len(summary["sweep"]) == 2
    assert {item["name"] for item in summary["lab"]["drafters"]} == {"DLITE", "n-gram lookup"}
    assert "Token view (DLITE)" in (out / "report.html").read_text()
