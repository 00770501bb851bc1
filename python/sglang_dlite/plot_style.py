"""How the package's plots look, and their bytes."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.figure import Figure as Drawing

# Text stays text in SVG (searchable, small); ids are the same in every build.
matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "sglang-dlite",
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e4e7ec",
        "axes.edgecolor": "#98a2b3",
        "axes.axisbelow": True,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
    }
)

BASELINE = "#98a2b3"
COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#7048e8", "#c2255c", "#0b7285", "#e67700")
MARKERS = "osD^vP*"


def svg(drawing: Drawing) -> str:
    """The drawing as an `<svg>` element, without XML prologue."""
    buffer = io.StringIO()
    drawing.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def png(drawing: Drawing) -> bytes:
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
