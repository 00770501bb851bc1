"""The report's content from a run's directory."""

from __future__ import annotations

from typing import Any

from sglang_dlite.bench.records import RunDirectory
from sglang_dlite.bench.report import figures, sections_acceptance, sections_setup, sections_speed
from sglang_dlite.bench.report.content import Document
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
        sections_speed.in_short(summary),
        sections_setup.overview(summary),
        sections_speed.speed(summary, palette),
        sections_acceptance.acceptance(summary, palette),
        sections_speed.first_tokens(summary, palette),
        sections_speed.steps(summary, palette),
        sections_acceptance.tokens(run, summary),
        sections_setup.memory(summary),
        sections_speed.sweep(summary),
        sections_setup.published(summary),
        sections_acceptance.lab(summary),
        sections_setup.provenance(summary),
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
