"""Figures from records whose values are known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sglang_dlite.bench import measures, stats
from sglang_dlite.bench.records import Reply, RoundResult

MakeResult = Callable[..., RoundResult]
MakeReply = Callable[..., Reply]


def test_median_and_its_interval() -> None:
    figure = stats.median([1.0, 2.0, 3.0, 4.0, 100.0])
    assert figure.value == 3.0 and figure.low < 3.0 < figure.high
    assert stats.median([1.0, 2.0, 3.0, 4.0, 100.0]) == figure  # no chance between reports
    assert stats.median([7.0]) == (7.0, 7.0, 7.0)
    assert math.isnan(stats.median([]).value)


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        low, high = stats.median(rng.normal(10, 2, 30).tolist())[1:]
        covered += low <= 10 <= high
    assert 0.88 <= covered / 200 <= 1.0


def test_ratio_pools_units() -> None:
    figure = stats.ratio([3, 0, 1], [1, 1, 2])
    assert figure.value == 1.0 and figure.low < 1 < figure.high
    assert math.isnan(stats.ratio([], []).value)


def test_position_rates() -> None:
    rates = stats.position_rates([2, 1, 0, 1])
    assert rates == [0.5, 0.25, 0.25]
    assert stats.conditional_rates(rates) == [0.5, 0.5, 1.0]
    assert stats.conditional_rates([0.0, 0.0]) == [0.0, None]
    assert stats.position_rates([]) == []
    # tau - 1 is the sum of the unconditional rates.
    assert sum(rates) == (1 * 1 + 3 * 1) / 4


def test_histograms_of_different_length_add_up() -> None:
    assert stats.add_histograms([[1], [0, 2], []]) == [1, 2]


def test_speed_of_a_load(make_result: MakeResult) -> None:
    figures = measures.load_figures([make_result(), make_result(repeat=1)])
    assert (figures["rounds"], figures["replies"], figures["output_tokens"]) == (2, 4, 28)
    assert figures["user_tok_per_s"].value == pytest.approx(7 / 0.4)
    assert figures["total_tok_per_s"].value == pytest.approx(14 / 2.0)
    assert figures["ttft_s"].value == 0.1
    assert figures["tpot_s"].value == pytest.approx(0.05)
    assert figures["itl_p50_s"] == pytest.approx(0.1)


def test_speedup_over_the_baseline(make_result: MakeResult) -> None:
    ours = [make_result(), make_result(repeat=1)]
    plain = [make_result("target-only", plain=True, repeat=r) for r in (0, 1)]
    assert measures.speedup(ours, plain).value == pytest.approx(2.0)
    # A turn that one side did not answer is left out, not counted as fast.
    plain[1].replies.pop()
    assert measures.speedup(ours, plain).value == pytest.approx(2.0)
    # A hiccup of the machine does not decide it.
    plain[0].replies[0] = replace(plain[0].replies[0], latency_s=80.0)
    assert measures.speedup(ours, plain).value == pytest.approx(2.0)
    assert math.isnan(measures.speedup(ours, []).value)


def test_throughput_over_the_baseline(make_result: MakeResult) -> None:
    ours = [make_result(repeat=r) for r in (0, 1, 2)]
    plain = [make_result("target-only", plain=True, repeat=r) for r in (0, 1)]
    plain = [
        replace(result, seconds=result.seconds * k) for result, k in zip(plain, (2, 3), strict=True)
    ]
    ratio = measures.throughput_ratio(ours, plain)  # the third repeat has no partner
    assert ratio == pytest.approx((2.5, 2.0, 3.0))
    assert math.isnan(measures.throughput_ratio(ours, []).value)


def test_acceptance(make_result: MakeResult) -> None:
    figures = measures.acceptance_figures([make_result(), make_result(cache="cold")])
    assert figures is not None
    assert figures["tau"].value == 2.0 and figures["verify_passes"] == 6  # warm rounds only
    assert figures["position_rates"] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert [point["at"] for point in figures["by_context"]] == [512, 1024]
    assert [point["at"] for point in figures["by_turn"]] == [1, 2]
    assert figures["cache"]["turns"] == 1
    assert figures["cache"]["cold"]["tau"].value == 2.0
    assert measures.acceptance_figures([make_result("target-only", plain=True)]) is None


@pytest.mark.parametrize(("tokens", "edge"), [(0, 0), (511, 0), (512, 512), (70000, 65536)])
def test_context_bins(tokens: int, edge: int) -> None:
    assert measures.context_bin(tokens) == edge


def test_first_token_by_turn(make_result: MakeResult) -> None:
    first, second = measures.ttft_by_turn([make_result()])
    assert (first["turn"], second["prompt_tokens"]) == (1, 1200)
    assert first["cached_share"] == 0.5


def test_step_times_inside_rounds(make_result: MakeResult, tmp_path: Path) -> None:
    def step(t: float, n: int = 1, whole: float | None = 0.1) -> str:
        values = {"t": t, "kind": "decode", "n": n, "context": 50 * n, "target_s": 0.06}
        return json.dumps(values | {"draft_s": 0.01, "step_s": whole}) + "\n"

    path = tmp_path / "steps.jsonl"
    # Before the round, without a next step, cut off by a kill: not counted.
    lines = [
        step(99.0),
        step(100.5),
        step(101.0, whole=0.12),
        step(101.5, 2),
        step(101.6, whole=None),
    ]
    path.write_text("".join(lines) + step(101.7)[:-5])
    one, two = measures.step_figures(path, [make_result()])
    assert (one["n"], one["steps"], two["n"], two["context"]) == (1, 2, 2, 50)
    assert one["other_s"] == pytest.approx(0.04)
    assert measures.step_figures(tmp_path / "none", [make_result()]) == []
