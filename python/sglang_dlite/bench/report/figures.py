"""The drawings, from the summary of a run; each is left out where nothing was measured for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from sglang_dlite.plot_style import BASELINE, COLOURS, MARKERS

MIN_STEPS = 5  # of a batch size, to be shown


class Palette:
    """One colour and marker per arm, the same in every drawing."""

    def __init__(self, arms: Sequence[str], baseline: str) -> None:
        others = [arm for arm in arms if arm != baseline]
        self._style = {
            arm: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)])
            for i, arm in enumerate(others)
        }
        self._style[baseline] = (BASELINE, "o")

    def colour(self, arm: str) -> str:
        return self._style[arm][0]

    def marker(self, arm: str) -> str:
        return self._style[arm][1]


def _panels(count: int, height: float = 3.4) -> tuple[Drawing, list[Axes]]:
    """Drawings side by side, at most three in a row."""
    columns = min(count, 3)
    rows = -(-count // columns)
    drawing = Drawing(figsize=(max(4.6, 3.7 * columns), height * rows))
    axes = drawing.subplots(rows, columns, squeeze=False).flatten().tolist()
    for empty in axes[count:]:
        empty.remove()
    return drawing, axes[:count]


def _line(
    axes: Axes, xs: Sequence[float], figures: Sequence[Sequence[float]], arm: str, palette: Palette
) -> None:
    """Values with their intervals: figures are (value, low, high)."""
    values = [figure[0] for figure in figures]
    errors = [
        [max(0.0, figure[0] - figure[1]) for figure in figures],
        [max(0.0, figure[2] - figure[0]) for figure in figures],
    ]
    axes.errorbar(
        xs,
        values,
        yerr=errors,
        label=arm,
        color=palette.colour(arm),
        marker=palette.marker(arm),
        markersize=5,
        linewidth=1.6,
        elinewidth=1,
        capsize=2.5,
    )


def _load_axis(axes: Axes, loads: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(loads), [str(load) for load in loads])
    axes.minorticks_off()
    axes.set_xlabel("concurrency (sessions at once)")


def speedup(summary: dict[str, Any], palette: Palette) -> Drawing | None:
    """Speed-up per user against concurrency, a panel per workload, with the 1.0 line."""
    warm = [load for load in summary["loads"] if load["cache"] == "warm"]
    workloads = list(dict.fromkeys(load["workload"] for load in warm))
    baseline = summary["config"]["baseline"]
    if not {load["arm"] for load in warm} - {baseline}:
        return None
    drawing, panels = _panels(len(workloads))
    for axes, workload in zip(panels, workloads, strict=True):
        here = [load for load in warm if load["workload"] == workload]
        for arm in summary["measured_arms"]:
            mine = [load for load in here if load["arm"] == arm and arm != baseline]
            if mine:
                _line(
                    axes,
                    [load["concurrency"] for load in mine],
                    [load["speedup"] for load in mine],
                    arm,
                    palette,
                )
        axes.axhline(1.0, color=BASELINE, linestyle="--", linewidth=1.4)
        axes.annotate(
            baseline, (1, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            color="#667085", fontsize=8,
        )  # fmt: skip
        _load_axis(axes, sorted({load["concurrency"] for load in here}))
        axes.set_title(workload)
    # One scale for all, by the figures: a wide interval is cut at the edge.
    values = [1.0, *(load["speedup"][0] for load in warm if load["speedup"][0] > 0)]
    for axes in panels:
        axes.set_ylim(0.85 * min(values), max(1.2, 1.25 * max(values)))
    panels[0].set_ylabel("speed-up of a user's tok/s")
    panels[0].legend()
    return drawing


def throughput(summary: dict[str, Any], palette: Palette) -> Drawing | None:
    """Output tokens per second of all users against those of one: the trade of every server."""
    warm = [load for load in summary["loads"] if load["cache"] == "warm"]
    levels: dict[str, set[int]] = {}
    for load in warm:
        levels.setdefault(load["workload"], set()).add(load["concurrency"])
    workloads = [workload for workload, found in levels.items() if len(found) > 1]
    if not workloads:
        return None
    drawing, panels = _panels(len(workloads))
    for axes, workload in zip(panels, workloads, strict=True):
        for arm in summary["measured_arms"]:
            mine = [w for w in warm if (w["workload"], w["arm"]) == (workload, arm)]
            xs = [load["user_tok_per_s"][0] for load in mine]
            ys = [load["total_tok_per_s"][0] for load in mine]
            axes.plot(
                xs, ys, label=arm, color=palette.colour(arm), marker=palette.marker(arm),
                markersize=5,
            )  # fmt: skip
            for load, x, y in zip(mine, xs, ys, strict=True):
                axes.annotate(
                    f"c={load['concurrency']}", (x, y), xytext=(4, 4),
                    textcoords="offset points", fontsize=7, color=palette.colour(arm),
                )  # fmt: skip
        axes.set_title(workload)
        axes.set_xlabel("tok/s per user")
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])  # room for the labels
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    panels[0].set_ylabel("tok/s in all")
    panels[0].legend()
    return drawing


def context_name(edge: int) -> str:
    return f"{edge // 1024}k+" if edge >= 1024 else f"{edge}+"


def tau(acceptance: dict[str, Any], palette: Palette) -> Drawing | None:
    """Acceptance length against context length and against the turn."""
    if not acceptance:
        return None
    drawing, (left, right) = _panels(2)
    edges = sorted({p["at"] for a in acceptance.values() for p in a["by_context"]})
    for arm, figures in acceptance.items():
        points = figures["by_context"]
        xs = [edges.index(point["at"]) for point in points]
        _line(left, xs, [point["tau"] for point in points], arm, palette)
        points = figures["by_turn"]
        _line(right, [p["at"] for p in points], [p["tau"] for p in points], arm, palette)
    left.set_xticks(range(len(edges)), [context_name(edge) for edge in edges])
    left.set_xlabel("prompt tokens")
    left.set_ylabel("acceptance length τ")
    right.set_xlabel("turn")
    turns = sorted({p["at"] for a in acceptance.values() for p in a["by_turn"]})
    right.set_xticks(turns)
    for axes in (left, right):
        axes.set_ylim(bottom=1)
    left.legend()
    return drawing


def positions(acceptance: dict[str, Any], palette: Palette) -> Drawing | None:
    """Acceptance per block position: the share of passes that got there, and the conditional."""
    if not acceptance:
        return None
    drawing, panels = _panels(2)
    width = 0.8 / len(acceptance)
    for axes, key, title in zip(
        panels,
        ("position_rates", "conditional_rates"),
        ("of all passes", "given that the one before was accepted"),
        strict=True,
    ):
        for index, (arm, figures) in enumerate(acceptance.items()):
            rates = [rate or 0.0 for rate in figures[key]]
            xs = [i + 1 + (index + 0.5) * width - 0.4 for i in range(len(rates))]
            axes.bar(xs, rates, width=width, label=arm, color=palette.colour(arm))
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("position in the block")
        longest = max(len(figures[key]) for figures in acceptance.values())
        axes.set_xticks(range(1, longest + 1))
        axes.set_ylim(0, 1)
        axes.grid(axis="x", visible=False)
    panels[0].set_ylabel("accepted")
    panels[0].legend()
    return drawing


def steps(summary: dict[str, Any], palette: Palette) -> Drawing | None:
    """Time of one decode step, stacked, by arm and batch size."""
    measured = {arm: figures for arm, figures in summary["steps"].items() if figures}
    if not measured:
        return None
    by_arm = [
        {step["n"] for step in steps if step["steps"] >= MIN_STEPS} for steps in measured.values()
    ]
    shown = sorted(set.intersection(*by_arm))  # what can be compared
    if not shown:
        return None
    if len(shown) > 8:
        shown = [n for n in shown if n & (n - 1) == 0] or shown[:8]
    drawing, (axes,) = _panels(1, height=3.8)
    drawing.set_figwidth(8)
    parts = (("target_s", "target pass"), ("draft_s", "draft"), ("other_s", "other"))
    shades = {"target_s": 1.0, "draft_s": 0.6, "other_s": 0.25}
    width = 0.8 / len(measured)
    for index, (arm, figures) in enumerate(measured.items()):
        for place, n in enumerate(shown):
            step = next(step for step in figures if step["n"] == n)
            x, bottom = place + (index + 0.5) * width - 0.4, 0.0
            for key, _ in parts:
                height = 1000 * step[key]
                axes.bar(
                    x, height, width=0.92 * width, bottom=bottom,
                    color=palette.colour(arm), alpha=shades[key],
                )  # fmt: skip
                bottom += height
    for arm in measured:
        axes.bar(0, 0, color=palette.colour(arm), label=arm)
    for key, name in parts:
        axes.bar(0, 0, color="#475467", alpha=shades[key], label=name)
    axes.set_xticks(range(len(shown)), [str(n) for n in shown])
    axes.set_xlabel("requests in the batch")
    axes.set_ylabel("ms per decode step")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])  # room for the legend
    axes.legend(ncols=3)
    return drawing


def first_tokens(summary: dict[str, Any], palette: Palette) -> Drawing | None:
    """Time to the first token of turn n."""
    if not any(summary["ttft_by_turn"].values()):
        return None
    drawing, (axes,) = _panels(1)
    for arm, points in summary["ttft_by_turn"].items():
        turns = [point["turn"] for point in points]
        _line(axes, turns, [point["ttft_s"] for point in points], arm, palette)
        axes.set_xticks(turns)
    axes.set_xlabel("turn")
    axes.set_ylabel("s to the first token (median)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return drawing


def lab(figures: dict[str, Any]) -> Drawing | None:
    """The lab's acceptance length against context length, one line per drafter."""
    drafters = figures["drafters"]
    palette = Palette([item["name"] for item in drafters], "")
    edges = sorted({point["at"] for item in drafters for point in item["by_context"]})
    if not edges:
        return None
    drawing, (axes,) = _panels(1)
    for item in drafters:
        points = item["by_context"]
        xs = [edges.index(point["at"]) for point in points]
        _line(axes, xs, [point["tau"] for point in points], item["name"], palette)
    axes.set_xticks(range(len(edges)), [context_name(edge) for edge in edges])
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("acceptance length τ")
    axes.set_ylim(bottom=1)
    axes.legend()
    return drawing
