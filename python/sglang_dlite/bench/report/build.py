"""The report's content from a run's directory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from sglang_dlite.bench.records import RoundResult, RunDirectory
from sglang_dlite.bench.report import figures
from sglang_dlite.bench.report.content import (
    Block,
    Code,
    Document,
    Figure,
    Items,
    Section,
    Table,
    Text,
)
from sglang_dlite.bench.report.formats import (
    MISSING,
    decimals,
    gigabytes,
    kilobytes,
    milliseconds,
    percent,
    times,
    with_interval,
)
from sglang_dlite.bench.report.token_view import token_runs
from sglang_dlite.bench.summary import summarise


def build(run: RunDirectory) -> tuple[Document, dict[str, Any]]:
    """The document, and the summary that it was made from.

    Raises:
        RunDirectoryError: there is no run in the directory.
    """
    summary = summarise(run)
    config = summary["config"]
    arms = [arm["name"] for arm in config["arms"]]
    palette = figures.Palette(arms, config["baseline"])
    sections = [
        _in_short(summary),
        _overview(summary),
        _speed(summary, palette),
        _acceptance(summary, palette),
        _first_tokens(summary, palette),
        _steps(summary, palette),
        _tokens(run, summary),
        _memory(summary),
        _sweep(summary),
        _published(summary),
        _lab(summary),
        _provenance(summary),
    ]
    origin = summary["provenance"]
    versions = origin.get("versions", {})
    subtitle = (
        f"{config['title'] or config['name']} · {origin.get('device', 'device unknown')}, "
        f"{origin.get('cpus', '?')} CPUs · sglang {versions.get('sglang', '?')}, "
        f"sglang-dlite {versions.get('sglang-dlite', '?')}"
    )
    made = [section for section in sections if section is not None and section.blocks]
    return Document("sglang-dlite benchmark", subtitle, made), summary


def _drawing(name: str, caption: str, drawing: Any) -> list[Block]:
    return [] if drawing is None else [Figure(name, caption, drawing)]


def _in_short(summary: dict[str, Any]) -> Section | None:
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


def _overview(summary: dict[str, Any]) -> Section:
    config = summary["config"]
    rows = []
    for arm in config["arms"]:
        state = summary["arms"].get(arm["name"], {})
        skipped = state.get("skipped")
        measured = "measured" if arm["name"] in summary["measured_arms"] else "not measured"
        flags = shlex.join(state.get("server_args", []))
        what = f"skipped: {short_reason(skipped)}" if skipped else measured
        rows.append((arm["name"], arm["algorithm"] or "(none)", what, flags))
    blocks: list[Block] = [Table(("arm", "algorithm", "here", "launch flags"), rows, left=4)]
    workloads = []
    for name, note in summary["workloads"].items():
        played = note.get("skipped") or f"{note['sessions']} sessions, {note['turns']} turns"
        fed = {"first": "first replies of the run", "own": "each server's own replies"}
        history = fed.get(note["history"], "recorded replies")
        workloads.append((name, note["kind"], played, history, note.get("text", "")))
    blocks.append(
        Table(("workload", "kind", "played", "fed back as history", "note"), workloads, left=5)
    )
    for name, note in summary["workloads"].items():
        for key, what in (("rejected", "unusable rows"), ("cut", "sessions cut or left out")):
            if note.get(key):
                blocks.append(Items(f"{name}: {len(note[key])} {what}", note[key]))
    failures = [
        f"{load['workload']} c={load['concurrency']} {load['arm']}: {failure}"
        for load in summary["loads"]
        for failure in load["failures"]
    ]
    for heading, items in (
        ("failed requests", failures),
        ("problems", summary["problems"]),
        ("rounds not played", summary["not_played"]),
    ):
        blocks.append(Items(f"{len(items)} {heading}", items) if items else Text(f"No {heading}."))
    return Section("What was run", blocks)


def short_reason(text: str) -> str:
    """The first line, and the next one where that announces it (`its log says:`)."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def _speed(summary: dict[str, Any], palette: figures.Palette) -> Section:
    rows = [
        (
            load["workload"] + ("" if load["cache"] == "warm" else " (cold cache)"),
            str(load["concurrency"]),
            load["arm"],
            with_interval(load["user_tok_per_s"], 1),
            with_interval(load["total_tok_per_s"], 1),
            times(load["speedup"]) if load["arm"] != summary["config"]["baseline"] else "1",
            with_interval(load["ttft_s"], 2),
            milliseconds(load["tpot_s"][0]),
            f"{milliseconds(load['itl_p50_s'])} / {milliseconds(load['itl_p99_s'])}",
            with_interval(load["turn_s"], 2),
        )
        for load in summary["loads"]
    ]
    headings = (
        "workload", "c", "arm", "tok/s per user", "tok/s in all", "speed-up", "TTFT s",
        "TPOT ms", "ITL p50 / p99 ms", "turn s",
    )  # fmt: skip
    note = (
        "c: sessions played at once. tok/s per user: output tokens over the time that users waited "
        "for replies, prefill included; in all: over the round's wall time. Speed-up: ratio of "
        "the tok/s per user over sessions that both arms played. Medians over repeats or replies, "
        "95 % bootstrap intervals in brackets. ITL is the gap between streamed chunks; with "
        "speculation a chunk holds several tokens."
    )
    return Section(
        "Speed and latency",
        [
            *_drawing(
                "speedup",
                "Speed-up over the baseline against concurrency; bars are 95 % intervals.",
                figures.speedup(summary, palette),
            ),
            *_drawing(
                "throughput",
                "Throughput of the server against that of one user.",
                figures.throughput(summary, palette),
            ),
            Table(headings, rows, left=3) if rows else Text("Nothing was measured yet."),
            Text(note),
        ],
    )


