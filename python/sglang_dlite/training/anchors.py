"""Anchors: which row, which tokens and which labels make one training example.

Symbols as in the paper: Reply token r stands at position a; the row that produced it is
the pivot a-1. An anchor at r therefore takes: states of row r, the G tokens ending in r, labels
r+1..r+K, previous tokens r..r+K-1, target laws of rows r+1..r+K (row r+j is position a+j-1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_dlite.training.replies import Part, ReplyStoreError, StoreFormat, read_parts


class AnchorBatch(NamedTuple):
    """n anchors, ready for the drafter."""

    pivot_states: Tensor  # [n, S, h] bf16
    token_group: Tensor  # [n, G] int64, ends in the anchor
    previous_tokens: Tensor  # [n, K] int64, column 0 is the anchor
    labels: Tensor  # [n, K] int64, 0 where there is none
    labelled: Tensor  # [n, K] bool
    top_ids: Tensor  # [n, K, M] int64
    top_logprobs: Tensor  # [n, K, M] float16


@dataclass(frozen=True)
class Reply:
    """Where one reply lies in the flat arrays."""

    id: str
    source: str
    row: int  # first row, global
    length: int  # reply tokens


def is_held_out(prompt_id: str, percent: float) -> bool:
    """Whether a prompt belongs to the held-out share; all turns of a session go together."""
    session = prompt_id.rsplit("#", 1)[0]
    digest = hashlib.sha256(session.encode()).digest()
    return int.from_bytes(digest[:4], "big") < percent / 100 * 2**32


class AnchorSet:
    """All rows of one or more data sets, addressed by a global row number."""

    def __init__(self, folders: Sequence[Path], group_size: int, num_drafts: int) -> None:
        """group_size: G; num_drafts: K. Raises `ReplyStoreError` where formats differ."""
        self.group_size, self.num_drafts = group_size, num_drafts
        formats = [StoreFormat.read(folder) for folder in folders]
        if not formats:
            raise ReplyStoreError("no data set given: set data.folders")
        self.format = formats[0]
        for folder, other in zip(folders, formats, strict=True):
            if (other.row_bytes, other.target_layer_ids) != (
                self.format.row_bytes,
                self.format.target_layer_ids,
            ):
                raise ReplyStoreError(f"{folder} has another format than {folders[0]}")
        self._parts: list[Part] = []
        self._starts: list[int] = []
        self.replies: list[Reply] = []
        tokens: list[np.ndarray] = []
        places: list[np.ndarray] = []
        remaining: list[np.ndarray] = []
        rows = offset = 0
        for folder in folders:
            for part in read_parts(folder):
                self._parts.append(part)
                self._starts.append(rows)
                for record in part.records:
                    reply = record["reply_ids"]
                    lead = ([0] * group_size + record["prompt_tail"])[-group_size:]
                    tokens.append(np.array([*lead, *reply], dtype=np.int64))
                    start = offset + group_size
                    places.append(np.arange(start, start + len(reply)))
                    remaining.append(np.arange(len(reply) - 1, -1, -1))
                    self.replies.append(
                        Reply(record["id"], record["source"], rows + record["row"], len(reply))
                    )
                    offset += group_size + len(reply)
                rows += len(part.states)
        if not tokens:
            raise ReplyStoreError(f"no replies in {', '.join(map(str, folders))}")
        self._tokens = np.concatenate(tokens)  # per reply: G prompt tokens, then the reply
        self._place = np.concatenate(places)  # row -> index in _tokens
        self._remaining = np.concatenate(remaining)  # row -> labels that follow
        self.num_rows = rows
        assert len(self._place) == rows

    def rows_of(self, replies: Sequence[Reply]) -> np.ndarray:
        """The rows of these replies that can be anchors: those with at least one label."""
        spans = [np.arange(r.row, r.row + r.length - 1) for r in replies if r.length > 1]
        return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)

    def states(self, rows: np.ndarray) -> Tensor:
        """Pivot states [n, S, h] bf16 of these rows."""
        return torch.from_numpy(self._take("states", rows)).view(torch.bfloat16)

    def token_group(self, rows: np.ndarray) -> Tensor:
        """[n, G] int64: the real tokens ending in each row's reply token."""
        back = np.arange(-self.group_size + 1, 1)
        return torch.from_numpy(self._tokens[self._place[rows][:, None] + back])

    def labels(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Labels [n, K] int64 and whether there is one [n, K] bool."""
        ahead = np.arange(1, self.num_drafts + 1)
        labelled = ahead <= self._remaining[rows][:, None]
        index = np.where(labelled, self._place[rows][:, None] + ahead, 0)
        labels = np.where(labelled, self._tokens[index], 0)
        return torch.from_numpy(labels), torch.from_numpy(labelled)

    def batch(self, rows: np.ndarray) -> AnchorBatch:
        """The training example of each row."""
        labels, labelled = self.labels(rows)
        group = self.token_group(rows)
        previous = torch.cat([group[:, -1:], labels[:, :-1]], 1)
        ahead = np.arange(1, self.num_drafts + 1)
        law_rows = np.where(labelled.numpy(), rows[:, None] + ahead, rows[:, None]).reshape(-1)
        shape = (len(rows), self.num_drafts, self.format.top_count)
        top_ids = torch.from_numpy(self._take("top_ids", law_rows)).long().view(shape)
        top_logprobs = torch.from_numpy(self._take("top_logprobs", law_rows)).view(shape)
        return AnchorBatch(
            self.states(rows), group, previous, labels, labelled, top_ids, top_logprobs
        )

    def _take(self, name: str, rows: np.ndarray) -> np.ndarray:
        owner = np.searchsorted(self._starts, rows, side="right") - 1
        first = getattr(self._parts[0], name)
        out = np.empty((len(rows), *first.shape[1:]), dtype=first.dtype)
        for index in np.unique(owner):
            mine = owner == index
            out[mine] = getattr(self._parts[index], name)[rows[mine] - self._starts[index]]
        return out


def split(replies: Sequence[Reply], percent: float) -> tuple[list[Reply], list[Reply]]:
    """(training replies, held-out replies)."""
    held = [r for r in replies if is_held_out(r.id, percent)]
    return [r for r in replies if not is_held_out(r.id, percent)], held
