"""Attention under Triton's interpreter (run by test_triton_interpreter.py)."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, SIZES, attention_inputs
from sglang_dlite.kernels.attention import attention_reference, plan_attention


@pytest.mark.parametrize(
    "size,dtype,n",
    [
        *((size, dtype, 2) for size in ("odd", "one-head", "wide-group") for dtype in DTYPES),
        *((size, dtype, 1) for size in ("4b", "8b") for dtype in DTYPES),
        ("4b", "bf16", 0),
        pytest.param("4b", "bf16", 64, marks=pytest.mark.slow),
        pytest.param("8b", "fp32", 3, marks=pytest.mark.slow),
    ],
)
def test_against_the_modules_operators(size: str, dtype: str, n: int) -> None:
    inputs = attention_inputs(SIZES[size], n, DTYPES[dtype])
    launch, out = plan_attention(*inputs)
    launch.run()
    wide = tuple(x.float() if isinstance(x, torch.Tensor) else x for x in inputs)
    atol = 2e-5 if dtype == "fp32" else 0.05  # of values up to about 4
    torch.testing.assert_close(out.float(), attention_reference(*wide), rtol=0, atol=atol)


@pytest.mark.parametrize("size", ["4b", "odd"])
def test_requests_and_padding_do_not_mix(size: str) -> None:
    """A request's rows are the same alone, and beside a request of NaN."""
    inputs = attention_inputs(SIZES[size], 3, torch.float32)
    qkv, context = inputs[0].clone(), inputs[1].clone()
    qkv[1], context[1] = float("nan"), float("nan")
    launch, together = plan_attention(qkv, context, *inputs[2:])
    launch.run()
    assert together[1].isnan().all()
    for i in (0, 2):
        launch, alone = plan_attention(qkv[i : i + 1], context[i : i + 1], *inputs[2:])
        launch.run()
        assert torch.equal(together[i], alone[0])
