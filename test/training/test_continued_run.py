"""A run that starts from another run's folder goes on as if that one had not stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang_dlite.drafter import HistoryAwareDrafter
from sglang_dlite.training import trainer as trainer_module
from sglang_dlite.training.config import TrainConfigError
from sglang_dlite.training.session import Session

from .conftest import MODEL, make_trainer


@pytest.fixture
def constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of different lengths then have the same learning rates."""
    monkeypatch.setattr(trainer_module, "learning_rate", lambda *_: 3e-3)


def _run(settings, folder: Path, steps: int, **run):
    trainer = make_trainer(settings(folder, stages={"stable": steps}, run=run))
    trainer.run()
    return trainer


def _equal(one, other) -> None:
    for name, weight in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name], weight, atol=0, rtol=0)


def test_it_equals_the_unbroken_run(config, tmp_path: Path, constant_rate) -> None:
    whole = _run(config, tmp_path / "whole", 11)
    _run(config, tmp_path / "first", 4)
    second = _run(config, tmp_path / "second", 3, init_from=str(tmp_path / "first"))
    assert (second.step, second.steps_before) == (3, 4)
    third = _run(config, tmp_path / "third", 4, init_from=str(tmp_path / "second"))
    assert (third.step, third.steps_before) == (4, 7)
    _equal(whole, third)


def test_it_resumes_without_the_earlier_run(config, tmp_path: Path, constant_rate) -> None:
    first = _run(config, tmp_path / "first", 4)
    start = str(tmp_path / "first")
    whole = _run(config, tmp_path / "whole", 6, init_from=start)
    broken = make_trainer(config(tmp_path / "b", stages={"stable": 6}, run={"init_from": start}))
    for _ in range(2):
        broken.train_step()
    broken.save()
    (first.folder / "checkpoint.pt").unlink()
    again = make_trainer(config(tmp_path / "b", stages={"stable": 6}, run={"init_from": start}))
    assert (again.step, again.steps_before) == (2, 4)
    again.run()
    _equal(whole, again)


def test_its_learning_rate_starts_at_the_peak(config, tmp_path: Path) -> None:
    optim = {"warmup_ratio": 0.5, "lr": 2e-3}
    fresh = make_trainer(config(tmp_path / "first", optim=optim))
    fresh.run()
    for start, rate in (("first", 2e-3), ("first/best", 4e-4)):
        run = {"init_from": str(tmp_path / start)}
        trainer = make_trainer(
            config(tmp_path / start.replace("/", "-") / "x", optim=optim, run=run)
        )
        trainer.train_step()
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert trainer.steps_before == (10 if start == "first" else 0)


def test_another_shape_is_refused(config, tmp_path: Path) -> None:
    _run(config, tmp_path / "first", 2)
    for start in ("first", "first/best"):
        run = {"init_from": str(tmp_path / start)}
        with pytest.raises(TrainConfigError, match=r"run\.init_from: .* has another shape"):
            make_trainer(config(tmp_path / "x", run=run, model={"group_size": 1}))


def test_a_teachers_checkpoint_is_refused(config, tmp_path: Path) -> None:
    session = Session(config(tmp_path / "first", stages={"teacher": 1}))
    fresh = HistoryAwareDrafter(session.shape, MODEL["window"])
    teacher = session.trainer("teacher", fresh, None)
    assert teacher is not None
    teacher.save()
    run = {"init_from": str(tmp_path / "first/teacher")}
    with pytest.raises(
        TrainConfigError, match=r"run\.init_from: .*/teacher holds no drafter: hist"
    ):
        make_trainer(config(tmp_path / "x", run=run))


def test_a_damaged_checkpoint_is_named(config, tmp_path: Path) -> None:
    make_trainer(config(tmp_path)).save()
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(TrainConfigError, match=r"cannot read .*checkpoint\.pt.*remove it"):
        make_trainer(config(tmp_path))
