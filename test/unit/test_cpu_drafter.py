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
