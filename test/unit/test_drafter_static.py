"""Construction, dtypes and the static, host-free draft step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_dlite.drafter import DLiteDrafter, DraftBlock
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException


def _draft_fake(drafter_class: type[DLiteDrafter], config: Any, n: int) -> DraftBlock:
    """Run the whole draft step on shapes alone, where reading a value back cannot work."""
    with FakeTensorMode():
        drafter = drafter_class(config)
        table = torch.empty(config.vocab_size, config.hidden_size)
        pivot = torch.empty(n, config.num_pivot_states, config.hidden_size)
        group = torch.empty(n, config.anchor_group_size, dtype=torch.int64)
        return drafter.draft(pivot, group, lambda ids: torch.nn.functional.embedding(ids, table))


@pytest.mark.parametrize("g", [1, 2, 3])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_draft_step_reads_nothing_back(make_drafter_config: Any, g: int, n: int) -> None:
    config = make_drafter_config(anchor_group_size=g)
    block = _draft_fake(DLiteDrafter, config, n)
    assert block.token_ids.shape == (n, config.num_drafts)
    assert block.head_vectors.shape == (n, config.num_drafts, config.sequential_rank)


def test_that_check_finds_a_planted_sync(make_drafter_config: Any) -> None:
    class Item(DLiteDrafter):
        def draft_logits(self, head_vectors: Tensor) -> Tensor:
            return super().draft_logits(head_vectors) * head_vectors.sum().item()

    with pytest.raises(DataDependentOutputException):
        _draft_fake(Item, make_drafter_config(), 2)


def test_that_check_finds_a_data_dependent_shape(make_drafter_config: Any) -> None:
    class Nonzero(DLiteDrafter):
        def draft_logits(self, head_vectors: Tensor) -> Tensor:
            return super().draft_logits(head_vectors[head_vectors.sum(-1) > 0])

    with pytest.raises(Exception, match=r"nonzero|dynamic|data-dependent"):
        _draft_fake(Nonzero, make_drafter_config(), 2)


def test_draft_in_inference_mode(make_drafter_config: Any) -> None:
    config = make_drafter_config()
    drafter = DLiteDrafter(config)
    with torch.inference_mode():
        pivot = torch.randn(2, 3, config.hidden_size)
        block = drafter.draft(
            pivot, torch.zeros(2, 1, dtype=torch.int64), lambda t: torch.zeros(*t.shape, 16)
        )
    assert block.token_ids.shape == (2, 4)


def test_qwen3_4b_has_the_checkpoint_tensors(make_drafter_config: Any) -> None:
    h, hq, hkv, d, i, v, r, num_layers = 2560, 32, 8, 128, 9728, 151936, 256, 36
    config = make_drafter_config(
        hidden_size=h,
        num_hidden_layers=5,
        num_target_layers=num_layers,
        num_attention_heads=hq,
        num_key_value_heads=hkv,
        head_dim=d,
        intermediate_size=i,
        vocab_size=v,
        block_size=8,
        target_layer_ids=(0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35),
        sequential_rank=r,
        mask_token_id=151669,
    )
    expected = {
        "norm.weight": (h,),
        "layer_depth_embedding.weight": (num_layers, h),
        "context_norm.weight": (h,),
        "sequential_head.prev_token_embedding.weight": (v, r),
        "sequential_head.output_proj.weight": (v, r),
        "sequential_head.state_proj.weight": (2 * r, 2 * r),
        "sequential_head.state_proj.bias": (2 * r,),
        "sequential_head.state_hidden_mlp.weight": (r, r + h),
        "sequential_head.state_hidden_mlp.bias": (r,),
    }
    for layer in range(5):
        expected |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (h,),
                "post_attention_layernorm": (h,),
                "self_attn.q_proj": (hq * d, h),
                "self_attn.k_proj": (hkv * d, h),
                "self_attn.v_proj": (hkv * d, h),
                "self_attn.o_proj": (h, hq * d),
                "self_attn.q_norm": (d,),
                "self_attn.k_norm": (d,),
                "mlp.gate_proj": (i, h),
                "mlp.up_proj": (i, h),
                "mlp.down_proj": (h, i),
            }.items()
        }
    with torch.device("meta"):
        drafter = DLiteDrafter(config)
    assert all(p.is_meta for p in drafter.parameters())
    assert {n: tuple(t.shape) for n, t in drafter.state_dict().items()} == expected
    assert 0.575e9 < sum(p.numel() for p in drafter.parameters()) < 0.590e9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rope_table_survives_a_cast(make_drafter_config: Any, dtype: torch.dtype) -> None:
    drafter = DLiteDrafter(make_drafter_config())
    before = drafter.constants.key_cos.clone()
    drafter.to(dtype)
    assert drafter.dtype == dtype
    assert drafter.constants.key_cos.dtype == torch.float32
    assert torch.equal(drafter.constants.key_cos, before)
    assert drafter.constants.layer_ids.tolist() == [0, 2, 5]


def test_constants_are_right_after_meta_and_to_empty(make_drafter_config: Any) -> None:
    config = make_drafter_config(anchor_group_size=3)
    plain = DLiteDrafter(config)
    with torch.device("meta"):
        other = DLiteDrafter(config)
    other.to_empty(device="cpu")
    other.load_state_dict(plain.state_dict())
    for name, value in plain.constants.named_buffers():
        assert torch.equal(other.constants.get_buffer(name), value)
    assert other.to("meta").constants.key_cos.is_meta


def test_bf16_drafter_takes_fp32_inputs_and_stays_close(make_drafter_config: Any) -> None:
    config = make_drafter_config()
    torch.manual_seed(0)
    drafter = DLiteDrafter(config)
    table = torch.randn(config.vocab_size, config.hidden_size)
    pivot, group = torch.randn(3, 3, config.hidden_size), torch.zeros(3, 1, dtype=torch.int64)
    exact = drafter.backbone(pivot, group, lambda t: table[t])
    rounded = drafter.to(torch.bfloat16).backbone(pivot, group, lambda t: table[t])
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 50_000])
def test_argmax_takes_the_lowest_id_of_a_tie(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.zeros(4, vocab, dtype=dtype)
    for row, first in enumerate([0, 1, vocab // 2, vocab - 2]):
        logits[row, first:] = 1
    assert logits.argmax(-1).tolist() == [0, 1, vocab // 2, vocab - 2]
