"""Packed linear weights give what F.linear gives, before and after a weight update."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang_dlite.platforms.hooks import repack_after_update
from sglang_dlite.platforms.packed_linear import PackedLinearMethod, pack_linear_weights
from torch import nn


class Layer(LinearBase):
    """A linear layer without the distributed set-up of upstream's."""

    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


class Head(ParallelLMHead):
    def __init__(self, weight: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    root = nn.Module()
    root.layer = Layer(torch.randn(48, 64).to(dtype))
    root.lm_head = Head(torch.randn(100, 64).to(dtype))
    root.plain = nn.Linear(3, 3)
    return root


def assert_within_one_step(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to one rounding step of the sum in bf16."""
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-6)


@pytest.mark.parametrize("rows", [1, 8, 33])
def test_bf16_against_f_linear(rows: int) -> None:
    root = model(torch.bfloat16)
    assert pack_linear_weights(root) == 2
    x = torch.randn(rows, 64).to(torch.bfloat16)
    bias = torch.randn(48).to(torch.bfloat16)
    for module, shift in ((root.layer, None), (root.layer, bias), (root.lm_head, None)):
        assert isinstance(module.quant_method, PackedLinearMethod)
        actual = module.quant_method.apply(module, x, shift)
        assert actual.dtype == torch.bfloat16
        assert_within_one_step(actual, F.linear(x, module.weight, shift))


def test_no_rows() -> None:
    root = model(torch.bfloat16)
    pack_linear_weights(root)
    out = root.layer.quant_method.apply(root.layer, torch.zeros(0, 64, dtype=torch.bfloat16))
    assert out.shape == (0, 48)


def test_other_dtypes_are_not_packed() -> None:
    root = model(torch.float32)
    assert pack_linear_weights(root) == 0
    x = torch.randn(4, 64)
    actual = root.layer.quant_method.apply(root.layer, x)
    assert torch.equal(actual, F.linear(x, root.layer.weight))


def test_packing_again_follows_a_weight_update() -> None:
    """Without the second call the packed copy would go on serving the old weights."""
    root = model(torch.bfloat16)
    pack_linear_weights(root)
    root.layer.weight.data.copy_(torch.randn(48, 64))
    assert pack_linear_weights(root) == 2
    x = torch.randn(4, 64).to(torch.bfloat16)
    assert_within_one_step(
        root.layer.quant_method.apply(root.layer, x), F.linear(x, root.layer.weight)
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_hook_packs_again_after_a_weight_update(device: str) -> None:
    root = model(torch.bfloat16)
    pack_linear_weights(root)
    root.layer.weight.data.copy_(torch.randn(48, 64))
    repack_after_update((True, ""), SimpleNamespace(device=device, get_model=lambda: root))
    x = torch.randn(4, 64).to(torch.bfloat16)
    actual = root.layer.quant_method.apply(root.layer, x)
    expected = F.linear(x, root.layer.weight)
    assert torch.allclose(actual, expected, rtol=2**-7, atol=2**-6) == (device == "cpu")


def test_the_head_still_looks_tokens_up() -> None:
    """A tied lm_head is the embedding table as well."""
    root = model(torch.bfloat16)
    pack_linear_weights(root)
    ids = torch.tensor([3, 99])
    assert torch.equal(
        root.lm_head.quant_method.embedding(root.lm_head, ids), root.lm_head.weight[ids]
    )


def test_upstream_does_not_take_the_head_for_an_unpacked_one() -> None:
    """The logits processor bypasses an lm_head method of this very name (and so the packing)."""
    root = model(torch.bfloat16)
    pack_linear_weights(root)
    assert type(root.lm_head.quant_method).__name__ != "UnquantizedEmbeddingMethod"


def test_an_fp32_head_stays_upstreams() -> None:
    """--enable-fp32-lm-head: the logits processor then computes from the plain weight."""
    root = model(torch.bfloat16)
    root.logits_processor = SimpleNamespace(use_fp32_lm_head=True)
    assert pack_linear_weights(root) == 1
    assert type(root.lm_head.quant_method) is UnquantizedEmbeddingMethod
