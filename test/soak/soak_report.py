"""What a soak found: counted while it runs, judged and written at its end."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# What SGLang's checkers of its pools write before they stop the scheduler.
LEAK = re.compile(r"leak detected|double free|use-after-free", re.IGNORECASE)
# What a leg must have met to have tested anything.
NEEDED = ("compared", "sampled", "aborted", "cached tokens")
KEPT = 20  # problems kept in full per leg; all are counted


@dataclass
class Leg:
    """One server's share of the soak."""

    name: str
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    """requests, replies by what was checked of them, events, and every kind of problem."""
    problems: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    canary: dict[str, float] = field(default_factory=dict)
    """Acceptance length of the canary prompts, at the start and at the end."""
    memory_mb: dict[str, float] = field(default_factory=dict)
    """Resident memory of the scheduler process, at the start and at the end."""
    healthy: bool = False

    def problem(self, kind: str, text: str) -> None:
        """kind: mismatch, failure or unhealthy."""
        self.counts[kind] += 1
        if len(self.problems) < KEPT:
            self.problems.append(f"{kind}: {text[:2000]}")

    def read_log(self, log: str) -> None:
        """Leaks that the server's log reports."""
        self.leaks += [line for line in log.splitlines() if LEAK.search(line)][:KEPT]

    @property
    def not_met(self) -> list[str]:
        """Of what there is to be checked, what did not occur."""
        return [name for name in NEEDED if not self.counts[name]]

    @property
    def passed(self) -> bool:
        """All kinds of replies occurred, nothing was wrong, and acceptance is what it was."""
        return (
            self.healthy
            and not self.problems
            and not self.leaks
            and not self.not_met
            and len(self.canary) == 2
            and self.canary["start"] == self.canary["end"]
        )


@dataclass
class Summary:
    """The whole soak."""

    minutes: float
    seed: int
    legs: list[Leg] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """All legs did, and somewhere the pool was too small for what ran."""
        retractions = sum(leg.counts["retractions"] for leg in self.legs)
        return bool(self.legs) and all(leg.passed for leg in self.legs) and retractions > 0

    def as_dict(self) -> dict[str, Any]:
        legs = [{**vars(leg), "passed": leg.passed} for leg in self.legs]
        return {
            "passed": self.passed,
            "minutes": self.minutes,
            "seed": self.seed,
            "requests": sum(leg.counts["requests"] for leg in self.legs),
            "mismatches": sum(leg.counts["mismatch"] for leg in self.legs),
            "failures": sum(leg.counts["failure"] for leg in self.legs),
            "leaks": sum(len(leg.leaks) for leg in self.legs),
            "healthy": all(leg.healthy for leg in self.legs),
            "legs": legs,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def text(self) -> str:
        """For people, a leg a paragraph."""
        lines = []
        for leg in self.legs:
            counts = ", ".join(f"{name} {n}" for name, n in sorted(leg.counts.items()))
            values = {
                "counts": counts,
                "did not occur": leg.not_met,
                "canary's acceptance length": leg.canary,
                "scheduler's memory (MB)": leg.memory_mb,
                "leaks": len(leg.leaks),
                "healthy": leg.healthy,
            }
            lines += [f"{leg.name}, {leg.seconds:.0f} s: {'passed' if leg.passed else 'FAILED'}"]
            lines += [f"  {name}: {value}" for name, value in values.items()]
            lines += [f"  {problem}" for problem in [*leg.problems, *leg.leaks]]
        whole = self.as_dict()
        totals = ", ".join(
            f"{name} {whole[name]}" for name in ("requests", "mismatches", "failures", "leaks")
        )
        lines.append(f"{'passed' if self.passed else 'FAILED'}: {totals}")
        return "\n".join(lines)
