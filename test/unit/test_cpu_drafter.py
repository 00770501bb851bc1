"""The compiled draft step against the module, and the choice between the two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter
from sglang_dlite.platforms.cpu_drafter import CompiledDrafter, prepare_drafter
from sglang_dlite.platforms.kernels import SWITCH, compiled_kernels

kernels = pytest.importorskip("sglang_dlite_kernel", reason="the compiled kernels are not built")

MakeConfig = Callable[..., DLiteConfig]


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    compiled_kernels.cache_clear()


def random_drafter(config: DLiteConfig) -> DLiteDrafter:
    """Weights large enough that every part of the step matters to the result."""
    torch.manual_seed(3)
    drafter = DLiteDrafter(config)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[-1] ** 0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    return drafter


def rounded(drafter: DLiteDrafter) -> DLiteDrafter:
    """The same weights as bf16 holds them, in fp32: the exact value of the compiled step."""
    return drafter.to(torch.bfloat16).float()


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"hidden_size": 576, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3},
        {"sequential_rank": 128, "vocab_size": 300, "num_hidden_layers": 1},
    ],
)
def test_against_the_module(
    make_drafter_config: MakeConfig, n: int, group: int, shape: dict[str, int]
) -> None:
    """Teacher-forced on the compiled step's own tokens, so that a near tie cannot hide an error."""
    config = make_drafter_config(anchor_group_size=group, **shape)
    exact = rounded(random_drafter(config))
    compiled = CompiledDrafter(rounded(random_drafter(config)).to(torch.bfloat16), kernels)
    generator = torch.Generator().manual_seed(n)
    states = torch.randn(n, config.num_pivot_states, config.hidden_size, generator=generator)
    states = states.to(torch.bfloat16)
    tokens = torch.randint(config.vocab_size, (n, group), generator=generator)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    table = table.to(torch.bfloat16)

    block = compiled.draft(states, tokens, lambda ids: table[ids])

    assert block.token_ids.shape == (n, config.num_drafts)
    assert block.token_ids.dtype == torch.int64
    if n == 0:
        return
    hidden = exact.backbone(states.float(), tokens, lambda ids: table[ids].float())
    previous = torch.cat([tokens[:, -1:], block.token_ids[:, :-1]], dim=1)
    vectors = exact.head_vectors(hidden, previous, tokens)
    scale = vectors.abs().max().item()
    torch.testing.assert_close(block.head_vectors.float(), vectors, rtol=0, atol=0.03 * scale)
    logits = exact.draft_logits(vectors)
    chosen = logits.gather(-1, block.token_ids[..., None])[..., 0]
    slack = 0.03 * logits.abs().amax()
    assert (chosen >= logits.amax(-1) - slack).all()


def test_ties_go_to_the_lowest_id(make_drafter_config: MakeConfig) -> None:
    config = make_drafter_config(vocab_size=100)
    drafter = random_drafter(config)
    drafter.sequential_head.output_proj.weight.data[:] = 0
    block = CompiledDrafter(drafter.to(torch.bfloat16), kernels).draft(
        torch.zeros(2, 3, 16),
        torch.zeros(2, 1, dtype=torch.int64),
        lambda ids: torch.zeros(2, 5, 16),
    )
    assert (block.token_ids == 0).all()


def test_requests_do_not_touch_each_other(make_drafter_config: MakeConfig) -> None:
    config = make_drafter_config(anchor_group_size=2)
    compiled = CompiledDrafter(random_drafter(config).to(torch.bfloat16), kernels)
    table = torch.randn(50, 16).to(torch.bfloat16)
    states, tokens = torch.randn(9, 3, 16), torch.randint(50, (9, 2))
    together = compiled.draft(states, tokens, lambda ids: table[ids])
    for i in range(9):
        alone = compiled.draft(states[i : i + 1], tokens[i : i + 1], lambda ids: table[ids])
        assert torch.equal(alone.token_ids[0], together.token_ids[i])
        assert torch.equal(alone.head_vectors[0], together.head_vectors[i])


def common_offset(output: torch.Tensor) -> None:
    output += 3 * torch.randn(output.shape[1])


def uneven_inputs(output: torch.Tensor) -> None:
    output *= torch.logspace(-3, 2, output.shape[1])


def one_token_has_no_number(output: torch.Tensor) -> None:
    output[7, 3] = torch.nan


def every_token_is_alike(output: torch.Tensor) -> None:
    output[:] = output[:1]


@pytest.mark.parametrize("level", kernels.runnable_isas())
@pytest.mark.parametrize(
    "change", [common_offset, uneven_inputs, one_token_has_no_number, every_token_is_alike]
)
def test_few_requests_draft_what_many_do(
    make_drafter_config: MakeConfig, level: str, change: Callable[[torch.Tensor], None]
) -> None:
    """Up to four requests leave most of the vocabulary out by bounds; more compute all of it."""
    config = make_drafter_config(vocab_size=4090, sequential_rank=30, anchor_group_size=2)
    drafter = random_drafter(config)
    with torch.no_grad():
        change(drafter.sequential_head.output_proj.weight)
    before = kernels.isa()
    kernels.use_isa(level)
    try:
        compiled = CompiledDrafter(drafter.to(torch.bfloat16), kernels)
        table = torch.randn(config.vocab_size, 16).to(torch.bfloat16)
        states, tokens = torch.randn(60, 3, 16), torch.randint(config.vocab_size, (60, 2))
        together = compiled.draft(states, tokens, lambda ids: table[ids])
        for n in (1, 2, 3, 4):
            for i in range(0, 60, n):
                few = compiled.draft(states[i : i + n], tokens[i : i + n], lambda ids: table[ids])
                assert torch.equal(few.token_ids, together.token_ids[i : i + n]), (n, i)
                assert torch.equal(few.head_vectors, together.head_vectors[i : i + n]), (n, i)
    finally:
        kernels.use_isa(before)


