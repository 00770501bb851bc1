"""The width policy against recorded and made-up costs, played through the worker's own control."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from sglang_dlite.speculative.adaptive import (
    RunningAcceptance,
    WidthPolicy,
    choose_width,
    expected_tokens,
    width_choices,
)
from sglang_dlite.speculative.step_costs import CostBook, bucket
from sglang_dlite.speculative.width_control import WidthControl

Cost = Callable[[int, int], float]  # (requests, width) -> seconds, without the drafter
WIDTHS = width_choices(8)


def flat(n: int, d: int) -> float:
    return 0.010


def linear(n: int, d: int) -> float:
    return 0.002 + 0.001 * n * d


def roofline(n: int, d: int) -> float:
    """Memory-bound up to 64 rows, then arithmetic."""
    return 0.008 + 0.008 * max(n * d / 64, 1.0)


DRAFT = 0.002
# Recorded on two cores with AMX: python benchmark/dlite/cpu_steps.py --widths 1 2 3 4 6 8
RECORDED = json.loads((Path(__file__).parent / "step_costs.json").read_text(encoding="utf-8"))
GRID = {
    int(n): {int(width): ms for width, ms in by_width.items()}
    for n, by_width in RECORDED["ms_by_requests_by_width"].items()
}


def measured_cpu(n: int, d: int) -> float:
    """The recorded step without its draft, which `Machine` adds; straight lines between them."""

    def at(requests: int) -> float:
        return float(np.interp(d, list(GRID[requests]), list(GRID[requests].values())))

    with_draft = np.interp(n, list(GRID), [at(requests) for requests in GRID]) / 1e3
    return float(with_draft) - (d > 1) * draft_cost(n)


def draft_cost(n: int) -> float:
    return DRAFT * (1 + 0.1 * n)


COSTS = {"flat": flat, "linear": linear, "roofline": roofline, "measured": measured_cpu}


def request_ids(n: int) -> list[str]:
    """Those of n running requests."""
    return [str(i) for i in range(n)]


@dataclass
class Machine:
    """A server's decode loop in simulated time: costs, acceptance and noise are given."""

    cost: Cost
    acceptance: list[float]
    noise: float = 0.1
    delay: int = 0  # steps until the host knows a result: 1 under the overlap scheduler
    seed: int = 0
    seconds: float = 0.0
    tokens: int = 0
    widths: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.control = WidthControl(WidthPolicy(WIDTHS), clock=lambda: self.seen_at)
        self.has_drafts: list[bool] = []
        self.results: list[tuple[float, list[int]]] = []
        self.seen_at = 0.0  # when the device finished the step whose result is read

    def step_cost(self, n: int, d: int, drafts: bool) -> float:
        return self.cost(n, d) + drafts * draft_cost(n)

    def prefill(self, n: int, seconds: float = 0.2) -> None:
        running = len(self.has_drafts)
        self.control.extended(request_ids(running + n)[running:])
        self.has_drafts += [self.control.width > 1] * n
        self.seconds += seconds

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            n, width = len(self.has_drafts), self.control.width
            accepted = [self._accepted(width) if has else 0 for has in self.has_drafts]
            self.control.verified(request_ids(n))
            drafts = self.control.width > 1
            self.has_drafts = [drafts] * n
            wobble = 1 + self.noise * self.rng.uniform(-1, 1)
            self.seconds += self.step_cost(n, width, drafts) * wobble
            self.tokens += n + sum(accepted)
            self.widths[width] += 1
            self.results.append((self.seconds, accepted))
            if len(self.results) > self.delay:
                self.read_result()

    def resize(self, n: int) -> None:
        """Requests end, or new ones are prefilled."""
        while self.results:
            self.read_result()
        if n > len(self.has_drafts):
            self.prefill(n - len(self.has_drafts))
        else:
            self.has_drafts = self.has_drafts[:n]

    def read_result(self) -> None:
        self.seen_at, accepted = self.results.pop(0)
        self.control.completed(accepted, len(accepted))

    def _accepted(self, width: int) -> int:
        for j in range(width - 1):
            if self.rng.random() >= self.acceptance[j]:
                return j
        return width - 1

    def best_rate(self, n: int) -> float:
        """Tokens per second of the best fixed width, of all from 1 to 8."""
        return max(
            n * expected_tokens(self.acceptance, d) / self.step_cost(n, d, d > 1)
            for d in range(1, 9)
        )

    def rate(self, steps: int) -> float:
        seconds, tokens = self.seconds, self.tokens
        self.decode(steps)
        return (self.tokens - tokens) / (self.seconds - seconds)


