"""Which verify width pays: the policy behind --speculative-adaptive.

A verify pass of width d costs c(n, d) seconds at n requests and outputs E(d) tokens per request,
so the width with the largest E(d) / c(n, d) is chosen. Width 1 is plain decoding, without drafter.
Nothing here knows torch, SGLang or the time: numbers come in, a width goes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sglang_dlite.speculative.step_costs import CostBook, bucket

HYSTERESIS = 0.02  # a width gives way to one that promises this much more
PROBE_SHARE = 0.01  # of the time may be lost to measuring other widths
PROBE_STEPS = 4  # the first and the last of them are not measured, next to another width
PROBE_GRANT = 16  # steps' worth of probing at the start, and saved up later
PROBE_AGE = 64  # steps before a width is measured again
ACCEPTANCE_WINDOW = 400  # requests' passes over which acceptance is averaged
ACCEPTANCE_PASSES = 1000  # passes over which it fades, whatever their width
FIRST_ACCEPTANCE = 0.6  # assumed of the first draft until it is measured
PRIOR_DRAFTS = 4.0  # what the assumption counts for


def width_choices(largest: int) -> tuple[int, ...]:
    """Widths worth telling apart, 1 to D: 1, 2, 3, 4, 6, 8, 12, 16, ..., D."""
    return (*(width for width in range(1, largest) if width == bucket(width)), largest)


def expected_tokens(acceptance: Sequence[float], width: int) -> float:
    """E(d) = 1 + sum over j < d of the product of a_1 .. a_j.

    acceptance[j - 1] is a_j: the share of draft j accepted where all before it were.
    """
    total = reached = 1.0
    for rate in acceptance[: width - 1]:
        reached *= rate
        total += reached
    return total


def choose_width(rates: Mapping[int, float], current: int, hysteresis: float) -> int:
    """The width of the largest rate (tokens per second), or `current` if that is about as good."""
    best = max(rates, key=rates.__getitem__)
    keeps = current in rates and rates[best] <= rates[current] * (1 + hysteresis)
    return current if keeps else best


class RunningAcceptance:
    """Conditional acceptance per draft position, recent passes weighing most.

    A pass of width d tells about its first d - 1 drafts only; one of width 1 lets what is known
    fade a little, so that text of another kind is noticed when it is probed.
    """

    def __init__(self, num_drafts: int) -> None:
        self._tried = [0.0] * num_drafts
        self._kept = [0.0] * num_drafts

    def add(self, num_accepted: Sequence[int], width: int) -> None:
        """num_accepted: each request's accepted drafts in one pass of `width` rows."""
        unseen = 1 - 1 / ACCEPTANCE_PASSES
        # Also where no draft came so far: what was known of that position is as old.
        seen = unseen * (1 - 1 / ACCEPTANCE_WINDOW) ** len(num_accepted)
        reaching = [sum(n >= j for n in num_accepted) for j in range(width)]
        for j in range(len(self._tried)):
            if j < width - 1:
                self._tried[j] = self._tried[j] * seen + reaching[j]
                self._kept[j] = self._kept[j] * seen + reaching[j + 1]
            else:
                self._tried[j] *= unseen
                self._kept[j] *= unseen

    @property
    def rates(self) -> list[float]:
        """a_1 .. a_K; a position without measurements is taken to do as the one before it."""
        rates, prior = [], FIRST_ACCEPTANCE
        for tried, kept in zip(self._tried, self._kept, strict=True):
            prior = (kept + PRIOR_DRAFTS * prior) / (tried + PRIOR_DRAFTS)
            rates.append(prior)
        return rates


class WidthPolicy:
    """Chooses the width of each verify pass from what the passes before it cost and kept.

    Other widths are probed now and then, a few steps each, while the time that this is expected
    to lose stays below PROBE_SHARE of all time.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        """widths: the allowed ones, ascending; the largest is where it starts."""
        self.widths = tuple(widths)
        self._acceptance = RunningAcceptance(self.widths[-1] - 1)
        self._costs = CostBook()
        self._standing = self.widths[-1]
        self._budget: float | None = None  # seconds that probing may lose
        self._wanted = 0.0  # the price of the probe that is due, in seconds
        self._probe = (0, 0, 0)  # width, batch-size bucket, steps left

    def record_acceptance(self, num_accepted: Sequence[int], width: int) -> None:
        """Each request's accepted drafts in a pass of `width` rows; width 1 where there were none
        for some request."""
        self._acceptance.add(num_accepted, width)

    def record_step(self, batch_size: int, width: int, seconds: float) -> None:
        """What a step cost, its drafting (at widths above 1) included."""
        self._costs.add(batch_size, width, seconds)
        if self._budget is None:
            self._budget = PROBE_GRANT * seconds
        expected = self._costs.estimate(batch_size, width)
        # A quiet hour's share, spent within a minute when the load changes, would be felt.
        self._budget = min(
            self._budget + PROBE_SHARE * min(seconds, 2 * expected),
            max(PROBE_GRANT * expected, self._wanted),
        )

    def next_width(self, batch_size: int) -> int:
        """Rows per request of the next verify pass."""
        width, of, left = self._probe
        if left and of == bucket(batch_size):
            self._probe = (width, of, left - 1)
            return width
        acceptance = self._acceptance.rates
        tokens = {d: expected_tokens(acceptance, d) for d in self.widths}
        costs = {d: self._costs.estimate(batch_size, d) for d in self.widths}
        rates = {d: tokens[d] / costs[d] for d in self.widths}
        self._standing = choose_width(rates, self._standing, HYSTERESIS)
        probe = self._affordable_probe(batch_size, tokens, costs)
        if probe is None:
            return self._standing
        self._probe = (probe, bucket(batch_size), PROBE_STEPS - 1)
        return probe

    def _affordable_probe(
        self, batch_size: int, tokens: Mapping[int, float], costs: Mapping[int, float]
    ) -> int | None:
        """The width whose measurement is oldest for its price, if the budget covers the price.

        Plain decoding is what all are judged by: where it was never measured, it goes on credit.
        """
        if self._budget is None:
            return None
        standing = self._standing
        per_token = costs[standing] / tokens[standing]
        best: tuple[float, int, float] | None = None
        for width in self.widths:
            age = min(self._costs.age(batch_size, width), 100 * PROBE_AGE)
            if width == standing or age < PROBE_AGE:
                continue
            lost = max(costs[width] - tokens[width] * per_token, 0.01 * costs[standing])
            price = PROBE_STEPS * lost
            if width == 1 and self._costs.age(batch_size, width) == math.inf:
                self._budget -= price
                return width
            if best is None or age / price > best[0]:
                best = (age / price, width, price)
        self._wanted = 0.0 if best is None else best[2]
        if best is None or best[2] > self._budget:
            return None
        self._budget -= best[2]
        return best[1]
