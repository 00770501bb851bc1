"""The command: what is checked, in which order, and the exit status (docs/gpu.md)."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sglang_dlite import __version__
from sglang_dlite.drafter import DLiteConfig
from sglang_dlite.gpu_check.drafters import OFFICIAL, random_drafter, random_table
from sglang_dlite.gpu_check.report import Report
from sglang_dlite.kernels.launch import unsupported_gpu

FAILED, NO_GPU = 1, 2
TIMED_SECONDS = 210  # of the six minutes: no timing starts later, so that serving has its share
ALL_SECONDS = 330  # no served arm is begun that would probably end later
TIMED_SIZES = (1, 2, 4, 8, 16, 32, 64)
GRAPH_SIZES = (1, 3, 64)
DEVICE = "cuda"


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all passed; 1: something failed; 2: nothing could be checked here."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_dlite.gpu_check",
        description="Prove DLITE's CUDA path on this machine's GPU, in at most six minutes.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args(arguments)
    reason = why_not_here()
    if reason is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return NO_GPU
    report, started = Report(), time.monotonic()
    environment = describe()
    print(json.dumps(environment, indent=1))
    check_draft_step(report, started + TIMED_SECONDS)
    check_serving(report, started + ALL_SECONDS)
    environment["seconds"] = round(time.monotonic() - started)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_json(**environment), indent=1) + "\n")
    failures = [check["name"] for check in report.checks if not check["passed"]]
    print(f"{len(report.checks)} checks, {len(failures)} failed, {environment['seconds']} s")
    for name in failures:
        print(f"failed: {name}")
    return 0 if report.passed else FAILED


def why_not_here() -> str | None:
    """Why nothing can be checked on this machine; None if it can."""
    if not torch.cuda.is_available():
        return (
            "torch sees no CUDA device (torch.cuda.is_available() is False). Run it on a machine "
            "with an NVIDIA GPU, its driver and a CUDA build of torch; what can be proven without "
            "one, `make test` proves."
        )
    reason = unsupported_gpu(torch.device(DEVICE))
    if reason is not None:
        return reason
    if find_spec("triton") is None:
        return "Triton is not installed; it comes with torch's CUDA builds: pip install triton"
    return None


def describe() -> dict[str, Any]:
    """The device and the versions."""
    import triton

    properties = torch.cuda.get_device_properties(DEVICE)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "sglang_dlite": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def check_draft_step(report: Report, deadline: float) -> None:
    """Kernels, fused step, graphs, times: without SGLang."""
    from sglang_dlite.gpu_check import parity, timing

    torch.backends.cuda.matmul.allow_tf32 = False  # references are exact
    for name, config in OFFICIAL.items():
        with report.part(f"{name}: kernels against their torch references"):
            parity.check_kernels(report, name, config, DEVICE)
        with report.part(f"{name}: fused step against the module"):
            parity.check_fused_step(report, name, replace(config, num_hidden_layers=2), DEVICE)
        free_memory()
    bandwidth = timing.copy_bandwidth(DEVICE, timing.cuda_timer)
    report.figure("copy bandwidth", bandwidth / 1e9, "GB/s")
    print(f"copy bandwidth: {bandwidth / 1e9:.0f} GB/s")
    for name, config in OFFICIAL.items():
        with report.part(f"{name}: graphs and times"):
            time_draft_step(report, name, config, bandwidth, deadline)
        free_memory()


def time_draft_step(
    report: Report, name: str, config: DLiteConfig, bandwidth: float, deadline: float
) -> None:
    """Graph = eager, and times: the torch module eager and in a graph, the kernels in a graph."""
    from sglang_dlite.gpu_check import parity, timing
    from sglang_dlite.kernels.fused_drafter import FusedDrafter

    module = random_drafter(config, DEVICE, torch.bfloat16)
    table = random_table(config, DEVICE, torch.bfloat16)
    capture = timing.cuda_capture
    timer = timing.DraftTimer(
        report, name, config, table, bandwidth, timing.cuda_timer, capture, deadline
    )
    parity.check_graph(report, f"{name} torch", module, table, GRAPH_SIZES, capture)
    timer.run("eager", module, TIMED_SIZES, graph=False)
    timer.run("graph", module, TIMED_SIZES, graph=True)
    fused = FusedDrafter(module)
    parity.check_graph(report, f"{name} kernels", fused, table, GRAPH_SIZES, capture)
    ratios = timer.run("graph + kernels", fused, TIMED_SIZES, graph=True)
    if 1 in ratios:
        met = "met" if ratios[1] <= timing.GOAL else "not met"
        report.note(
            f"{name}, graph + kernels, n = 1: {ratios[1]:.2f} x the bandwidth bound; the goal of "
            f"{timing.GOAL} is {met}"
        )


def check_serving(report: Report, deadline: float) -> None:
    """With SGLang present: DLITE served, graphs on and off; `deadline` is of time.monotonic()."""
    if find_spec("sglang") is None:
        report.note("sglang is not installed: serving was not checked")
        return
    with report.part("serving"):
        from sglang_dlite.gpu_check.serving import run_serving_checks

        run_serving_checks(report, deadline=deadline)


def free_memory() -> None:
    """Give memory back, so that the next part, or a server, finds it."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
