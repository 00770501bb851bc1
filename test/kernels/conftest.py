"""The kernel tests need the compiled package; each test that asks for `isa` runs on every set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

kernels = pytest.importorskip(
    "sglang_dlite_kernel", reason="the compiled kernels are not built (no C++ compiler)"
)


@pytest.fixture(params=["amx", "avx512_bf16", "avx512", "avx2"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU can run, in use during the test."""
    if request.param not in kernels.runnable_isas():
        pytest.skip(f"this CPU cannot run {request.param}")
    kernels.use_isa(request.param)
    yield request.param
    kernels.use_isa("")
