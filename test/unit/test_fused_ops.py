"""Upstream's modules on the compiled kernels give what their own torch code gives."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from sglang_dlite.platforms.fused_ops import register_fused_ops

kernels = pytest.importorskip("sglang_dlite_kernel", reason="the compiled kernels are not built")

KEY = "fused-ops-test"
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-6, "atol": 0.03}}


class Counting:
    """The kernels, with a count of calls by name."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return getattr(kernels, name)(*args)

        return call


@pytest.fixture
def counting() -> Iterator[Counting]:
    double = Counting()
    register_fused_ops(double, KEY)  # type: ignore[arg-type]
    yield double
    del BaseFusedOp._oot_forward_registry[KEY]


def forward(op: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the dispatcher calls on our platform."""
    return BaseFusedOp._oot_forward_registry[KEY][type(op)](op, *args, **kwargs)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(counting: Counting, dtype: torch.dtype, with_residual: bool) -> None:
    norm = RMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(7, 48).to(dtype), torch.randn(7, 48).to(dtype)
    args = (x, residual) if with_residual else (x,)
    actual = forward(norm, *(a.clone() for a in args))
    expected = norm.forward_native(*(a.clone() for a in args))
    for a, e in zip(
        actual if with_residual else [actual],
        expected if with_residual else [expected],
        strict=True,
    ):
        torch.testing.assert_close(a, e, **CLOSE[dtype])
    assert counting.calls == ["add_rms_norm" if with_residual else "rms_norm"]


@pytest.mark.parametrize(
    "options",
    [{"cast_x_before_out_mul": True}, {"var_hidden_size": 16}, {"fp32_residual": True}],
)
def test_what_the_norm_kernel_does_not_do_is_left_to_torch(
    counting: Counting, options: dict[str, Any]
) -> None:
    norm = RMSNorm(48, **options)
    x = torch.randn(3, 48)
    assert torch.equal(forward(norm, x.clone()), norm.forward_native(x.clone()))
    assert counting.calls == []


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("neox", [True, False])
def test_rotary(counting: Counting, dtype: torch.dtype, neox: bool) -> None:
    rope = RotaryEmbedding(16, 16, 64, 10000, neox, dtype)
    qkv = torch.randn(5, 16 * 4).to(dtype)
    positions = torch.tensor([0, 1, 9, 9, 63])
    query, key, value = qkv.split([32, 16, 16], dim=-1)
    expected = rope.forward_native(positions, query.clone(), key.clone())
    untouched = value.clone()
    actual = forward(rope, positions, query, key)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **CLOSE[dtype])
    assert torch.equal(value, untouched)
    assert counting.calls == ["rotary_"]


def test_rotary_with_offsets_is_left_to_torch(counting: Counting) -> None:
    rope = RotaryEmbedding(16, 16, 64, 10000, True, torch.float32)
    query, key, offsets = torch.randn(2, 32), torch.randn(2, 16), torch.tensor([1, 2])
    positions = torch.tensor([3, 4])
    expected = rope.forward_native(positions, query.clone(), key.clone(), offsets)
    actual = forward(rope, positions, query, key, offsets)
    assert torch.equal(actual[0], expected[0])
    assert counting.calls == []


def test_llama3_tables_are_the_modules_own(counting: Counting) -> None:
    rope = Llama3RotaryEmbedding(16, 16, 64, 10000, True, torch.float32, 8.0, 1.0, 4.0, 32)
    query, key, positions = torch.randn(2, 32), torch.randn(2, 16), torch.tensor([5, 60])
    expected = rope.forward_native(positions, query.clone(), key.clone())
    torch.testing.assert_close(forward(rope, positions, query, key)[0], expected[0])
    assert counting.calls == ["rotary_"]


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_silu_and_mul(counting: Counting, dtype: torch.dtype) -> None:
    act, x = SiluAndMul(), torch.randn(3, 5, 40).to(dtype)
    torch.testing.assert_close(forward(act, x), act.forward_native(x), **CLOSE[dtype])


def test_the_dispatcher_finds_them(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through upstream's own look-up, on a platform whose key is ours."""
    platform = SimpleNamespace(is_out_of_tree=lambda: True, get_dispatch_key_name=lambda: KEY)
    monkeypatch.setattr("sglang.srt.platforms.current_platform", platform, raising=False)
    act = SiluAndMul()
    method = act._resolve_forward_method()
    method(torch.randn(2, 8))
    assert counting.calls == ["silu_and_mul"]


def test_half_precision_is_left_to_torch(counting: Counting) -> None:
    """A target in fp16 serves on torch operators."""
    norm, rope = RMSNorm(32).half(), RotaryEmbedding(16, 16, 64, 10000, True, torch.float16)
    x = torch.randn(2, 32).half()
    assert torch.equal(forward(norm, x.clone()), norm.forward_native(x.clone()))
    assert torch.equal(forward(SiluAndMul(), x), SiluAndMul().forward_native(x))
    positions, key = torch.tensor([1, 2]), torch.randn(2, 16).half()
    expected = rope.forward_native(positions, x.clone(), key.clone())
    assert torch.equal(forward(rope, positions, x, key)[0], expected[0])
    assert counting.calls == []
