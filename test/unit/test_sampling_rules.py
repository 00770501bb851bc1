"""The law of the output, by chi-square over a tiny vocabulary: both rules, and planted bugs.

Target and drafter are random Markov chains: the law of a token depends on its place in the block
and on the token before it. 100 000 blocks are drafted and verified at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from chi_square import p_value
from sglang_dlite.drafter.sampling import draw, temperature_law
from sglang_dlite.speculative.acceptance import Acceptance, match_drafts, reject_drafts
from torch._subclasses.fake_tensor import FakeTensorMode

VOCAB = 5
WIDTH = 4
BLOCKS = 100_000
# Chance of a sound rule to fail one test; the seeds are fixed, so that a pass is a pass. A planted
# bug must be found with a p-value far below it.
SIGNIFICANCE = 1e-4
CERTAIN = 1e-12

Chain = torch.Tensor  # [D, V, V]: the law of the token after row j, given candidates[j]
Rule = Callable[["Blocks"], Acceptance]


class Blocks(NamedTuple):
    """What a rule gets to see: n blocks."""

    candidates: torch.Tensor  # [n, D]
    target_law: torch.Tensor  # [n, D, V]
    draft_law: torch.Tensor  # [n, K, V]
    generator: torch.Generator

    def uniforms(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self.generator)


def random_chain(seed: int) -> Chain:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(1.2 * torch.randn(WIDTH, VOCAB, VOCAB, generator=generator), dim=-1)


TARGET, DRAFTER = random_chain(1), random_chain(2)
ANCHOR = 3


def draft_blocks(seed: int, num_blocks: int = BLOCKS) -> Blocks:
    """Blocks that the drafter's chain really drew."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.full((num_blocks,), ANCHOR)]
    for k in range(WIDTH - 1):
        uniforms = torch.rand(num_blocks, dtype=torch.float64, generator=generator)
        tokens.append(draw(DRAFTER[k, tokens[-1]], uniforms))
    candidates = torch.stack(tokens, dim=1)
    places = torch.arange(WIDTH)
    return Blocks(
        candidates,
        TARGET[places, candidates],
        DRAFTER[places[:-1], candidates[:, :-1]],
        generator,
    )


def rejection(blocks: Blocks) -> Acceptance:
    n = len(blocks.candidates)
    return reject_drafts(
        blocks.candidates,
        blocks.target_law,
        blocks.draft_law,
        blocks.uniforms(n, WIDTH - 1),
        blocks.uniforms(n),
    )


def target_samples(blocks: Blocks) -> torch.Tensor:
    n = len(blocks.candidates)
    laws = blocks.target_law.flatten(0, 1)
    return draw(laws, blocks.uniforms(n * WIDTH)).view(n, WIDTH)


def matching(blocks: Blocks) -> Acceptance:
    return match_drafts(blocks.candidates, target_samples(blocks))


# -- planted bugs -------------------------------------------------------------------------------


def residual_skipped(blocks: Blocks) -> Acceptance:
    """The first rejected draft is replaced by a token of p, not of (p - q)+."""
    accepted = rejection(blocks)
    rows = torch.arange(len(blocks.candidates))
    law = blocks.target_law[rows, accepted.num_accepted]
    anchor = draw(law, blocks.uniforms(len(rows)))
    output = accepted.output_ids.scatter(1, accepted.num_accepted[:, None], anchor[:, None])
    return Acceptance(accepted.num_accepted, output, anchor)


def target_row_off_by_one(blocks: Blocks) -> Acceptance:
    return rejection(blocks._replace(target_law=blocks.target_law.roll(-1, dims=1)))


def draft_row_off_by_one(blocks: Blocks) -> Acceptance:
    return rejection(blocks._replace(draft_law=blocks.draft_law.roll(1, dims=1)))


def temperature_forgotten(blocks: Blocks) -> Acceptance:
    """q at temperature 1, drafts drawn at another."""
    other = blocks.draft_law**0.8
    return rejection(blocks._replace(draft_law=other / other.sum(-1, keepdim=True)))


def bonus_from_the_drafter(blocks: Blocks) -> Acceptance:
    law = blocks.target_law.clone()
    law[:, -1] = DRAFTER[-1, blocks.candidates[:, -1]]
    return rejection(blocks._replace(target_law=law))


def successor_of_the_rejected(blocks: Blocks) -> Acceptance:
    """The anchor is the row behind the first mismatch: it has read the rejected draft."""
    samples = target_samples(blocks)
    accepted = match_drafts(blocks.candidates, samples)
    rows = (accepted.num_accepted + 1).clamp(max=WIDTH - 1)
    anchor = samples.gather(1, rows[:, None]).squeeze(1)
    output = samples.scatter(1, accepted.num_accepted[:, None], anchor[:, None])
    return Acceptance(accepted.num_accepted, output, anchor)


