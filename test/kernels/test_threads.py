"""The team of threads: shared by callers, woken from sleep, sized by a variable."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import sglang_dlite_kernel as kernels
import torch

PROGRAM = """
import torch, sglang_dlite_kernel as kernels
print(kernels.num_threads())
x, weight = torch.ones(2, 64).bfloat16(), torch.ones(640, 64).bfloat16()
(packed,) = kernels.pack_linear_weights([weight])
assert (kernels.linear(x, packed, 640, None) == 64).all()
"""


def run_with(threads: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "DLITE_CPU_THREADS": threads},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("threads", ["1", "5"])
def test_any_number_of_threads(threads: str) -> None:
    done = run_with(threads)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == threads


def test_a_bad_number_is_named() -> None:
    done = run_with("many")
    assert done.returncode != 0
    assert "DLITE_CPU_THREADS = 'many': must be an integer from 1 to 1024" in done.stderr


def test_callers_at_the_same_time_get_their_own_results() -> None:
    """A caller that finds the team busy works alone."""
    weight = torch.randn(1024, 256).to(torch.bfloat16)
    (packed,) = kernels.pack_linear_weights([weight])
    inputs = [torch.randn(3, 256).to(torch.bfloat16) for _ in range(4)]
    expected = [kernels.linear(x, packed, 1024, None) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(200):
            if not torch.equal(kernels.linear(inputs[index], packed, 1024, None), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


def test_helpers_come_back_from_sleep() -> None:
    weight = torch.ones(1024, 64).to(torch.bfloat16)
    (packed,) = kernels.pack_linear_weights([weight])
    x = torch.ones(1, 64).to(torch.bfloat16)
    for _ in range(5):
        time.sleep(0.02)  # long enough for helpers to stop polling
        assert (kernels.linear(x, packed, 1024, None) == 64).all()
