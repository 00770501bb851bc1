"""States and laws on disk, for the chosen anchors only.

A cache is a folder with `cache.json` (what it was made for) and parts. A part has one line per
reply in `.jsonl`, with a hash of its tokens, and arrays of rows in the order of the lines:
    .states    bfloat16 [S, h]   pivot states, one row per chosen anchor
    .topids    int32    [M]      the likeliest next tokens, best first: one row per law needed
    .toplogp   float16  [M]      their log-probabilities under the target
    .window    bfloat16 [3, h]   history features, one row per position that a window sees
The line is written last, so a killed run leaves at most rows without a line, which opening for
append cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from sglang_dlite.training.anchors import AnchorBatch, AnchorSpec, Pick, Reply, concatenate
from sglang_dlite.training.cache_format import CacheError, CacheFormat, CacheIndex, read_entries
from sglang_dlite.training.states import ReplyStates
from sglang_dlite.training.storage import StorageError


class CacheWriter:
    """Appends replies to one part."""

    def __init__(self, folder: Path, part: str, fmt: CacheFormat) -> None:
        fmt.bind(folder)
        self._stem = folder / part
        lines = self._stem.with_suffix(".jsonl")
        self.index = CacheIndex(fmt)  # of all parts: the number of shares may change
        self._rows = dict.fromkeys(fmt.kinds, 0)
        for path, entry in read_entries(folder):
            self.index.add(entry)
            if path == lines:
                self._rows = entry.end
        kept = lines.read_bytes().rfind(b"\n") + 1 if lines.exists() else 0
        self._files: dict[str, IO[bytes]] = {}
        for kind in fmt.kinds:
            path = self._stem.with_suffix(f".{kind}")
            size = self._rows[kind] * fmt.row_bytes(kind)
            if (path.stat().st_size if path.exists() else 0) < size:
                raise CacheError(f"{path} is shorter than {lines.name} says: remove the part")
            self._files[kind] = _append_after(path, size)
        self._lines = _append_after(lines, kept)
        self._pending: list[bytes] = []

    def append(self, part: ReplyStates, batch: AnchorBatch, laws: tuple[Tensor, Tensor]) -> None:
        """Queue one reply: batch of its chosen anchors; laws [len(part.laws), M] ids, logprobs."""
        arrays = {
            "states": batch.pivot_states.bfloat16().view(torch.int16).numpy(),
            "topids": laws[0].to(torch.int32).numpy(),
            "toplogp": laws[1].to(torch.float16).numpy(),
        }
        if batch.window is not None:
            arrays["window"] = batch.window.features.bfloat16().view(torch.int16).numpy()
        record = {
            "id": part.reply.id,
            "content": part.reply.content,
            "places": part.places.tolist(),
            "laws": len(part.laws),
            "seen": len(part.seen),
            "rows": dict(self._rows),
        }
        self._guard(lambda: self._write(arrays, record))
        for kind, array in arrays.items():
            self._rows[kind] += len(array)

    def _write(self, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
        for kind, array in arrays.items():
            self._files[kind].write(np.ascontiguousarray(array).tobytes())
        self._pending.append(json.dumps(record).encode() + b"\n")

    def commit(self) -> None:
        """Make all that was appended durable: arrays first, lines last."""
        self._guard(self._sync)

    def _sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        # Not before: a line that stood in a buffer could outlive rows that the disk refused.
        self._lines.write(b"".join(self._pending))
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self._pending = []

    def _guard(self, write: Any) -> None:
        try:
            write()
        except OSError as error:
            raise StorageError(
                f"cannot write to {self._stem.parent}: {error}. Free some space and run the same "
                "command again: it continues with the next reply."
            ) from error

    def close(self) -> None:
        self.commit()
        for file in (*self._files.values(), self._lines):
            file.close()


def _append_after(path: Path, size: int) -> IO[bytes]:
    file = path.open("ab")
    file.truncate(size)
    return file


class CachedStates:
    """A `StateSource` that reads a cache. Replies that it lacks have no places.

    A cache serves any drafter that needs no more than it holds: fewer target layers, drafts, top
    tokens, or a smaller window.
    """

    def __init__(self, folder: Path, replies: Sequence[Reply], spec: AnchorSpec) -> None:
        """Raises `CacheError` where the cache does not hold what `spec` needs."""
        self.replies, self.format = replies, CacheFormat.read(folder)
        lacking = sorted(set(spec.layer_ids) - set(self.format.target_layer_ids))
        if lacking:
            raise CacheError(
                f"{folder}: the drafter needs target layers {lacking}, the cache holds "
                f"{list(self.format.target_layer_ids)}. Set data.cached_layer_ids to all that are "
                "wanted, data.cache to a new folder, and run cache-states."
            )
        for name, mine, held in (
            ("model.block_size - 1", spec.num_drafts, self.format.num_drafts),
            ("data.top_k", spec.top_k, self.format.top_k),
            ("model.window, where a teacher is used,", spec.window, self.format.window),
        ):
            if mine > held:
                raise CacheError(
                    f"{folder}: {name} is {mine}, the cache was made for {held}. Set data.cache to "
                    "a new folder, and run cache-states with these settings."
                )
        index = CacheIndex(self.format)
        for _, entry in read_entries(folder, self._arrays):
            index.add(entry)
        found = {reply.id: index.find(reply) for reply in replies}
        self._entries = {name: entry for name, entry in found.items() if entry is not None}

    def _arrays(self, lines: Path) -> dict[str, np.ndarray]:
        """Of the part with these lines, by kind."""
        return {k: self._map(lines.with_suffix(f".{k}"), k) for k in self.format.kinds}

    def _map(self, path: Path, kind: str) -> np.ndarray:
        fmt, count = self.format, path.stat().st_size // self.format.row_bytes(kind)
        dtype, shape = {
            "states": (np.int16, (count, len(fmt.target_layer_ids), fmt.hidden_size)),
            "topids": (np.int32, (count, fmt.top_k)),
            "toplogp": (np.float16, (count, fmt.top_k)),
            "window": (np.int16, (count, 3, fmt.hidden_size)),
        }[kind]
        return np.memmap(path, dtype, "r", shape=shape) if count else np.empty(shape, dtype)

    def places(self, reply: Reply) -> np.ndarray:
        """The chosen anchors of a reply; none if the cache lacks it."""
        entry = self._entries.get(reply.id)
        return np.empty(0, np.int64) if entry is None else entry.places

    def batch(self, picks: Sequence[Pick], spec: AnchorSpec) -> AnchorBatch:
        return concatenate([self._one(pick, spec) for pick in picks])

    def _one(self, pick: Pick, spec: AnchorSpec) -> AnchorBatch:
        reply = self.replies[pick.reply]
        entry = self._entries[reply.id]
        held = replace(spec, num_drafts=self.format.num_drafts, window=self.format.window)
        stored = ReplyStates(reply, entry.places, held)  # what the arrays' rows are
        wanted = ReplyStates(reply, pick.places, spec)
        rows = np.searchsorted(entry.places, pick.places)
        states = entry.rows("states")[rows]
        if spec.layer_ids != self.format.target_layer_ids:
            states = states[:, [self.format.target_layer_ids.index(i) for i in spec.layer_ids]]
        laws = np.searchsorted(stored.laws, wanted.laws)
        ids = torch.from_numpy(entry.rows("topids")[laws][:, : spec.top_k]).long()
        logprobs = torch.from_numpy(entry.rows("toplogp")[laws][:, : spec.top_k])
        features = None
        if spec.window:
            seen = np.searchsorted(stored.seen, wanted.seen)
            features = torch.from_numpy(entry.rows("window")[seen]).view(torch.bfloat16)
        return wanted.assemble(
            torch.from_numpy(states).view(torch.bfloat16), ids[:, 0], (ids, logprobs), features
        )