def one_match_forgiven(blocks: Blocks) -> Acceptance:
    """A lenient match: the second best token of the target passes at the first place."""
    samples = target_samples(blocks)
    second = blocks.target_law[:, 0].topk(2).indices[:, 1]
    drafts = blocks.candidates[:, 1]
    lenient = torch.where(drafts == second, drafts, samples[:, 0])
    return match_drafts(
        blocks.candidates, samples.index_copy(1, torch.tensor([0]), lenient[:, None])
    )


# -- the checks ---------------------------------------------------------------------------------


def check_joint(rule: Rule, seed: int) -> float:
    """The first D output tokens, a block that stops early being continued by the target itself."""
    blocks = draft_blocks(seed)
    accepted = rule(blocks)
    tokens, last = [], blocks.candidates[:, 0]
    for j in range(WIDTH):
        own = draw(TARGET[j, last], blocks.uniforms(BLOCKS))
        last = torch.where(j <= accepted.num_accepted, accepted.output_ids[:, j], own)
        tokens.append(last)
    cells = torch.zeros(BLOCKS, dtype=torch.int64)
    law = torch.ones(1)
    for j, token in enumerate(tokens):
        cells = cells * VOCAB + token
        rows = TARGET[j, ANCHOR][None] if j == 0 else TARGET[j].repeat(len(law) // VOCAB, 1)
        law = (law[:, None] * rows).flatten()
    return p_value(torch.bincount(cells, minlength=VOCAB**WIDTH), law)


def previous(blocks: Blocks, accepted: Acceptance, j: int) -> torch.Tensor:
    return blocks.candidates[:, 0] if j == 0 else accepted.output_ids[:, j - 1]


def check_place(rule: Rule, seed: int, j: int) -> float:
    """Output token j given the output before it, where the block reaches it: the target's law."""
    blocks = draft_blocks(seed)
    accepted = rule(blocks)
    reached = accepted.num_accepted >= j
    before = previous(blocks, accepted, j)[reached]
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    counts.index_put_(
        (before, accepted.output_ids[reached, j]), torch.ones_like(before), accumulate=True
    )
    share = torch.bincount(before, minlength=VOCAB) / len(before)
    return p_value(counts, share[:, None] * TARGET[j])


def check_rejected_at(rule: Rule, seed: int, j: int) -> float:
    """The token in place of the first rejected draft j: the residual law, given what is before."""
    blocks = draft_blocks(seed)
    accepted = rule(blocks)
    here = accepted.num_accepted == j
    assert here.sum() > BLOCKS / 100
    before = previous(blocks, accepted, j)[here]
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    counts.index_put_((before, accepted.anchor[here]), torch.ones_like(before), accumulate=True)
    residual = TARGET[j] - DRAFTER[j] if j < WIDTH - 1 else TARGET[j]
    residual = residual.clamp(min=0)
    residual = residual / residual.sum(dim=-1, keepdim=True)
    share = torch.bincount(before, minlength=VOCAB) / len(before)
    return p_value(counts, share[:, None] * residual)


def expected_counts() -> torch.Tensor:
    """P(n accepted drafts), n = 0..K, by summing over all blocks: draft j passes with min(p, q)."""
    alive = torch.zeros(VOCAB)
    alive[ANCHOR] = 1.0
    chances = []
    for j in range(WIDTH - 1):
        passed = alive @ torch.minimum(TARGET[j], DRAFTER[j])
        chances.append(alive.sum() - passed.sum())
        alive = passed
    return torch.stack([*chances, alive.sum()])


RULES = [rejection, matching]


@pytest.mark.parametrize("rule", RULES)
def test_the_joint_law(rule: Rule) -> None:
    assert check_joint(rule, 1) > SIGNIFICANCE


@pytest.mark.parametrize("place", range(WIDTH))
@pytest.mark.parametrize("rule", RULES)
def test_every_place_of_the_block(rule: Rule, place: int) -> None:
    assert check_place(rule, 2, place) > SIGNIFICANCE


@pytest.mark.parametrize("place", range(WIDTH))
def test_the_first_rejection_at_every_place(place: int) -> None:
    """The last place is the bonus of a block that was kept whole."""
    assert check_rejected_at(rejection, 3, place) > SIGNIFICANCE


def test_how_many_are_accepted() -> None:
    counts = torch.bincount(rejection(draft_blocks(4)).num_accepted, minlength=WIDTH)
    assert p_value(counts, expected_counts()) > SIGNIFICANCE


@pytest.mark.parametrize(
    "bug",
    [
        residual_skipped,
        target_row_off_by_one,
        draft_row_off_by_one,
        temperature_forgotten,
        bonus_from_the_drafter,
        successor_of_the_rejected,
        one_match_forgiven,
    ],
)
def test_planted_bugs_are_found(bug: Rule) -> None:
    assert check_joint(bug, 1) < CERTAIN
    assert min(check_place(bug, 2, place) for place in range(WIDTH)) < CERTAIN


def test_a_skipped_residual_shows_at_every_rejected_place() -> None:
    for place in range(WIDTH - 1):
        assert check_rejected_at(residual_skipped, 3, place) < CERTAIN


def test_no_draft_is_kept_that_the_target_never_says() -> None:
    """top-k and its like put zeros into p; a uniform number may be 0."""
    law = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    drafted = torch.tensor([[[1.0, 0.0]]])
    accepted = reject_drafts(
        torch.tensor([[0, 0]]), law, drafted, torch.zeros(1, 1), torch.zeros(1)
    )
    assert (accepted.num_accepted.tolist(), accepted.anchor.tolist()) == ([0], [1])


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("draft", range(VOCAB))
def test_a_greedy_row_is_matched_whatever_q_is(draft: int, uniform: float) -> None:
    """Beside sampling requests, a greedy one has a law of one token and drafts the likeliest."""
    drafted = random_chain(5)[:1, :1]  # [1, 1, V]
    law = torch.nn.functional.one_hot(torch.tensor([[2, 4]]), VOCAB).float()
    u = torch.full((1, 1), uniform, dtype=torch.float64)
    accepted = reject_drafts(torch.tensor([[0, draft]]), law, drafted, u, u[0])
    assert accepted.num_accepted.item() == int(draft == 2)
    assert accepted.anchor.item() == (4 if draft == 2 else 2)


def test_equal_laws_accept_everything() -> None:
    blocks = draft_blocks(6, 1000)
    law = blocks.target_law.clone()
    law[:, :-1] = blocks.draft_law
    assert rejection(blocks._replace(target_law=law)).num_accepted.tolist() == [WIDTH - 1] * 1000


def test_a_residual_without_mass_falls_back_to_the_target() -> None:
    """Rounding alone can reject where p = q; some token must come out all the same."""
    law = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    drafted = torch.tensor([[[0.25 + 1e-7, 0.75]]])
    accepted = reject_drafts(
        torch.tensor([[0, 0]]), law, drafted, torch.full((1, 1), 1 - 2**-53), torch.zeros(1)
    )
    assert accepted.num_accepted.item() == 0 and accepted.anchor.item() == 0


def test_an_empty_batch() -> None:
    empty = torch.zeros(0, WIDTH, dtype=torch.int64)
    law, u = torch.zeros(0, WIDTH, VOCAB), torch.zeros(0, WIDTH - 1)
    accepted = reject_drafts(empty, law, law[:, 1:], u, u[:, 0])
    assert accepted.output_ids.shape == (0, WIDTH) and accepted.anchor.shape == (0,)


def test_rejecting_needs_no_host_synchronisation() -> None:
    with FakeTensorMode():
        law = torch.rand(6, WIDTH, VOCAB)
        u = torch.rand(6, WIDTH - 1, dtype=torch.float64)
        candidates = torch.zeros(6, WIDTH, dtype=torch.int64)
        accepted = reject_drafts(candidates, law, law[:, 1:], u, u[:, 0])
        assert accepted.output_ids.shape == (6, WIDTH)


def test_draw_follows_the_weights() -> None:
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(BLOCKS, dtype=torch.float64, generator=generator)
    counts = torch.bincount(draw(weights.expand(BLOCKS, -1), u), minlength=6)
    assert p_value(counts, weights / 8) > SIGNIFICANCE


def test_draw_at_the_ends() -> None:
    """Zeros are never drawn, not even at 0 and just below 1; the total need not be 1."""
    weights = torch.tensor([[0.0, 0.1, 0.2, 0.0]])
    for uniform, token in ((0.0, 1), (1 / 3 + 1e-6, 2), (1 - 2**-53, 2)):
        assert draw(weights, torch.tensor([uniform], dtype=torch.float64)).item() == token
    nan = torch.full((1, 4), float("nan"))
    assert 0 <= draw(nan, torch.tensor([0.5])).item() < 4  # an id that can be embedded


def test_temperature_law_takes_each_request_for_itself() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([0.5, 2.0])
    law = temperature_law(logits, temperatures)
    for i in range(2):
        torch.testing.assert_close(law[i], torch.softmax(logits[i] / temperatures[i], -1))
    torch.testing.assert_close(temperature_law(logits[:, 0], temperatures), law[:, 0])
