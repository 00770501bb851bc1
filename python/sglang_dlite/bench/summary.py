"""All figures of a run in one JSON object, from its directory alone."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from sglang_dlite.bench import measures, schedule
from sglang_dlite.bench.arms import Arm
from sglang_dlite.bench.config import ArmSpec, BenchConfig, config_from_dict
from sglang_dlite.bench.memory import memory_of
from sglang_dlite.bench.records import RoundResult, RunDirectory
from sglang_dlite.bench.runner import sweep_file
from sglang_dlite.bench.sweep import read_sweep_point


def summarise(run: RunDirectory) -> dict[str, Any]:
    """The run's figures; what was not measured is absent or None.

    Raises:
        RunDirectoryError: there is no run in the directory.
    """
    manifest = run.manifest()
    config = config_from_dict(manifest["config"])
    results = run.results()
    by_arm: dict[str, list[RoundResult]] = defaultdict(list)
    for result in results:
        by_arm[result.round.arm].append(result)
    arms = [arm.name for arm in config.arms if arm.name in by_arm]
    lab = run.path / "lab.json"
    return {
        "config": manifest["config"],
        "provenance": manifest.get("provenance", {}),
        "arms": manifest.get("arms", {}),
        "measured_arms": arms,
        "workloads": manifest.get("workloads", {}),
        "not_played": _not_played(run, config, manifest),
        "problems": manifest.get("problems", []),
        "loads": _loads(config, results),
        "acceptance": {
            arm: figures
            for arm in arms
            if (figures := measures.acceptance_figures(by_arm[arm])) is not None
        },
        "acceptance_by_workload": _acceptance_by_workload(config, results),
        "ttft_by_turn": {arm: measures.ttft_by_turn(_one_user(by_arm[arm])) for arm in arms},
        "steps": {
            arm: measures.step_figures(run.path / "steps" / f"{arm}.jsonl", by_arm[arm])
            for arm in arms
        },
        "memory": {arm.name: _memory(config, arm, manifest) for arm in config.arms},
        "sweep": _sweep(run, config),
        "published": [asdict(item) for item in config.published],
        "lab": json.loads(lab.read_text(encoding="utf-8")) if lab.is_file() else None,
    }


def _not_played(run: RunDirectory, config: BenchConfig, manifest: dict[str, Any]) -> list[str]:
    """Rounds and sweep points still to be played, of arms and workloads that can be."""
    notes, states = manifest.get("workloads", {}), manifest.get("arms", {})
    arms = [arm.name for arm in config.arms if not states.get(arm.name, {}).get("skipped")]
    workloads = [w.name for w in config.workloads if not notes.get(w.name, {}).get("skipped")]
    rounds = schedule.order(config, arms, workloads)
    missing = [round.file_name for round in rounds if not run.is_done(round)]
    if config.sweep and config.sweep.workload in workloads:
        points = [sweep_file(run, arm, c) for c in config.sweep.concurrency for arm in arms]
        missing += [f"sweep/{file.name}" for file in points if not file.is_file()]
    return missing


def _loads(config: BenchConfig, results: list[RoundResult]) -> list[dict[str, Any]]:
    """One entry per workload, concurrency, cache and arm."""
    groups: dict[tuple[str, int, str], dict[str, list[RoundResult]]] = defaultdict(dict)
    for result in results:
        key = result.round.load[:3]
        groups[key].setdefault(result.round.arm, []).append(result)
    entries = []
    # In the configuration's order; the cache kept before flushed.
    names = [spec.name for spec in config.workloads]
    for key in sorted(groups, key=lambda k: (names.index(k[0]), k[2] == "cold", k[1])):
        (workload, concurrency, cache), arms = key, groups[key]
        baseline = arms.get(config.baseline, [])
        for arm in (spec.name for spec in config.arms if spec.name in arms):
            rounds = arms[arm]
            figures = measures.load_figures(rounds)
            figures |= {"workload": workload, "concurrency": concurrency, "cache": cache}
            figures |= {
                "arm": arm,
                "speedup": measures.speedup(rounds, baseline),
                "throughput_ratio": measures.throughput_ratio(rounds, baseline),
            }
            entries.append(figures)
    return entries


def _acceptance_by_workload(config: BenchConfig, results: list[RoundResult]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for spec in config.workloads:
        for arm in config.arms:
            rounds = [
                r for r in results if (r.round.workload, r.round.arm) == (spec.name, arm.name)
            ]
            figures = measures.acceptance_figures(rounds)
            if figures is not None:
                found.setdefault(spec.name, {})[arm.name] = figures
    return found


def _one_user(results: list[RoundResult]) -> list[RoundResult]:
    """Rounds at the lowest concurrency, where a first token waits for nobody else's prompt."""
    warm = [result for result in results if result.round.cache == "warm"]
    lowest = min((result.round.concurrency for result in warm), default=0)
    return [result for result in warm if result.round.concurrency == lowest]


def _memory(config: BenchConfig, spec: ArmSpec, manifest: dict[str, Any]) -> Any:
    arm = Arm(spec, manifest.get("target", config.target), ())
    figures = memory_of(config, arm)
    return figures if isinstance(figures, str) else asdict(figures)


def _sweep(run: RunDirectory, config: BenchConfig) -> list[dict[str, Any]]:
    points = []
    for concurrency in config.sweep.concurrency if config.sweep else ():
        for arm in config.arms:
            file = sweep_file(run, arm.name, concurrency)
            if file.is_file():
                point = {"arm": arm.name, "concurrency": concurrency}
                points.append(point | read_sweep_point(file))
    return points
