"""RMSNorm, rotary embedding and SiLU against fp32, on every instruction set."""

from __future__ import annotations

import pytest
import sglang_dlite_kernel as kernels
import torch
import torch.nn.functional as F
from kernel_reference import assert_rounded_once

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(0, 64), (1, 1), (1, 576), (5, 3), (7, 100), (300, 64)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", SIZES)
def test_rms_norm(isa: str, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, seed=1, dtype=dtype)
    assert_rounded_once(kernels.rms_norm(x, weight, 1e-5), norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", SIZES)
def test_add_rms_norm(isa: str, dtype: torch.dtype, rows: int, size: int) -> None:
    x, residual = random(rows, size, dtype=dtype), random(rows, size, seed=2, dtype=dtype)
    weight = random(size, seed=1, dtype=dtype)
    before = residual.clone()
    out, after = kernels.add_rms_norm(x, residual, weight, 1e-5)
    total = x.float() + residual.float()
    assert torch.equal(after, total.to(dtype))
    assert_rounded_once(out, norm(total, weight, 1e-5))
    assert torch.equal(residual, before), "the residual must not be changed in place"


def test_rms_norm_of_strided_rows(isa: str) -> None:
    wide, weight = random(4, 100), random(64, seed=1)
    assert torch.equal(
        kernels.rms_norm(wide[:, :64], weight, 1e-6),
        kernels.rms_norm(wide[:, :64].contiguous(), weight, 1e-6),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,size", SIZES)
def test_silu_and_mul(isa: str, dtype: torch.dtype, rows: int, size: int) -> None:
    x = 5 * random(rows, 2 * size, dtype=dtype)
    exact = F.silu(x[:, :size].double()) * x[:, size:].double()
    assert_rounded_once(kernels.silu_and_mul(x.to(dtype)), exact.float())


def test_silu_of_extreme_values(isa: str) -> None:
    gate = torch.tensor([-1e4, -200, -89, -1e-30, 0, 1e-30, 200, 1e4, float("inf"), float("nan")])
    gate = gate.repeat(4)
    out = kernels.silu_and_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(out, F.silu(gate), rtol=1e-5, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("head_dim,rotary_dim", [(64, 64), (96, 96), (128, 64), (20, 12), (6, 2)])
def test_rotary(isa: str, dtype: torch.dtype, neox: bool, head_dim: int, rotary_dim: int) -> None:
    rows, heads, kv_heads = 5, 3, 1
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    query, key, value = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
    positions = torch.tensor([0, 3, 3, 9, 1])
    angles = random(10, rotary_dim // 2, seed=3)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    expected = [
        rotated(x.clone(), positions, table.double(), head_dim, rotary_dim, neox)
        for x in (query, key)
    ]
    untouched = value.clone()
    kernels.rotary_(positions, query, key, head_dim, table, neox)
    for actual, (exact, scale) in zip((query, key), expected, strict=True):
        assert_rounded_once(actual, exact, scale)
    assert torch.equal(value, untouched)


def rotated(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    head_dim: int,
    rotary_dim: int,
    neox: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation, and |a cos| + |b sin| as its scale; x [n, heads * head_dim]."""
    heads = x.double().view(x.shape[0], -1, head_dim)
    cos, sin = table[positions].chunk(2, dim=-1)  # [n, r / 2]
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = heads[..., :rotary_dim], heads[..., rotary_dim:]
    a, b = (
        turned.chunk(2, dim=-1) if neox else (turned[..., 0::2], turned[..., 1::2])
    )  # [n, heads, r / 2]

    def join(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        pairs = (
            torch.cat([first, second], -1) if neox else torch.stack([first, second], -1).flatten(-2)
        )
        return torch.cat([pairs, rest], dim=-1).reshape(x.shape).float()

    return (
        join(a * cos - b * sin, b * cos + a * sin),
        join((a * cos).abs() + (b * sin).abs(), (b * cos).abs() + (a * sin).abs()).abs(),
    )
