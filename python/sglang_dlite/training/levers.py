"""Compare settings at equal budgets of time: `python -m sglang_dlite.training.levers`.

A file names a config and, per lever, overrides; `config.stages` holds the shares of the time. The
learning rate follows the time that is spent, so that a budget holds however busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from sglang_dlite.training.config import (
    SHIPPED_CONFIGS,
    TrainConfigError,
    load_config,
)
from sglang_dlite.training.provenance import read_metrics
from sglang_dlite.training.storage import read_lines, write_atomically, write_json

STAGES = ("teacher", "warm_up", "transition", "stable")


def read_levers(path: Path) -> tuple[str, list[str], dict[str, list[str]]]:
    """(config, overrides of all, overrides by lever). Raises `TrainConfigError`."""
    shipped = SHIPPED_CONFIGS / "levers" / f"{path.name}.yaml"
    path = path if path.exists() else shipped
    try:
        raw = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise TrainConfigError(f"cannot read {path}: {error}") from error
    known = {"config", "all", "levers"}
    if not isinstance(raw, dict) or not {"config", "levers"} <= raw.keys() <= known:
        raise TrainConfigError(f"{path}: must hold config, levers and, if wanted, all")
    levers = {str(name): list(overrides or []) for name, overrides in raw["levers"].items()}
    return str(raw["config"]), list(raw.get("all") or []), levers


def run_lever(base: str, overrides: list[str], minutes: float, folder: Path) -> None:
    """Train one lever, or go on with it, and write its `result.json`."""
    from sglang_dlite.training.train import train

    config = load_config(Path(base), overrides)
    shares = {name: getattr(config.stages, name) for name in STAGES}
    budget = {name: minutes * share / sum(shares.values()) for name, share in shares.items()}
    whole = [f"stages.{name}={budget[name]:g}" for name in STAGES]
    whole += ["stages.unit=minutes", f"run.folder={folder}"]
    export = train(load_config(Path(base), [*overrides, *whole]))
    spent = {
        name: _spent(folder / part) for name, part in (("teacher", "teacher"), ("drafter", ""))
    }
    result = {
        "overrides": overrides,
        "steps": {name: line["step"] for name, line in spent.items() if line},
        "seconds": sum(line["train_seconds"] for line in spent.values() if line),
        "command": shlex.join(["sglang-dlite", "train", base, *overrides, *whole]),
    }
    result |= read_metrics(export)
    write_json(folder / "result.json", result)


def _spent(folder: Path) -> dict[str, Any]:
    """The last evaluation of a model's training; empty where there was none."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "eval"]
    return lines[-1] if lines else {}


def finished(out: Path, levers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results in `out`, of whichever call."""
    paths = {name: out / name / "result.json" for name in levers}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def table(results: dict[str, dict[str, Any]], minutes: float) -> str:
    """Markdown, best first."""
    lines = [
        f"Equal budgets of {minutes:g} minutes of training each.",
        "",
        "| lever | overrides | steps | seconds | held-out tau | tau on eval.folders "
        "| expected length |",
        "|---|---|---|---|---|---|---|",
    ]
    ranked = sorted(
        results.items(), key=lambda item: -item[1].get("best", {}).get("tau", {}).get("mean", 0)
    )
    for name, result in ranked:
        best, final = result.get("best", {}), result.get("simulated_tau", {})
        cells = (best.get("tau", {}).get("mean"), final.get("mean"), best.get("expected_length"))
        shown = " | ".join("" if cell is None else f"{cell:.3f}" for cell in cells)
        steps = " + ".join(f"{count} {stage}" for stage, count in result["steps"].items())
        about = f"{name} | {' '.join(result['overrides'])} | {steps} | {result['seconds']:.0f}"
        lines.append(f"| {about} | {shown} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run levers of a file and write `levers.md` of all that are finished; none is run again."""
    from sglang_dlite.training.divergence import TrainingDiverged
    from sglang_dlite.training.train import ERRORS

    parser = argparse.ArgumentParser(prog="levers", description=main.__doc__)
    parser.add_argument("levers", type=Path, help="YAML file, or the name of a shipped one")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time of each")
    parser.add_argument("--out", type=Path, default=Path("work/levers"))
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="repeatable")
    args = parser.parse_args(argv)
    diverged: list[str] = []
    try:
        base, common, levers = read_levers(args.levers)
        unknown = sorted(set(args.only) - levers.keys())
        if unknown:
            raise TrainConfigError(f"--only {unknown}: the levers are {', '.join(levers)}")
        for name, overrides in levers.items():
            if args.only and name not in args.only:
                continue
            if finished(args.out, [name]):
                continue
            print(f"levers: {name}", file=sys.stderr)
            try:
                run_lever(base, [*common, *overrides], args.minutes, args.out / name)
            except TrainingDiverged as error:  # a finding about this one; the others go on
                print(f"levers: {name} diverged: {error}", file=sys.stderr)
                diverged.append(name)
                continue
            _write_table(args.out, levers, args.minutes)
        print(_write_table(args.out, levers, args.minutes))
    except ERRORS as error:
        print(f"levers: {error}", file=sys.stderr)
        return 1
    return 1 if diverged else 0


def _write_table(out: Path, levers: Iterable[str], minutes: float) -> str:
    text = table(finished(out, levers), minutes)
    write_atomically(out / "levers.md", lambda file: file.write(text.encode()))
    return text


if __name__ == "__main__":
    raise SystemExit(main())
