"""Anchors: which rows, which tokens and which labels make one training example.

Reply token r (its *place*) stands at position a = prompt length + r. An anchor there takes: the
states of row a-1, the G tokens ending in a, the tokens a+1..a+K, and the target's laws of rows
a..a+K-1. The CE labels are those laws' likeliest tokens, which for greedy replies are the tokens
a+1..a+K themselves; the head is fed the reply's own tokens (DLite's development repository).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig, HistoryWindow


@dataclass(frozen=True)
class Reply:
    """One reply of the target and the prompt it answers."""

    id: str
    source: str
    turn: int
    prompt_ids: np.ndarray  # int32
    reply_ids: np.ndarray  # int32

    @property
    def length(self) -> int:
        return len(self.reply_ids)

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([self.prompt_ids, self.reply_ids])

    @cached_property
    def content(self) -> str:
        """A hash of prompt and reply: ids may come back with another text."""
        digest = hashlib.sha256(len(self.prompt_ids).to_bytes(8, "big"))
        digest.update(self.tokens.astype("<i4").tobytes())
        return digest.hexdigest()[:16]

    @property
    def places(self) -> np.ndarray:
        """All places that can be anchors: those with a label."""
        return np.arange(max(0, self.length - 1))


class Pick(NamedTuple):
    """Some anchors of one reply."""

    reply: int  # its index among the replies
    places: np.ndarray  # int64


@dataclass(frozen=True)
class AnchorSpec:
    """What a drafter (or a teacher) needs to know of an anchor."""

    layer_ids: tuple[int, ...]  # of the S pivot states
    group_size: int  # G
    num_drafts: int  # K
    top_k: int  # of the target's law; 0: all of it
    window: int = 0  # W of the teacher; 0: no history

    @classmethod
    def of(cls, config: DLiteConfig, top_k: int, window: int = 0) -> AnchorSpec:
        return cls(
            config.target_layer_ids, config.anchor_group_size, config.num_drafts, top_k, window
        )


class TopLaw(NamedTuple):
    """The target's law on its M likeliest tokens."""

    ids: Tensor  # [n, K, M] int64
    logprobs: Tensor  # [n, K, M]


class HiddenLaw(NamedTuple):
    """The whole law, as the input of the target's lm_head."""

    hidden: Tensor  # [n, K, h]


class AnchorBatch(NamedTuple):
    """n anchors, ready for the drafter. Where `labelled` is false, the rest means nothing."""

    pivot_states: Tensor  # [n, S, h]
    token_group: Tensor  # [n, G] int64, ends in the anchor
    next_tokens: Tensor  # [n, K] int64, the reply's
    labels: Tensor  # [n, K] int64, the target's likeliest
    labelled: Tensor  # [n, K] bool: the reply has that token
    law: TopLaw | HiddenLaw
    window: HistoryWindow | None

    @property
    def previous_tokens(self) -> Tensor:
        """[n, K] int64: the token before each draft; column 0 is the anchor."""
        return torch.cat([self.token_group[:, -1:], self.next_tokens[:, :-1]], 1)


class Tokens(NamedTuple):
    """The token part of a batch."""

    group: Tensor  # [m, G] int64
    following: Tensor  # [m, K] int64, 0 where there is none
    labelled: Tensor  # [m, K] bool


def anchor_tokens(reply: Reply, places: np.ndarray, spec: AnchorSpec) -> Tokens:
    """Group, following tokens and label mask of these anchors; token 0 before the prompt."""
    tokens = reply.tokens.astype(np.int64)
    a = len(reply.prompt_ids) + places
    back = a[:, None] + np.arange(1 - spec.group_size, 1)
    group = np.where(back >= 0, tokens[np.maximum(back, 0)], 0)
    ahead = a[:, None] + np.arange(1, spec.num_drafts + 1)
    labelled = ahead < len(tokens)
    following = np.where(labelled, tokens[np.minimum(ahead, len(tokens) - 1)], 0)
    return Tokens(*map(torch.from_numpy, (group, following, labelled)))


def law_places(places: np.ndarray, num_drafts: int, length: int) -> np.ndarray:
    """The reply places whose rows' laws these anchors need, sorted: r..r+K-1 below length-1."""
    wanted = (places[:, None] + np.arange(num_drafts)).ravel()
    return np.unique(wanted[wanted < length - 1])


def window_positions(reply: Reply, places: np.ndarray, window: int) -> np.ndarray:
    """Positions a-W..a-2 of each anchor, [m, W-1]; negative where there is none."""
    a = len(reply.prompt_ids) + places
    return a[:, None] + np.arange(-window, -1)


def concatenate(batches: Sequence[AnchorBatch]) -> AnchorBatch:
    """One batch of all anchors; the windows' features are put behind each other."""
    first = batches[0]
    if len(batches) == 1:
        return first
    plain = {
        name: torch.cat([getattr(batch, name) for batch in batches])
        for name in ("pivot_states", "token_group", "next_tokens", "labels", "labelled")
    }
    law = type(first.law)(*map(torch.cat, zip(*(batch.law for batch in batches), strict=True)))
    window = None
    if first.window is not None:
        parts, start = [], 0
        for batch in batches:
            assert batch.window is not None
            parts.append(batch.window._replace(index=batch.window.index + start))
            start += len(batch.window.features)
        window = HistoryWindow(*map(torch.cat, zip(*parts, strict=True)))
    return AnchorBatch(**plain, law=law, window=window)


def select(batch: AnchorBatch, rows: Tensor) -> AnchorBatch:
    """The anchors `rows` [m] of a batch; of the windows' features only what they see."""
    window = batch.window
    if window is not None:
        seen, index = window.index[rows].unique(return_inverse=True)
        window = HistoryWindow(
            window.features[seen], index, window.valid[rows], window.position[rows]
        )
    return _mapped(batch, lambda part: part[rows])._replace(window=window)


def to_device(batch: AnchorBatch, device: torch.device) -> AnchorBatch:
    """The batch on another device."""
    window = batch.window and HistoryWindow(*(part.to(device) for part in batch.window))
    return _mapped(batch, lambda part: part.to(device))._replace(window=window)


def _mapped(batch: AnchorBatch, change: Callable[[Tensor], Tensor]) -> AnchorBatch:
    """The batch with `change` done to all but its window."""
    return AnchorBatch(
        change(batch.pivot_states),
        change(batch.token_group),
        change(batch.next_tokens),
        change(batch.labels),
        change(batch.labelled),
        type(batch.law)(*map(change, batch.law)),
        batch.window,
    )


def is_held_out(reply_id: str, percent: float) -> bool:
    """Whether a reply belongs to the held-out share; all turns of a session go together, and so do
    all replies to one prompt, whose ids begin alike (`load_replies`)."""
    session = reply_id.rsplit("#", 1)[0]
    digest = hashlib.sha256(session.encode()).digest()
    return int.from_bytes(digest[:4], "big") < percent / 100 * 2**32
