"""`sglang-dlite bench`: play a configuration's arms and workloads, write the report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from sglang_dlite.bench.config import BenchConfig, BenchConfigError, load_config, shipped_configs
from sglang_dlite.bench.records import RunDirectory, RunDirectoryError
from sglang_dlite.bench.workloads.sessions import WorkloadError

PARTS = ("servers", "lab", "report")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--config",
        default="cpu",
        help=f"a YAML file, or one of {', '.join(shipped_configs())} (default: %(default)s)",
    )
    add(
        "--out",
        type=Path,
        help="folder of the run (default: work/bench/<config>); a run that was stopped goes on",
    )
    add("--max-minutes", type=float, help="start no further round after this time")
    add(
        "--only",
        choices=PARTS,
        action="append",
        help="do only this part: play the rounds, the lab, or write the report anew; repeatable",
    )
    add("--dry-run", action="store_true", help="print what would run, offline, and stop")


def run(args: argparse.Namespace) -> int:
    try:
        config = load_config(args.config)
        if args.max_minutes is not None and args.max_minutes <= 0:
            raise BenchConfigError(f"--max-minutes {args.max_minutes:g} must be above 0")
        if args.dry_run:
            return _dry_run(config)
    except BenchConfigError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return _execute(args, config)


def _dry_run(config: BenchConfig) -> int:
    from sglang_dlite.bench.dry_run import describe
    from sglang_dlite.platforms import has_accelerator

    for line in describe(config, has_accelerator()):
        print(line)
    return 0


def _execute(args: argparse.Namespace, config: BenchConfig) -> int:
    from sglang_dlite.bench.report.write import write_report
    from sglang_dlite.bench.runner import Run
    from sglang_dlite.demo.launch import ending_by_exception
    from sglang_dlite.embedded_model import EmbeddedModelError
    from sglang_dlite.server_process import ServerError

    console = Console()
    directory = RunDirectory(args.out or Path("work/bench") / config.name)
    parts = args.only or PARTS
    try:
        with ending_by_exception():
            if "servers" in parts:
                Run(config, directory, console, args.max_minutes).execute()
            if "lab" in parts and config.lab is not None:
                _lab(config, directory, console)
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on with {escape(str(directory.path))}")
        return 130
    except (EmbeddedModelError, RunDirectoryError, ServerError, WorkloadError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if "report" in parts:
        try:
            page = write_report(directory)
        except RunDirectoryError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        console.print(f"wrote {escape(str(page))} (and report.md, summary.json)", soft_wrap=True)
    return 0


def _lab(config: BenchConfig, directory: RunDirectory, console: Console) -> None:
    """Play the lab, unless the run has its figures already."""
    from sglang_dlite.bench.arms import resolve_drafter, resolve_target
    from sglang_dlite.bench.lab import run_lab
    from sglang_dlite.bench.prepare import prepare_workload
    from sglang_dlite.files import write_atomic

    assert config.lab is not None
    directory.bind(config.as_dict())
    output = directory.path / "lab.json"
    if output.is_file():
        return
    target = resolve_target(config.target)
    spec = next(item for item in config.workloads if item.name == config.lab.workload)
    sessions, _ = prepare_workload(spec, target)
    console.print(f"acceptance lab: {config.lab.sessions} sessions of {escape(spec.name)}")
    result = run_lab(
        target,
        Path(resolve_drafter(config.lab.drafter)),
        sessions[: config.lab.sessions],
        config.lab.max_tokens,
        teacher_path=Path(config.lab.teacher) if config.lab.teacher else None,
        template=config.request_fields.get("chat_template_kwargs"),
    )
    write_atomic(output, json.dumps(result, indent=1) + "\n")
