"""The packed linear kernel against fp32 products, on every instruction set."""

from __future__ import annotations

import pytest
import sglang_dlite_kernel as kernels
import torch
from kernel_reference import assert_rounded_once

SHAPES = [(1, 1), (33, 70), (64, 32), (100, 128), (576, 576), (200, 1536)]  # out, in
ROWS = [0, 1, 2, 3, 8, 15, 16, 17, 33, 64, 300]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("out_features,in_features", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_against_fp32(isa: str, out_features: int, in_features: int, bias: bool) -> None:
    weight = random(out_features, in_features, seed=1)
    (packed,) = kernels.pack_linear_weights([weight])
    shift = random(out_features, seed=2) if bias else None
    for rows in ROWS:
        x = random(rows, in_features, seed=rows)
        exact = x.double() @ weight.double().T
        scale = x.double().abs() @ weight.double().abs().T
        if shift is not None:
            exact, scale = exact + shift, scale + shift.abs()
        out = kernels.linear(x, packed, out_features, shift)
        assert_rounded_once(out, exact.float(), scale.float())


def test_a_row_does_not_depend_on_the_others(isa: str) -> None:
    """Bit for bit: what makes a verify pass and a decode step agree."""
    weight = random(96, 200, seed=1)
    (packed,) = kernels.pack_linear_weights([weight])
    x = random(300, 200, seed=3)
    together = kernels.linear(x, packed, 96, None)
    for rows in (1, 2, 5, 8, 16, 31, 64, 299):
        assert torch.equal(kernels.linear(x[:rows], packed, 96, None), together[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed, 96, None), together[-rows:])


def test_strided_rows_and_leading_dimensions(isa: str) -> None:
    weight = random(48, 64, seed=1)
    (packed,) = kernels.pack_linear_weights([weight])
    wide = random(6, 100, seed=4)
    expected = kernels.linear(wide[:, 10:74].contiguous(), packed, 48, None)
    assert torch.equal(kernels.linear(wide[:, 10:74], packed, 48, None), expected)
    assert torch.equal(
        kernels.linear(wide[:, 10:74].reshape(2, 3, 64), packed, 48, None),
        expected.view(2, 3, 48),
    )


def test_weights_of_a_model_share_one_block() -> None:
    weights = [random(48, 64, seed=1), random(10, 33, seed=2)]
    first, second = kernels.pack_linear_weights(weights)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    x = random(2, 33, seed=3)
    exact = (x.double() @ weights[1].double().T).float()
    assert_rounded_once(kernels.linear(x, second, 10, None), exact, exact.abs() + 30)


@pytest.mark.parametrize(
    "x,message",
    [
        (torch.zeros(2, 64), "x is Float, must be bfloat16"),
        (torch.zeros(2, 96, dtype=torch.bfloat16), "packed has"),
    ],
)
def test_bad_input_is_refused(x: torch.Tensor, message: str) -> None:
    (packed,) = kernels.pack_linear_weights([random(48, 64)])
    with pytest.raises(RuntimeError, match=message):
        kernels.linear(x, packed, 48, None)
