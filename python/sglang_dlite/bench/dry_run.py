"""What a configuration would run, without running it: launch lines, rounds, disk and time.

Needs no network and no GPU. Nothing is measured here: the time follows from the configuration's
`assumed` speeds, which are printed beside it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

from sglang_dlite.bench import schedule
from sglang_dlite.bench.arms import (
    EMBEDDED,
    Arm,
    cached_snapshot,
    checkpoint_problem,
    resolve_drafter,
    skip_reason,
    speculative_args,
)
from sglang_dlite.bench.config import BenchConfig, BenchConfigError, WorkloadSpec
from sglang_dlite.bench.memory import memory_of
from sglang_dlite.bench.provenance import device_name
from sglang_dlite.embedded_model import embedded_model_dir
from sglang_dlite.server_process import launch_command

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
# Of one reply in raw/: text, token ids, and the time of every chunk.
_BYTES_PER_OUTPUT_TOKEN = 40
_PORT = 30000  # stands for the free port that a run takes


@cache
def known_flags() -> frozenset[str]:
    """The flags of the installed `sglang.launch_server`, from its own help; empty without it."""
    try:
        shown = subprocess.run(
            [sys.executable, "-m", "sglang.launch_server", "--help"],
            capture_output=True,
            text=True,
            timeout=180,
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(_FLAG.findall(shown.stdout)) if shown.returncode == 0 else frozenset()


def unknown_flags(config: BenchConfig) -> list[str]:
    """Launch flags of the arms that the installed SGLang does not have."""
    flags = known_flags()
    used = [(arm.name, (*config.server_args, *speculative_args(arm))) for arm in config.arms]
    return [
        f"{name}: {item}"
        for name, args in used
        for item in args
        if flags and item.startswith("--") and item.partition("=")[0] not in flags
    ]


def describe(config: BenchConfig, accelerator: bool) -> Iterator[str]:
    """The lines that a dry run prints.

    Raises:
        BenchConfigError: a launch flag that the installed SGLang does not know.
    """
    if wrong := unknown_flags(config):
        raise BenchConfigError(
            "the installed sglang.launch_server has no such flag: " + "; ".join(wrong)
        )
    checked = "known to the installed SGLang" if known_flags() else "not checked: no SGLang here"
    yield f"{config.name}: {config.title}"
    yield f"this machine: {device_name()}{'' if accelerator else ' (no accelerator)'}"
    yield f"target: {config.target}"
    yield ""
    target = str(embedded_model_dir()) if config.target == EMBEDDED else config.target
    yield f"{len(config.arms)} arms; servers {config.placement}; launch flags {checked}"
    for spec in config.arms:
        args = (*config.server_args, *speculative_args(spec))
        command = launch_command(target, None, _PORT, args)
        reason = None if config.target == EMBEDDED else checkpoint_problem(config.target)
        reason = reason or skip_reason(spec, accelerator)
        yield f"  {spec.name}" + (f"  [skipped on this machine: {reason}]" if reason else "")
        yield f"    {shlex.join(['python', *command[1:]])}"
    yield ""
    yield from _workloads(config)
    yield ""
    yield from _estimates(config)
    if config.published:
        yield ""
        yield f"{len(config.published)} published figures stand beside the measured ones"
        yield f"  from {config.published_source}"


def _workloads(config: BenchConfig) -> Iterator[str]:
    yield f"{len(config.workloads)} workloads, {config.repeats} repeats"
    for spec in config.workloads:
        levels = list(schedule.loads(config, spec.name))
        shown = ", ".join(f"{c}{' cold' if kind == 'cold' else ''}" for c, kind in levels)
        source = spec.path or ("this interpreter" if spec.kind == "generated" else "the hub")
        optional = " (left out where absent)" if spec.optional else ""
        yield (
            f"  {spec.name}: {spec.kind} from {source}{optional}; up to {spec.sessions} sessions, "
            f"replies of at most {spec.max_tokens} tokens, context at most {spec.max_context}; "
            f"concurrency {shown}"
        )
    if config.sweep:
        levels_text = ", ".join(map(str, config.sweep.concurrency))
        yield f"  sweep by sglang.bench_serving over {config.sweep.workload}: {levels_text}"
    if config.lab:
        yield f"  acceptance lab over {config.lab.workload}: {config.lab.sessions} sessions"


def _turns(spec: WorkloadSpec) -> int:
    return spec.turns or (4 if spec.kind in ("generated", "messages", "bfcl-multi-turn") else 1)


def _round_seconds(config: BenchConfig, spec: WorkloadSpec, concurrency: int, kind: str) -> float:
    """A round's time by the assumed speeds: prompts one after the other, decoding together."""
    assumed, turns = config.assumed, _turns(spec)
    count = min(spec.sessions, max(concurrency, spec.min_sessions))
    prompt = spec.expected_prompt_tokens * turns
    if kind == "cold":
        prompt = spec.expected_prompt_tokens * turns * (turns + 1) // 2
    users = min(concurrency, count)
    speed = min(users * assumed.tok_per_s, assumed.tok_per_s_limit)
    return count * (prompt / assumed.prefill_tok_per_s + turns * spec.max_tokens / speed)


