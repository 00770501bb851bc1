"""The fused attention and MLP blocks give what their parts give, and step aside where they must."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.models.llama import LlamaMLP
from sglang_dlite.platforms.fused_blocks import fuse_blocks
from sglang_dlite.platforms.kernels import SWITCH, compiled_kernels
from sglang_dlite.platforms.packed_linear import pack_linear_weights
from torch import nn

kernels = pytest.importorskip("sglang_dlite_kernel", reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(SWITCH, raising=False)
    compiled_kernels.cache_clear()
    yield
    compiled_kernels.cache_clear()


class Layer(LinearBase):
    """A whole linear layer without the distributed set-up of upstream's."""

    def __init__(self, out_features: int, in_features: int) -> None:
        nn.Module.__init__(self)
        weight = torch.randn(out_features, in_features).to(torch.bfloat16) / in_features**0.5
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        self.skip_bias_add = False
        self.input_size = self.input_size_per_partition = in_features
        self.quant_method = UnquantizedLinearMethod()


def make_mlp() -> Any:
    torch.manual_seed(0)
    mlp = LlamaMLP.__new__(LlamaMLP)
    nn.Module.__init__(mlp)
    mlp.gate_up_proj, mlp.down_proj, mlp.act_fn = Layer(96, 40), Layer(40, 48), SiluAndMul()
    root = nn.Module()
    root.mlp = mlp
    pack_linear_weights(root)
    assert fuse_blocks(root, kernels) == 1
    assert fuse_blocks(root, kernels) == 0, "twice must change nothing"
    return root


def by_parts(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    wide = mlp.gate_up_proj.quant_method.apply(mlp.gate_up_proj, x)
    return mlp.down_proj.quant_method.apply(mlp.down_proj, kernels.silu_and_mul(wide))


@pytest.mark.parametrize("rows", [0, 1, 8, 70])
def test_mlp_is_its_parts(rows: int) -> None:
    root = make_mlp()
    x = torch.randn(rows, 40).to(torch.bfloat16)
    assert torch.equal(root.mlp(x), by_parts(root.mlp, x))


def test_a_weight_update_reaches_the_fused_block() -> None:
    root = make_mlp()
    x = torch.randn(3, 40).to(torch.bfloat16)
    before = root.mlp(x)
    root.mlp.down_proj.weight.data.copy_(torch.randn(40, 48))
    pack_linear_weights(root)
    after = root.mlp(x)
    assert not torch.equal(after, before)
    assert torch.equal(after, by_parts(root.mlp, x))


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_a_wrapped_layer_is_not_bypassed(name: str) -> None:
    """What a LoRA manager does after loading."""
    root = make_mlp()
    setattr(root.mlp, name, nn.Identity())
    with pytest.raises(AttributeError):  # upstream's own forward, on this bare module
        root.mlp(torch.zeros(1, 40, dtype=torch.bfloat16))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_layer_that_somebody_watches_is_called(register: str) -> None:
    """--forward-hooks, --debug-tensor-dump-output-folder."""
    root = make_mlp()
    x = torch.zeros(1, 40, dtype=torch.bfloat16)
    handle = getattr(root.mlp.down_proj, register)(lambda *_: None)
    with pytest.raises(AttributeError):  # upstream's own forward, on this bare module
        root.mlp(x)
    handle.remove()
    root.mlp(x)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_attention_block_is_its_parts(rows: int, norms: bool) -> None:
    heads, kv_heads, size, hidden, keys = 6, 2, 32, 80, 90
    torch.manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    weights = [random((heads + 2 * kv_heads) * size, hidden) / 9, random(hidden, heads * size) / 14]
    qkv_packed, o_packed = kernels.pack_linear_weights(weights)
    bias, norm = random((heads + 2 * kv_heads) * size), (random(size), random(size))
    angles = torch.randn(100, size // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(torch.bfloat16)
    x, positions = random(rows, hidden), torch.arange(keys - rows, keys)
    caches = [random(keys + 5, kv_heads, size) for _ in range(2)]
    own = [cache.clone() for cache in caches]
    slots = torch.randperm(keys + 5)[:keys]
    plan = (slots.int()[None], torch.tensor([0]), torch.tensor([keys]), torch.tensor([0, rows]))
    fused = kernels.attention_block(
        x,
        qkv_packed,
        bias,
        heads,
        norm[0] if norms else None,
        norm[1] if norms else None,
        1e-6,
        positions,
        table,
        True,
        slots[-rows:],
        *caches,
        *plan,
        size**-0.5,
        -1,
        o_packed,
        None,
        hidden,
    )

    qkv = kernels.linear(x, qkv_packed, (heads + 2 * kv_heads) * size, bias)
    q, k, v = (
        part.contiguous()
        for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    )
    if norms:
        q = kernels.rms_norm(q.view(-1, size), norm[0], 1e-6).view(rows, -1)
        k = kernels.rms_norm(k.view(-1, size), norm[1], 1e-6).view(rows, -1)
    kernels.rotary_(positions, q, k, size, table, True)
    kernels.store_kv(k.view(rows, -1, size), v.view(rows, -1, size), slots[-rows:], *own)
    out = kernels.attention(q.view(rows, -1, size), *own, *plan, size**-0.5, -1)
    expected = kernels.linear(out.view(rows, -1), o_packed, hidden, None)
    assert torch.equal(fused, expected)
    for cache, other in zip(caches, own, strict=True):
        assert torch.equal(cache, other)