def _acceptance(summary: dict[str, Any], palette: figures.Palette) -> Section | None:
    if not summary["acceptance"]:
        return None
    rows = []
    for workload, arms in summary["acceptance_by_workload"].items():
        for arm, found in arms.items():
            rows.append(
                (
                    workload,
                    arm,
                    with_interval(found["tau"], 2),
                    *(decimals(found[f"tau_p{q}"], 2) for q in (10, 50, 90)),
                    str(found["verify_passes"]),
                )
            )
    headings = ("workload", "arm", "τ", "p10", "p50", "p90", "passes")
    width = max(len(found["position_rates"]) for found in summary["acceptance"].values())
    position_rows = [
        (arm, name, *(percent(rate) for rate in found[key]))
        for arm, found in summary["acceptance"].items()
        for name, key in (
            ("of all passes", "position_rates"),
            ("given the one before", "conditional_rates"),
        )
    ]
    position_rows = [(*row, *[""] * (width + 2 - len(row))) for row in position_rows]
    blocks: list[Block] = [
        *_drawing(
            "tau",
            "Acceptance length against prompt length and turn, all workloads together.",
            figures.tau(summary["acceptance"], palette),
        ),
        *_drawing(
            "positions",
            "How often the draft at each position of the block was accepted.",
            figures.positions(summary["acceptance"], palette),
        ),
        Table(headings, rows, left=2),
        Table(
            ("arm", "accepted", *(f"draft {i + 1}" for i in range(width))), position_rows, left=2
        ),
        Text(
            "τ = 1 + accepted drafts / verify passes, over all passes; percentiles are over "
            "replies. Counts are SGLang's own, per request."
        ),
    ]
    cache = [
        (
            arm,
            str(found["cache"]["turns"]),
            *(
                text
                for kind in ("cached", "cold")
                for text in (
                    percent(found["cache"][kind]["cached_share"]),
                    with_interval(found["cache"][kind]["tau"], 2),
                    with_interval(found["cache"][kind]["ttft_s"], 2),
                )
            ),
        )
        for arm, found in summary["acceptance"].items()
        if found["cache"]
    ]
    if cache:
        cache_headings = (
            "arm", "turns", "cached share", "τ cached", "TTFT cached s", "cold share", "τ cold",
            "TTFT cold s",
        )  # fmt: skip
        blocks.append(Table(cache_headings, cache))
        blocks.append(
            Text(
                "Cached against cold: the same turns (the second and later ones) at concurrency 1, "
                "with the prefix cache kept, and flushed before every turn."
            )
        )
    return Section("Acceptance", blocks)


def _first_tokens(summary: dict[str, Any], palette: figures.Palette) -> Section | None:
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
    drawing = figures.first_tokens(summary, palette)
    headings = ("arm", "turn", "prompt tokens", "cached", "TTFT s")
    return Section(
        "First token of turn n",
        [
            *_drawing("ttft", "Prefix cache kept, lowest concurrency.", drawing),
            Table(headings, rows),
        ],
    )


def _steps(summary: dict[str, Any], palette: figures.Palette) -> Section | None:
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
    ]
    if not rows:
        return None
    headings = ("arm", "batch", "steps", "context", "target ms", "draft ms", "other ms", "step ms")
    return Section(
        "Time of a decode step",
        [
            *_drawing(
                "steps",
                "Mean time of one decode step (a verify pass, where there is speculation).",
                figures.steps(summary, palette),
            ),
            Table(headings, rows),
            Text(
                "Taken inside the server, from one step's start to the next one's, while the batch "
                "stayed the same. Other: scheduler, sampling, acceptance and, for algorithms other "
                "than DLITE, the drafter."
            ),
        ],
    )


def _tokens(run: RunDirectory, summary: dict[str, Any]) -> Section | None:
    for arm in summary["acceptance"]:
        try:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(run.manifest()["target"])
        except (OSError, ValueError, KeyError) as error:
            return Section("Token view", [Text(f"Not shown: no tokenizer ({error}).")])

        def decode(ids: Sequence[int], tokenizer: Any = tokenizer) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=False))

        results = run.results()
        runs, note = token_runs(results, arm, decode, _prompts(run, results))
        explanation = (
            "Each piece is one output token. With --stream-interval 1 a server streams one chunk "
            f"per verify pass: the accepted drafts, then the target's own token. {note}"
        )
        return Section(f"Token view ({arm})", [Text(explanation), *runs])
    return None


