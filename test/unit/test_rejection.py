"""What rejection sampling takes from SGLang: the target's law, uniform numbers, the drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sampler_rows import VOCAB, Row, naive_law, sampling_info
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter
from sglang_dlite.platforms.cpu_drafter import SampledCompiledDrafter, prepare_drafter
from sglang_dlite.platforms.kernels import compiled_kernels
from sglang_dlite.platforms.sampling import sample_rows
from sglang_dlite.speculative import rejection
from sglang_dlite.speculative.drafting import SampledDrafter, require_sampled_drafts
from sglang_dlite.speculative.rejection import RejectionSampling, target_law, uniform_numbers


@pytest.mark.parametrize(
    "rows",
    [
        [(1.0, TOP_K_ALL, 1.0, 0.0), (0.3, TOP_K_ALL, 1.0, 0.0)],
        [(1.0, 5, 1.0, 0.0), (2.0, TOP_K_ALL, 1.0, 0.0), (1.0, 1, 1.0, 0.0)],
        [(1.0, TOP_K_ALL, 0.4, 0.0), (0.7, 12, 0.9, 0.0)],
        [(1.0, TOP_K_ALL, 1.0, 0.2), (3.0, 9, 0.8, 0.05), (1.0, 1, 0.3, 0.1)],
    ],
)
def test_target_law(sampler: Sampler, rows: list[Row]) -> None:
    logits = 2 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    law = target_law(sampler, sampling_info(rows), logits, torch.arange(len(rows)))
    expected = [naive_law(row, params) for row, params in zip(before.tolist(), rows, strict=True)]
    assert law.dtype == torch.float32
    torch.testing.assert_close(law.double(), torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(logits, before)  # log-probabilities are computed from them afterwards


@pytest.mark.parametrize("scale", [0.5, 4.0])  # a nucleus beyond the 256 likeliest, and within
def test_the_law_with_the_cpu_sampler(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    """The hook that spares the CPU a sort of every row keeps the law."""
    from sglang.srt.layers import sampler as module

    original = module.top_k_top_p_min_p_sampling_from_probs_torch
    original = getattr(original, "__wrapped__", original)
    monkeypatch.setattr(
        module,
        "top_k_top_p_min_p_sampling_from_probs_torch",
        lambda *args, **kwargs: sample_rows(original, *args, **kwargs),
    )
    rows = [(1.0, TOP_K_ALL, 0.95, 0.0), (0.8, 300, 0.99, 0.01), (2.0, TOP_K_ALL, 1.0, 0.0)]
    logits = scale * torch.randn(3, 900, generator=torch.Generator().manual_seed(6))
    law = target_law(sampler, sampling_info(rows), logits, torch.arange(3))
    expected = [naive_law(row, params) for row, params in zip(logits.tolist(), rows, strict=True)]
    torch.testing.assert_close(law.double(), torch.tensor(expected, dtype=torch.float64))


def test_a_greedy_row_beside_a_sampling_one_takes_the_lowest_id_of_a_tie(sampler: Sampler) -> None:
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
    info = sampling_info([(1.0, 1, 1.0, 0.0), (1.0, TOP_K_ALL, 1.0, 0.0)])
    law = target_law(sampler, info, logits, torch.arange(2))
    assert law[0].tolist() == [1.0] + [0.0] * (VOCAB - 1)
    torch.testing.assert_close(law[1], torch.full((VOCAB,), 1 / VOCAB))


def test_seeded_rows_are_filtered_too(sampler: Sampler) -> None:
    """Upstream's own seeded draw refuses min_p; the law does not draw."""
    rows = [(1.0, 7, 0.9, 0.1)]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    law = target_law(sampler, sampling_info(rows, seeds=[3]), logits, torch.arange(1))
    expected = torch.tensor([naive_law(logits[0].tolist(), rows[0])])
    torch.testing.assert_close(law, expected)


# -- uniform numbers ----------------------------------------------------------------------------


def test_numbers_without_a_seed_are_fresh() -> None:
    positions = torch.zeros(100, 50, dtype=torch.int64)
    torch.manual_seed(0)
    first, second = (uniform_numbers(None, positions, rejection.DRAFT) for _ in range(2))
    assert first.dtype == torch.float64 and first.shape == (100, 50)
    assert first.min() >= 0 and first.max() < 1 and abs(float(first.mean()) - 0.5) < 0.02
    assert not torch.equal(first, second)


def test_seeded_numbers_belong_to_seed_position_and_purpose(hashing: None) -> None:
    seeds, positions = torch.tensor([7, 8, 7]), torch.tensor([[5, 6], [5, 6], [6, 5]])
    numbers = uniform_numbers(seeds, positions, rejection.DRAFT)
    assert numbers[0].tolist() == numbers[2].flip(0).tolist()  # wherever the request stands
    others = [uniform_numbers(seeds, positions, p) for p in (rejection.ACCEPT, rejection.FINISH)]
    distinct = torch.cat([numbers, *others]).unique()
    assert len(distinct) == 3 * 4 and distinct.min() >= 0 and distinct.max() < 1


# -- drafts and acceptance ----------------------------------------------------------------------

MakeConfig = Callable[..., DLiteConfig]
WIDTH = 3


