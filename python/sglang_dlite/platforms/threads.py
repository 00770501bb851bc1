"""OpenMP settings that survive beside SGLang's other processes."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores this process may run on (affinity respected)."""
    return len(os.sched_getaffinity(0))


def set_thread_environment() -> None:
    """Set OMP_* defaults for the processes that SGLang spawns; explicit values win.

    Idle OpenMP threads that spin take whole cores from the tokenizer and the detokenizer, and
    every parallel region then waits for a descheduled thread. So threads wait passively, and one
    core is left to the other processes. The variables are read when libgomp loads, which in a
    spawned process is after this parent has set them.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
