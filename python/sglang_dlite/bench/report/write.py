"""Writes a run's report: report.html, report.md with PNG files, summary.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sglang_dlite.bench.records import RunDirectory
from sglang_dlite.bench.report import html, markdown
from sglang_dlite.bench.report.build import build
from sglang_dlite.bench.report.content import Figure
from sglang_dlite.files import write_atomic
from sglang_dlite.plot_style import png


def write_report(run: RunDirectory) -> Path:
    """Write everything; returns the HTML file.

    Raises:
        RunDirectoryError: there is no run in the directory.
    """
    document, summary = build(run)
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Figure):
                write_atomic(run.path / f"{block.name}.png", png(block.drawing))
    write_atomic(run.path / "report.md", markdown.text(document))
    write_atomic(run.path / "summary.json", json.dumps(_without_nan(summary), indent=1) + "\n")
    page = run.path / "report.html"
    write_atomic(page, html.page(document))
    return page


def _without_nan(value: Any) -> Any:
    """JSON knows no NaN: what was not measured becomes null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
