"""What an evaluation says: acceptance and speed by category, block position, context and turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_dlite.training.reply_kinds import LOOKUP_RULE, LOOP_RULE, bucket_of


@dataclass(frozen=True)
class Measured:
    """One served reply."""

    id: str
    source: str
    category: str
    turn: int
    temperature: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    verify_passes: int
    accepted: int
    histogram: list[int]  # [n]: verify passes that accepted n drafts
    looping: bool
    lookup_passes: int  # what n-gram lookup would have needed on the same text
    lookup_accepted: int
    alone_tokens: int = 0  # the target without a drafter, on the same prompt
    alone_seconds: float = 0.0


@dataclass
class Counts:
    """Sums over replies. tau = 1 + accepted drafts / verify passes."""

    replies: int = 0
    output_tokens: int = 0
    verify_passes: int = 0
    accepted: int = 0
    lookup_passes: int = 0
    lookup_accepted: int = 0
    seconds: float = 0.0
    alone_tokens: int = 0
    alone_seconds: float = 0.0
    histogram: list[int] = field(default_factory=list)

    def add(self, row: Measured) -> None:
        self.replies += 1
        for name in (
            "output_tokens", "verify_passes", "accepted", "lookup_passes", "lookup_accepted",
            "seconds", "alone_tokens", "alone_seconds",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(row, name))
        missing = len(row.histogram) - len(self.histogram)
        self.histogram += [0] * max(0, missing)
        for accepted, passes in enumerate(row.histogram):
            self.histogram[accepted] += passes

    @property
    def tau(self) -> float | None:
        return 1 + self.accepted / self.verify_passes if self.verify_passes else None

    @property
    def lookup_tau(self) -> float | None:
        return 1 + self.lookup_accepted / self.lookup_passes if self.lookup_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.output_tokens / self.seconds if self.seconds else None

    @property
    def alone_tokens_per_second(self) -> float | None:
        return self.alone_tokens / self.alone_seconds if self.alone_seconds else None

    @property
    def speed_up(self) -> float | None:
        mine, alone = self.tokens_per_second, self.alone_tokens_per_second
        return mine / alone if mine and alone else None

    def to_dict(self) -> dict[str, Any]:
        names = ("tau", "lookup_tau", "tokens_per_second", "alone_tokens_per_second", "speed_up")
        return asdict(self) | {name: getattr(self, name) for name in names}


def grouped(rows: Sequence[Measured], key: Callable[[Measured], str]) -> dict[str, Counts]:
    """Counts per group, sorted by the group's name."""
    groups: dict[str, Counts] = {}
    for row in rows:
        groups.setdefault(key(row), Counts()).add(row)
    return dict(sorted(groups.items()))


def by_position(histogram: Sequence[int], num_drafts: int) -> list[dict[str, float]]:
    """Per draft k = 1..K: the share of passes that accepted it, and that share among the passes
    that accepted its predecessors."""
    total = sum(histogram)
    rates, before = [], total
    for k in range(1, num_drafts + 1):
        reached = sum(histogram[k:])
        rates.append(
            {
                "position": k,
                "accepted": reached / total if total else 0.0,
                "given_before": reached / before if before else 0.0,
            }
        )
        before = reached
    return rates


def summarise(rows: Sequence[Measured], num_drafts: int) -> dict[str, Any]:
    """The tables of one temperature. Replies that loop are in none but their own."""
    plain = [row for row in rows if not row.looping]
    tables = {
        "source": grouped(plain, lambda row: row.source),
        "category": grouped(plain, lambda row: row.category or row.source),
        "context": grouped(plain, lambda row: bucket_of(row.prompt_tokens)),
        "turn": grouped(plain, lambda row: f"{row.turn + 1:03d}"),
    }
    everything = grouped(plain, lambda _: "all").get("all", Counts())
    taus = [counts.tau for counts in tables["source"].values() if counts.tau is not None]
    return {
        "mean_tau": sum(taus) / len(taus) if taus else None,
        "all": everything.to_dict(),
        "looping": grouped([r for r in rows if r.looping], lambda _: "all")
        .get("all", Counts())
        .to_dict(),
        "by": {
            name: {group: counts.to_dict() for group, counts in table.items()}
            for name, table in tables.items()
        },
        "by_position": by_position(everything.histogram, num_drafts),
        "rules": {"looping": LOOP_RULE, "lookup": LOOKUP_RULE},
    }
