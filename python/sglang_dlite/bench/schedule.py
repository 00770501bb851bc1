"""Which rounds a run has, and in which order: arms alternate, so that drift meets all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_dlite.bench.config import BenchConfig, WorkloadSpec
from sglang_dlite.bench.records import Round
from sglang_dlite.bench.workloads.sessions import Session


def loads(config: BenchConfig, workload: str) -> Iterator[tuple[int, str]]:
    """(concurrency, cache) of the rounds that every arm plays of a workload."""
    spec = next(item for item in config.workloads if item.name == workload)
    for concurrency in spec.concurrency or config.concurrency:
        yield concurrency, "warm"
    if spec.cold:
        yield 1, "cold"


def order(config: BenchConfig, arms: Sequence[str], workloads: Sequence[str]) -> list[Round]:
    """All rounds in playing order.

    Repeats are outermost, so that a run that is cut short has measured everything at least once.
    Servers up together: the arms take turns on every load. One at a time: they take turns on
    every repeat. Either way the order of the arms is reversed each time.
    """
    rounds = []
    turn = 0

    def taking_turns() -> list[str]:
        nonlocal turn
        turn += 1
        return list(arms) if turn % 2 else list(reversed(arms))

    for repeat in range(config.repeats):
        combinations = [(w, *load) for w in workloads for load in loads(config, w)]
        if config.placement == "together":
            for workload, concurrency, cache in combinations:
                rounds += [
                    Round(workload, concurrency, cache, repeat, arm) for arm in taking_turns()
                ]
        else:
            for arm in taking_turns():
                rounds += [
                    Round(workload, concurrency, cache, repeat, arm)
                    for workload, concurrency, cache in combinations
                ]
    return rounds


def sessions_of(
    spec: WorkloadSpec, sessions: Sequence[Session], concurrency: int
) -> Sequence[Session]:
    """The sessions of one round: one per user, but not fewer than `min_sessions`."""
    return sessions[: max(concurrency, spec.min_sessions)]
