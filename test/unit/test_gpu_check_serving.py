"""The judgement of the served part of gpu_check, on results that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sglang_dlite.gpu_check import serving
from sglang_dlite.gpu_check.serving import (
    ADAPTIVE,
    NO_GRAPHS,
    NO_OVERLAP,
    PLAIN,
    TARGET_ONLY,
    Played,
    compare,
    divergences,
    requests,
)

FAIR = Played(
    texts=[[1, 2, 3], [4, 5]],
    gaps=[],
    accepted=200,
    passes=100,
    kv_gb=0.25,
    graph_gb={},
    seconds=1.0,
)
TARGET = replace(FAIR, gaps=[[2.0, 0.1, 2.0], [2.0, 2.0]], accepted=0, passes=0)


class Report:
    def __init__(self) -> None:
        self.failed: list[str] = []

    def add(self, name: str, passed: bool, detail: dict[str, Any]) -> None:
        if not passed:
            self.failed.append(name)


def failures(**changes: Any) -> list[str]:
    """What fails where the run without graphs differs by `changes`."""
    report = Report()
    arms = {TARGET_ONLY: TARGET, PLAIN: FAIR, NO_OVERLAP: FAIR, NO_GRAPHS: replace(FAIR, **changes)}
    arms[ADAPTIVE] = replace(FAIR, passes=FAIR.passes + 1, accepted=0)
    compare(report, arms)
    return report.failed


def test_equal_runs_pass() -> None:
    assert failures() == []


def test_an_adaptive_run_that_only_knew_one_width_fails() -> None:
    report = Report()
    compare(report, {TARGET_ONLY: TARGET, PLAIN: FAIR, ADAPTIVE: FAIR})
    assert len(report.failed) == 1 and "other widths" in report.failed[0]


@pytest.mark.parametrize(
    "changes,failed",
    [
        ({"texts": [[1, 2, 9], [4, 5]]}, "text equals target only"),
        ({"texts": [[1, 2], [4, 5]]}, "text equals target only"),
        ({"accepted": 150}, "acceptance equals"),
        ({"accepted": 0}, "acceptance equals"),
        ({"passes": 0}, "acceptance equals"),
        ({"kv_gb": 0.31}, "K/V bytes per token"),
    ],
)
def test_a_difference_fails(changes: dict[str, Any], failed: str) -> None:
    (name,) = failures(**changes)
    assert failed in name and NO_GRAPHS.name in name


def test_either_of_two_nearly_equal_tokens_is_the_targets() -> None:
    assert failures(texts=[[1, 9, 9], [4, 5]]) == []
    assert divergences([[1, 9, 9], [4, 5]], TARGET.texts, TARGET.gaps) == [(0, 1, 0.1)]


def test_requests_are_the_same_each_time_and_of_both_kinds() -> None:
    assert requests() == requests()
    biased = ["logit_bias" in request["sampling_params"] for request in requests()]
    assert any(biased) and not all(biased)


def test_arms_that_would_end_too_late_are_left_out_and_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, begun, notes = [0.0], [], []

    def play(arm: Any, *_: Any) -> Played:
        begun.append(arm)
        now[0] += 100.0
        return replace(TARGET if arm is TARGET_ONLY else FAIR, seconds=100.0)

    class Noting(Report):
        note = notes.append

    monkeypatch.setattr(serving, "play", play)
    monkeypatch.setattr(serving, "make_pair", lambda *_: (None, None))
    monkeypatch.setattr(serving.time, "monotonic", lambda: now[0])
    serving.run_serving_checks(Noting(), "cuda", deadline=330.0)
    assert begun == [TARGET_ONLY, PLAIN, NO_GRAPHS]
    assert len(notes) == 2 and NO_OVERLAP.name in notes[0] and ADAPTIVE.name in notes[1]
    begun.clear()
    serving.run_serving_checks(Noting(), "cuda", deadline=now[0])
    assert begun == [TARGET_ONLY, PLAIN]
