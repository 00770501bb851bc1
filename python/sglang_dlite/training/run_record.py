"""What a run leaves for its reader: metrics.jsonl, TensorBoard events, the progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dlite.training.storage import StorageError, read_lines, write_atomically


class RunRecord:
    """Appends to `metrics.jsonl` and to TensorBoard; only the main process has one."""

    def __init__(
        self, folder: Path, name: str, step: int, at: float, length: int, unit: str
    ) -> None:
        """The run is at `step`; of its `length` in units (steps or seconds), `at` are done.

        Lines of steps after `step` are a killed run's: they will be written again.
        """
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self._path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(self._path) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept).encode()
        write_atomically(self._path, lambda file: file.write(text))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        self._bar = tqdm(total=length, initial=int(at), desc=name, unit=unit, smoothing=0.1)
        self._shown: dict[str, str] = {}

    def add(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """One line, and its numbers on the board. Raises `StorageError` on a full disk."""
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
            for name, number in _flat(values).items():
                self._board.add_scalar(f"{kind}/{name}", number, step)
        except OSError as error:
            raise StorageError(
                f"cannot write to {self._path.parent}: {error}. Free some space and run the same "
                "command again: it continues from the last checkpoint."
            ) from error

    def advance(self, at: float) -> None:
        """Move the bar to `at` units; a second that is not full does not show."""
        self._bar.update(int(at) - self._bar.n)

    def show(self, **values: str) -> None:
        """Put these beside the bar, with what is there already."""
        self._shown |= values
        self._bar.set_postfix(self._shown)

    def close(self) -> None:
        self._bar.close()
        self._board.close()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            numbers |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            numbers[f"{prefix}{name}"] = value
    return numbers
