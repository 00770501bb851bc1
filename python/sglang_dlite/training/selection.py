"""Which replies, and which of their places, a run trains on or is evaluated on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_dlite.training.anchors import Reply, is_held_out
from sglang_dlite.training.config import DataSection, TrainConfig
from sglang_dlite.training.reply_kinds import is_looping, loop_start


def usable(reply: Reply, data: DataSection) -> bool:
    """Whether a reply is of a length, and of a kind, to be used."""
    if data.drop_looping and is_looping(reply.reply_ids.tolist()):
        return False
    tokens = len(reply.prompt_ids) + reply.length
    return reply.length >= max(2, data.min_reply_tokens) and tokens <= data.max_tokens


def split_replies(replies: Sequence[Reply], config: TrainConfig) -> tuple[list[int], list[int]]:
    """Indices of the replies to train on, and of those that may be evaluated on."""
    good = [i for i, reply in enumerate(replies) if usable(reply, config.data)]
    held = {i for i in good if is_held_out(replies[i].id, config.data.held_out_percent)}
    short = [i for i in sorted(held) if len(replies[i].tokens) <= config.eval.max_tokens]
    return [i for i in good if i not in held], short


def learned_places(reply: Reply, places: np.ndarray, data: DataSection) -> np.ndarray:
    """Those of `places` in a reply that is trained on that may be anchors."""
    if not data.cut_loops:
        return places
    return places[places < loop_start(reply.reply_ids.tolist())]
