"""Stages, learning rate, the order of the data, the losses' denominators."""

from __future__ import annotations

import numpy as np
import pytest
from sglang_dlite.training.anchors import Pick, Reply
from sglang_dlite.training.config import OptimSection, StagesSection, TrainConfigError
from sglang_dlite.training.schedule import (
    Sampler,
    Stage,
    learning_rate,
    mixture,
    plan_stages,
    weight_sum,
)

NAMES = ("warm_up", "transition", "stable")


def test_stages_last_epochs_or_steps_and_can_be_switched_off() -> None:
    section = StagesSection(teacher=2, warm_up=1, transition=0.5, stable=4)
    assert plan_stages(section, NAMES, 10) == [
        Stage("warm_up", 0, 10), Stage("transition", 10, 5), Stage("stable", 15, 40),
    ]  # fmt: skip
    assert plan_stages(section, ("teacher",), 10) == [Stage("teacher", 0, 20)]
    direct = StagesSection(unit="steps", stable=7)
    assert plan_stages(direct, NAMES, 10) == [Stage("stable", 0, 7)]


@pytest.mark.parametrize("unit, value", [("steps", 0.4), ("epochs", 0.04), ("minutes", 0.001)])
def test_a_stage_that_is_shorter_than_a_step_is_refused(unit: str, value: float) -> None:
    with pytest.raises(TrainConfigError, match=rf"stages\.stable = {value} with .* = {unit}"):
        plan_stages(StagesSection(unit=unit, stable=value), NAMES, 10)


def test_the_transition_fades_from_the_teacher_to_the_target() -> None:
    stages = [Stage("warm_up", 0, 3), Stage("transition", 3, 4), Stage("stable", 7, 2)]
    mixed = [mixture(stages, step) for step in range(9)]
    assert [m.distill for m in mixed[:3]] == [1, 1, 1] and [m.target for m in mixed[:3]] == [0] * 3
    assert [m.head_frozen for m in mixed] == [True] * 3 + [False] * 6
    fading = [m.distill for m in mixed[3:7]]
    expected = [0.5 * (1 + np.cos(np.pi * x)) for x in (0.125, 0.375, 0.625, 0.875)]
    assert fading == pytest.approx(expected)
    assert all(m.distill + m.target == 1 for m in mixed)
    assert [m.target for m in mixed[7:]] == [1, 1]
    assert mixture([Stage("stable", 0, 5)], 0) == (0, 1, False)
    assert mixture([Stage("teacher", 0, 5)], 3) == (0, 1, False)


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.04) for step in range(100)]
    assert rates[0] == 0.25 and max(rates) == 1.0 == rates[4]
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] < 0.01


def _sampler(places: list[np.ndarray], **optim) -> Sampler:
    settings = {"batch_replies": 4, "anchors_per_reply": 3, "micro_replies": 2} | optim
    return Sampler(places, OptimSection(**settings))


