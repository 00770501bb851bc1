"""The fused losses against brute force through full logits and autograd."""

from __future__ import annotations

import pytest
import torch
from sglang_dlite.training.losses import (
    LinearP,
    TopP,
    Weights,
    draft_losses,
    expected_accept_length,
    position_weights,
    sample_positions,
)
from torch.utils._python_dispatch import TorchDispatchMode

N, R, V, M = 13, 8, 50, 10


def _inputs(seed: int, kind: str):
    """u, head, labels, the law as the losses take it, the law as [N, V] probabilities, weights."""
    torch.manual_seed(seed)
    u = torch.randn(N, R, requires_grad=True)
    head = torch.randn(V, R, requires_grad=True)
    vectors, matrix = torch.randn(N, 6), torch.randn(V, 6)
    p = torch.softmax(vectors @ matrix.T, -1)
    top_logprobs, top_ids = p.log().topk(M, -1)
    labels = top_ids[:, 0].clone()
    labels[::3] = torch.randint(0, V, (len(labels[::3]),))  # also labels outside T
    law: TopP | LinearP | None = LinearP(vectors, matrix)
    if kind == "top":
        law = TopP(top_ids, top_logprobs)
        p = torch.zeros(N, V).scatter(-1, top_ids, top_logprobs.softmax(-1))
    return u, head, labels, law, p, torch.rand(N)


def _brute_force(u, head, labels, p):
    z = u @ head.T
    log_q = z.log_softmax(-1)
    ce = -log_q.gather(-1, labels[:, None])[:, 0]
    tv = (p - log_q.exp()).abs().sum(-1)
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    return ce, tv, kl


@pytest.mark.parametrize("kind", ["top", "linear"])
@pytest.mark.parametrize("rows", [1, 4, 13, 100])
@pytest.mark.parametrize(
    "factors",
    [(0.1, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.3, 0.7, 0.4)],
)
def test_losses_and_gradients_equal_brute_force(kind: str, rows: int, factors: tuple) -> None:
    u, head, labels, law, p, weights = _inputs(rows, kind)
    got = draft_losses(u, head, labels, law, weights, Weights(*factors), torch.float32, rows)
    expected = _brute_force(u, head, labels, p)
    for mine, theirs in zip((got.ce, got.tv, got.kl), expected, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), atol=2e-5, rtol=1e-5)
    each = zip(factors, expected, strict=True)
    total = (weights * sum(factor * loss for factor, loss in each)).sum()
    torch.testing.assert_close(got.total, total)
    mine = torch.autograd.grad(3 * got.total, [u, head])
    theirs = torch.autograd.grad(3 * total, [u, head])
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_the_base_loss_needs_no_law_and_no_gradient_of_a_frozen_head() -> None:
    hidden, head, labels, _, p, weights = _inputs(0, "linear")
    frozen = head.detach()
    got = draft_losses(hidden, frozen, labels, None, weights, Weights(0.06, 0.0), torch.float32, 4)
    total = 0.06 * (weights * _brute_force(hidden, frozen, labels, p)[0]).sum()
    torch.testing.assert_close(got.total, total)
    (mine,) = torch.autograd.grad(got.total, [hidden])
    (theirs,) = torch.autograd.grad(total, [hidden])
    torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-4)
    with pytest.raises(ValueError, match="need a law"):
        draft_losses(hidden, frozen, labels, None, weights, Weights(0.0, 1.0))


class _Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["top", "linear"])
def test_all_logits_never_exist_at_once(kind: str) -> None:
    u, head, labels, law, _, weights = _inputs(0, kind)
    rows = 3
    with _Largest() as seen:
        loss = draft_losses(
            u, head, labels, law, weights, Weights(0.1, 1.0, 1.0), torch.float32, rows
        )
        loss.total.backward()
    # The tables [V, R] and blocks [rows, V] are the largest; [N, V] would be four times as large.
    assert rows * V <= seen.elements <= max(rows * V, V * R) < N * V


@pytest.mark.parametrize("kind", ["top", "linear"])
def test_bf16_is_close_to_fp32(kind: str) -> None:
    u, head, labels, law, _, weights = _inputs(3, kind)
    args = (u, head, labels, law, weights, Weights(0.1, 1.0, 0.5))
    low, high = draft_losses(*args, torch.bfloat16), draft_losses(*args, torch.float32)
    torch.testing.assert_close(low.tv, high.tv, atol=0.05, rtol=0.05)
    torch.testing.assert_close(low.kl, high.kl, atol=0.05, rtol=0.05)
    a = torch.autograd.grad(low.total, head)[0]
    b = torch.autograd.grad(high.total, head)[0]
    assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.995


def test_no_rows_gives_zero_loss_and_gradient() -> None:
    u, head, labels, law, _, weights = _inputs(0, "top")
    none = TopP(law.ids[:0], law.logprobs[:0])
    got = draft_losses(u[:0], head, labels[:0], none, weights[:0], Weights(0.1, 1.0), torch.float32)
    got.total.backward()
    assert got.total == 0
    assert head.grad is None or not head.grad.any()


def test_expected_accept_length_equals_loop() -> None:
    torch.manual_seed(0)
    tv = 2 * torch.rand(5, 4)
    labelled = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]])
    tv[3] = float("nan")  # a row without label may hold anything
    got = expected_accept_length(tv, labelled.bool())
    for row in range(5):
        length, alive = 1.0, 1.0
        for j in range(4):
            alive *= (1 - tv[row, j].item() / 2) if labelled[row, j] else 0
            length += alive
        assert got[row].item() == pytest.approx(length, abs=1e-6)


def test_position_weights_decay_by_gamma_or_not_at_all() -> None:
    assert position_weights(3, 4.0).tolist() == pytest.approx([1, 0.7788008, 0.6065307])
    assert position_weights(3, 0.0).tolist() == [1, 1, 1]


@pytest.mark.parametrize("gamma", [4.0, 1.3, 0.05])
def test_positions_are_sampled_in_proportion_to_their_weights(gamma: float) -> None:
    generator = torch.Generator().manual_seed(0)
    labelled = torch.ones(20000, 7, dtype=torch.bool)
    labelled[:, 6] = False
    share = sample_positions(labelled, gamma, generator).float().mean(0)
    expected = position_weights(7, gamma)
    expected[6] = 0
    torch.testing.assert_close(share, expected, atol=0.015, rtol=0)
    # An anchor has a label, and its first draft is always kept: no anchor is ever without a loss.
    assert share[0] == 1 and share[6] == 0