GOOD, FAIR, BAD = [0.9] * 7, [0.55, 0.5, 0.45, 0.4, 0.4, 0.4, 0.4], [0.15] * 7


@pytest.mark.parametrize("acceptance", [GOOD, FAIR, BAD], ids=["good", "fair", "bad"])
@pytest.mark.parametrize("n", [1, 4, 12, 32])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("delay", [0, 1], ids=["", "overlap"])
def test_at_most_5_percent_from_the_best_fixed_width(
    cost: Cost, n: int, acceptance: list[float], delay: int
) -> None:
    machine = Machine(cost, acceptance, delay=delay)
    machine.prefill(n)
    machine.decode(600)
    assert machine.rate(2000) >= 0.95 * machine.best_rate(n)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_acceptance_that_drifts(cost: Cost) -> None:
    """Each kind of text is learned within 400 passes, from whatever width it finds."""
    machine = Machine(cost, BAD, delay=1)
    machine.prefill(8)
    machine.decode(400)
    for acceptance in (GOOD, BAD, FAIR, BAD):
        machine.acceptance = acceptance
        machine.decode(400)
        assert machine.rate(1200) >= 0.95 * machine.best_rate(8)


@pytest.mark.parametrize("acceptance", [GOOD, FAIR, BAD], ids=["good", "fair", "bad"])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_batch_size_that_changes(cost: Cost, acceptance: list[float]) -> None:
    """Between 1 and 30 requests every 150 steps: what one size teaches serves the others."""
    machine = Machine(cost, acceptance, delay=1)
    machine.prefill(1)
    seconds = best_seconds = 0.0
    for lap in range(4):
        for n in (1, 7, 30, 12, 2, 24):
            machine.resize(n)
            started, tokens = machine.seconds, machine.tokens
            machine.decode(150)
            if lap:  # the first one is for warming up
                seconds += machine.seconds - started
                best_seconds += (machine.tokens - tokens) / machine.best_rate(n)
    assert best_seconds >= 0.95 * seconds


def test_noise_and_outliers() -> None:
    class Rough(Machine):
        def step_cost(self, n: int, d: int, drafts: bool) -> float:
            return super().step_cost(n, d, drafts) * (10 if self.rng.random() < 0.01 else 1)

    machine = Rough(measured_cpu, FAIR, noise=0.3)
    machine.prefill(8)
    machine.decode(800)
    calm = Machine(measured_cpu, FAIR)
    rate = machine.rate(3000) * 1.09  # what the outliers cost any width
    assert rate >= 0.93 * calm.best_rate(8)


def test_a_machine_that_gets_slower_changes_no_width() -> None:
    """Only the width in use is measured; the others must not look cheap for that (contexts grow,
    other programs start)."""
    slowness = [1.0]
    machine = Machine(lambda n, d: roofline(n, d) * slowness[0], GOOD)
    machine.prefill(4)
    machine.decode(800)
    machine.widths.clear()
    for _ in range(10):
        slowness[0] *= 1.5
        machine.decode(100)
    assert machine.widths[8] > 900


