"""Draft-step times, and what share of them the memory traffic of the weights explains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.gpu_check.drafters import random_inputs, step_bytes
from sglang_dlite.gpu_check.parity import Capture
from sglang_dlite.gpu_check.report import Report
from sglang_dlite.speculative.draft_graph import CudaRecorder

GOAL = 1.3  # graph + kernels at n = 1, in multiples of the bound

Timer = Callable[[Callable[[], Any]], float]

_REPEATS, _CALLS, _WARM_UPS = 5, 20, 3


def cuda_timer(step: Callable[[], Any]) -> float:
    """Seconds of one call: the median over repeats of the mean over calls, by CUDA events."""
    for _ in range(_WARM_UPS):
        step()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_CALLS):
            step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / _CALLS)
    return statistics.median(times)


def cuda_capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """`step` as a CUDA graph: replays it on the same tensors and returns its static outputs."""
    outputs: Any = None

    def keep_outputs() -> None:
        nonlocal outputs
        outputs = step()

    graph = CudaRecorder()(keep_outputs)

    def replay() -> Any:
        graph.replay()
        return outputs

    return replay


def copy_bandwidth(device: str, timer: Timer, num_bytes: int = 2**30) -> float:
    """Bytes per second read and written by a copy of num_bytes on the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / timer(lambda: target.copy_(source))


class DraftTimer:
    """Times one size's drafters at each n and records the figures."""

    def __init__(
        self,
        report: Report,
        name: str,
        config: DLiteConfig,
        table: Tensor,
        bandwidth: float,
        timer: Timer,
        capture: Capture,
        deadline: float = float("inf"),
    ) -> None:
        """`deadline` is of time.monotonic(): what comes after it is left out, and noted."""
        self._report, self._name, self._config = report, name, config
        self._table, self._timer, self._capture = table, timer, capture
        self._deadline = deadline
        self.bound = step_bytes(config, table.dtype) / bandwidth  # seconds
        report.figure("bandwidth bound of a draft step", self.bound * 1e6, "us", size=name)
        print(f"{name}: the weights of a draft step take {self.bound * 1e6:.0f} us to read")

    def run(self, arm: str, drafter: Any, sizes: tuple[int, ...], graph: bool) -> dict[int, float]:
        """One arm (a drafter, eager or in a graph) at each n -> n: time / bound."""
        ratios = {}
        for n in sizes:
            if time.monotonic() > self._deadline:
                self._report.note(f"{self._name}, {arm}, n = {n}: not timed, out of time")
                continue
            states, group = random_inputs(
                self._config, n, str(self._table.device), self._table.dtype
            )
            embed = lambda ids: F.embedding(ids, self._table)  # noqa: E731

            def step(s: Tensor = states, g: Tensor = group, e: Any = embed) -> Any:
                return drafter.draft(s, g, e)

            seconds = self._timer(self._capture(step) if graph else step)
            ratio = ratios[n] = seconds / self.bound
            labels = {"size": self._name, "arm": arm, "n": n, "ratio_to_bound": ratio}
            self._report.figure("draft step", seconds * 1e6, "us", **labels)
            print(f"{self._name}  {arm:<16} n = {n:<3} {seconds * 1e6:8.0f} us  {ratio:5.2f} x")
        return ratios
