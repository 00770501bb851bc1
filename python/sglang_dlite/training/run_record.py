"""What a run leaves for its reader: metrics.jsonl, TensorBoard events, the progress bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dlite.training.storage import StorageError, read_lines, write_atomically


class RunRecord:
    """Appends to `metrics.jsonl` and to TensorBoard; only the main process has one."""

    def __init__(self, folder: Path, name: str, start: int, steps: int) -> None:
        """Lines of steps after `start` are a killed run's: they will be written again."""
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self._path = folder / "metrics.jsonl"
        kept = [line for line in read_lines(self._path) if line["step"] <= start]
        text = "".join(json.dumps(line) + "\n" for line in kept).encode()
        write_atomically(self._path, lambda file: file.write(text))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self.bar = tqdm(total=steps, initial=start, desc=name, unit="step", smoothing=0.1)
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

    def show(self, **values: str) -> None:
        """Put these beside the bar, with what is there already."""
        self._shown |= values
        self.bar.set_postfix(self._shown)

    def close(self) -> None:
        self.bar.close()
        self._board.close()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            numbers |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            numbers[f"{prefix}{name}"] = value
    return numbers
