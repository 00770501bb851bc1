"""An evaluation as JSON, a Markdown page and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_dlite.training.eval_metrics import Measured
from sglang_dlite.training.storage import write_atomically, write_json

_COLUMNS = (
    ("replies", "replies", "{:d}"),
    ("tokens", "output_tokens", "{:d}"),
    ("tau", "tau", "{:.3f}"),
    ("n-gram lookup", "lookup_tau", "{:.3f}"),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("target alone", "alone_tokens_per_second", "{:.1f}"),
    ("speed-up", "speed_up", "{:.2f}"),
)
_TITLES = {"source": "prompts", "category": "category", "context": "prompt tokens", "turn": "turn"}


def write_report(folder: Path, report: dict[str, Any], rows: Sequence[Measured]) -> None:
    """`report.json`, `replies.jsonl`, `report.md` and a PNG per table, each written atomically.

    report: {"settings": ..., "temperatures": {"0.0": `summarise`'s result, ...}}.
    """
    write_json(folder / "report.json", report)
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows).encode()
    write_atomically(folder / "replies.jsonl", lambda file: file.write(lines))
    text = markdown(report).encode()
    write_atomically(folder / "report.md", lambda file: file.write(text))
    write_plots(folder, report)


def markdown(report: dict[str, Any]) -> str:
    """The page: a table per temperature and grouping."""
    settings = report["settings"]
    parts = ["# Served acceptance", "", f"`{' '.join(settings['command'])}`", ""]
    for temperature, found in report["temperatures"].items():
        parts += [f"## Temperature {temperature}", ""]
        mean = found["mean_tau"]
        if mean is not None:
            parts += [f"Mean tau over the prompt files: **{mean:.3f}**.", ""]
        overall = {"all": found["all"], "looping (not in any other row)": found["looping"]}
        parts += _table("", overall)
        for name, groups in found["by"].items():
            parts += _table(_TITLES[name], groups)
        parts += ["| draft | accepted | given the drafts before it |", "|---|---|---|"]
        parts += [
            f"| {row['position']} | {row['accepted']:.3f} | {row['given_before']:.3f} |"
            for row in found["by_position"]
        ]
        rules = found["rules"]
        parts += [
            "",
            f"A reply loops if {rules['looping']}. N-gram lookup drafts {rules['lookup']}; its tau "
            "is computed on the same replies.",
            "",
        ]
    return "\n".join(parts)


def _table(title: str, groups: dict[str, dict[str, Any]]) -> list[str]:
    head = [title, *(name for name, _, _ in _COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for group, counts in groups.items():
        cells = [
            "" if counts[key] is None else form.format(counts[key]) for _, key, form in _COLUMNS
        ]
        lines.append("| " + " | ".join([group, *cells]) + " |")
    return [*lines, ""]


def write_plots(folder: Path, report: dict[str, Any]) -> None:
    """`tau-by-<grouping>.png` and `acceptance-by-position.png`."""
    from matplotlib.figure import Figure

    from sglang_dlite.plot_style import png

    found = report["temperatures"]
    for name, title in _TITLES.items():
        figure = Figure(figsize=(7, 3.5))
        axes = figure.subplots()
        for temperature, tables in found.items():
            groups = tables["by"][name]
            axes.plot(
                list(groups), [g["tau"] for g in groups.values()], "o-", label=f"T={temperature}"
            )
            axes.plot(
                list(groups), [g["lookup_tau"] for g in groups.values()], "x:",
                label=f"n-gram lookup, T={temperature}",
            )  # fmt: skip
        axes.set(xlabel=title, ylabel="acceptance length", ylim=(1, None))
        axes.tick_params(axis="x", labelrotation=30)
        axes.legend()
        _save(folder / f"tau-by-{name}.png", png(figure))
    figure = Figure(figsize=(7, 3.5))
    axes = figure.subplots()
    for temperature, tables in found.items():
        rows = tables["by_position"]
        axes.plot(
            [r["position"] for r in rows],
            [r["accepted"] for r in rows],
            "o-",
            label=f"T={temperature}",
        )
    axes.set(xlabel="draft", ylabel="share of passes that accept it", ylim=(0, 1))
    axes.legend()
    _save(folder / "acceptance-by-position.png", png(figure))


def _save(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))
