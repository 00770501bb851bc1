"""Acceptance length without a server: play greedy replies through a drafter as serving would.

From the anchor at reply token r the drafter proposes K tokens; the n leading ones that agree with
the reply are accepted, the reply's next token is the bonus, and the new anchor is r + n + 1. All
replies walk in lock-step. tau = 1 + accepted drafts / verify passes (the prefill's token is no
pass). Exact for greedy serving up to rounding, since a greedy reply does not depend on drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang_dlite.drafter import DLiteDrafter, load_drafter
from sglang_dlite.training.anchors import AnchorSet, Reply
from sglang_dlite.training.losses import draft_losses, expected_accept_length

_BATCH = 256


@dataclass
class Acceptance:
    """Counts over some replies."""

    passes: int = 0
    accepted: int = 0

    @property
    def tau(self) -> float:
        return 1 + self.accepted / self.passes if self.passes else float("nan")

    def add(self, other: Acceptance) -> None:
        self.passes += other.passes
        self.accepted += other.accepted


@torch.no_grad()
def simulate_greedy(
    drafter: DLiteDrafter, embed: torch.nn.Module, anchors: AnchorSet, replies: Sequence[Reply]
) -> list[Acceptance]:
    """Play each reply; returns its counts, in the order of `replies`."""
    counts = [Acceptance() for _ in replies]
    place = np.zeros(len(replies), dtype=np.int64)  # the anchor's reply token, per reply
    lengths = np.array([reply.length for reply in replies])
    first = np.array([reply.row for reply in replies])
    while True:
        active = np.flatnonzero(place < lengths - 1)
        if not len(active):
            return counts
        for some in np.array_split(active, -(-len(active) // _BATCH)):
            rows = first[some] + place[some]
            block = drafter.draft(anchors.states(rows), anchors.token_group(rows), embed)
            labels, labelled = anchors.labels(rows)
            right = (block.token_ids == labels) & labelled
            matched = right.cumprod(-1).sum(-1).numpy()
            for index, accepted in zip(some, matched, strict=True):
                counts[index].passes += 1
                counts[index].accepted += int(accepted)
            place[some] += matched + 1


def simulated_tau(
    drafter: DLiteDrafter, embed: torch.nn.Module, anchors: AnchorSet, replies: Sequence[Reply]
) -> dict[str, float]:
    """tau per source, and `mean`: the mean over the sources."""
    totals: dict[str, Acceptance] = {}
    counts = simulate_greedy(drafter, embed, anchors, replies)
    for reply, count in zip(replies, counts, strict=True):
        totals.setdefault(reply.source, Acceptance()).add(count)
    taus = {source: total.tau for source, total in sorted(totals.items())}
    return taus | {"mean": float(np.mean(list(taus.values())))} if taus else {}


@torch.no_grad()
def teacher_forced_length(
    drafter: DLiteDrafter, embed: torch.nn.Module, anchors: AnchorSet, rows: np.ndarray
) -> float:
    """Mean expected acceptance length of rejection sampling over these rows."""
    lengths = []
    for start in range(0, len(rows), _BATCH):
        batch = anchors.batch(rows[start : start + _BATCH])
        hidden = drafter.backbone(batch.pivot_states, batch.token_group, embed)
        vectors = drafter.head_vectors(hidden, batch.previous_tokens, batch.token_group)
        n, k, rank = vectors.shape
        losses = draft_losses(
            vectors.detach().reshape(n * k, rank),
            drafter.sequential_head.output_proj.weight.detach(),
            batch.labels.reshape(-1),
            batch.top_ids.reshape(n * k, -1),
            batch.top_logprobs.reshape(n * k, -1),
            torch.ones(n * k),
            w_ce=0.0,
            w_tv=1.0,
        )
        lengths.append(expected_accept_length(losses.tv.view(n, k), batch.labelled))
    return float(torch.cat(lengths).mean()) if lengths else float("nan")


def simulate_folders(
    drafter: DLiteDrafter, embed: torch.nn.Module, folders: Sequence[Path]
) -> dict[str, float]:
    """Simulated greedy tau over data sets of replies, per source and mean."""
    config = drafter.config
    anchors = AnchorSet(folders, config.anchor_group_size, config.num_drafts)
    return simulated_tau(drafter, embed, anchors, anchors.replies)


def main(argv: list[str] | None = None) -> int:
    """`python -m sglang_dlite.training.simulate DRAFTER FOLDER ...` prints tau as JSON."""
    from transformers import AutoModelForCausalLM

    from sglang_dlite.embedded_model import prepare_embedded_model

    parser = argparse.ArgumentParser(prog="simulate", description=main.__doc__)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("folders", type=Path, nargs="+", help="data sets made by `generate`")
    parser.add_argument("--target", help="HF directory (default: the embedded model)")
    args = parser.parse_args(argv)
    target = AutoModelForCausalLM.from_pretrained(
        args.target or prepare_embedded_model(), dtype=torch.bfloat16
    )
    drafter = load_drafter(args.drafter)
    print(json.dumps(simulate_folders(drafter, target.get_input_embeddings(), args.folders)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
