"""A whole run against stand-ins for the servers: order, resumption, arms that fall out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sglang_dlite.bench import prepare, runner
from sglang_dlite.bench.config import BenchConfig, config_from_dict
from sglang_dlite.bench.records import Round, RunDirectory, RunDirectoryError
from sglang_dlite.bench.report.write import write_report
from sglang_dlite.bench.runner import Run
from sglang_dlite.bench.summary import summarise
from sglang_dlite.bench.workloads.sessions import WorkloadError
from sglang_dlite.server_process import ServerError


class StandIn:
    """What the runner needs of a ServerProcess; answers with a fake server."""

    def __init__(self, world: World, extra_args: tuple[str, ...], log_path: Path) -> None:
        self.name = log_path.stem
        self.command = ["python", *extra_args]
        self._world = world
        self.base_url = world.servers[self.name].base_url

    def __enter__(self) -> StandIn:
        self._world.up.append(self.name)
        self._world.most_up = max(self._world.most_up, len(self._world.up))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.name in self._world.up:
            self._world.up.remove(self.name)

    def require_alive(self) -> None:
        if self.name in self._world.dies:
            raise ServerError("the server ended with status -9")


class World:
    """The servers by arm, and what is to go wrong."""

    def __init__(self, make_server: Callable[..., Any]) -> None:
        self.servers = {
            "target-only": make_server("target-only"),
            "DLITE": make_server("DLITE", speculative=True),
        }
        self.up: list[str] = []
        self.most_up = 0
        self.dies: set[str] = set()
        self.no_start: set[str] = set()

    def wait_ready(self, server: StandIn, name: str, console: Console) -> None:
        if server.name in self.no_start:
            raise ServerError("the server ended with status 1; its log says:\n  ValueError: no")


@pytest.fixture
def world(
    make_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> World:
    made = World(make_server)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    origin = {"accelerator": False, "device": "a test", "cpus": 1, "versions": {}, "argv": []}

    def stand_in(target: str, *, extra_args: Any, log_path: Path, env: Any) -> StandIn:
        return StandIn(made, tuple(extra_args), log_path)

    monkeypatch.setattr(runner, "ServerProcess", stand_in)
    monkeypatch.setattr(runner, "wait_ready", made.wait_ready)
    monkeypatch.setattr(prepare, "tokenizer_count", lambda target: len)
    monkeypatch.setattr(runner, "provenance", lambda: dict(origin))
    monkeypatch.setattr(runner, "resolve_target", lambda name: str(target))
    return made


def config(**changes: Any) -> BenchConfig:
    values: dict[str, Any] = {
        "name": "t",
        "target": "embedded",
        "placement": "together",
        "arms": [
            {"name": "target-only"},
            {"name": "DLITE", "algorithm": "DLITE", "drafter": "shipped"},
            {"name": "NGRAM", "algorithm": "NGRAM"},
        ],
        "workloads": [
            {"name": "agent", "kind": "generated", "sessions": 3, "turns": 2, "max_tokens": 8},
            {"name": "absent", "kind": "messages", "path": "absent.jsonl", "optional": True},
        ],
        "concurrency": [1, 2],
        "repeats": 2,
    }
    return config_from_dict(values | changes)


def execute(folder: Path, made: BenchConfig | None = None, minutes: float | None = None) -> Run:
    run = Run(made or config(), RunDirectory(folder), Console(quiet=True), minutes)
    run.execute()
    return run


def test_every_arm_that_can_run_plays_every_round(world: World, tmp_path: Path) -> None:
    run = execute(tmp_path / "run")
    results = run.directory.results()
    assert len(results) == 2 * 2 * 2 and world.most_up == 2 and not world.up
    order = [result.round.arm for result in results]
    assert order == ["target-only", "DLITE", "DLITE", "target-only"] * 2
    manifest = run.directory.manifest()
    assert "no accelerator" in manifest["arms"]["NGRAM"]["skipped"]
    assert "no such file" in manifest["workloads"]["absent"]["skipped"]
    assert manifest["arms"]["DLITE"]["facts"]["speculative_num_draft_tokens"] == 8
    assert summarise(run.directory)["not_played"] == [] and manifest["problems"] == []


def test_the_first_replies_are_everybodys_history(world: World, tmp_path: Path) -> None:
    execute(tmp_path / "run")
    second_turns = [
        [m for m in world.servers[name].sessions if len(m) == 4] for name in world.servers
    ]
    fed_back = {m[1]["content"][:60]: m[2]["content"] for m in second_turns[0]}
    for messages in (m for turns in second_turns for m in turns):
        assert fed_back[messages[1]["content"][:60]] == messages[2]["content"]


def test_servers_one_at_a_time(world: World, tmp_path: Path) -> None:
    run = execute(tmp_path / "run", config(placement="alone"))
    assert world.most_up == 1
    arms = [result.round.arm for result in run.directory.results()]
    assert arms == ["target-only"] * 2 + ["DLITE"] * 4 + ["target-only"] * 2


def test_a_killed_run_goes_on(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    server, seen = world.servers["DLITE"], 0

    def kill(request: dict[str, Any]) -> bool:
        nonlocal seen
        seen += 1
        return seen > 4  # in the second round of this arm

    server.refuse = kill
    original = RunDirectory.write

    def interrupted(self: RunDirectory, result: Any) -> None:
        if result.failures:
            raise KeyboardInterrupt
        original(self, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            execute(folder)
    directory = RunDirectory(folder)
    done = {result.round: result.started for result in directory.results()}
    assert 0 < len(done) < 8 and not world.up
    assert len(summarise(directory)["not_played"]) == 8 - len(done)

    server.refuse = lambda request: False
    execute(folder)
    results = directory.results()
    assert len(results) == 8 and summarise(directory)["not_played"] == []
    for result in results:  # what was complete was not played again
        assert done.get(result.round, result.started) == result.started

    requests = len(server.requests)
    execute(folder)
    assert len(server.requests) == requests


def test_no_round_begins_after_the_time_is_up(world: World, tmp_path: Path) -> None:
    run = execute(tmp_path / "run", minutes=1e-9)
    assert run.directory.results() == [] and not world.up
    assert len(summarise(run.directory)["not_played"]) == 8


def test_another_configuration_is_refused(world: World, tmp_path: Path) -> None:
    execute(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match=r"different: repeats\); choose another --out"):
        execute(tmp_path / "run", config(repeats=3))


def test_an_arm_that_does_not_start_is_skipped(world: World, tmp_path: Path) -> None:
    world.no_start.add("DLITE")
    run = execute(tmp_path / "run")
    assert {result.round.arm for result in run.directory.results()} == {"target-only"}
    skipped = run.directory.manifest()["arms"]["DLITE"]["skipped"]
    assert skipped.startswith("it did not start: ") and "ValueError: no" in skipped


def test_an_arm_that_dies_is_skipped_from_then_on(world: World, tmp_path: Path) -> None:
    world.dies.add("DLITE")
    run = execute(tmp_path / "run")
    assert {result.round.arm for result in run.directory.results()} == {"target-only"}
    assert "it died" in run.directory.manifest()["arms"]["DLITE"]["skipped"]


def test_a_round_whose_warm_up_fails_is_a_problem(world: World, tmp_path: Path) -> None:
    world.servers["DLITE"].refuse = lambda request: True
    run = execute(tmp_path / "run")
    manifest = run.directory.manifest()
    assert len(manifest["problems"]) == len(summarise(run.directory)["not_played"]) == 4
    assert (
        "agent/c1/0/DLITE.jsonl: POST /v1/chat/completions answered 400" in manifest["problems"][0]
    )


def test_there_is_no_comparison_without_the_baseline(world: World, tmp_path: Path) -> None:
    world.no_start.add("target-only")
    with pytest.raises(ServerError, match="did not start"):
        execute(tmp_path / "run")
    assert not world.up


def test_failures_are_kept_and_shown(world: World, tmp_path: Path) -> None:
    def refuse(request: dict[str, Any]) -> bool:
        return len(request["messages"]) == 4

    world.servers["DLITE"].refuse = refuse
    run = execute(tmp_path / "run")
    failed = [failure for result in run.directory.results() for failure in result.failures]
    assert len(failed) == 8 and all(failure.turn == 2 for failure in failed)
    write_report(run.directory)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "8 failed requests" in page and "answered 400" in page


def test_a_needed_workload_must_be_there(world: World, tmp_path: Path) -> None:
    workloads = [{"name": "w", "kind": "messages", "path": str(tmp_path / "no.jsonl")}]
    with pytest.raises(WorkloadError, match="no such file"):
        execute(tmp_path / "run", config(workloads=workloads))


def test_the_sweep_is_bench_serving(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run_point(command: list[str], output: Path, log: Path) -> None:
        commands.append(command)
        output.write_text(json.dumps({"completed": 4, "output_throughput": 12.5}) + "\n")

    monkeypatch.setattr(runner, "run_sweep_point", run_point)
    sweep = {"workload": "agent", "concurrency": [2, 4], "prompts_per_user": 2}
    run = execute(tmp_path / "run", config(sweep=sweep, request_fields={"x": 1}))
    assert len(commands) == 4
    assert commands[0][1:3] == ["-m", "sglang.bench_serving"]
    text = " ".join(commands[-1])
    assert "--max-concurrency 4" in text and "--num-prompts 8" in text
    trace = json.loads(Path(commands[0][commands[0].index("--dataset-path") + 1]).read_text())
    assert len(trace["conversations"]) == 3
    assert text.endswith('--extra-request-body {"x": 1}')
    (tmp_path / "run/sweep/DLITE-c4.json").rename(tmp_path / "kept")
    assert summarise(run.directory)["not_played"] == ["sweep/DLITE-c4.json"]
    (tmp_path / "kept").rename(tmp_path / "run/sweep/DLITE-c4.json")
    execute(tmp_path / "run", config(sweep=sweep, request_fields={"x": 1}))
    assert len(commands) == 4  # points are not measured twice
    write_report(run.directory)
    assert "12.5" in (tmp_path / "run" / "report.md").read_text()


def test_a_half_written_round_is_not_a_round(tmp_path: Path, make_result: Any) -> None:
    directory = RunDirectory(tmp_path)
    result = make_result()
    directory.write(result)
    file = tmp_path / "raw" / result.round.file_name
    assert directory.is_done(result.round) and directory.read(result.round) == result
    (file.parent / f".{file.name}.abc").write_text('{"half')
    other = Round("agent", 1, "warm", 0, "other")
    assert directory.results() == [result] and not directory.is_done(other)
    with pytest.raises(RunDirectoryError, match="holds no run"):
        directory.manifest()
