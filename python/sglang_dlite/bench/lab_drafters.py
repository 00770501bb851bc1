"""The drafters of the acceptance lab, and what they are shown of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang_dlite.drafter import DLiteDrafter


@dataclass(frozen=True)
class LayerOutputs:
    """What some of the target's layers made of the tokens from position `first` on."""

    layers: dict[int, torch.Tensor]  # layer id -> [tokens, h]
    first: int

    def at(self, layer_ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        """[n, len(layer_ids), h] for positions [n]."""
        rows = positions - self.first
        return torch.stack([self.layers[index][rows] for index in layer_ids], dim=1)


@dataclass(frozen=True)
class LabReply:
    """One greedy reply, and what the target computed for it."""

    prompt_ids: list[int]
    reply_ids: list[int]
    outputs: LayerOutputs

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.reply_ids


class Proposer(Protocol):
    """A drafter, as the lab needs it."""

    name: str

    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        """Up to K draft ids behind each anchor; an anchor is a position in `reply.ids`."""
        ...


class NgramLookup:
    """Copies what followed the latest earlier occurrence of the longest suffix, as prompt lookup.

    Looks for the last `longest` tokens ending in the anchor, then for fewer, down to one.
    """

    name = "n-gram lookup"

    def __init__(self, num_drafts: int, longest: int = 8) -> None:
        self._num_drafts, self._longest = num_drafts, longest

    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        ids = reply.ids
        return [self._behind(ids[: anchor + 1]) for anchor in anchors]

    def _behind(self, seen: list[int]) -> list[int]:
        last = len(seen) - 1
        for length in range(min(self._longest, last), 0, -1):
            suffix = seen[-length:]
            for end in range(last - 1, length - 2, -1):
                if seen[end] == suffix[-1] and seen[end - length + 1 : end + 1] == suffix:
                    return seen[end + 1 : end + 1 + self._num_drafts]
        return []


class DLiteProposer:
    """The DLite drafter: pivot states of the token before the anchor, and the last G tokens."""

    name = "DLITE"

    def __init__(self, drafter: DLiteDrafter, embed: torch.nn.Module) -> None:
        self._drafter, self._embed = drafter, embed

    @torch.no_grad()
    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        inputs = _drafter_inputs(self._drafter, reply, anchors)
        return self._drafter.draft(*inputs, self._embed).token_ids.tolist()


def _drafter_inputs(
    drafter: DLiteDrafter, reply: LabReply, anchors: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pivot states [n, S, h] and token groups [n, G] of these anchors."""
    config, ids = drafter.config, reply.ids
    group = torch.tensor([ids[a - config.anchor_group_size + 1 : a + 1] for a in anchors])
    return reply.outputs.at(config.target_layer_ids, torch.tensor(anchors) - 1), group


class TeacherProposer:
    """The history-aware teacher as a drafter: also sees the W tokens before the anchor."""

    name = "history-aware teacher"

    def __init__(self, teacher: Any, embed: torch.nn.Module) -> None:
        self._teacher, self._embed = teacher, embed

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The layers that make its history."""
        from sglang_dlite.drafter.history import history_layer_ids

        return history_layer_ids(self._teacher.config.num_target_layers)

    @torch.no_grad()
    def propose(self, reply: LabReply, anchors: Sequence[int]) -> list[list[int]]:
        from sglang_dlite.drafter.history import HistoryWindow

        first = reply.outputs.first
        everything = torch.arange(first, len(reply.ids))
        position = torch.tensor(anchors)
        window = position[:, None] + torch.arange(-self._teacher.window, -1)  # a-W..a-2
        history = HistoryWindow(
            features=reply.outputs.at(self.layer_ids, everything),
            index=(window - first).clamp(min=0),
            valid=window >= 0,
            position=position,
        )
        inputs = _drafter_inputs(self._teacher, reply, anchors)
        return self._teacher.draft_with_history(*inputs, self._embed, history).token_ids.tolist()
