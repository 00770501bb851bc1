"""Gives Triton 3.8's interpreter the bf16 arithmetic that a GPU has.

Its `tl.dot` multiplies the bit patterns of bf16 operands as integers, and its fp32 -> bf16 cast
truncates where PTX rounds to nearest even. Both are replaced here, for the checks in this folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    product = np.matmul(_widened(a), _widened(b), dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


_cast = InterpreterBuilder.cast_impl


def _rounding_cast(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)
    return _cast(self, source, target)


@pytest.fixture(scope="session", autouse=True)
def bf16_as_on_a_gpu() -> None:
    assert triton.knobs.runtime.interpret, "run with TRITON_INTERPRET=1"
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.cast_impl = _rounding_cast
    InterpreterBuilder.create_fp_trunc = _rounding_cast
