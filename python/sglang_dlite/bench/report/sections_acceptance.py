"""Sections on acceptance: figures, one session token by token, the lab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dlite.bench.records import RoundResult, RunDirectory
from sglang_dlite.bench.report import figures
from sglang_dlite.bench.report.content import Block, Section, Table, Text
from sglang_dlite.bench.report.formats import decimals, percent, with_interval
from sglang_dlite.bench.report.sections_speed import drawing
from sglang_dlite.bench.report.token_view import token_runs


def acceptance(summary: dict[str, Any], palette: figures.Palette) -> Section | None:
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
        *drawing(
            "tau",
            "Acceptance length against prompt length and turn, all workloads together.",
            figures.tau(summary["acceptance"], palette),
        ),
        *drawing(
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


def tokens(run: RunDirectory, summary: dict[str, Any]) -> Section | None:
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


def lab(summary: dict[str, Any]) -> Section | None:
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
        *drawing("lab", "The same replies, played through each drafter.", figures.lab(found)),
        Table(("drafter", "τ", "passes", "by prompt tokens"), rows),
        *(Text(f"{name}: {reason}") for name, reason in found["absent"].items()),
        Text(
            f"No server: {found['replies']} greedy replies of the target, "
            f"{found['reply_tokens']} tokens, K = {found['num_drafts']} drafts for each drafter. "
            "Acceptance only; what drafting costs is not part of it."
        ),
    ]
    return Section("Acceptance lab", blocks)
