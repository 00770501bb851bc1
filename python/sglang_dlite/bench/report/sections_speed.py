"""Sections on speed: in short, by load, first tokens, steps, SGLang's own benchmark."""

from __future__ import annotations

from typing import Any

from sglang_dlite.bench.report import figures
from sglang_dlite.bench.report.content import Block, Figure, Section, Table, Text
from sglang_dlite.bench.report.formats import (
    MISSING,
    decimals,
    milliseconds,
    percent,
    times,
    with_interval,
)


def drawing(name: str, caption: str, picture: Any) -> list[Block]:
    """A figure, or nothing where nothing was measured for it."""
    return [] if picture is None else [Figure(name, caption, picture)]


def in_short(summary: dict[str, Any]) -> Section | None:
    """Speed-ups by workload and load, and the acceptance lengths: what most readers come for."""
    baseline = summary["config"]["baseline"]
    warm = [load for load in summary["loads"] if load["cache"] == "warm"]
    levels = sorted({load["concurrency"] for load in warm})
    rows = []
    for workload in dict.fromkeys(load["workload"] for load in warm):
        for arm in summary["measured_arms"]:
            mine = {
                load["concurrency"]: load["speedup"]
                for load in warm
                if (load["workload"], load["arm"]) == (workload, arm)
            }
            found = summary["acceptance_by_workload"].get(workload, {}).get(arm)
            if arm != baseline and mine:
                speeds = [with_interval(mine[c], 2) if c in mine else MISSING for c in levels]
                rows.append((workload, arm, *speeds, decimals(found and found["tau"][0], 2)))
    if not rows:
        return None
    headings = ("workload", "arm", *(f"{c} at once" for c in levels), "τ")
    return Section(
        "In short",
        [
            Text(
                f"Output tokens per second of each user, as a multiple of {baseline!r}, by the "
                "number of sessions played at once; and the acceptance length τ, the mean number "
                "of tokens per verify pass."
            ),
            Table(headings, rows, left=2),
        ],
    )


def speed(summary: dict[str, Any], palette: figures.Palette) -> Section:
    baseline = summary["config"]["baseline"]
    rows = [
        (
            load["workload"] + ("" if load["cache"] == "warm" else " (cold cache)"),
            str(load["concurrency"]),
            load["arm"],
            with_interval(load["user_tok_per_s"], 1),
            with_interval(load["total_tok_per_s"], 1),
            times(load["throughput_ratio"]) if load["arm"] != baseline else "1",
            times(load["speedup"]) if load["arm"] != baseline else "1",
            with_interval(load["ttft_s"], 2),
            milliseconds(load["tpot_s"][0]),
            f"{milliseconds(load['itl_p50_s'])} / {milliseconds(load['itl_p99_s'])}",
            with_interval(load["turn_s"], 2),
        )
        for load in summary["loads"]
    ]
    headings = (
        "workload", "c", "arm", "tok/s per user", "tok/s in all", "ratio", "speed-up",
        "TTFT s", "TPOT ms", "ITL p50 / p99 ms", "turn s",
    )  # fmt: skip
    note = (
        "c: sessions played at once. tok/s per user: output tokens of a reply over the time that "
        "its user waited, prefill included; in all: over the round's wall time; ratio: to the "
        "baseline's in the same repeat. Speed-up: ratio of the tok/s per user on the same turn. "
        "Medians over replies, turns or rounds, with 95 % "
        "bootstrap intervals in brackets. ITL is the gap between streamed chunks; with "
        "speculation a chunk holds several tokens."
    )
    return Section(
        "Speed and latency",
        [
            *drawing(
                "speedup",
                "Speed-up over the baseline against concurrency, with 95 % intervals.",
                figures.speedup(summary, palette),
            ),
            *drawing(
                "throughput",
                "Throughput of the server against that of one user.",
                figures.throughput(summary, palette),
            ),
            Table(headings, rows, left=3) if rows else Text("Nothing was measured yet."),
            Text(note),
        ],
    )


def first_tokens(summary: dict[str, Any], palette: figures.Palette) -> Section | None:
    rows = [
        (
            arm,
            str(point["turn"]),
            decimals(point["prompt_tokens"], 0),
            percent(point["cached_share"]),
            with_interval(point["ttft_s"], 3),
        )
        for arm, points in summary["ttft_by_turn"].items()
        for point in points
    ]
    if not rows:
        return None
    picture = figures.first_tokens(summary, palette)
    headings = ("arm", "turn", "prompt tokens", "cached", "TTFT s")
    return Section(
        "First token of turn n",
        [
            *drawing("ttft", "Prefix cache kept, lowest concurrency.", picture),
            Table(headings, rows),
        ],
    )


def steps(summary: dict[str, Any], palette: figures.Palette) -> Section | None:
    rows = [
        (
            arm,
            str(step["n"]),
            str(step["steps"]),
            decimals(step["context"], 0),
            *(milliseconds(step[key]) for key in ("target_s", "draft_s", "other_s")),
            milliseconds(step["target_s"] + step["draft_s"] + step["other_s"]),
        )
        for arm, measured in summary["steps"].items()
        for step in measured
        if step["steps"] >= figures.MIN_STEPS
    ]
    if not rows:
        return None
    headings = ("arm", "batch", "steps", "context", "target ms", "draft ms", "other ms", "step ms")
    return Section(
        "Time of a decode step",
        [
            *drawing(
                "steps",
                "Median time of one decode step (a verify pass, where there is speculation).",
                figures.steps(summary, palette),
            ),
            Table(headings, rows),
            Text(
                "Taken inside the server, from one step's start to the next one's, while the batch "
                f"stayed the same; batches of fewer than {figures.MIN_STEPS} steps are left out. "
                "Medians of each part. Other: scheduler, sampling, acceptance and, for algorithms "
                "other than DLITE, the drafter."
            ),
        ],
    )


def sweep(summary: dict[str, Any]) -> Section | None:
    rows = [
        (
            point["arm"],
            str(point["concurrency"]),
            str(point["completed"]),
            decimals(point["output_throughput"], 1),
            *(
                decimals(point[key], 1)
                for key in ("median_ttft_ms", "median_tpot_ms", "p99_itl_ms")
            ),
        )
        for point in summary["sweep"]
    ]
    if not rows:
        return None
    headings = ("arm", "c", "requests", "tok/s in all", "TTFT ms", "TPOT ms", "ITL p99 ms")
    sweep = summary["config"]["sweep"]
    note = (
        f"`python -m sglang.bench_serving` on the workload {sweep['workload']!r}, written as an "
        "agentic trace; each server's own replies are fed back, replies end where the model does."
    )
    return Section("SGLang's own benchmark", [Table(headings, rows), Text(note)])
