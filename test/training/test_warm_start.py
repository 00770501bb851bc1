"""What a warm start takes from the target and its states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sglang_dlite.drafter import DLiteDrafter, HistoryAwareDrafter
from sglang_dlite.training.anchors import AnchorSpec, Pick
from sglang_dlite.training.config import TrainConfigError
from sglang_dlite.training.session import Session
from sglang_dlite.training.warm_start import factorise_head, warm_start


@pytest.fixture
def session(config, tmp_path: Path) -> Session:
    return Session(config(tmp_path, model={"warm_start": True}))


def _slot_states(session: Session) -> torch.Tensor:
    """[N, S, h] of all training anchors: the tiny data are few enough to be all looked at."""
    from sglang_dlite.training.states import OnlineStates

    source = OnlineStates(session.target, session.replies)
    picks = [Pick(i, session.replies[i].places) for i in session.training]
    batch = source.batch(picks, AnchorSpec.of(session.shape, 1))
    return batch.pivot_states.float()


def test_the_depth_embedding_takes_the_slots_means_away(session: Session) -> None:
    drafter = session.fresh_drafter()
    states = _slot_states(session)
    ids = list(session.shape.target_layer_ids)
    mean = states.mean(0)
    torch.testing.assert_close(drafter.layer_depth_embedding.weight[ids], -0.8 * mean)
    centred = states + drafter.layer_depth_embedding.weight[ids].detach()
    torch.testing.assert_close(centred.mean(0), 0.2 * mean, atol=1e-5, rtol=1e-4)
    others = [i for i in range(session.shape.num_target_layers) if i not in ids]
    assert others and drafter.layer_depth_embedding.weight[others].abs().max() < 0.2  # fresh


def test_without_a_reply_to_train_on_the_settings_are_named(config, tmp_path: Path) -> None:
    settings = config(tmp_path, model={"warm_start": True}, data={"min_reply_tokens": 999})
    with pytest.raises(TrainConfigError, match=r"of 30 .*data\.min_reply_tokens = 999"):
        Session(settings).fresh_drafter()


def test_it_is_deterministic(session: Session) -> None:
    torch.manual_seed(0)
    one = session.fresh_drafter().state_dict()
    torch.manual_seed(0)
    two = session.fresh_drafter().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_teachers_history_starts_as_the_states_of_the_last_slot(session: Session) -> None:
    torch.manual_seed(0)
    teacher = HistoryAwareDrafter(session.shape, 6)
    hidden, slots = torch.randn(9, 32), torch.zeros(session.shape.num_pivot_states, 32)
    warm_start(teacher, session.target.model, hidden, slots)
    features = torch.randn(5, 3, 32)
    passed = teacher.history_norm(teacher.history_fuse(features.flatten(1)))
    torch.testing.assert_close(passed, teacher.context_norm(features[:, 2]))
    drafter = DLiteDrafter(session.shape)
    warm_start(drafter, session.target.model, hidden, slots)
    for name, weight in drafter.layers.state_dict().items():
        assert torch.equal(weight, teacher.layers.state_dict()[name])


def test_the_head_is_the_best_of_its_rank() -> None:
    torch.manual_seed(0)
    hiddens = torch.randn(400, 12) @ torch.randn(12, 12)
    head = torch.randn(30, 12)
    centred = head - head.mean(0)
    errors = []
    for rank in (2, 6, 12):
        left, right = factorise_head(head, hiddens, rank)
        assert left.shape == (30, rank) and right.shape == (rank, 12)
        missed = (hiddens @ (centred - left @ right).T).square().sum()
        # Eckart-Young: what a rank-R stand-in must miss of the logits.
        best = torch.linalg.svdvals(centred @ hiddens.T)[rank:].square().sum()
        errors.append((missed.item(), best.item()))
    total = (hiddens @ centred.T).square().sum().item()
    for missed, best in errors:
        assert missed == pytest.approx(best, abs=2e-2 * total)
