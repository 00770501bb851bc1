"""Every kernel compiled for GPUs that are not there; a register spill fails.

Run with -s to see registers, spills and shared memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import ALL_DTYPES, SIZES

triton = pytest.importorskip("triton", reason="Triton is not installed")

from ahead_of_time import compile_launch, resources  # noqa: E402
from launches import draft_step_launches  # noqa: E402

# Shared memory that one program may have (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
DATACENTRE = (80, 90, 100)


def case(capability: int, size: str, dtype: str, n: int, slow: bool = False) -> Any:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(capability, size, dtype, n, marks=marks)


@pytest.mark.parametrize(
    "capability,size,dtype,n",
    [
        *(case(c, "4b", "bf16", 1) for c in DATACENTRE),
        *(case(c, "8b", "bf16", 64, slow=True) for c in SHARED_LIMIT),
        case(90, "4b", "fp16", 64, slow=True),
        *(case(c, "4b", "fp32", 1, slow=True) for c in SHARED_LIMIT),
        *(case(c, "odd", "bf16", 17, slow=True) for c in DATACENTRE),
    ],
)
def test_compiles_without_spills(
    capability: int,
    size: str,
    dtype: str,
    n: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    spilling = []
    for name, launch in draft_step_launches(SIZES[size], n, ALL_DTYPES[dtype]).items():
        needs = resources(compile_launch(launch, capability), tmp_path)
        print(f"sm_{capability} {size} {dtype} n={n:<3} {name:17} {needs}")
        assert needs.shared <= SHARED_LIMIT[capability], name
        assert needs.registers <= 255, name
        if needs.spilled:
            spilling.append(f"{name}: {needs}")
    assert not spilling


def test_that_check_finds_a_planted_spill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block far too large for its registers."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launch = draft_step_launches(SIZES["4b"], 1, torch.bfloat16)["advance"]
    constants = launch.constants | {"ROW_BLOCK": 128}
    needs = resources(compile_launch(launch._replace(constants=constants), 90), tmp_path)
    assert needs.spilled > 0
