"""The fused losses against brute force through full logits and autograd."""

from __future__ import annotations

import pytest
import torch
from sglang_dlite.training.losses import (
    draft_losses,
    expected_accept_length,
    position_weights,
    sample_positions,
)

N, R, V, M = 13, 8, 50, 10


def _inputs(seed: int):
    torch.manual_seed(seed)
    u = torch.randn(N, R, requires_grad=True)
    head = torch.randn(V, R, requires_grad=True)
    law = torch.softmax(2 * torch.randn(N, V), -1)
    top_logprobs, top_ids = law.log().topk(M, -1)
    labels = top_ids[:, 0].clone()
    labels[::3] = torch.randint(0, V, (len(labels[::3]),))  # also labels outside T
    return u, head, labels, top_ids, top_logprobs, torch.rand(N)


def _brute_force(u, head, labels, top_ids, top_logprobs):
    z = u @ head.T
    p = torch.zeros(N, V).scatter(-1, top_ids, top_logprobs.softmax(-1))
    ce = -z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return ce, (p - z.softmax(-1)).abs().sum(-1)


@pytest.mark.parametrize("rows", [1, 4, 13, 100])
@pytest.mark.parametrize("w_ce,w_tv", [(0.1, 1.0), (1.0, 0.0), (1.3, 0.7)])
def test_losses_and_gradients_equal_brute_force(rows: int, w_ce: float, w_tv: float) -> None:
    u, head, labels, ids, logprobs, weights = _inputs(rows)
    got = draft_losses(u, head, labels, ids, logprobs, weights, w_ce, w_tv, torch.float32, rows)
    ce, tv = _brute_force(u, head, labels, ids, logprobs)
    torch.testing.assert_close(got.ce, ce.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.tv, tv.detach(), atol=1e-5, rtol=1e-5)
    total = (weights * (w_ce * ce + w_tv * tv)).sum()
    torch.testing.assert_close(got.total, total)
    mine = torch.autograd.grad(3 * got.total, [u, head])
    theirs = torch.autograd.grad(3 * total, [u, head])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_bf16_is_close_to_fp32() -> None:
    u, head, labels, ids, logprobs, weights = _inputs(3)
    args = (u, head, labels, ids, logprobs, weights, 0.1, 1.0)
    low, high = draft_losses(*args, torch.bfloat16), draft_losses(*args, torch.float32)
    torch.testing.assert_close(low.tv, high.tv, atol=0.05, rtol=0.05)
    a = torch.autograd.grad(low.total, head)[0]
    b = torch.autograd.grad(high.total, head)[0]
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.999


def test_no_rows_gives_zero_loss_and_gradient() -> None:
    u, head, labels, ids, logprobs, weights = _inputs(0)
    got = draft_losses(
        u[:0], head, labels[:0], ids[:0], logprobs[:0], weights[:0], 0.1, 1.0, torch.float32
    )
    got.total.backward()
    assert got.total == 0
    assert head.grad is None or not head.grad.any()


def test_expected_accept_length_equals_loop() -> None:
    torch.manual_seed(0)
    tv = 2 * torch.rand(5, 4)
    labelled = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    got = expected_accept_length(tv, labelled.bool())
    for row in range(5):
        length, alive = 1.0, 1.0
        for j in range(4):
            alive *= (1 - tv[row, j].item() / 2) * labelled[row, j].item()
            length += alive
        assert got[row].item() == pytest.approx(length, abs=1e-6)


def test_positions_are_sampled_in_proportion_to_their_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    labelled = torch.ones(20000, 7, dtype=torch.bool)
    labelled[:, 6] = False
    share = sample_positions(labelled, 4.0, generator).float().mean(0)
    expected = position_weights(7, 4.0)
    expected[6] = 0
    torch.testing.assert_close(share, expected, atol=0.015, rtol=0)
    assert share[0] == 1 and share[6] == 0