def test_an_epoch_visits_each_reply_once_and_resuming_needs_no_state() -> None:
    places = [np.arange(i) for i in range(9)]  # reply 0 has none
    sampler = _sampler(places)
    assert sampler.steps_per_epoch == 2
    steps = [sampler.micro_batches(step) for step in range(6)]
    for epoch in range(3):
        micro = steps[2 * epoch] + steps[2 * epoch + 1]
        assert [len(picks) for picks in micro] == [2, 2, 2, 2]
        visited = [pick.reply for picks in micro for pick in picks]
        assert sorted(visited) == list(range(1, 9))
    order = [[pick.reply for picks in step for pick in picks] for step in steps]
    assert order[:2] != order[2:4]
    for step in (5, 0, 3):  # in any order, by a new sampler
        again = _sampler(places).micro_batches(step)
        for mine, theirs in zip(again, steps[step], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a.reply == b.reply and np.array_equal(a.places, b.places)


def test_anchors_are_drawn_without_replacement_from_all_places() -> None:
    sampler = _sampler([np.arange(10, 40), np.arange(2)], batch_replies=2)
    seen: set[int] = set()
    for step in range(200):
        for pick in sampler.micro_batches(step)[0]:
            assert len(set(pick.places.tolist())) == min(3, [30, 2][pick.reply])
            if pick.reply == 0:
                seen |= set(pick.places.tolist())
    assert seen == set(range(10, 40))


def _visits(sampler: Sampler, epochs: int) -> np.ndarray:
    """How often each reply is visited in the first epochs."""
    counts = np.zeros(len(SOURCES), dtype=int)
    for step in range(epochs * sampler.steps_per_epoch):
        for pick in (pick for micro in sampler.micro_batches(step) for pick in micro):
            counts[pick.reply] += 1
    return counts


SOURCES = ["a"] * 4 + ["b"] * 6 + ["c"] * 2


def test_weights_say_how_often_a_source_is_visited() -> None:
    places = [np.arange(5)] * len(SOURCES)
    optim = OptimSection(batch_replies=3, anchors_per_reply=3, micro_replies=2)
    weights = {"b": 0.5, "c": 2.5}
    sampler = Sampler(places, optim, SOURCES, weights)
    assert sampler.steps_per_epoch == 4  # 4 + 3 + 5 visits
    assert _visits(sampler, 1)[:4].tolist() == [1] * 4
    assert _visits(sampler, 1)[4:10].sum() == 3 and _visits(sampler, 1)[10:].sum() == 5
    # Over two epochs each reply has had its turn equally often.
    assert _visits(sampler, 2).tolist() == [2] * 4 + [1] * 6 + [5] * 2
    # A new sampler, asked in any order, says the same: resuming needs no state.
    fresh = Sampler(places, optim, SOURCES, weights)
    for step in (7, 0, 3):
        mine, theirs = fresh.micro_batches(step), sampler.micro_batches(step)
        assert [[p.reply for p in m] for m in mine] == [[p.reply for p in m] for m in theirs]
    none = Sampler(places, optim, SOURCES, {"a": 0, "c": 0})
    assert _visits(none, 1).tolist() == [0] * 4 + [1] * 6 + [0] * 2


def test_weights_of_one_change_nothing() -> None:
    places = [np.arange(5)] * len(SOURCES)
    optim = OptimSection(batch_replies=3, anchors_per_reply=3, micro_replies=2)
    plain, named = Sampler(places, optim), Sampler(places, optim, SOURCES, {"b": 1.0})
    for step in range(8):
        for mine, theirs in zip(
            plain.micro_batches(step)[0], named.micro_batches(step)[0], strict=True
        ):
            assert mine.reply == theirs.reply and np.array_equal(mine.places, theirs.places)


def test_weights_of_an_unknown_source_are_refused() -> None:
    with pytest.raises(TrainConfigError, match=r"data\.weights names d; the sources are a, b, c"):
        Sampler([np.arange(5)] * len(SOURCES), OptimSection(), SOURCES, {"d": 1.0})


def test_no_anchor_is_an_error() -> None:
    with pytest.raises(TrainConfigError, match="no anchors"):
        _sampler([np.arange(0)])


def test_denominators_equal_a_loop_over_labelled_drafts() -> None:
    weights = np.array([1.0, 0.5, 0.25])
    replies = [
        Reply("a", "s", 0, np.arange(3), np.arange(6)),
        Reply("b", "s", 0, np.arange(1), np.arange(3)),
    ]
    batches = [[Pick(0, np.array([0, 3, 4]))], [Pick(1, np.array([0, 1])), Pick(0, np.array([2]))]]
    expected = 0.0
    for pick in (p for batch in batches for p in batch):
        for place in pick.places:
            for j in range(3):
                if place + 1 + j < replies[pick.reply].length:
                    expected += weights[j]
    assert weight_sum(batches, replies, weights) == pytest.approx(expected)
