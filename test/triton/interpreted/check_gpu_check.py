"""gpu_check's kernel parity under Triton's interpreter (run by test_triton_interpreter.py)."""

from __future__ import annotations

import pytest
import torch
from drafters import SMALL
from sglang_dlite.gpu_check import parity
from sglang_dlite.gpu_check.report import Report
from sglang_dlite.kernels import recurrence


def test_every_kernel_passes() -> None:
    report = Report()
    parity.check_kernels(report, "small", SMALL.config(anchor_group_size=2), "cpu", (2,))
    assert report.passed
    assert {check["name"] for check in report.checks} >= {
        f"small {dtype} {kernel}"
        for dtype in ("fp32", "bf16")
        for kernel in ("norm", "attention", "advance", "combine", "project, sampled")
    }


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = recurrence.plan_combine
    monkeypatch.setattr(recurrence, "plan_combine", lambda s, w, p: plan(s, w, torch.zeros_like(p)))
    report = Report()
    parity.check_kernels(report, "small", SMALL.config(), "cpu", (1,))
    failed = [check["name"] for check in report.checks if not check["passed"]]
    assert failed == ["small fp32 combine", "small bf16 combine"]
