"""Workloads by kind: `load(spec)` gives sessions, and names what could not be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sglang_dlite.bench.config import WorkloadSpec
from sglang_dlite.bench.workloads.generated import generated
from sglang_dlite.bench.workloads.question_sets import (
    LONGBENCH_SUBSETS,
    QUESTION_SETS,
    bfcl_multi_turn,
    longbench_v2,
    question_set,
    swe_bench,
)
from sglang_dlite.bench.workloads.recorded import agentic_trace, openai_messages, swe_agent
from sglang_dlite.bench.workloads.sessions import Loaded, WorkloadError

_FILE_KINDS: dict[str, Callable[[Path], Loaded]] = {
    "messages": openai_messages,
    "swe-agent": swe_agent,
    "agentic-trace": agentic_trace,
}


def load(spec: WorkloadSpec) -> Loaded:
    """All sessions of a workload, cut to its number of turns.

    Raises:
        WorkloadError: nothing can be played; the message names the file or data set.
    """
    path = Path(spec.path).expanduser() if spec.path else None
    if spec.kind == "generated":
        loaded = generated(
            spec.sessions,
            spec.turns or 4,
            seed=spec.seed,
            read_chars=spec.read_chars,
            held_out=spec.held_out,
        )
    elif spec.kind in _FILE_KINDS:
        assert path is not None  # the configuration demands it
        loaded = _FILE_KINDS[spec.kind](path)
    elif spec.kind in QUESTION_SETS:
        loaded = question_set(spec.kind, path)
    elif spec.kind.startswith("longbench-v2/"):
        loaded = longbench_v2(spec.kind.partition("/")[2], path)
    elif spec.kind == "swe-bench":
        loaded = swe_bench(path)
    else:
        loaded = bfcl_multi_turn(path)
    loaded.sessions = [session.first(spec.turns) for session in loaded.sessions]
    if not loaded.sessions:
        first = (
            f"; the first of {len(loaded.rejected)}: {loaded.rejected[0]}"
            if loaded.rejected
            else ""
        )
        raise WorkloadError(f"workload {spec.name!r} ({spec.kind}) has no usable session{first}")
    return loaded


def known_kinds() -> list[str]:
    """Every value that `kind:` may have."""
    longbench = [f"longbench-v2/{name}" for name in LONGBENCH_SUBSETS]
    return ["generated", *_FILE_KINDS, *QUESTION_SETS, *longbench, "swe-bench", "bfcl-multi-turn"]
