"""The whole objective against a loop over drafts with full softmaxes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sglang_dlite.drafter import DLiteDrafter, HistoryAwareDrafter
from sglang_dlite.training.anchors import AnchorSpec, Pick, TopLaw
from sglang_dlite.training.config import DistillSection, LossSection
from sglang_dlite.training.dataset import load_replies
from sglang_dlite.training.objective import Objective, predict
from sglang_dlite.training.schedule import Mixture
from sglang_dlite.training.states import OnlineStates
from sglang_dlite.training.targets import drafter_config
from torch import nn

from .conftest import VOCAB, model_section

LOSS = LossSection(w_ce=0.3, w_tv=0.9, w_base=0.2, gamma=2.0, base_gamma=5.0)


@pytest.fixture(params=[0, 6])
def setting(request, data_folder: Path, frozen):
    """(source, picks, batch, drafter, teacher, embed, lm_head) for the whole or the top-6 law."""
    torch.manual_seed(3)
    model = model_section()
    shape = drafter_config(frozen.shape, model)
    drafter, teacher = DLiteDrafter(shape), HistoryAwareDrafter(shape, model.window)
    for parameter in (*drafter.parameters(), *teacher.parameters()):
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.3)
    replies = load_replies([data_folder], VOCAB)
    source = OnlineStates(frozen, replies)
    picks = [Pick(0, replies[0].places), Pick(3, replies[3].places)]
    spec = AnchorSpec.of(shape, request.param, model.window)
    embed = nn.Embedding.from_pretrained(frozen.embedding)
    return source, picks, source.batch(picks, spec), drafter, teacher, embed, frozen.lm_head


def _naive(batch, model, teacher, embed, lm_head, mix: Mixture):
    hidden, vectors = predict(model, batch, embed)
    logits = model.draft_logits(vectors)
    law = batch.law
    if isinstance(law, TopLaw):
        p = torch.zeros(logits.shape).scatter(-1, law.ids, law.logprobs.softmax(-1))
    else:
        p = (law.hidden @ lm_head.T).softmax(-1)
    against_target = base = distill = below = base_below = distill_below = 0.0
    gold = None if teacher is None else teacher.draft_logits(predict(teacher, batch, embed).vectors)
    for i in range(len(batch.labels)):
        for j in range(batch.labels.shape[1]):
            if not batch.labelled[i, j]:
                continue
            weight = torch.tensor(-j / LOSS.gamma).exp()
            base_weight = torch.tensor(-j / LOSS.base_gamma).exp()
            log_q, label = logits[i, j].log_softmax(-1), batch.labels[i, j]
            tv = (p[i, j] - log_q.exp()).abs().sum()
            against_target = against_target + weight * (-LOSS.w_ce * log_q[label] + LOSS.w_tv * tv)
            base = base - base_weight * (hidden[i, j] @ lm_head.T).log_softmax(-1)[label]
            below, base_below = below + weight, base_below + base_weight
            if gold is not None:
                g = gold[i, j].log_softmax(-1)
                distill = distill + (g.exp() * (g - log_q)).sum()
                distill_below += 1
    total = mix.target * (against_target / below + LOSS.w_base * base / base_below)
    if mix.distill:
        total = total + mix.distill * distill / distill_below
    return total


@pytest.mark.parametrize("mix", [(0.0, 1.0), (1.0, 0.0), (0.3, 0.7)])
def test_it_equals_a_loop_over_drafts(setting, mix: tuple[float, float]) -> None:
    source, picks, batch, drafter, teacher, embed, lm_head = setting
    mixture = Mixture(*mix, head_frozen=False)
    objective = Objective(LOSS, DistillSection(), embed, lm_head, False, teacher)
    below = objective.denominators([picks], source.replies, 4)
    got = objective.loss(drafter, batch, mixture, below, torch.Generator())
    expected = _naive(batch, drafter, teacher, embed, lm_head, mixture)
    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5)
    parameters = list(drafter.parameters())
    mine = torch.autograd.grad(got, parameters, allow_unused=True)
    theirs = torch.autograd.grad(expected, parameters, allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        if b is not None and b.abs().max() > 1e-7:
            torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-3)


def test_the_teacher_learns_by_the_same_loss(setting) -> None:
    source, picks, batch, _, teacher, embed, lm_head = setting
    objective = Objective(LOSS, DistillSection(), embed, lm_head, False)
    below = objective.denominators([picks], source.replies, 4)
    mixture = Mixture(0.0, 1.0, False)
    got = objective.loss(teacher, batch, mixture, below, torch.Generator())
    expected = _naive(batch, teacher, None, embed, lm_head, mixture)
    torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5)
    assert torch.autograd.grad(got, teacher.history_fuse.weight)[0].abs().max() > 0


@pytest.mark.parametrize("gamma", [2.0, 1.3])
def test_sampling_positions_keeps_the_loss_in_expectation(setting, gamma: float) -> None:
    source, picks, batch, drafter, teacher, embed, lm_head = setting
    mixture = Mixture(0.5, 0.5, False)
    loss = replace(LOSS, gamma=gamma)
    whole = Objective(loss, DistillSection(), embed, lm_head, False, teacher)
    sampled = replace(loss, sample_positions=True)
    some = Objective(sampled, DistillSection(keep=0.5), embed, lm_head, False, teacher)
    below = whole.denominators([picks], source.replies, 4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        expected = whole.loss(drafter, batch, mixture, below, generator).item()
        drawn = [some.loss(drafter, batch, mixture, below, generator).item() for _ in range(300)]
    mean = sum(drawn) / len(drawn)
    spread = (sum((x - mean) ** 2 for x in drawn) / len(drawn)) ** 0.5 / len(drawn) ** 0.5
    assert min(drawn) < expected < max(drawn)
    assert abs(mean - expected) < 4 * spread
