"""Norms and SiLU under Triton's interpreter (run by test_triton_interpreter.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import DTYPES, SIZES, filled
from sglang_dlite.kernels import activation, norms

EPS = 1e-6
# The kernels round where the references do; a sum in another order can tip one rounding.
TOLERANCE = {"fp32": {"rtol": 1e-5, "atol": 1e-5}, "bf16": {"rtol": 2**-7, "atol": 1e-5}}


def run(planned: tuple[Any, Any]) -> Any:
    launch, outputs = planned
    launch.run()
    return outputs


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", ["4b", "8b", "odd"])
def test_norms(size: str, dtype: str, n: int) -> None:
    shape, kind, close = SIZES[size], DTYPES[dtype], TOLERANCE[dtype]
    x = filled(n, shape.queries, shape.hidden, dtype=kind)
    delta = filled(n, shape.queries, shape.hidden, dtype=kind, seed=1)
    weight = filled(shape.hidden, dtype=kind, seed=2) + 1
    torch.testing.assert_close(
        run(norms.plan_norm(x, weight, EPS)), norms.norm_reference(x, weight, EPS), **close
    )
    total, normed = run(norms.plan_add_norm(x, delta, weight, EPS))
    expected_total, expected = norms.add_norm_reference(x, delta, weight, EPS)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **close)
    last = run(norms.plan_final_norm(x, delta, weight, EPS, shape.drafts))
    assert last.shape == (n, shape.drafts, shape.hidden)
    torch.testing.assert_close(
        last, norms.final_norm_reference(x, delta, weight, EPS, shape.drafts), **close
    )


@pytest.mark.parametrize("states_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_context_norm(dtype: str, states_dtype: torch.dtype) -> None:
    kind = DTYPES[dtype]
    states, depth = filled(2, 5, 96, dtype=states_dtype), filled(5, 96, dtype=kind)
    weight = filled(96, dtype=kind) + 1
    slots = run(norms.plan_context_norm(states, depth, weight, EPS))
    assert slots.dtype == kind
    expected = norms.context_norm_reference(states, depth, weight, EPS)
    torch.testing.assert_close(slots, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("intermediate", [9728, 1024, 29])
def test_silu_mul(intermediate: int, dtype: str, n: int) -> None:
    gate_up = filled(n, 2, 2 * intermediate, dtype=DTYPES[dtype], scale=3)
    out = run(activation.plan_silu_mul(gate_up))
    torch.testing.assert_close(out, activation.silu_mul_reference(gate_up), **TOLERANCE[dtype])
