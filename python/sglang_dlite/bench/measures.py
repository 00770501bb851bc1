"""From raw rounds to the figures of the report. No figure is made up where there is no record."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_dlite.bench import stats
from sglang_dlite.bench.records import Reply, RoundResult

CONTEXT_EDGES = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

Figures = dict[str, Any]


def _median(values: Iterable[float | None]) -> stats.Interval:
    return stats.median([value for value in values if value is not None])


def _throughput(result: RoundResult) -> float:
    """Output tokens of all users over the round's wall time."""
    return sum(reply.output_tokens for reply in result.replies) / result.seconds


def load_figures(results: Sequence[RoundResult]) -> Figures:
    """Speed and latency of one arm at one load: rounds of one workload, concurrency and cache."""
    replies = [reply for result in results for reply in result.replies]
    gaps = [gap for reply in replies for gap in reply.gaps_s]
    return {
        "rounds": len(results),
        "replies": len(replies),
        "failures": [
            f"{failure.session} turn {failure.turn}: {failure.error} "
            f"({failure.turns_not_played} later turns not played)"
            for result in results
            for failure in result.failures
        ],
        "output_tokens": sum(reply.output_tokens for reply in replies),
        "user_tok_per_s": _median(reply.tok_per_s for reply in replies),
        "total_tok_per_s": _median(_throughput(result) for result in results),
        "ttft_s": _median(reply.ttft_s for reply in replies),
        "tpot_s": _median(reply.tpot_s for reply in replies),
        "turn_s": _median(reply.latency_s for reply in replies),
        "itl_p50_s": stats.percentile(gaps, 50),
        "itl_p99_s": stats.percentile(gaps, 99),
    }


def speedup(results: Sequence[RoundResult], baseline: Sequence[RoundResult]) -> stats.Interval:
    """Median over turns of a reply's tok/s over the baseline's for the same turn and repeat.

    Turns that only one side answered are left out. A median, since a machine that hiccups for
    seconds would else decide the figure.
    """

    def by_turn(rounds: Sequence[RoundResult]) -> dict[tuple[int, str, int], Reply]:
        return {
            (result.round.repeat, reply.session, reply.turn): reply
            for result in rounds
            for reply in result.replies
        }

    ours, theirs = by_turn(results), by_turn(baseline)
    shared = [key for key in ours if key in theirs]
    return _median(ours[key].tok_per_s / theirs[key].tok_per_s for key in shared)


def throughput_ratio(
    results: Sequence[RoundResult], baseline: Sequence[RoundResult]
) -> stats.Interval:
    """Median over repeats of a round's tok/s in all over the baseline's in the same repeat.

    Repeats that only one side played are left out.
    """
    theirs = {result.round.repeat: _throughput(result) for result in baseline}
    return _median(
        _throughput(result) / theirs[result.round.repeat]
        for result in results
        if theirs.get(result.round.repeat)
    )


def tau(replies: Sequence[Reply]) -> stats.Interval:
    """Acceptance length over all verify passes of these replies; the interval resamples replies."""
    extra = stats.ratio([r.correct_drafts for r in replies], [r.verify_passes for r in replies])
    return stats.Interval(*(1 + value for value in extra))


def _tau_by(replies: Sequence[Reply], key: Callable[[Reply], Any]) -> list[dict[str, Any]]:
    groups: dict[Any, list[Reply]] = defaultdict(list)
    for reply in replies:
        groups[key(reply)].append(reply)
    return [
        {"at": at, "tau": tau(group), "passes": sum(r.verify_passes for r in group)}
        for at, group in sorted(groups.items())
    ]


def context_bin(tokens: int) -> int:
    """The lower edge of the bin that a context length belongs to."""
    return max(edge for edge in CONTEXT_EDGES if edge <= tokens)


def acceptance_figures(results: Sequence[RoundResult]) -> Figures | None:
    """How many drafts one arm's verify passes accepted; None if it never verified."""
    speculated = [(r.round, reply) for r in results for reply in r.replies if reply.verify_passes]
    if not speculated:
        return None
    warm = [reply for round, reply in speculated if round.cache == "warm"]
    rates = stats.position_rates(stats.add_histograms([reply.histogram for reply in warm]))
    per_reply = [reply.tau for reply in warm if reply.tau is not None]
    return {
        "replies": len(warm),
        "verify_passes": sum(reply.verify_passes for reply in warm),
        "tau": tau(warm),
        **{f"tau_p{q}": stats.percentile(per_reply, q) for q in (10, 50, 90)},
        "position_rates": rates,
        "conditional_rates": stats.conditional_rates(rates),
        "by_context": _tau_by(warm, lambda reply: context_bin(reply.prompt_tokens)),
        "by_turn": _tau_by(warm, lambda reply: reply.turn),
        "cache": _cached_against_cold(results),
    }


def _cached_against_cold(results: Sequence[RoundResult]) -> dict[str, Any] | None:
    """tau and time to the first token on the same turns, cache kept and flushed, one user."""

    def turns(cache: str) -> dict[tuple[str, int], list[Reply]]:
        found: dict[tuple[str, int], list[Reply]] = defaultdict(list)
        for result in results:
            if result.round.cache == cache and result.round.concurrency == 1:
                for reply in result.replies:
                    if reply.turn > 1:  # a first turn finds nothing in the cache either way
                        found[reply.session, reply.turn].append(reply)
        return found

    warm, cold = turns("warm"), turns("cold")
    shared = warm.keys() & cold.keys()
    if not shared:
        return None
    figures: dict[str, Any] = {"turns": len(shared)}
    for name, source in (("cached", warm), ("cold", cold)):
        replies = [reply for key in shared for reply in source[key]]
        figures[name] = {
            "tau": tau(replies),
            "ttft_s": _median(reply.ttft_s for reply in replies),
            "cached_share": sum(r.cached_tokens for r in replies)
            / sum(r.prompt_tokens for r in replies),
        }
    return figures


def ttft_by_turn(results: Sequence[RoundResult]) -> list[dict[str, Any]]:
    """Time to the first token of turn n, with the cached share of its prompt."""
    groups: dict[int, list[Reply]] = defaultdict(list)
    for result in results:
        for reply in result.replies:
            groups[reply.turn].append(reply)
    return [
        {
            "turn": turn,
            "ttft_s": _median(reply.ttft_s for reply in group),
            "prompt_tokens": stats.percentile([r.prompt_tokens for r in group], 50),
            "cached_share": sum(r.cached_tokens for r in group)
            / sum(r.prompt_tokens for r in group),
        }
        for turn, group in sorted(groups.items())
    ]


def step_figures(path: Path, results: Sequence[RoundResult]) -> list[Figures]:
    """Median times of a decode step by batch size, of the steps inside rounds."""
    if not path.is_file():
        return []
    windows = [(result.started, result.started + result.seconds) for result in results]
    groups: dict[int, list[Figures]] = defaultdict(list)
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.endswith("\n"):
                break  # the server was ended while it wrote
            step = json.loads(line)
            inside = any(start <= step["t"] <= end for start, end in windows)
            if inside and step["step_s"] is not None:
                groups[step["n"]].append(step)
    return [
        {
            "n": n,
            "steps": len(steps),
            "context": stats.percentile([step["context"] / n for step in steps], 50),
            "target_s": stats.percentile([step["target_s"] for step in steps], 50),
            "draft_s": stats.percentile([step["draft_s"] for step in steps], 50),
            "other_s": stats.percentile(
                [step["step_s"] - step["target_s"] - step["draft_s"] for step in steps], 50
            ),
        }
        for n, steps in sorted(groups.items())
    ]
