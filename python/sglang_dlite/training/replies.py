"""The data set on disk: the target's replies and, per reply token, what the drafter learns from.

A part is four files with one stem. `.jsonl` has one line per reply; the three arrays hold one row
per reply token, in the order of the lines:
    .states    bfloat16 [S, h]   pivot states of the row that produced the token
    .topids    int32    [M]      the most likely next tokens there, best first
    .toplogp   float16  [M]      their log-probabilities under the target
The line is written last, so a killed run leaves at most rows without a line, which opening for
append cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch


class ReplyStoreError(ValueError):
    """A data set is absent, damaged or made with other settings."""


@dataclass(frozen=True)
class StoreFormat:
    """What all parts of a data set agree on; kept in `format.json`."""

    target: str  # the target's name, for the reader's eyes
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    top_count: int
    max_new_tokens: int

    @property
    def row_bytes(self) -> dict[str, int]:
        states = 2 * len(self.target_layer_ids) * self.hidden_size
        return {"states": states, "topids": 4 * self.top_count, "toplogp": 2 * self.top_count}

    def bind(self, folder: Path) -> None:
        """Write the format into a new data set, or raise if the one there has another."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "format.json"
        mine = json.loads(json.dumps(asdict(self)))
        if path.exists():
            found = json.loads(path.read_text())
            differing = sorted(k for k in mine if found.get(k) != mine[k])
            if differing:
                raise ReplyStoreError(
                    f"{folder} was made with other settings: "
                    + "; ".join(f"{k} is {found.get(k)!r}, now {mine[k]!r}" for k in differing)
                    + ". Use another --out folder, or the old settings."
                )
            return
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(mine, indent=2) + "\n")
        scratch.replace(path)

    @classmethod
    def read(cls, folder: Path) -> StoreFormat:
        try:
            found = json.loads((folder / "format.json").read_text())
        except OSError as error:
            raise ReplyStoreError(
                f"{folder} is no data set (no format.json): run `sglang-dlite generate` first"
            ) from error
        found["target_layer_ids"] = tuple(found["target_layer_ids"])
        return cls(**found)


class ReplyWriter:
    """Appends replies to one part, so that a kill loses only what was not yet committed."""

    def __init__(self, folder: Path, part: str, fmt: StoreFormat) -> None:
        fmt.bind(folder)
        self._fmt = fmt
        self._stem = folder / part
        self.done: dict[str, dict[str, Any]] = {}
        self.rows = 0
        self._lines = self._open_lines()
        self._arrays: dict[str, IO[bytes]] = {}
        for kind, size in fmt.row_bytes.items():
            path = self._stem.with_suffix(f".{kind}")
            if (path.stat().st_size if path.exists() else 0) < self.rows * size:
                raise ReplyStoreError(f"{path} is shorter than {part}.jsonl says: remove the part")
            file = path.open("ab")
            file.truncate(self.rows * size)
            self._arrays[kind] = file

    def _open_lines(self) -> IO[bytes]:
        path = self._stem.with_suffix(".jsonl")
        kept = 0
        if path.exists():
            with path.open("rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):
                        break  # cut off in the middle by a kill
                    record = json.loads(line)
                    self.done[record["id"]] = record
                    self.rows = record["row"] + len(record["reply_ids"])
                    kept += len(line)
        file = path.open("ab")
        file.truncate(kept)
        return file

    def append(
        self, record: dict[str, Any], states: torch.Tensor, top_ids: Any, top_logprobs: Any
    ) -> None:
        """Queue one reply: states bf16 [T, S, h]; top_ids int32, top_logprobs fp16, [T, M]."""
        count = len(record["reply_ids"])
        assert states.shape[0] == count and states.dtype == torch.bfloat16
        self._arrays["states"].write(states.contiguous().view(torch.int16).numpy().tobytes())
        self._arrays["topids"].write(top_ids.contiguous().numpy().tobytes())
        self._arrays["toplogp"].write(top_logprobs.contiguous().numpy().tobytes())
        record = record | {"row": self.rows}
        self.rows += count
        self.done[record["id"]] = record
        self._lines.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")

    def commit(self) -> None:
        """Make all that was appended durable: arrays first, lines last."""
        for file in (*self._arrays.values(), self._lines):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        self.commit()
        for file in (*self._arrays.values(), self._lines):
            file.close()


@dataclass(frozen=True)
class Part:
    """One part, opened for reading; the arrays are memory-mapped."""

    records: list[dict[str, Any]]
    states: np.ndarray  # [rows, S, h] int16: the bits of bfloat16
    top_ids: np.ndarray  # [rows, M] int32
    top_logprobs: np.ndarray  # [rows, M] float16


def read_parts(folder: Path) -> Iterator[Part]:
    """Open every part of a data set, also one that is still being written (its committed rows)."""
    fmt = StoreFormat.read(folder)
    depth, top = len(fmt.target_layer_ids), fmt.top_count
    for lines in sorted(folder.glob("*.jsonl")):
        if not lines.with_suffix(".states").exists():
            continue
        text = lines.read_bytes()
        records = [json.loads(x) for x in text[: text.rfind(b"\n") + 1].splitlines()]
        if not records:
            continue
        rows = records[-1]["row"] + len(records[-1]["reply_ids"])
        available = min(
            lines.with_suffix(f".{kind}").stat().st_size // size
            for kind, size in fmt.row_bytes.items()
        )
        while records and rows > available:
            records.pop()
            rows = records[-1]["row"] + len(records[-1]["reply_ids"]) if records else 0

        def mapped(kind: str, dtype: Any, shape: tuple[int, ...], stem: Path = lines) -> np.ndarray:
            return np.memmap(stem.with_suffix(f".{kind}"), dtype=dtype, mode="r", shape=shape)

        if records:
            yield Part(
                records,
                mapped("states", np.int16, (rows, depth, fmt.hidden_size)),
                mapped("topids", np.int32, (rows, top)),
                mapped("toplogp", np.float16, (rows, top)),
            )
