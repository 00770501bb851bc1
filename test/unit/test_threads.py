"""Thread settings of the processes that SGLang spawns on a CPU."""

from __future__ import annotations

import os

import pytest
from sglang_dlite.platforms import threads

NAMES = ("OMP_NUM_THREADS", "DLITE_CPU_THREADS", "OMP_WAIT_POLICY", threads.RANK_CORES)


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # restored afterwards, whatever the test leaves
        monkeypatch.delenv(name)
    monkeypatch.setattr(threads, "_ours", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)


def settings() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


def test_one_process_has_all_cores_but_one() -> None:
    threads.set_thread_environment()
    assert settings() == ["7", "8", "PASSIVE", None]


def test_ranks_share_the_cores_and_upstream_is_told() -> None:
    threads.set_thread_environment()
    threads.set_thread_environment(2)
    assert settings() == ["3", "4", "PASSIVE", "0,1,2,3|4,5,6,7"]
    threads.set_thread_environment(1)  # the next engine of this process
    assert settings() == ["7", "8", "PASSIVE", None]


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLITE_CPU_THREADS", "2")
    monkeypatch.setenv(threads.RANK_CORES, "0|1")
    for ranks in (1, 2, 4):
        threads.set_thread_environment(ranks)
    assert settings() == ["1", "2", "PASSIVE", "0|1"]


@pytest.mark.parametrize(
    "cores,ranks,expected",
    [
        ([0, 1, 2, 3], 2, "0,1|2,3"),
        ([3, 5, 9], 2, "3|5"),
        ([4], 3, "4|4|4"),
        ([0, 1], 3, "0|1|0"),
    ],
)
def test_every_rank_has_cores(cores: list[int], ranks: int, expected: str) -> None:
    assert threads.rank_cores(cores, ranks) == expected
