"""What a run of gpu_check found: printed as it comes, and as JSON."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Report:
    """Checks, which pass or fail, and figures, which are only recorded."""

    def __init__(self) -> None:
        self.checks: list[dict[str, Any]] = []
        self.figures: list[dict[str, Any]] = []
        self.notes: list[str] = []

    @property
    def passed(self) -> bool:
        return all(check["passed"] for check in self.checks)

    def add(self, name: str, passed: bool, detail: dict[str, Any]) -> None:
        """One thing that must hold, and the figures behind it."""
        self.checks.append({"name": name, "passed": bool(passed), "detail": detail})
        shown = ", ".join(f"{key} {value}" for key, value in detail.items())
        print(f"{'ok  ' if passed else 'FAIL'}  {name:<44} {shown}", flush=True)

    def figure(self, name: str, value: float, unit: str, **labels: Any) -> None:
        """One measured number."""
        self.figures.append({"name": name, "value": value, "unit": unit, **labels})

    def note(self, text: str) -> None:
        """What was left out, and why."""
        self.notes.append(text)
        print(f"note  {text}", flush=True)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part whose exception is a failed check, and does not end the others."""
        print(f"-- {name}", flush=True)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(name, False, {"error": f"{type(error).__name__}: {error}"})

    def to_json(self, **environment: Any) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "environment": environment,
            "checks": self.checks,
            "figures": self.figures,
            "notes": self.notes,
        }
