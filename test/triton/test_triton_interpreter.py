"""Runs the checks of `interpreted/` with TRITON_INTERPRET=1.

Each in a process of its own: Triton decides at its import whether kernels are interpreted, and no
other test may find it in that state.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).resolve().parent
CHECKS = sorted(file.stem for file in (HERE / "interpreted").glob("check_*.py"))


def run(check: str, markers: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", markers, f"interpreted/{check}.py"],
        cwd=HERE,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0, f"TRITON_INTERPRET=1 pytest {check}.py failed (see its output)"


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str) -> None:
    run(check, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check_attention", "check_projection", "check_recurrence"])
def test_interpreted_at_length(check: str) -> None:
    run(check, "slow")


def test_that_a_failing_check_fails_here(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="failed"):
        run("no_such_check", "not slow")