def _prompts(run: RunDirectory, results: Sequence[RoundResult]) -> dict[tuple[str, int], str]:
    """The new text of each turn that was played, where the workload can be loaded again."""
    from sglang_dlite.bench.config import config_from_dict
    from sglang_dlite.bench.workloads import load
    from sglang_dlite.bench.workloads.sessions import WorkloadError

    prompts = {}
    played = {result.round.workload for result in results}
    for spec in config_from_dict(run.manifest()["config"]).workloads:
        if spec.name not in played:
            continue
        try:
            sessions = load(spec).sessions
        except WorkloadError:
            continue
        for session in sessions:
            for number, turn in enumerate(session.turns, 1):
                prompts[session.id, number] = str(turn.messages[-1]["content"])
    return prompts


def _memory(summary: dict[str, Any]) -> Section:
    from sglang_dlite.bench.memory import SESSION_LENGTHS

    rows, missing = [], []
    for arm, found in summary["memory"].items():
        if isinstance(found, str):
            missing.append(f"{arm}: {found}")
            continue
        fits = {int(length): count for length, count in found["sessions"].items()}
        rows.append(
            (
                arm,
                kilobytes(found["target_kv"]),
                kilobytes(found["draft_kv"]),
                kilobytes(found["state"]),
                gigabytes(found["drafter_bytes"]),
                *("?" if fits[n] is None else str(fits[n]) for n in SESSION_LENGTHS),
                found["source"],
            )
        )
    headings = (
        "arm", "target KV kB/token", "draft KV kB/token", "state kB/request", "drafter GB",
        *(f"sessions of {length // 1024}k" for length in SESSION_LENGTHS), "drafter's shape from",
    )  # fmt: skip
    memory = summary["config"]["memory_gib"]
    blocks: list[Block] = [Table(headings, rows)] if rows else []
    if missing:
        blocks.append(Items("not reckoned", missing))
    blocks.append(
        Text(
            f"Arithmetic, not a measurement: K/V in 16 bits, {memory:g} GiB for weights and K/V, "
            "nothing set aside for activations. A target may not take contexts that long."
        )
    )
    return Section("Memory", blocks)


def _sweep(summary: dict[str, Any]) -> Section | None:
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


def _published(summary: dict[str, Any]) -> Section | None:
    rows = []
    for item in summary["published"]:
        measured = None
        if item["measure"] == "speedup":
            measured = next(
                (
                    load["speedup"][0]
                    for load in summary["loads"]
                    if (load["workload"], load["arm"], load["concurrency"], load["cache"])
                    == (item["workload"], item["arm"], item["concurrency"], "warm")
                ),
                None,
            )
        else:
            found = summary["acceptance_by_workload"].get(item["workload"], {}).get(item["arm"])
            measured = found["tau"][0] if found else None
        rows.append(
            (
                item["workload"],
                item["arm"],
                item["measure"],
                str(item["concurrency"]),
                decimals(item["value"], 2),
                "not measured" if measured is None else decimals(measured, 2),
            )
        )
    if not rows:
        return None
    headings = ("workload", "arm", "measure", "c", "published", "here")
    source = summary["config"]["published_source"]
    return Section("Published figures", [Table(headings, rows, left=3), Text(f"From: {source}.")])


def _lab(summary: dict[str, Any]) -> Section | None:
    found = summary["lab"]
    if found is None:
        return None
    rows = [
        (
            item["name"],
            with_interval(item["tau"], 2),
            str(item["passes"]),
            ", ".join(
                f"{figures.context_name(point['at'])}: {decimals(point['tau'][0], 2)}"
                for point in item["by_context"]
            ),
        )
        for item in found["drafters"]
    ]
    blocks: list[Block] = [
        *_drawing("lab", "The same replies, played through each drafter.", figures.lab(found)),
        Table(("drafter", "τ", "passes", "by prompt tokens"), rows),
        *(Text(f"{name}: {reason}") for name, reason in found["absent"].items()),
        Text(
            f"No server: {found['replies']} greedy replies of the target, "
            f"{found['reply_tokens']} tokens, K = {found['num_drafts']} drafts for each drafter. "
            "Acceptance only; what drafting costs is not part of it."
        ),
    ]
    return Section("Acceptance lab", blocks)


def _provenance(summary: dict[str, Any]) -> Section:
    origin = summary["provenance"]
    versions = ", ".join(f"{name} {v}" for name, v in origin.get("versions", {}).items())
    facts = [
        ("command", shlex.join(origin.get("argv", []))),
        ("commit", str(origin.get("commit"))),
        ("versions", versions),
        ("Python", str(origin.get("python"))),
        ("platform", str(origin.get("platform"))),
        ("device", str(origin.get("device"))),
    ]
    blocks: list[Block] = [Table(("", ""), facts, left=2)]
    for name, arm in summary["arms"].items():
        if command := arm["facts"].get("command"):
            blocks.append(Text(f"{name}:"))
            blocks.append(Code(shlex.join(command)))
            shown = {k: v for k, v in arm["facts"].items() if k != "command"}
            blocks.append(Text(", ".join(f"{key} {value}" for key, value in shown.items())))
    return Section("Provenance", blocks)
