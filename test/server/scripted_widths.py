"""The oracle, with the width policy under the test's control inside the scheduler process.

DLITE_DRAFTER_FACTORY=scripted_widths:make. The script is read from a file at every step: `policy`
for the real one, as good as new, else widths that are played in turn. Each width that is settled
is logged.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path

import oracle
import torch
from sglang_dlite.speculative.adaptive import WidthPolicy

FOLDER_VARIABLE = "DLITE_TEST_WIDTHS"
# Every step another width, and all pairs of wide, narrow and plain next to one another.
SCRIPT = (8, 1, 3, 3, 1, 1, 2, 8, 8, 4, 1, 5, 2, 7, 6, 1)


def widths_environment(folder: Path) -> dict[str, str]:
    write_script(folder, SCRIPT)
    return {"DLITE_DRAFTER_FACTORY": "scripted_widths:make", FOLDER_VARIABLE: str(folder)}


def write_script(folder: Path, widths: tuple[int, ...] | None) -> None:
    """Play `widths`, or leave it to the policy; empties the log."""
    (folder / "script").write_text("policy" if widths is None else " ".join(map(str, widths)))
    (folder / "widths").write_text("")


def settled_widths(folder: Path) -> list[int]:
    """What was settled since `write_script`: after each prefill and each verify pass."""
    return [int(line) for line in (folder / "widths").read_text().split()]


def predict_histogram(widths: list[int], num_tokens: int) -> list[int]:
    """Verify passes by accepted drafts, of a lone request whose drafts are all right."""
    counts: Counter[int] = Counter()
    done = 1  # the prefill gives the first token
    for width in widths:
        if done >= num_tokens:
            break
        counts[width - 1] += 1
        done += width
    return [counts[n] for n in range(max(counts, default=-1) + 1)]


def script_widths() -> None:
    """Put the script in the policy's place in this process, and log what is settled."""
    folder = Path(os.environ[FOLDER_VARIABLE])
    steps = itertools.count()
    chosen = WidthPolicy.next_width
    fresh = False  # whether the policy knows only what it has chosen itself

    def next_width(self: WidthPolicy, batch_size: int) -> int:
        nonlocal fresh
        if torch.distributed.get_rank() > 0:
            return next(steps) % self.widths[-1] + 1  # rank 0's is what counts
        script = (folder / "script").read_text()
        if script == "policy" and not fresh:
            self.__init__(self.widths)
        fresh = script == "policy"
        if fresh:
            width = chosen(self, batch_size)
        else:
            widths = script.split()
            width = int(widths[next(steps) % len(widths)])
        with open(folder / "widths", "a") as log:
            log.write(f"{width}\n")
        return width

    WidthPolicy.next_width = next_width


def make(path: str, device: str, dtype: torch.dtype) -> oracle.OracleDrafter:
    """The factory that DLITE_DRAFTER_FACTORY names."""
    script_widths()
    return oracle.make(path, device, dtype)
