"""Drawn drafts: their law, its recomputation at the verify pass, and what bf16 would do to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chi_square import p_value
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, temperature_law
from sglang_dlite.speculative.acceptance import reject_drafts
from sglang_dlite.speculative.inputs import pack_vectors, unpack_vectors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

MakeConfig = Callable[..., DLiteConfig]
VOCAB = 6
ROWS = 60_000
TEMPERATURE = 0.8
SIGNIFICANCE = 1e-4
CERTAIN = 1e-12


def random_drafter(config: DLiteConfig, dtype: torch.dtype) -> DLiteDrafter:
    """Logits around 60, all within a few units: bf16 has steps of 1/4 there."""
    torch.manual_seed(5)
    drafter = DLiteDrafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.4)
        head = drafter.sequential_head
        head.state_hidden_mlp.bias.fill_(4.0)
        head.output_proj.weight.normal_(60 / (4 * config.sequential_rank), 0.1)
    return drafter.to(dtype)


class Setting:
    """ROWS equal requests of a tiny bf16 drafter, all at one temperature, and their blocks."""

    def __init__(self, make_config: MakeConfig) -> None:
        config = make_config(
            vocab_size=VOCAB, mask_token_id=VOCAB - 1, block_size=4, num_hidden_layers=1
        )
        self.drafter = random_drafter(config, torch.bfloat16)
        generator = torch.Generator().manual_seed(9)
        table = torch.randn(VOCAB, config.hidden_size, generator=generator)
        pivot = torch.randn(1, config.num_pivot_states, config.hidden_size, generator=generator)
        self.generator = generator
        self.block = self.drafter.draft_sampled(
            pivot.expand(ROWS, -1, -1),
            torch.ones(ROWS, 1, dtype=torch.int64),
            lambda ids: table[ids],
            torch.full((ROWS,), TEMPERATURE),
            torch.zeros(ROWS, dtype=torch.bool),
            self.uniforms(ROWS, config.num_drafts),
        )

    def uniforms(self, *shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=self.generator)


@pytest.fixture(scope="module")
def setting(make_drafter_config: MakeConfig) -> Setting:
    return Setting(make_drafter_config)


def prefix_counts(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [V^k, V] of the last of tokens [n, k + 1] by the others; and each row's prefix [n]."""
    prefix = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens[:, :-1].T:
        prefix = prefix * VOCAB + column
    cells = prefix * VOCAB + tokens[:, -1]
    size = VOCAB ** tokens.shape[1]
    return torch.bincount(cells, minlength=size).view(-1, VOCAB), prefix


def test_every_draft_has_the_law_of_its_head_vector(setting: Setting) -> None:
    """For each k, given the drafts before it; the law is recomputed from the relayed bits."""
    block = setting.block
    k, rank = block.head_vectors.shape[1:]
    vectors = unpack_vectors(pack_vectors(block.head_vectors), k, rank)
    law = temperature_law(setting.drafter.law_logits(vectors), torch.full((ROWS,), TEMPERATURE))
    for place in range(k):
        counts, prefix = prefix_counts(block.token_ids[:, : place + 1])
        expected = torch.zeros(len(counts), VOCAB, dtype=torch.float64)
        expected.index_add_(0, prefix, law[:, place].double())
        assert p_value(counts, expected / ROWS) > SIGNIFICANCE
    assert len(block.token_ids.unique()) == VOCAB


def test_greedy_rows_draft_what_draft_does(make_drafter_config: MakeConfig) -> None:
    drafter = random_drafter(make_drafter_config(), torch.float32)
    config = drafter.config
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    pivot = torch.randn(7, config.num_pivot_states, config.hidden_size, generator=generator)
    arguments = (pivot, torch.arange(7)[:, None], lambda ids: table[ids])
    greedy = torch.tensor([True, False] * 3 + [True])
    uniforms = torch.rand(7, config.num_drafts, dtype=torch.float64, generator=generator)
    plain = drafter.draft(*arguments)
    mixed = drafter.draft_sampled(*arguments, torch.full((7,), 5.0), greedy, uniforms)
    assert torch.equal(mixed.token_ids[greedy], plain.token_ids[greedy])
    assert not torch.equal(mixed.token_ids[~greedy], plain.token_ids[~greedy])
    torch.testing.assert_close(mixed.head_vectors[greedy], plain.head_vectors[greedy])


def output_p_value(setting: Setting, recompute: Callable[[Tensor], Tensor]) -> float:
    """Chi-square of the first output token, with q recomputed from head vectors by `recompute`."""
    block = setting.block
    k = block.token_ids.shape[1]
    candidates = torch.cat([torch.ones(ROWS, 1, dtype=torch.int64), block.token_ids], dim=1)
    # Near the drafter's law, where most drafts are kept and an error in q matters most.
    logits = setting.drafter.law_logits(block.head_vectors[:1, :1])[0, 0] / TEMPERATURE
    noise = 0.3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    target = torch.softmax(logits + noise, dim=-1)
    drafted = temperature_law(recompute(block.head_vectors), torch.full((ROWS,), TEMPERATURE))
    accepted = reject_drafts(
        candidates,
        target.expand(ROWS, k + 1, -1),
        drafted,
        setting.uniforms(ROWS, k),
        setting.uniforms(ROWS),
    )
    return p_value(torch.bincount(accepted.output_ids[:, 0], minlength=VOCAB), target)


def test_the_output_with_q_in_fp32(setting: Setting) -> None:
    assert output_p_value(setting, setting.drafter.law_logits) > SIGNIFICANCE


@torch.no_grad()
def test_q_in_bf16_is_found(setting: Setting) -> None:
    """The drafter's own bf16 logits, in which it drafts greedily, are not the law it draws from."""
    bf16 = setting.drafter.draft_logits
    assert output_p_value(setting, lambda vectors: bf16(vectors).float()) < CERTAIN


def test_the_fp32_law_keeps_no_copy_of_an_fp32_weight(make_drafter_config: MakeConfig) -> None:
    drafter = DLiteDrafter(make_drafter_config())
    names = set(drafter.state_dict())
    assert drafter.law_logits(torch.randn(3, 7)).shape == (3, 50)
    assert drafter._output_weight_fp32.data_ptr() == (
        drafter.sequential_head.output_proj.weight.data_ptr()
    )
    assert set(drafter.state_dict()) == names


@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_drawn_block_reads_nothing_back(make_drafter_config: Any, n: int) -> None:
    config = make_drafter_config()
    with FakeTensorMode():
        drafter = DLiteDrafter(config)
        table = torch.empty(config.vocab_size, config.hidden_size)
        block = drafter.draft_sampled(
            torch.empty(n, config.num_pivot_states, config.hidden_size),
            torch.empty(n, 1, dtype=torch.int64),
            lambda ids: torch.nn.functional.embedding(ids, table),
            torch.ones(n),
            torch.zeros(n, dtype=torch.bool),
            torch.empty(n, config.num_drafts, dtype=torch.float64),
        )
    assert block.token_ids.shape == (n, config.num_drafts)
    assert block.head_vectors.shape == (n, config.num_drafts, config.sequential_rank)
