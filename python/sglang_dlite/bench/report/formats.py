"""Numbers as a reader sees them; what is missing is a dash."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING = "–"


def decimals(value: float | None, places: int) -> str:
    return MISSING if value is None or math.isnan(value) else f"{value:.{places}f}"


def with_interval(figure: Sequence[float], places: int) -> str:
    """`value [low, high]`, the bounds left out where they say nothing."""
    value, low, high = figure
    text = decimals(value, places)
    bounds = decimals(low, places), decimals(high, places)
    return (
        text
        if MISSING in (text, *bounds) or bounds == (text, text)
        else (f"{text} [{bounds[0]}, {bounds[1]}]")
    )


def times(figure: Sequence[float]) -> str:
    return with_interval(figure, 2)


def milliseconds(seconds: float | None) -> str:
    return decimals(None if seconds is None else 1000 * seconds, 0 if (seconds or 0) >= 0.1 else 1)


def percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.0f} %"


def kilobytes(count: float) -> str:
    return f"{count / 1000:.1f}"


def gigabytes(count: float | None) -> str:
    return MISSING if count is None else f"{count / 1e9:.2f}"
