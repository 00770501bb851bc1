"""What a state cache was made for, and which of its lines holds which reply."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dlite.training.anchors import AnchorSpec, Reply
from sglang_dlite.training.states import ReplyStates
from sglang_dlite.training.storage import read_lines, write_json
from sglang_dlite.training.targets import FrozenTarget


class CacheError(ValueError):
    """A cache is absent, damaged, or made for something else."""


def row_bytes(layers: int, hidden_size: int, top_k: int) -> dict[str, int]:
    """Bytes of a row of each array: an anchor's states, a law's ids and log-probabilities, and
    the features of a position that a window sees."""
    return {
        "states": 2 * layers * hidden_size,
        "topids": 4 * top_k,
        "toplogp": 2 * top_k,
        "window": 2 * 3 * hidden_size,
    }


@dataclass(frozen=True)
class CacheFormat:
    """What a cache was made for; kept in `cache.json`."""

    target: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    num_drafts: int
    top_k: int
    window: int
    anchors_per_reply: int
    seed: int
    # Of the target as it was loaded. Empty in a cache made before they were kept: not compared.
    target_weights: str = ""  # `FrozenTarget.fingerprint`
    target_dtype: str = ""

    def row_bytes(self, kind: str) -> int:
        return row_bytes(len(self.target_layer_ids), self.hidden_size, self.top_k)[kind]

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("states", "topids", "toplogp", *(("window",) if self.window else ()))

    def bind(self, folder: Path) -> None:
        """Write into a new cache, or raise `CacheError` if the one there has another format."""
        if not (folder / "cache.json").exists():
            write_json(folder / "cache.json", asdict(self))
            return
        _compare(folder, asdict(CacheFormat.read(folder)), asdict(self))

    @classmethod
    def read(cls, folder: Path) -> CacheFormat:
        try:
            found = json.loads((folder / "cache.json").read_text())
        except OSError as error:
            raise CacheError(
                f"{folder} is no state cache: run `sglang-dlite cache-states CONFIG` first, or set "
                "data.states=online"
            ) from error
        found["target_layer_ids"] = tuple(found["target_layer_ids"])
        return cls(**found)


def _compare(folder: Path, found: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise `CacheError` where a setting differs from what was kept of it."""
    differing = sorted(k for k in mine if found[k] != mine[k] and found[k] != "")
    if differing:
        raise CacheError(
            f"{folder} was made with other settings: "
            + "; ".join(f"{k} is {found[k]!r}, now {mine[k]!r}" for k in differing)
            + ". Set data.cache to another folder, or restore the settings."
        )


class CacheEntry:
    """One line of a cache: where a reply lies in the arrays of its part."""

    def __init__(self, line: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """line: id, content (absent in old caches), places, laws, seen, and first row by kind."""
        self.id, self.content = line["id"], line.get("content")
        self.places = np.array(line["places"], dtype=np.int64)
        self.counts = {
            "states": len(line["places"]),
            "topids": line["laws"],
            "toplogp": line["laws"],
            "window": line["seen"],
        }
        self._first, self._arrays = line["rows"], arrays

    @property
    def end(self) -> dict[str, int]:
        """The rows behind this reply's, by kind."""
        return {kind: first + self.counts[kind] for kind, first in self._first.items()}

    def rows(self, kind: str) -> np.ndarray:
        return self._arrays[kind][self._first[kind] : self.end[kind]]


def read_entries(
    folder: Path, arrays: Callable[[Path], dict[str, np.ndarray]] = lambda _: {}
) -> Iterator[tuple[Path, CacheEntry]]:
    """The entries of all parts, each with its part's `.jsonl`; arrays: opens a part's arrays."""
    for path in sorted(folder.glob("*.jsonl")):
        opened = arrays(path)
        for line in read_lines(path):
            yield path, CacheEntry(line, opened)


class CacheIndex:
    """Finds a reply's line by its tokens: an id may come back with another text."""

    def __init__(self, fmt: CacheFormat) -> None:
        self._format = fmt
        self._by_content: dict[str, CacheEntry] = {}
        self._unhashed: dict[str, CacheEntry] = {}  # by id
        self._ids: set[str] = set()

    def add(self, entry: CacheEntry) -> None:
        self._ids.add(entry.id)
        if entry.content is None:
            self._unhashed[entry.id] = entry
        else:
            self._by_content[entry.content] = entry

    def find(self, reply: Reply) -> CacheEntry | None:
        """The line of exactly this prompt and reply; None if there is none."""
        entry = self._by_content.get(reply.content)
        if entry is None:
            entry = self._unhashed.get(reply.id)
            if entry is not None and not self._fits(entry, reply):
                return None
        return entry

    def is_stale(self, reply: Reply) -> bool:
        """Whether there are states under the reply's id, but of other tokens."""
        return reply.id in self._ids and self.find(reply) is None

    def _fits(self, entry: CacheEntry, reply: Reply) -> bool:
        """Whether a line without a hash, of an older cache, can be this reply's.

        Its row counts follow from the lengths: of a reply all of whose places are cached the
        length is known exactly. Another text of the same length is not told apart.
        """
        fmt, count = self._format, len(reply.places)
        chosen = len(entry.places)
        if chosen not in (count, min(count, fmt.anchors_per_reply)):
            return False
        if chosen and entry.places[-1] >= count:
            return False
        spec = AnchorSpec(fmt.target_layer_ids, 1, fmt.num_drafts, fmt.top_k, fmt.window)
        part = ReplyStates(reply, entry.places, spec)
        return (len(part.laws), len(part.seen)) == (entry.counts["topids"], entry.counts["window"])


def check_cache(folder: Path, target: FrozenTarget, replies: Sequence[Reply]) -> None:
    """Raise `CacheError` if the cache at `folder` was made with another target, or lacks the states
    of some of these replies, be it that it holds other texts under their ids."""
    fmt = CacheFormat.read(folder)
    loaded = {"target_weights": target.fingerprint, "target_dtype": target.dtype}
    _compare(folder, asdict(fmt), loaded)
    index = CacheIndex(fmt)
    for _, entry in read_entries(folder):
        index.add(entry)
    missing = [reply for reply in replies if index.find(reply) is None]
    stale = [reply.id for reply in missing if index.is_stale(reply)]
    remedy = (
        "Run cache-states again with these replies, which adds what is missing, or set data.cache "
        "to the cache of these replies."
    )
    if stale:
        raise CacheError(
            f"{folder}: the states of {len(stale)} replies, the first {stale[0]!r}, are those of "
            f"another prompt or reply with the same id. {remedy}"
        )
    # They have no places, so a run would leave them out without a word.
    if missing:
        raise CacheError(
            f"{folder} lacks the states of {len(missing)} of {len(replies)} replies, the first "
            f"{missing[0].id!r}. {remedy}"
        )
