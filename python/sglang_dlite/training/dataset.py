"""Data sets of replies on disk: text and token ids only, with their provenance.

A folder with `dataset.json` and shards. A shard being written is `<share>-00003.jsonl`, one reply
a line; a full one stays as it is or is turned into `<share>-00003.parquet`. A
killed run leaves at most one torn line, which the next run cuts off.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from sglang_dlite.training.anchors import Reply
from sglang_dlite.training.storage import (
    StorageError,
    locked,
    read_lines,
    write_atomically,
    write_json,
)

DESCRIPTION = "dataset.json"
_OLD_DESCRIPTION = "format.json"  # of the first, unreleased trainer


class DatasetError(ValueError):
    """A data set is absent, damaged or made with other settings."""


@dataclass(frozen=True)
class ReplyRecord:
    """One reply as it is stored."""

    id: str  # "<prompt>#<turn>", for the reader; two prompts may have come by the same
    source: str
    turn: int
    category: str
    prompt_ids: list[int]
    reply_ids: list[int]  # the target's, the end-of-text token included
    text: str
    finish: str  # stop or length
    question: str = ""  # what the target asked itself (self-instruct)
    prompt_hash: str = ""  # `conversation_hash` of all that the reply follows


_DEFAULTS = {f.name: f.default for f in fields(ReplyRecord) if f.default is not MISSING}


@dataclass(frozen=True)
class Description:
    """What all replies of a data set agree on. `provenance` may differ between runs."""

    target: str  # its name, for the reader's eyes
    architecture: str
    vocab_size: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    provenance: list[dict[str, Any]] = field(default_factory=list)  # one entry per run

    def bind(self, folder: Path) -> None:
        """Write into a new data set, or add this run to the one there.

        Raises `DatasetError` if that was made with other settings.
        """
        with locked(folder, "dataset", wait=True):  # shares may start at once, each with its run
            self._bind(folder)

    def _bind(self, folder: Path) -> None:
        runs = []
        if (folder / DESCRIPTION).exists() or (folder / _OLD_DESCRIPTION).exists():
            found = Description.read(folder)
            mine, theirs = asdict(self), asdict(found)
            differing = sorted(k for k in mine if k != "provenance" and theirs[k] != mine[k])
            if differing:
                raise DatasetError(
                    f"{folder} was made with other settings: "
                    + "; ".join(f"{k} is {theirs[k]!r}, now {mine[k]!r}" for k in differing)
                    + ". Use another --out folder, or the old settings."
                )
            runs = found.provenance
        write_json(folder / DESCRIPTION, asdict(self) | {"provenance": runs + self.provenance})

    @classmethod
    def read(cls, folder: Path) -> Description:
        if (folder / _OLD_DESCRIPTION).exists() and not (folder / DESCRIPTION).exists():
            raise DatasetError(
                f"{folder} was written by an earlier trainer, which stored states instead of "
                "prompts. Run `sglang-dlite generate` again, into another folder."
            )
        try:
            return cls(**json.loads((folder / DESCRIPTION).read_text()))
        except OSError as error:
            raise DatasetError(
                f"{folder} is no data set (no {DESCRIPTION}): run `sglang-dlite generate` first"
            ) from error


def tokens_hash(prompt_ids: Sequence[int] | np.ndarray) -> str:
    """What a reply without `prompt_hash`, of an older data set, is found by."""
    return hashlib.sha256(np.asarray(prompt_ids, "<i4").tobytes()).hexdigest()


class ReplyWriter:
    """Appends replies to one share of a data set, so that a kill loses none that was committed."""

    def __init__(
        self, folder: Path, share: str, parquet: bool = False, shard_size: int = 1000
    ) -> None:
        self._folder, self._share = folder, share
        self._parquet, self._shard_size = parquet, shard_size
        self.done: dict[str, dict[str, Any]] = {}  # by id
        self.made: dict[str, dict[str, Any]] = {}  # by prompt: its hash, or else `tokens_hash`
        self._lines: IO[bytes] | None = None
        for path in _shards(folder, f"{share}-*"):
            if path.suffix == ".jsonl" and path.with_suffix(".parquet").exists():
                path.unlink()  # converted, but killed before it was removed
        for path in _shards(folder):  # of all shares: the number of shares may change
            for record in _read_shard(path):
                self._know(record)
        shards = _shards(folder, f"{share}-*")
        # Only the newest can be unfinished; one before it stays, whatever its format.
        unfinished = [path for path in shards[-1:] if path.suffix == ".jsonl"]
        self._number = len(shards) - len(unfinished)
        self._held: list[dict[str, Any]] = read_lines(unfinished[0]) if unfinished else []

    def _know(self, record: dict[str, Any]) -> None:
        self.done[record["id"]] = record
        self.made[record.get("prompt_hash") or tokens_hash(record["prompt_ids"])] = record

    def append(self, record: ReplyRecord) -> None:
        """Write one reply and make it durable. Raises `StorageError` on a full disk."""
        value = asdict(record)
        try:
            if self._lines is None:
                self._open()
            assert self._lines is not None
            self._lines.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            self._lines.flush()
            os.fsync(self._lines.fileno())
        except OSError as error:
            raise StorageError(
                f"cannot write to {self._folder}: {error}. Free some space and run the same "
                "command again: it continues with the next reply."
            ) from error
        self._know(value)
        self._held.append(value)
        if len(self._held) >= self._shard_size:
            self._finish_shard()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._share}-{self._number:05d}.jsonl"

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = 0
        if self._path.exists():
            data = self._path.read_bytes()
            kept = data.rfind(b"\n") + 1  # behind it: a line cut off by a kill
        self._lines = self._path.open("ab")
        self._lines.truncate(kept)

    def _finish_shard(self) -> None:
        self.close()
        if self._parquet:
            import pyarrow
            import pyarrow.parquet

            # Its columns are the first row's, which may be of before replies had all fields.
            table = pyarrow.Table.from_pylist([{**_DEFAULTS, **record} for record in self._held])
            target = self._path.with_suffix(".parquet")
            write_atomically(target, lambda file: pyarrow.parquet.write_table(table, file))
            self._path.unlink()
        self._held = []
        self._number += 1

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _shards(folder: Path, pattern: str = "*") -> list[Path]:
    return sorted([*folder.glob(f"{pattern}.jsonl"), *folder.glob(f"{pattern}.parquet")])


def _read_shard(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return read_lines(path)
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DatasetError(
            f"{path} is damaged ({error}): restore or remove it; its replies are then made again"
        ) from error


def answered_prompts(folder: Path) -> set[str]:
    """The `prompt_hash` of every reply. Raises `DatasetError` for a data set without them."""
    Description.read(folder)
    hashes = set()
    for path in _shards(folder):
        for record in _read_shard(path):
            if not record.get("prompt_hash"):
                raise DatasetError(
                    f"--exclude {folder}: {path.name} is of before replies had a prompt_hash; "
                    "exclude its prompt files instead"
                )
            hashes.add(record["prompt_hash"])
    return hashes


def load_replies(folders: Sequence[Path], vocab_size: int) -> list[Reply]:
    """All replies of these data sets, in a fixed order, under ids of their own.

    A reply that occurs twice, prompt and all, is taken once; the number is reported. Another reply
    to the same prompt, or to another prompt of the same id, is "<id>~<content>", <id> being that
    of the first: so replies to one prompt are held out together.
    Raises `DatasetError` for an absent data set, a target of another vocabulary, or a token
    outside it.
    """
    if not folders:
        raise DatasetError("no data set given: set data.replies")
    replies: dict[str, Reply] = {}
    first_ids: dict[str, str] = {}  # by prompt
    contents: set[str] = set()
    repeated = 0
    for folder in folders:
        found = Description.read(folder)
        if found.vocab_size != vocab_size:
            raise DatasetError(
                f"{folder} holds replies of {found.target}, whose vocabulary has "
                f"{found.vocab_size} tokens; the target's has {vocab_size}. Generate replies with "
                "the target itself."
            )
        for path in _shards(folder):
            for record in _read_shard(path):
                reply = _reply(record, path, vocab_size)
                if reply.content in contents:
                    repeated += 1
                    continue
                contents.add(reply.content)
                name = first_ids.setdefault(tokens_hash(reply.prompt_ids), reply.id)
                if name in replies:
                    name = f"{name}~{reply.content}"
                replies[name] = replace(reply, id=name)
    if not replies:
        raise DatasetError(f"no replies in {', '.join(map(str, folders))}")
    if repeated:
        print(f"{repeated} replies occur more than once, taken once", file=sys.stderr)
    return list(replies.values())


def _reply(record: dict[str, Any], path: Path, vocab_size: int) -> Reply:
    prompt = np.array(record["prompt_ids"], dtype=np.int32)
    reply = np.array(record["reply_ids"], dtype=np.int32)
    largest = max(prompt.max(initial=0), reply.max(initial=0))
    if largest >= vocab_size:
        raise DatasetError(
            f"{path}: reply {record['id']!r} has token {largest}, the target's vocabulary ends at "
            f"{vocab_size - 1}"
        )
    return Reply(record["id"], record["source"], record["turn"], prompt, reply)


def fingerprint(folders: Sequence[Path]) -> dict[str, str]:
    """sha256 of every shard, by its path."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in _shards(folder)
    }