def _estimates(config: BenchConfig) -> Iterator[str]:
    assumed = config.assumed
    arms, workloads = [arm.name for arm in config.arms], [w.name for w in config.workloads]
    rounds = schedule.order(config, arms, workloads)
    specs = {spec.name: spec for spec in config.workloads}
    playing = sum(_round_seconds(config, specs[r.workload], r.concurrency, r.cache) for r in rounds)
    starts = 1 if config.placement == "together" else config.repeats * len(arms)
    yield f"{len(rounds)} rounds if every arm runs"
    yield (
        f"time: about {(playing + starts * assumed.start_s) / 3600:.1f} h (rounds "
        f"{playing / 3600:.1f} h, {starts} starts of {assumed.start_s:g} s), if a user gets "
        f"{assumed.tok_per_s:g} tok/s, all users together at most {assumed.tok_per_s_limit:g}, and "
        f"prompts are read at {assumed.prefill_tok_per_s:g} tok/s; a faster arm takes less"
    )
    replies = sum(
        _turns(specs[r.workload])
        * min(specs[r.workload].sessions, max(r.concurrency, specs[r.workload].min_sessions))
        * specs[r.workload].max_tokens
        for r in rounds
    )
    yield from _disk(config, replies * _BYTES_PER_OUTPUT_TOKEN)
    target = str(embedded_model_dir()) if config.target == EMBEDDED else config.target
    for spec in config.arms:
        found = memory_of(config, Arm(spec, target, ()))
        if isinstance(found, str):
            yield f"memory, {spec.name}: {found}"
        else:
            fits = ", ".join(
                f"{'?' if n is None else n} of {length // 1024}k"
                for length, n in found.sessions.items()
            )
            yield (
                f"memory, {spec.name}: draft KV {found.draft_kv} B/token, state {found.state} "
                f"B/request, beside {found.target_kv} B/token of the target; in "
                f"{config.memory_gib:g} GiB fit {fits} sessions"
            )


def _disk(config: BenchConfig, raw_bytes: int) -> Iterator[str]:
    wanted = [(config.target, config.assumed.target_gb)]
    wanted += [(arm.drafter, arm.drafter_gb) for arm in config.arms if arm.drafter]
    missing, unknown = 0.0, []
    for name, size in dict(wanted).items():
        if name == EMBEDDED or cached_snapshot(resolve_drafter(name)) is not None:
            continue
        if size is None:
            unknown.append(name)
        else:
            missing += size
    yield (
        f"disk: {missing:.1f} GB of checkpoints to fetch"
        + (f" and {', '.join(unknown)} of unknown size" if unknown else "")
        + f", at most {raw_bytes / 1e6:.0f} MB of raw records, and the data sets"
    )
