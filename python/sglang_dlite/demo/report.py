"""From replies to the demo's table and its JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from sglang_dlite.demo.player import Played
from sglang_dlite.files import write_atomic

DLITE = "dlite"
PLAIN = "target-only"


@dataclass(frozen=True)
class Row:
    """One turn on one arm: medians over the repeats."""

    arm: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    tok_per_s: float
    accept_length: float | None  # None without speculation
    reply: str


@dataclass(frozen=True)
class Report:
    rows: list[Row]
    speedup: float
    accept_length: float
    same_replies: int  # turns whose text is the same on both arms

    def as_json(self) -> dict[str, Any]:
        return {
            "turns": [vars(row) for row in self.rows],
            "speedup": self.speedup,
            "accept_length": self.accept_length,
        }

    def of(self, arm: str) -> list[Row]:
        return [row for row in self.rows if row.arm == arm]


def _row(arm: str, turn: int, played: Sequence[Played]) -> Row:
    replies = [item.reply for item in played]
    verify_passes = sum(reply.verify_passes for reply in replies)
    correct_drafts = sum(reply.correct_drafts for reply in replies)
    return Row(
        arm=arm,
        turn=turn,
        prompt_tokens=replies[0].prompt_tokens,
        cached_tokens=replies[0].cached_tokens,
        output_tokens=replies[0].output_tokens,
        seconds=statistics.median(reply.seconds for reply in replies),
        tok_per_s=statistics.median(reply.tok_per_s for reply in replies),
        accept_length=1 + correct_drafts / verify_passes if verify_passes else None,
        reply=replies[0].text,
    )


def total_tok_per_s(rows: Sequence[Row]) -> float:
    """Output tokens per second over the whole session."""
    return sum(row.output_tokens for row in rows) / sum(row.seconds for row in rows)


def summarise(played: Sequence[Played]) -> Report:
    """Medians per turn and arm, and what they say together."""
    keys = sorted({(item.turn, item.arm) for item in played})
    rows = [
        _row(arm, turn, [item for item in played if (item.turn, item.arm) == (turn, arm)])
        for turn, arm in keys
    ]
    with_dlite = [row for row in rows if row.arm == DLITE]
    without = [row for row in rows if row.arm == PLAIN]
    speculated = [item.reply for item in played if item.arm == DLITE]
    verify_passes = sum(reply.verify_passes for reply in speculated)
    correct_drafts = sum(reply.correct_drafts for reply in speculated)
    return Report(
        rows=rows,
        speedup=total_tok_per_s(with_dlite) / total_tok_per_s(without),
        accept_length=1 + correct_drafts / max(verify_passes, 1),
        same_replies=sum(a.reply == b.reply for a, b in zip(with_dlite, without, strict=True)),
    )


def table(report: Report) -> Table:
    """One line per turn; the two arms side by side."""
    # Narrow headings: the table fits a terminal of 80 columns.
    result = Table(title="One agent session, with DLITE and by the target alone")
    for heading in (
        *("turn", "prompt\ntokens", "cached\ntokens"),
        *("DLITE\noutput", "DLITE\ntok/s", "accept\nlength"),
        *("alone\noutput", "alone\ntok/s", "speed\n-up"),
    ):
        result.add_column(heading, justify="right", no_wrap=True)
    for ours, plain in zip(report.of(DLITE), report.of(PLAIN), strict=True):
        result.add_row(
            str(ours.turn),
            str(ours.prompt_tokens),
            str(ours.cached_tokens),
            str(ours.output_tokens),
            f"{ours.tok_per_s:.1f}",
            "-" if ours.accept_length is None else f"{ours.accept_length:.2f}",
            str(plain.output_tokens),
            f"{plain.tok_per_s:.1f}",
            f"{ours.tok_per_s / plain.tok_per_s:.2f}x",
        )
    result.add_section()
    ours_rows, plain_rows = report.of(DLITE), report.of(PLAIN)
    result.add_row(
        "all",
        "",
        "",
        str(sum(row.output_tokens for row in ours_rows)),
        f"{total_tok_per_s(ours_rows):.1f}",
        f"{report.accept_length:.2f}",
        str(sum(row.output_tokens for row in plain_rows)),
        f"{total_tok_per_s(plain_rows):.1f}",
        f"{report.speedup:.2f}x",
    )
    return result


def write_json(report: Report, path: Path) -> None:
    """Write the whole file or nothing."""
    write_atomic(path, json.dumps(report.as_json(), indent=2) + "\n")