def test_a_hiccup_at_the_first_measurement_is_forgiven() -> None:
    """One step of a hundred times its cost, the first that is timed of the width that pays best."""

    class Hiccup(Machine):
        def read_result(self) -> None:
            fresh = 4 not in timed and self.control._pending[0].width == 4
            if fresh and self.control._pending[0].timed:
                timed.append(4)
                behind = 100 * self.cost(1, 4)
                self.seconds += behind
                self.results = [(at + behind, kept) for at, kept in self.results]
            super().read_result()

    timed: list[int] = []
    machine = Hiccup(lambda n, d: 0.02 + 0.0005 * d, [0.8] * 3 + [0.05] * 4)
    machine.prefill(1)
    machine.decode(1500)
    assert timed
    machine.widths.clear()
    machine.decode(2000)
    assert machine.widths[4] > 1500


def test_a_quiet_hour_does_not_pay_for_probing_under_load() -> None:
    """Alone, all widths cost the same and probing is free; then 24 requests pay for every row."""

    def cost(n: int, d: int) -> float:
        drafter = (d > 1) * DRAFT * (1 + 0.1 * n)  # the machine adds it
        return 0.02 - drafter + (n > 1) * 0.00125 * n * d

    machine = Machine(cost, [0.05] * 7, noise=0.03)
    machine.prefill(1)
    machine.decode(15_000)
    machine.resize(24)
    machine.decode(20)
    assert machine.rate(500) >= 0.9 * machine.best_rate(24)


# -- parts --------------------------------------------------------------------------------------


def test_width_choices() -> None:
    assert width_choices(2) == (1, 2)
    assert width_choices(7) == (1, 2, 3, 4, 6, 7)
    assert width_choices(8) == (1, 2, 3, 4, 6, 8)
    assert width_choices(16) == (1, 2, 3, 4, 6, 8, 12, 16)


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 33, 48, 49)] == [
        *(1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 16, 24, 48, 48, 64)
    ]


def test_expected_tokens_is_the_mean_of_what_passes_output() -> None:
    rng, acceptance = random.Random(0), [0.8, 0.6, 0.5, 0.9]

    def output(width: int) -> int:
        kept = 0
        while kept < width - 1 and rng.random() < acceptance[kept]:
            kept += 1
        return kept + 1

    for width in range(1, 6):
        mean = sum(output(width) for _ in range(20_000)) / 20_000
        assert expected_tokens(acceptance, width) == pytest.approx(mean, rel=0.02)


def test_choose_width_keeps_the_current_one_unless_another_is_clearly_better() -> None:
    rates = {1: 100.0, 4: 101.0, 8: 90.0}
    assert choose_width(rates, current=1, hysteresis=0.02) == 1
    assert choose_width(rates, current=8, hysteresis=0.02) == 4
    assert choose_width(rates, current=1, hysteresis=0.0) == 4
    assert choose_width(rates, current=16, hysteresis=0.5) == 4  # not a choice any more


def test_running_acceptance_recovers_conditional_rates_from_narrow_and_wide_passes() -> None:
    rng, truth = random.Random(1), [0.8, 0.5, 0.7]
    running = RunningAcceptance(3)
    for index in range(3000):
        width = (4, 2, 1)[index % 3]
        kept = 0
        while kept < width - 1 and rng.random() < truth[kept]:
            kept += 1
        running.add([kept], width)
    # About 300 to 400 passes are remembered; a draft behind two others is seen in 40 % of them.
    assert running.rates == pytest.approx(truth, abs=0.12)


def test_a_position_without_measurements_does_as_the_one_before_it() -> None:
    running = RunningAcceptance(7)
    for _ in range(400):
        running.add([1, 0, 0, 0], 2)
    assert running.rates[0] == pytest.approx(0.25, abs=0.01)
    assert running.rates[1:] == pytest.approx([running.rates[0]] * 6)


