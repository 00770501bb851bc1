"""What a dry run says is what a run then takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang_dlite.drafter import HistoryAwareDrafter
from sglang_dlite.training.cache_states import cache_states
from sglang_dlite.training.config import from_dict
from sglang_dlite.training.data_estimate import estimate_data
from sglang_dlite.training.dataset import load_replies
from sglang_dlite.training.estimate import estimate
from sglang_dlite.training.session import Session
from sglang_dlite.training.simulate import EvalSet

from .conftest import MODEL, VOCAB, make_trainer


def _bytes_of(data: EvalSet) -> int:
    """Of all tensors that the set keeps."""
    found = torch.utils._pytree.tree_leaves(data.batch)
    return sum(x.numel() * x.element_size() for x in found if isinstance(x, torch.Tensor))


def test_checkpoints_take_what_was_estimated(config, tmp_path: Path) -> None:
    settings = config(tmp_path, optim={"ema": 0.9})
    trainer = make_trainer(settings)
    trainer.run()
    figures = estimate(settings, Session(settings).target.shape, trainer.model.config)
    size = (tmp_path / "checkpoint.pt").stat().st_size
    assert figures.run_checkpoint < size < figures.run_checkpoint + 60_000
    best = (tmp_path / "best/model.safetensors").stat().st_size
    # The folder once more large, while the checkpoint is replaced, and the export.
    assert figures.run_folder == 2 * figures.run_checkpoint + 2 * figures.checkpoint
    assert best == pytest.approx(figures.checkpoint, abs=4000)
    kept = sum(p.numel() * 4 for p in trainer.model.parameters())
    assert figures.training_state == 5 * kept  # weight, gradient, two moments, average


@pytest.mark.parametrize("teacher", [0, 3])
def test_the_cache_takes_no_more_than_estimated(
    target: Path, data_folder: Path, config, tmp_path: Path, teacher: int
) -> None:
    data = {"states": "cache", "cache": str(tmp_path / "c"), "top_k": 6}
    data["cached_anchors_per_reply"] = 5
    settings = config(tmp_path, data=data, stages={"teacher": teacher})
    drafter = Session(settings).shape
    figures = estimate_data(settings, drafter, load_replies([data_folder], VOCAB))
    cache_states(settings)
    written = sum(p.stat().st_size for p in (tmp_path / "c").iterdir() if "json" not in p.suffix)
    assert 0.6 * figures.cache < written <= figures.cache


@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize("windowed", [False, True])
def test_evaluations_keep_what_was_estimated(
    config, data_folder: Path, tmp_path: Path, top_k: int, windowed: bool
) -> None:
    stages = {"teacher": 3} if windowed else {}
    settings = config(tmp_path, data={"top_k": top_k}, stages=stages)
    session = Session(settings)
    model = (
        HistoryAwareDrafter(session.shape, MODEL["window"]) if windowed else session.fresh_drafter()
    )
    trainer = session.trainer("teacher" if windowed else "drafter", model, None)
    assert trainer is not None
    figures = estimate_data(settings, session.shape, load_replies([data_folder], VOCAB))
    assert figures.evaluated == len(trainer.eval_set.replies) + _of_one_token(session)
    kept = _bytes_of(trainer.eval_set)
    if windowed:  # tokens at either end of a reply are in nobody's window
        assert 0.8 * figures.evaluation < kept <= figures.evaluation
    else:
        assert kept == figures.evaluation


def _of_one_token(session: Session) -> int:
    return sum(session.replies[i].length < 2 for i in session.held_out)


def test_without_an_evaluation_nothing_is_kept(data_folder: Path) -> None:
    settings = from_dict({"model": MODEL, "eval": {"replies": 0}, "data": {"top_k": 6}})
    replies = load_replies([data_folder], VOCAB)
    from sglang_dlite.training.targets import TargetShape, drafter_config

    shape = TargetShape("LlamaForCausalLM", 32, 4, 4, 2, 8, 48, VOCAB, 1e-6, 1e4)
    figures = estimate_data(settings, drafter_config(shape, settings.model), replies)
    assert figures.evaluation == figures.cache == figures.evaluated == 0
    assert figures.places > 100 and "state cache" not in figures.text()