class Scene:
    """Three requests (sampling, greedy, sampling) of a tiny drafter, and random target logits."""

    def __init__(self, config: DLiteConfig, order: list[int]) -> None:
        torch.manual_seed(4)
        self.drafter = DLiteDrafter(config)
        rows: list[Row] = [
            (1.0, TOP_K_ALL, 0.9, 0.0),
            (1.0, 1, 1.0, 0.0),
            (0.6, TOP_K_ALL, 1.0, 0.0),
        ]
        self.info = sampling_info([rows[i] for i in order], seeds=[[5, 6, 7][i] for i in order])
        table = torch.randn(config.vocab_size, config.hidden_size)
        self.embed = lambda ids: table[ids]
        self.pivot = torch.randn(3, config.num_pivot_states, config.hidden_size)[order]
        self.group = torch.tensor([[1], [2], [3]])[order]
        self.anchor_positions = torch.tensor([10, 20, 30])[order]
        self.logits = torch.randn(3, WIDTH, VOCAB)[order].flatten(0, 1)
        self.rejection = RejectionSampling(self.drafter, WIDTH, "cpu")

    def play(self, sampler: Sampler) -> Any:
        block = self.rejection.draft(
            self.pivot, self.group, self.embed, self.info, self.anchor_positions
        )
        candidates = torch.cat([self.group, block.token_ids[:, : WIDTH - 1]], dim=1)
        positions = (self.anchor_positions[:, None] + torch.arange(WIDTH)).reshape(-1)
        accepted = self.rejection.accept(
            sampler,
            SimpleNamespace(
                sampling_info=self.info,
                seq_lens=self.anchor_positions,
                return_logprob=True,
                top_logprobs_nums=[],
                token_ids_logprobs=[],
            ),
            SimpleNamespace(next_token_logits=self.logits.clone()),
            positions,
            candidates,
            block.head_vectors[:, : WIDTH - 1],
        )
        return block, accepted


@pytest.fixture
def make_scene(
    make_drafter_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Scene]:
    monkeypatch.setattr(rejection, "broadcast_from_rank0", lambda values: values)

    def make(order: list[int], seeded: bool = True) -> Scene:
        # The drafter's table is padded beyond the target's 40 tokens.
        scene = Scene(make_drafter_config(vocab_size=64), order)
        if not seeded:
            scene.info = dataclasses.replace(scene.info, sampling_seed=None)
        return scene

    return make


def test_seeded_output_does_not_depend_on_the_batch(
    make_scene: Callable[..., Scene], sampler: Sampler, hashing: None
) -> None:
    _, first = make_scene([0, 1, 2]).play(sampler)
    _, again = make_scene([2, 0, 1]).play(sampler)
    assert first.num_accepted.tolist() == again.num_accepted[[1, 2, 0]].tolist()
    assert torch.equal(first.output_ids, again.output_ids[[1, 2, 0]])


def test_a_mixed_batch(make_scene: Callable[..., Scene], sampler: Sampler) -> None:
    """The greedy request gets the target's likeliest tokens; no output is outside its table."""
    scene = make_scene([0, 1, 2], seeded=False)
    likeliest = scene.logits.view(3, WIDTH, VOCAB)[1].argmax(-1)
    drafts, beyond = set(), False
    for _ in range(40):
        block, accepted = scene.play(sampler)
        drafts |= {tuple(row) for row in block.token_ids.tolist()}
        n = int(accepted.num_accepted[1])
        assert accepted.output_ids[1, : n + 1].tolist() == likeliest[: n + 1].tolist()
        assert torch.equal(
            accepted.anchor, accepted.output_ids.gather(1, accepted.num_accepted[:, None])[:, 0]
        )
        # Behind the anchor too: log-probabilities and penalties look all of them up.
        assert accepted.output_ids.max() < VOCAB
        beyond |= bool((block.token_ids[:, : WIDTH - 1] >= VOCAB).any())
    assert beyond
    greedy_block = scene.drafter.draft(scene.pivot, scene.group, scene.embed).token_ids[1]
    assert tuple(greedy_block.tolist()) in drafts
    assert len(drafts) > 40  # the other two draw theirs


def test_a_drafter_that_cannot_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class GreedyOnly:
        config = None

        def draft(self) -> None: ...

    monkeypatch.setenv("DLITE_DRAFTER_FACTORY", "mine:make")
    greedy_only: Any = GreedyOnly()
    with pytest.raises(ValueError) as error:
        require_sampled_drafts(greedy_only)
    for part in ("--speculative-use-rejection-sampling", "GreedyOnly", "mine:make", "Drop"):
        assert part in str(error.value)


def test_on_a_cpu_the_module_draws_beside_the_compiled_step(
    make_drafter_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang_dlite_kernel", reason="the compiled kernels are not built")
    compiled_kernels.cache_clear()
    monkeypatch.delenv("DLITE_CPU_KERNELS", raising=False)
    config = make_drafter_config()
    torch.manual_seed(1)
    drafter = DLiteDrafter(config).to(torch.bfloat16)
    plain = DLiteDrafter(config).to(torch.bfloat16)
    plain.load_state_dict(drafter.state_dict())
    assert not isinstance(prepare_drafter(plain), SampledDrafter)
    prepared = prepare_drafter(drafter, sampled_drafts=True)
    assert isinstance(prepared, SampledCompiledDrafter) and isinstance(prepared, SampledDrafter)
    table = torch.randn(config.vocab_size, config.hidden_size)
    arguments = (
        torch.randn(4, config.num_pivot_states, config.hidden_size),
        torch.arange(4)[:, None],
        lambda ids: table[ids],
    )
    greedy = prepared.draft(*arguments)
    uniforms = torch.rand(4, config.num_drafts, dtype=torch.float64)
    drawn = prepared.draft_sampled(
        *arguments, torch.ones(4), torch.tensor([True, True, False, False]), uniforms
    )
    assert drawn.token_ids.shape == greedy.token_ids.shape
    # Carried in one row by either, so of one shape.
    assert drawn.head_vectors.shape == greedy.head_vectors.shape
    assert prepared.law_logits(drawn.head_vectors).dtype == torch.float32
