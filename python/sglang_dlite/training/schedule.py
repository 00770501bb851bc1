"""When what is trained: stages, the learning rate over all of them, and the order of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_dlite.training.anchors import Pick, Reply
from sglang_dlite.training.config import OptimSection, StagesSection, TrainConfigError


@dataclass(frozen=True)
class Stage:
    """From `start` on for `length`: in optimiser steps, or in seconds of training."""

    name: str
    start: int
    length: int


class Mixture(NamedTuple):
    """How the two losses of a drafter mix at a step, and whether its head learns."""

    distill: float  # KL against the teacher
    target: float  # CE, TV and base CE against the target
    head_frozen: bool


def plan_stages(section: StagesSection, names: Sequence[str], steps_per_epoch: int) -> list[Stage]:
    """The stages that are switched on, in order.

    Raises `TrainConfigError` for one that is shorter than half a step (or half a second).
    """
    scale = {"epochs": steps_per_epoch, "steps": 1, "minutes": 60}[section.unit]
    stages: list[Stage] = []
    start = 0
    for name in names:
        wanted = getattr(section, name)
        length = round(wanted * scale)
        if wanted and not length:
            raise TrainConfigError(
                f"stages.{name} = {wanted:g} with stages.unit = {section.unit}: less than a step "
                "or a second. Give more, or 0 to leave the stage out"
            )
        if length:
            stages.append(Stage(name, start, length))
            start += length
    return stages


def mixture(stages: Sequence[Stage], at: float) -> Mixture:
    """The mixture at a step (or second): warm-up (1, 0), on a cosine to stable's (0, 1)."""
    stage = stage_at(stages, at)
    if stage.name == "warm_up":
        return Mixture(1.0, 0.0, True)
    if stage.name == "transition":
        progress = min(1.0, (at - stage.start + 0.5) / stage.length)
        fading = 0.5 * (1 + math.cos(math.pi * progress))
        return Mixture(fading, 1 - fading, False)
    return Mixture(0.0, 1.0, False)


def stage_at(stages: Sequence[Stage], at: float) -> Stage:
    return next(s for s in reversed(stages) if s.start <= at)


def learning_rate(at: float, length: int, peak: float, warmup_ratio: float) -> float:
    """Linear warm-up, then cosine to zero, over all stages; `at` counts steps or seconds from 0."""
    warmup = max(1, int(length * warmup_ratio))
    if at < warmup:
        return peak * min(1.0, (at + 1) / warmup)
    return peak * 0.5 * (1 + math.cos(math.pi * (at - warmup) / max(1, length - warmup)))


class Sampler:
    """Which anchors a step sees: a function of (seed, step) only, so resuming needs no state.

    An epoch visits every reply once, in an order of its own, or as often as its source's weight
    says. A visit draws up to `anchors_per_reply` of its places without replacement.
    """

    def __init__(
        self,
        places: Sequence[np.ndarray],
        optim: OptimSection,
        sources: Sequence[str] = (),
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """places[i]: where reply i can have an anchor; replies without any are not visited.

        weights: visits of a source's replies per epoch, of `sources` [number of replies]; one for
        sources that are not named. Raises `TrainConfigError` where nothing is left to visit.
        """
        usable = np.flatnonzero([len(some) > 0 for some in places])
        self._parts = [(usable, len(usable))]  # replies, and visits to them per epoch
        if weights:
            by_source: dict[str, list[int]] = {}
            for reply in usable.tolist():
                by_source.setdefault(sources[reply], []).append(reply)
            unknown = sorted(weights.keys() - set(sources))
            if unknown:
                raise TrainConfigError(
                    f"data.weights names {', '.join(unknown)}; the sources are "
                    f"{', '.join(sorted(set(sources)))}"
                )
            self._parts = [
                (np.array(replies), round(weights.get(source, 1.0) * len(replies)))
                for source, replies in sorted(by_source.items())
            ]
        self._visits = sum(visits for _, visits in self._parts)
        if self._visits == 0:
            raise TrainConfigError("no anchors to train on: the data sets hold no usable reply")
        self._places, self._optim = places, optim
        self._batch = min(optim.batch_replies, self._visits)
        self._epoch, self._order = -1, usable

    @property
    def steps_per_epoch(self) -> int:
        return self._visits // self._batch

    @property
    def passes_per_step(self) -> int:
        return -(-self._batch // self._optim.micro_replies)

    def _visited(self, epoch: int) -> np.ndarray:
        """The replies of an epoch, sorted. A source's turn goes round: no reply is visited once
        more than another, or once less, over any number of epochs."""
        chosen = []
        for number, (replies, visits) in enumerate(self._parts):
            # Mixed once, so that replies that are neighbours in their file do not go together.
            mixed = np.random.default_rng((self._optim.seed, number)).permutation(replies)
            turn = epoch * visits + np.arange(visits)
            chosen.append(mixed[turn % len(mixed)])
        return np.sort(np.concatenate(chosen))

    def micro_batches(self, step: int) -> list[list[Pick]]:
        """The picks of step 0, 1, ..., one list per forward pass."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng((self._optim.seed, epoch))
            self._epoch, self._order = epoch, generator.permutation(self._visited(epoch))
        replies = self._order[index * self._batch : (index + 1) * self._batch]
        generator = np.random.default_rng((self._optim.seed, epoch, index))
        picks = [Pick(int(reply), self._draw(int(reply), generator)) for reply in replies]
        size = self._optim.micro_replies
        return [picks[start : start + size] for start in range(0, len(picks), size)]

    def _draw(self, reply: int, generator: np.random.Generator) -> np.ndarray:
        places = self._places[reply]
        if len(places) <= self._optim.anchors_per_reply:
            return places
        return np.sort(generator.choice(places, self._optim.anchors_per_reply, replace=False))


def weight_sum(
    batches: Sequence[Sequence[Pick]], replies: Sequence[Reply], weights: np.ndarray
) -> float:
    """Sum of weights[j] over all labelled drafts of a step: the losses' common denominator.

    It follows from the plan alone, so that accumulation and processes need not exchange it.
    """
    running = np.concatenate([[0.0], weights.cumsum()])
    total = 0.0
    for pick in (pick for batch in batches for pick in batch):
        ahead = replies[pick.reply].length - 1 - pick.places  # labels that follow
        total += running[ahead.clip(0, len(weights))].sum()
    return float(total)
