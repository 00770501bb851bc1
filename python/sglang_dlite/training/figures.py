"""The drawings of docs/training/ablations.md: `python -m sglang_dlite.training.figures`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure as Drawing

from sglang_dlite.plot_style import COLOURS, MARKERS, svg
from sglang_dlite.training.storage import StorageError, read_lines, write_atomically


def learning_curve(run: Path) -> list[tuple[float, float]]:
    """(minutes of training, held-out tau) at every evaluation of a run's drafter.

    A teacher that was trained for it in the same folder has used up its minutes before. A run of a
    teacher alone gives the teacher's curve, one that was never evaluated none.
    """
    of_teacher, of_drafter = (
        [
            (line["train_seconds"] / 60, line["tau"]["mean"])
            for line in read_lines(folder / "metrics.jsonl")
            if line["kind"] == "eval" and "mean" in line["tau"]
        ]
        for folder in (run / "teacher", run)
    )
    if not of_drafter:
        return of_teacher
    before = of_teacher[-1][0] if of_teacher else 0.0
    return [(before + minutes, tau) for minutes, tau in of_drafter]


def curves(runs: dict[str, Path]) -> Drawing:
    """Held-out tau against minutes of training.

    Raises ValueError for a run that was never evaluated.
    """
    drawing = Drawing(figsize=(7, 3.6))
    axes = drawing.subplots()
    for (name, run), colour, marker in zip(runs.items(), COLOURS, MARKERS, strict=False):
        points = learning_curve(run)
        if not points:
            raise ValueError(f"{name}={run}: holds no evaluation (metrics.jsonl); train it further")
        minutes, taus = zip(*points, strict=True)
        axes.plot(minutes, taus, color=colour, marker=marker, markersize=4, label=name)
    axes.set(xlabel="minutes of training, the teacher's included", ylabel="held-out tau")
    axes.legend()
    return drawing


def contexts(files: dict[str, Path]) -> Drawing:
    """tau by prompt length, of files that `simulate --by context` printed."""
    drawing = Drawing(figsize=(7, 3.6))
    axes = drawing.subplots()
    found = {name: json.loads(path.read_text()) for name, path in files.items()}
    buckets = sorted({key for taus in found.values() for key in taus if key[0].isdigit()})
    for (name, taus), colour, marker in zip(found.items(), COLOURS, MARKERS, strict=False):
        places = [place for place, bucket in enumerate(buckets) if bucket in taus]
        values = [taus[buckets[place]] for place in places]
        axes.plot(places, values, color=colour, marker=marker, label=name)
    shown = ["-".join(part.lstrip("0") or "0" for part in bucket.split("-")) for bucket in buckets]
    axes.set_xticks(range(len(buckets)), shown, rotation=20)
    axes.set(xlabel="prompt tokens", ylabel="acceptance length")
    axes.legend()
    return drawing


def main(argv: Sequence[str] | None = None) -> int:
    """`curves OUT.svg NAME=RUN ...` or `contexts OUT.svg NAME=FILE ...`."""
    parser = argparse.ArgumentParser(prog="figures", description=main.__doc__)
    parser.add_argument("drawing", choices=("curves", "contexts"))
    parser.add_argument("out", type=Path)
    parser.add_argument("named", nargs="+", metavar="NAME=PATH")
    args = parser.parse_args(argv)
    named = {}
    for item in args.named:
        name, equals, path = item.partition("=")
        if not equals or not Path(path).exists():
            parser.error(f"{item!r}: must be NAME=PATH, of something that exists")
        named[name] = Path(path)
    if len(named) > len(COLOURS):
        parser.error(f"{len(named)} curves: at most {len(COLOURS)} can be told apart")
    try:
        drawing = curves(named) if args.drawing == "curves" else contexts(named)
        write_atomically(args.out, lambda file: file.write(svg(drawing).encode()))
    except (OSError, ValueError, StorageError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
