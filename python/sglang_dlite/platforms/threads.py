"""OpenMP settings that survive beside SGLang's other processes."""

from __future__ import annotations

import os
from pathlib import Path

RANK_CORES = "SGLANG_CPU_OMP_THREADS_BIND"


def usable_cores() -> int:
    """Cores this process may run on: its affinity, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


# What this process has set itself; a variable that the user set is never changed.
_ours: dict[str, str] = {}


def set_thread_environment(num_ranks: int = 1) -> None:
    """Set defaults for the threads of the processes that SGLang spawns; explicit values win.

    Idle OpenMP threads that spin take whole cores from the tokenizer and the detokenizer, and
    every parallel region then waits for a descheduled thread. So threads wait passively, and one
    core is left to the other processes. The variables are read when libgomp loads, which in a
    spawned process is after this parent has set them.

    num_ranks model processes share the cores. For more than one, upstream wants to know the cores
    of each, or a NUMA node per rank; a machine with fewer nodes would not start otherwise.
    """
    cores = usable_cores()
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (cores - 1) // num_ranks)),
        "DLITE_CPU_THREADS": str(max(1, cores // num_ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if num_ranks > 1:
        defaults[RANK_CORES] = rank_cores(sorted(os.sched_getaffinity(0)), num_ranks)
    for name, value in _ours.items():  # of an earlier engine in this process, of another size
        if os.environ.get(name) == value:
            del os.environ[name]
    _ours.clear()
    for name, value in defaults.items():
        if name not in os.environ:
            os.environ[name] = _ours[name] = value


def rank_cores(cores: list[int], num_ranks: int) -> str:
    """Upstream's notation of each rank's cores, `0,1|2,3`; too few cores are shared."""
    share = max(1, len(cores) // num_ranks)
    groups = []
    for rank in range(num_ranks):
        start = rank * share % len(cores)
        groups.append(cores[start : start + share])
    return "|".join(",".join(map(str, group)) for group in groups)
