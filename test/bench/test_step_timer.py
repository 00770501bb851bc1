"""The step timer: what it writes for a sequence of steps."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_dlite.bench import step_timer
from sglang_dlite.bench.step_timer import StepTimer


class CountingClock:
    """Each mark is one second after the last."""

    def __init__(self) -> None:
        self.now = 0
        self.ready = True

    def mark(self) -> int:
        self.now += 1
        return self.now

    def is_past(self, mark: int) -> bool:
        return self.ready

    def seconds(self, start: int, end: int) -> float:
        return float(end - start)


def batch(decode: bool, n: int = 2) -> Any:
    mode = SimpleNamespace(is_decode=lambda: decode)
    lens = torch.full((n,), 10)
    return SimpleNamespace(forward_mode=mode, seq_lens=lens, seq_lens_cpu=lens)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
def timer(tmp_path: Path, clock: CountingClock, monkeypatch: pytest.MonkeyPatch) -> StepTimer:
    monkeypatch.setattr(step_timer, "_FLUSH_EVERY", 1)
    return StepTimer(str(tmp_path / "steps"), clock)


def run_target(timer: StepTimer, source: Any, draft_worker: bool = False, **kw: Any) -> Any:
    worker = SimpleNamespace(is_draft_worker=draft_worker)
    return timer.around_target(lambda *args, **kwargs: "result", worker, source, **kw)


def test_decode_steps(timer: StepTimer, tmp_path: Path) -> None:
    assert run_target(timer, batch(decode=True)) == "result"  # marks 1, 2
    assert timer.around_draft(lambda x: x, 5) == 5  # 3, 4
    run_target(timer, None, forward_batch=batch(decode=False), is_verify=True)  # 5, 6
    run_target(timer, batch(decode=False))  # 7, 8: an extend
    run_target(timer, batch(decode=True))
    first, second, third = lines(tmp_path / "steps")
    assert (first["kind"], first["n"], first["context"]) == ("decode", 2, 20)
    assert (first["target_s"], first["draft_s"], first["step_s"]) == (1.0, 1.0, 4.0)
    assert second["kind"] == "decode" and second["step_s"] is None  # an extend came next
    assert third["kind"] == "extend" and third["step_s"] is None


def test_a_changed_batch_has_no_step_time(timer: StepTimer, tmp_path: Path) -> None:
    run_target(timer, batch(decode=True, n=2))
    run_target(timer, batch(decode=True, n=1))
    assert lines(tmp_path / "steps")[0]["step_s"] is None


def test_draft_workers_are_not_steps(timer: StepTimer, tmp_path: Path) -> None:
    for _ in range(3):
        run_target(timer, batch(decode=True), draft_worker=True)
    assert not (tmp_path / "steps").exists()


def test_steps_wait_until_the_device_is_done(
    timer: StepTimer, clock: CountingClock, tmp_path: Path
) -> None:
    clock.ready = False
    for _ in range(3):
        run_target(timer, batch(decode=True))
    assert not (tmp_path / "steps").exists()
    clock.ready = True
    run_target(timer, batch(decode=True))
    assert len(lines(tmp_path / "steps")) == 3


def test_asleep_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(step_timer.STEP_TIMES_VARIABLE, raising=False)
    monkeypatch.setattr(step_timer, "StepTimer", None)  # would fail if it were made
    step_timer.register()


def test_the_hooked_functions_are_where_they_were() -> None:
    """Upstream's function takes what the timer passes on; ours exists. Read, not imported: that
    takes ten seconds."""
    target = function("sglang.srt.managers.tp_worker", "TpModelWorker", "forward_batch_generation")
    names = [argument.arg for argument in target.args.args]
    assert names[:3] == ["self", "batch", "forward_batch"] and "is_verify" in names
    assert function("sglang_dlite.speculative.worker", "DLiteWorker", "_draft")


def function(module: str, class_name: str, name: str) -> ast.FunctionDef:
    package, _, last = module.rpartition(".")
    folder = Path(importlib.util.find_spec(package.partition(".")[0]).submodule_search_locations[0])
    path = folder.joinpath(*package.split(".")[1:], f"{last}.py")
    (owner,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    (found,) = (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return found
