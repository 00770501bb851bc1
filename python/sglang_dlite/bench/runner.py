"""Plays a configuration: servers up, rounds in order, sweeps, everything kept as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from tqdm import tqdm

from sglang_dlite.bench import schedule
from sglang_dlite.bench.arms import Arm, hub_is_offline, resolve_arms, resolve_target
from sglang_dlite.bench.client import StreamingClient
from sglang_dlite.bench.config import BenchConfig
from sglang_dlite.bench.prepare import Prepared, prepare_workloads
from sglang_dlite.bench.provenance import provenance
from sglang_dlite.bench.records import Round, RoundResult, RunDirectory
from sglang_dlite.bench.replay import Load, play_round, script_of
from sglang_dlite.bench.step_timer import STEP_TIMES_VARIABLE
from sglang_dlite.bench.sweep import SweepError, run_sweep_point, sweep_command
from sglang_dlite.bench.workloads.recorded import write_agentic_trace
from sglang_dlite.bench.workloads.sessions import Session
from sglang_dlite.chat_api import RequestError
from sglang_dlite.demo.launch import wait_ready
from sglang_dlite.server_process import ServerError, ServerProcess

_SERVER_FACTS = (
    "version",
    "dtype",
    "attention_backend",
    "max_total_num_tokens",
    "speculative_num_draft_tokens",
    "disable_overlap_schedule",
)


class Run:
    """One benchmark in its directory; `execute` goes on where an earlier call stopped."""

    def __init__(
        self, config: BenchConfig, run: RunDirectory, console: Console, max_minutes: float | None
    ) -> None:
        self.config, self.directory, self.console = config, run, console
        self.deadline = time.monotonic() + 60 * max_minutes if max_minutes else float("inf")
        self.arms: dict[str, Arm] = {}
        self.prepared = Prepared()
        self.problems: list[str] = []
        self.facts: dict[str, dict[str, object]] = {}
        self._known: dict[str, list[RoundResult]] = {}  # by workload, for the text fed back

    def execute(self) -> None:
        """Play all rounds that are still to be played.

        Raises:
            WorkloadError, ServerError: nothing can be measured.
        """
        config = self.config
        target = resolve_target(config.target)
        origin = provenance()
        self.directory.bind(config.as_dict())
        self.arms = {arm.name: arm for arm in resolve_arms(config, target, origin["accelerator"])}
        for arm in self.arms.values():
            if arm.skipped:
                self.console.print(f"arm {escape(arm.name)} skipped: {escape(arm.skipped)}")
        if baseline := self.arms[config.baseline].skipped:
            raise ServerError(f"the baseline {config.baseline!r} cannot run here: {baseline}")
        self.prepared = prepare_workloads(config, target)
        self.directory.update_manifest(
            provenance=origin, target=target, workloads=self.prepared.notes
        )
        self._note_arms()
        for result in self.directory.results():
            self._known.setdefault(result.round.workload, []).append(result)
        if not self._missing() and not self._sweep_points(self._running()):
            name = escape(str(self.directory.path))
            self.console.print(f"{name} is complete; to measure anew, remove it or give --out")
        try:
            if config.placement == "together":
                self._play(self._running())
            else:
                for repeat in range(config.repeats):
                    rounds = [round for round in self._rounds() if round.repeat == repeat]
                    for name in dict.fromkeys(round.arm for round in rounds):
                        self._play([name], repeat)
        finally:
            self._note_arms()
            self.directory.update_manifest(problems=self.problems)

    def _running(self) -> list[str]:
        return [arm.name for arm in self.arms.values() if not arm.skipped]

    def _rounds(self) -> list[Round]:
        return schedule.order(self.config, self._running(), list(self.prepared.sessions))

    def _missing(self) -> list[Round]:
        return [round for round in self._rounds() if not self.directory.is_done(round)]

    def _play(self, arms: Sequence[str], repeat: int | None = None) -> None:
        """Start these arms' servers and play their rounds (of one repeat), then their sweep."""
        todo = [
            round
            for round in self._missing()
            if round.arm in arms and repeat in (None, round.repeat)
        ]
        last = repeat in (None, self.config.repeats - 1)
        points = self._sweep_points(arms) if last else []
        if (not todo and not points) or self._is_late():
            return
        with contextlib.ExitStack() as stack:
            servers = self._start(arms, stack)
            turns = sum(len(session.turns) for round in todo for session in self._sessions(round))
            with tqdm(total=turns, unit="turn", smoothing=0.05, dynamic_ncols=True) as bar:
                # Arms of one load belong together: the clock is looked at before the first.
                for _, group in itertools.groupby(todo, key=lambda round: round.load):
                    if self._is_late():
                        break
                    for round in group:
                        if round.arm in servers:
                            self._round(round, servers, bar)
            for arm, concurrency in points:
                if arm in servers and not self._is_late():
                    self._sweep_point(arm, concurrency, servers[arm])

    def _start(self, arms: Sequence[str], stack: contextlib.ExitStack) -> dict[str, ServerProcess]:
        """The servers that came up; the others are skipped from now on, with their reason."""
        servers = {}
        for name in arms:
            arm = self.arms[name]
            steps = self.directory.path / "steps" / f"{name}.jsonl"
            steps.parent.mkdir(parents=True, exist_ok=True)
            env = {STEP_TIMES_VARIABLE: str(steps.resolve())}
            if not Path(arm.target).is_dir() and not hub_is_offline():
                env["HF_HUB_OFFLINE"] = "0"  # a hub id: the server has to fetch it
            servers[name] = ServerProcess(
                arm.target,
                extra_args=arm.server_args,
                log_path=self.directory.path / "logs" / f"{name}.log",
                env=env,
            )
            stack.enter_context(servers[name])
        for name in list(servers):
            try:
                wait_ready(servers[name], f"the server of {name}", self.console)
                self.facts[name] = _facts(servers[name]) | {"command": servers[name].command}
            except ServerError as error:
                self._drop(name, f"it did not start: {error}", servers)
        if self.config.baseline in arms and self.config.baseline not in servers:
            raise ServerError(self.arms[self.config.baseline].skipped or "no baseline")
        self._note_arms()
        return servers

    def _drop(self, name: str, reason: str, servers: dict[str, ServerProcess]) -> None:
        servers.pop(name).stop()
        self.arms[name] = self.arms[name].without(reason)
        self.console.print(f"arm {escape(name)} skipped: {escape(reason)}")

    def _round(self, round: Round, servers: dict[str, ServerProcess], bar: tqdm) -> None:
        config, spec = self.config, self.prepared.specs[round.workload]
        bar.set_description(f"{round.workload} c={round.concurrency} {round.cache} {round.arm}")
        known = self._known.setdefault(round.workload, [])
        replies = [reply for result in known for reply in result.replies]
        sessions = self._sessions(round)
        plan = Load(
            spec,
            sessions,
            config.temperature,
            script_of(spec, sessions, replies),
            config.request_fields,
        )
        server, result, problem = servers[round.arm], None, ""
        try:
            result = asyncio.run(_one_round(server.base_url, round, plan, bar))
        except RequestError as error:
            problem = str(error)
        try:
            server.require_alive()
        except ServerError as error:
            self._drop(round.arm, f"it died: {error}", servers)
            return
        if result is None:
            self.problems.append(f"{round.file_name}: {problem}")
            return
        self.directory.write(result)
        known.append(result)

    def _sessions(self, round: Round) -> Sequence[Session]:
        spec = self.prepared.specs[round.workload]
        sessions = self.prepared.sessions[round.workload]
        return schedule.sessions_of(spec, sessions, round.concurrency)

    def _sweep_points(self, arms: Sequence[str]) -> list[tuple[str, int]]:
        sweep = self.config.sweep
        if sweep is None or sweep.workload not in self.prepared.sessions:
            return []
        points = [(arm, c) for c in sweep.concurrency for arm in arms]
        return [point for point in points if not sweep_file(self.directory, *point).is_file()]

    def _sweep_point(self, arm: str, concurrency: int, server: ServerProcess) -> None:
        sweep = self.config.sweep
        assert sweep is not None
        trace = self.directory.path / "sweep" / f"{sweep.workload}.json"
        write_agentic_trace(trace, self.prepared.sessions[sweep.workload])
        output = sweep_file(self.directory, arm, concurrency)
        part = output.with_suffix(".part")
        target = self.arms[arm].target
        command = sweep_command(
            sweep, server.base_url, target, trace, concurrency, part, self.config.request_fields
        )
        log = self.directory.path / "logs" / f"sweep-{arm}-c{concurrency}.log"
        try:
            with self.console.status(f"bench_serving, {arm}, concurrency {concurrency}"):
                run_sweep_point(command, part, log)
            part.replace(output)
        except SweepError as error:
            self.problems.append(str(error))

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _note_arms(self) -> None:
        """Keep what is known of the arms; also of use if we are killed."""
        earlier = self.directory.manifest().get("arms", {})
        arms = {}
        for name, arm in self.arms.items():
            facts = self.facts.get(name) or earlier.get(name, {}).get("facts", {})
            arms[name] = {
                "algorithm": arm.spec.algorithm,
                "server_args": list(arm.server_args),
                "skipped": arm.skipped,
                "facts": facts,
            }
        self.directory.update_manifest(arms=arms)


def sweep_file(run: RunDirectory, arm: str, concurrency: int) -> Path:
    """Where the figures of one point of the sweep are kept."""
    return run.path / "sweep" / f"{arm}-c{concurrency}.json"


async def _one_round(base_url: str, round: Round, plan: Load, bar: tqdm) -> RoundResult:
    client = StreamingClient(base_url)
    try:
        return await play_round(client, round, plan, on_turn=lambda: _advance(bar))
    finally:
        await client.close()


def _advance(bar: tqdm) -> None:
    bar.update()


def _facts(server: ServerProcess) -> dict[str, object]:
    """What the server says of itself, as far as the report needs it."""
    try:
        reply = httpx.get(f"{server.base_url}/server_info", timeout=30.0, trust_env=False)
        info = reply.raise_for_status().json()
    except (httpx.HTTPError, ValueError):
        return {}
    return {key: info[key] for key in _SERVER_FACTS if key in info}
