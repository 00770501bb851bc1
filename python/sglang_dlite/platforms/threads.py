"""OpenMP settings that survive beside SGLang's other processes."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores this process may run on: its affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def set_thread_environment() -> None:
    """Set defaults for the threads of the processes that SGLang spawns; explicit values win.

    Idle OpenMP threads that spin take whole cores from the tokenizer and the detokenizer, and
    every parallel region then waits for a descheduled thread. So threads wait passively, and one
    core is left to the other processes. The variables are read when libgomp loads, which in a
    spawned process is after this parent has set them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))
    os.environ.setdefault("DLITE_CPU_THREADS", str(usable_cores()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
