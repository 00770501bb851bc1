"""Where the states of anchors come from: a forward pass of the target, made for the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglang_dlite.drafter import HistoryWindow
from sglang_dlite.drafter.history import history_layer_ids
from sglang_dlite.training.anchors import (
    AnchorBatch,
    AnchorSpec,
    HiddenLaw,
    Pick,
    Reply,
    TopLaw,
    anchor_tokens,
    concatenate,
    law_places,
    window_positions,
)
from sglang_dlite.training.targets import FrozenTarget, Rows


class StateSource(Protocol):
    """Makes training examples; `OnlineStates` and `CachedStates` are the two."""

    replies: Sequence[Reply]

    def batch(self, picks: Sequence[Pick], spec: AnchorSpec) -> AnchorBatch:
        """The anchors of the picks, in their order."""
        ...


class ReplyStates:
    """What one reply contributes: states and laws at exactly the rows that its anchors need."""

    def __init__(self, reply: Reply, places: np.ndarray, spec: AnchorSpec) -> None:
        self.reply, self.places, self.spec = reply, places, spec
        self.laws = law_places(places, spec.num_drafts, reply.length)
        positions = window_positions(reply, places, spec.window) if spec.window else None
        self.positions = positions  # [m, W-1]
        self.seen = np.empty(0, np.int64) if positions is None else np.unique(positions.clip(min=0))

    @property
    def pivots(self) -> np.ndarray:
        return len(self.reply.prompt_ids) + self.places - 1

    @property
    def law_rows(self) -> np.ndarray:
        return len(self.reply.prompt_ids) + self.laws

    def assemble(
        self, states: Tensor, labels: Tensor, law: tuple[Tensor, ...], features: Tensor | None
    ) -> AnchorBatch:
        """The batch from states [m, S, h], and of the rows `law_rows`: their likeliest tokens
        and law; features [len(seen), 3, h]. Laws may be those of more rows than needed here."""
        tokens = anchor_tokens(self.reply, self.places, self.spec)
        wanted = self.places[:, None] + np.arange(self.spec.num_drafts)
        # A place without label points somewhere; it weighs nothing.
        index = torch.from_numpy(np.searchsorted(self.laws, wanted).clip(max=len(self.laws) - 1))
        kind = TopLaw if self.spec.top_k else HiddenLaw
        window = None
        if features is not None and self.positions is not None:
            window = HistoryWindow(
                features,
                torch.from_numpy(np.searchsorted(self.seen, self.positions.clip(min=0))),
                torch.from_numpy(self.positions >= 0),
                torch.from_numpy(self.pivots + 1),
            )
        return AnchorBatch(
            states,
            tokens.group,
            tokens.following,
            torch.where(tokens.labelled, labels[index], 0),
            tokens.labelled,
            kind(*(part[index] for part in law)),
            window,
        )


class OnlineStates:
    """States by a forward pass of the frozen target over prompt and reply, one for all picks."""

    def __init__(self, target: FrozenTarget, replies: Sequence[Reply]) -> None:
        self.target, self.replies = target, replies

    def batch(self, picks: Sequence[Pick], spec: AnchorSpec) -> AnchorBatch:
        return concatenate(self.batches(picks, spec))

    def batches(self, picks: Sequence[Pick], spec: AnchorSpec) -> list[AnchorBatch]:
        """The anchors of each pick for themselves, from one forward pass over all the replies."""
        parts = [ReplyStates(self.replies[pick.reply], pick.places, spec) for pick in picks]
        last = self.target.shape.num_hidden_layers - 1
        requests = [
            _rows([part.pivots for part in parts], spec.layer_ids),
            _rows([part.law_rows for part in parts], (last,)),
        ]
        if spec.window:
            layers = history_layer_ids(self.target.shape.num_hidden_layers)
            requests.append(_rows([part.seen for part in parts], layers))
        found = [
            states.cpu()
            for states in self.target.states([part.reply.tokens for part in parts], requests)
        ]
        hidden = found[1][:, 0]
        if spec.top_k:
            ids, logprobs = self.target.top_law(hidden.to(self.target.device), spec.top_k)
            law: tuple[Tensor, ...] = (ids.cpu(), logprobs.cpu())
            labels = law[0][:, 0]
        else:
            law = (hidden,)
            labels = self.target.top_law(hidden.to(self.target.device), 1)[0][:, 0].cpu()
        batches = []
        at = law_at = seen_at = 0
        for part in parts:
            rows = slice(at, at + len(part.places))
            laws = slice(law_at, law_at + len(part.laws))
            seen = slice(seen_at, seen_at + len(part.seen))
            features = found[2][seen] if spec.window else None
            batches.append(
                part.assemble(found[0][rows], labels[laws], tuple(x[laws] for x in law), features)
            )
            at, law_at, seen_at = rows.stop, laws.stop, seen.stop
        return batches


def _rows(per_sequence: Sequence[np.ndarray], layer_ids: tuple[int, ...]) -> Rows:
    sequence = np.repeat(np.arange(len(per_sequence)), [len(rows) for rows in per_sequence])
    return Rows(sequence, np.concatenate(per_sequence), layer_ids)