def test_cost_book_estimates_cells_that_were_never_measured() -> None:
    book = CostBook()

    def cost(n: int, d: int) -> float:
        return 0.01 + 0.0005 * n + 0.0004 * n * d + 0.003 * (d > 1)

    for _ in range(20):
        for n, d in ((1, 1), (1, 8), (8, 1), (8, 8), (16, 2)):
            book.add(n, d, cost(n, d))
    for n, d in ((4, 4), (16, 8), (24, 1), (8, 3)):
        assert book.estimate(n, d) == pytest.approx(cost(n, d), rel=0.1)
        assert book.age(n, d) > 1e9


class Recorder(WidthPolicy):
    """Plays widths and keeps what it is told."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__(WIDTHS)
        self.script: Iterator[int] = iter(widths)
        self.asked: list[int] = []
        self.accepted: list[tuple[list[int], int]] = []
        self.steps: list[tuple[int, int, float]] = []

    def next_width(self, batch_size: int) -> int:
        self.asked.append(batch_size)
        return next(self.script)

    def record_acceptance(self, num_accepted: list[int], width: int) -> None:
        self.accepted.append((num_accepted, width))

    def record_step(self, batch_size: int, width: int, seconds: float) -> None:
        self.steps.append((batch_size, width, seconds))


def test_steps_next_to_a_prefill_or_to_plain_decoding_are_not_timed() -> None:
    now = [0.0]
    policy = Recorder([8, 8, 8, 4, 1, 1, 1, 8, 8])
    control = WidthControl(policy, clock=lambda: now[0])

    def verify(num_accepted: list[int]) -> None:
        now[0] += 1.0
        control.verified(request_ids(len(num_accepted)))
        control.completed(num_accepted, len(num_accepted))

    control.extended(request_ids(2))
    verify([7, 0])  # width 8, behind a prefill
    verify([1, 1])  # 8, timed
    verify([2, 3])  # 8, timed: the next one is narrower, and drafted for
    verify([1, 0])  # 4, but does not draft any more
    verify([0, 0])  # 1, timed
    control.extended(["another"])  # planned width 1: not drafted for
    verify([0, 0, 0])  # 1, and drafts for all
    verify([5, 0, 1])  # 8, timed
    assert policy.steps == [(2, 8, 1.0), (2, 8, 1.0), (2, 1, 1.0), (3, 8, 1.0)]
    assert [width for _, width in policy.accepted] == [8, 8, 8, 4, 1, 1, 8]
    assert policy.asked == [2, 2, 2, 2, 2, 2, 3, 3, 3]


def test_acceptance_counts_only_where_every_request_had_drafts() -> None:
    policy = Recorder([8, 1, 8, 8, 8])
    control = WidthControl(policy, clock=lambda: 0.0)
    for prefilled, running in ((1, 1), (1, 2), (0, 2)):
        if prefilled:
            control.extended(request_ids(running)[-prefilled:])
        control.verified(request_ids(running))
        control.completed([0] * running, running)
    # The second pass is 8 wide, but its first request was not drafted for.
    assert [width for _, width in policy.accepted] == [8, 1, 8]


def test_results_that_are_never_read_are_skipped() -> None:
    policy = Recorder([4] * 4)
    control = WidthControl(policy, clock=lambda: 0.0)
    control.extended(request_ids(3))
    for n in (3, 2, 1):
        control.verified(request_ids(n))
    control.completed([1], 1)  # of the third pass
    assert policy.accepted == [([1], 4)] and policy.steps == []
    control.completed([1], 1)  # of none
    assert len(policy.accepted) == 1


def test_a_request_counts_once() -> None:
    """Chunks of one prompt, and decoding requests that ride in its batches."""
    policy = Recorder([4] * 6)
    control = WidthControl(policy, clock=lambda: 0.0)
    control.extended(["a"])
    control.verified(["a"])
    control.extended(["b", "a"])  # a chunk, mixed
    control.extended(["b", "c", "a"])
    control.verified(["a", "b", "c"])
    control.verified(["c"])
    assert policy.asked == [1, 1, 2, 3, 3, 1]
