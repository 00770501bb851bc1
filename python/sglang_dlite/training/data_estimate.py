"""What the configured replies will take: the state cache's disk, the evaluations' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.training.anchors import Reply, is_held_out
from sglang_dlite.training.cache_format import row_bytes
from sglang_dlite.training.config import TrainConfig
from sglang_dlite.training.estimate import DTYPE_BYTES, size_text
from sglang_dlite.training.selection import learned_places, split_replies, usable
from sglang_dlite.training.simulate import choose_evenly


@dataclass(frozen=True)
class DataEstimate:
    """Of the replies at hand."""

    replies: int  # to train on
    places: int  # of them that can be anchors
    evaluated: int  # replies held out for the evaluations
    cache: int  # bytes on disk, 0 without a cache
    evaluation: int  # bytes of the evaluations' anchors, in the main process

    def text(self) -> str:
        lines = [
            (f"{self.replies:,} replies to train on, places", f"{self.places:,}"),
            (f"{self.evaluated:,} held-out replies, in memory", size_text(self.evaluation)),
            ("  while they are put together", size_text(2 * self.evaluation)),
        ]
        if self.cache:
            lines.append(("disk: state cache, at most", size_text(self.cache)))
        return "\n".join(f"{name:<44}{value:>18}" for name, value in lines)


def estimate_data(
    config: TrainConfig, drafter: DLiteConfig, replies: Sequence[Reply]
) -> DataEstimate:
    """From the replies' lengths alone; the target is not needed."""
    data, window = config.data, config.model.window - 1
    training, held_out = split_replies(replies, config)
    chosen = choose_evenly(held_out, [reply.source for reply in replies], config.eval.replies)
    drafts, hidden = drafter.num_drafts, drafter.hidden_size
    history = window if config.uses_history else 0

    cache = 0
    layers = len(data.cached_layer_ids) or drafter.num_pivot_states
    row = row_bytes(layers, hidden, data.top_k)
    for reply in (reply for reply in replies if usable(reply, data)):
        anchors = places = len(reply.places)
        if not is_held_out(reply.id, data.held_out_percent):  # those are cached from end to end
            anchors = min(places, data.cached_anchors_per_reply)
        cache += row["states"] * anchors
        cache += (row["topids"] + row["toplogp"]) * min(places, anchors * drafts)
        cache += row["window"] * min(len(reply.tokens), anchors * history)

    cached = data.states == "cache"
    element = 2 if cached else DTYPE_BYTES[config.target.dtype]
    law = data.top_k * (8 + (2 if cached else 4)) if data.top_k else element * hidden
    tokens = 8 * (drafter.anchor_group_size + 2 * drafts) + drafts
    per_row = element * drafter.num_pivot_states * hidden + drafts * law + tokens
    rows = sum(len(replies[index].places) for index in chosen)
    evaluation = rows * per_row
    if config.stages.teacher:  # the teacher is evaluated with its window
        evaluation += rows * window * 9 + 8 * rows
        evaluation += element * 3 * hidden * sum(len(replies[index].tokens) for index in chosen)
    return DataEstimate(
        replies=len(training),
        places=sum(
            len(learned_places(replies[index], replies[index].places, data)) for index in training
        ),
        evaluated=len(chosen),
        cache=cache if cached else 0,
        evaluation=evaluation,
    )
