"""Where a loop starts, and that nothing behind it is learned from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sglang_dlite.training.data_estimate import estimate_data
from sglang_dlite.training.reply_kinds import loop_start
from sglang_dlite.training.session import Session

from .conftest import make_trainer


@pytest.mark.parametrize("period", [1, 2, 5, 11])
def test_a_loop_starts_with_its_third_round(period: int) -> None:
    head, again = list(range(100, 130)), list(range(period))
    reply = head + again * (120 // period)
    start = loop_start(reply)
    # The 4-gram that tells the third round apart ends up to three tokens into it.
    assert len(head) + 2 * period <= start <= len(head) + 2 * period + 4
    assert loop_start([7, 7, 7, 7]) == 4  # too short to be called a loop


def test_what_does_not_loop_is_left_whole() -> None:
    assert loop_start(list(range(60))) == 60
    assert loop_start([1, 2, 3] * 5 + list(range(50, 110))) == 75  # it found its way out
    assert loop_start([]) == 0


@pytest.mark.parametrize("cut_loops", [False, True])
def test_a_dry_run_counts_the_anchors_that_training_announces(
    config, tmp_path: Path, cut_loops: bool, capsys
) -> None:
    settings = config(tmp_path, data={"cut_loops": cut_loops})
    session = Session(settings)
    for index in session.training[:3]:
        reply = np.array([5, 6, 7, 8] * 12, dtype=np.int32)
        session.replies[index] = replace(session.replies[index], reply_ids=reply)
    session.trainer("drafter", session.fresh_drafter(), None)
    (announced,) = re.findall(r"(\d+) anchors", capsys.readouterr().err)
    assert estimate_data(settings, session.shape, session.replies).places == int(announced)


def test_anchors_behind_the_start_are_left_out(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    load = Session.__init__

    def with_loops(session: Session, settings) -> None:
        load(session, settings)
        for index in session.training[:3]:
            reply = np.array([5, 6, 7, 8] * 12, dtype=np.int32)
            session.replies[index] = replace(session.replies[index], reply_ids=reply)

    monkeypatch.setattr(Session, "__init__", with_loops)
    make_trainer(config(tmp_path / "whole"))
    cut = make_trainer(config(tmp_path / "cut", data={"cut_loops": True}))
    whole, rest = (int(n) for n in re.findall(r"(\d+) anchors", capsys.readouterr().err))
    assert whole - rest == 3 * (47 - loop_start([5, 6, 7, 8] * 12)) > 0
    assert cut.run()
