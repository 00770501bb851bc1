"""What a run was made with: versions, machine, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("sglang-dlite", "sglang", "torch", "transformers", "triton", "flashinfer-python")


def provenance() -> dict[str, Any]:
    """Versions and the machine, for the manifest; asks no network."""
    import torch

    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "argv": sys.argv,
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "device": device_name(),
        "accelerator": torch.cuda.is_available(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "platform": platform.platform(),
    }


def device_name() -> str:
    """The accelerators by name, or the processor."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return f"{len(names)} x {names[0]}"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree that this package runs from; None for an installed wheel."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
        if head.returncode:
            return None
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + (" with uncommitted changes" if status.stdout.strip() else "")
