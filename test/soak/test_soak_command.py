"""The whole command: passes on a server that is right, fails where replies are not the recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow]

SOAK = Path(__file__).parent
FALSIFIED = """
import runpy, sys
sys.path[:0] = [{soak!r}, {server!r}]
import soak_cases
recorded = soak_cases.record_cases
def falsified(*args):
    cases = recorded(*args)
    for case in cases[::5]:
        case.answer["output_ids"][-1] ^= 1
    return cases
soak_cases.record_cases = falsified
sys.argv[0] = {soak!r}
runpy.run_path({soak!r}, run_name="__main__")
"""


@pytest.mark.parametrize("falsified", [False, True])
def test_a_short_soak(tmp_path: Path, falsified: bool) -> None:
    command = [sys.executable, str(SOAK)]
    if falsified:
        server = str(SOAK.parent / "server")
        command = [sys.executable, "-c", FALSIFIED.format(soak=str(SOAK), server=server)]
    command += ["--minutes", "0.5", "--work-dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    summary: dict[str, Any] = json.loads((tmp_path / "summary.json").read_text())
    assert ended.returncode == int(falsified), ended.stdout + ended.stderr
    assert summary["passed"] == (not falsified)
    assert summary["healthy"] and summary["leaks"] == summary["failures"] == 0
    assert (summary["mismatches"] > 0) == falsified
    assert all(leg["counts"]["compared"] > 10 for leg in summary["legs"])
    assert "Traceback" not in ended.stderr
