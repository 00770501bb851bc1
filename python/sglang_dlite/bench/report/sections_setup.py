"""Sections on what was run: arms, workloads, memory, published figures, provenance."""

from __future__ import annotations

import shlex
from typing import Any

from sglang_dlite.bench.report.content import Block, Code, Items, Section, Table, Text
from sglang_dlite.bench.report.formats import decimals, gigabytes, kilobytes


def overview(summary: dict[str, Any]) -> Section:
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


def memory(summary: dict[str, Any]) -> Section:
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


def published(summary: dict[str, Any]) -> Section | None:
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


def provenance(summary: dict[str, Any]) -> Section:
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