def first_drafts(config: DLiteConfig, output: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """What one request and what five draft first, the head vector being `vector` [R] always."""
    drafter = random_drafter(config)
    with torch.no_grad():
        drafter.sequential_head.output_proj.weight[:] = output
        drafter.sequential_head.state_hidden_mlp.weight[:] = 0
        drafter.sequential_head.state_hidden_mlp.bias[:] = vector
    compiled = CompiledDrafter(drafter.to(torch.bfloat16), kernels)
    found = [
        compiled.draft(
            torch.zeros(n, 3, 16),
            torch.zeros(n, 1, dtype=torch.int64),
            lambda ids: torch.zeros(*ids.shape, 16),
        ).token_ids[0, 0]
        for n in (1, 5)
    ]
    return torch.stack(found)


@pytest.mark.parametrize("seed", range(12))
def test_scores_closer_than_the_digits_tell(make_drafter_config: MakeConfig, seed: int) -> None:
    """Twelve tokens of almost the same score, far above all others, in groups of their own."""
    config = make_drafter_config(vocab_size=4096, sequential_rank=64)
    torch.manual_seed(seed)
    vector, output = torch.randn(64).bfloat16().float(), torch.randn(4096, 64)
    close = torch.randperm(64)[:12] * 64 + torch.randint(64, (12,))
    along = vector / vector.norm()
    output -= torch.outer(output @ along, along)
    output[close] += 2 * along + torch.outer(1e-3 * torch.randn(12), along)
    alone, full = first_drafts(config, output, vector)
    assert full in close
    assert alone == full


def test_scores_that_are_equal_once_rounded(make_drafter_config: MakeConfig) -> None:
    """638 and 640 are the same in bf16: the lower id is drafted, though its score is lower."""
    config = make_drafter_config(vocab_size=4096, sequential_rank=640)
    torch.manual_seed(0)
    half = torch.randint(2, (2048, 640)) * 2.0 - 1  # digits of 8 bits hold these exactly
    output = torch.stack([half, -half], 1).flatten(0, 1)
    output[3000], output[3001] = 1, -1
    output[100], output[101] = 1, -1
    output[100, 5], output[101, 5] = -1, 1
    assert first_drafts(config, output, torch.ones(640)).tolist() == [100, 100]


def test_states_that_are_no_numbers(make_drafter_config: MakeConfig) -> None:
    """They end in some token of the vocabulary, as with more requests, and touch nobody else."""
    config = make_drafter_config(vocab_size=4090, sequential_rank=30)
    compiled = CompiledDrafter(random_drafter(config).to(torch.bfloat16), kernels)
    table = torch.randn(config.vocab_size, 16).to(torch.bfloat16)
    states, tokens = torch.randn(2, 3, 16), torch.randint(config.vocab_size, (2, 1))
    alone = compiled.draft(states[1:], tokens[1:], lambda ids: table[ids])
    states[0] = torch.nan
    both = compiled.draft(states, tokens, lambda ids: table[ids])
    assert torch.equal(both.token_ids[1], alone.token_ids[0])
    assert ((both.token_ids >= 0) & (both.token_ids < config.vocab_size)).all()


@pytest.mark.parametrize(
    "token,states", [(50, (1, 3, 16)), (-1, (1, 3, 16)), (0, (1, 2, 16)), (0, (2, 3, 16))]
)
def test_bad_input_is_refused(
    make_drafter_config: MakeConfig, token: int, states: tuple[int, ...]
) -> None:
    compiled = CompiledDrafter(random_drafter(make_drafter_config()).to(torch.bfloat16), kernels)
    with pytest.raises(RuntimeError, match=r"outside the drafter's vocabulary|does not fit|size"):
        compiled.draft(
            torch.zeros(states), torch.tensor([[token]]), lambda ids: torch.zeros(1, 5, 16)
        )


def test_what_serves(make_drafter_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 is compiled; fp32, and bf16 without the kernels, stay modules."""
    make = lambda dtype: random_drafter(make_drafter_config()).to(dtype)  # noqa: E731
    assert isinstance(prepare_drafter(make(torch.bfloat16)), CompiledDrafter)
    assert isinstance(prepare_drafter(make(torch.float32)), DLiteDrafter)
    monkeypatch.setenv(SWITCH, "0")
    compiled_kernels.cache_clear()
    assert isinstance(prepare_drafter(make(torch.bfloat16)), DLiteDrafter)
    compiled_kernels.cache_clear()
