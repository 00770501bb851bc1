"""A benchmark's configuration: arms, workloads and loads, read from YAML and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import yaml

SUFFIX = ".yaml"
HISTORIES = ("first", "own", "recorded")
PLACEMENTS = ("together", "alone")
# Upstream's names, and ours; None (no `algorithm`) is the target alone.
ALGORITHMS = ("DLITE", "NGRAM", "EAGLE", "EAGLE3", "DFLASH", "DSPARK", "STANDALONE")
NEEDS_DRAFTER = frozenset(ALGORITHMS) - {"NGRAM"}


class BenchConfigError(ValueError):
    """A key or value of a configuration cannot be used; the message names it."""


@dataclass(frozen=True)
class ArmSpec:
    """One server to measure: the common flags, and these."""

    name: str
    algorithm: str | None = None
    drafter: str | None = None  # directory, hub id, or `shipped`
    args: tuple[str, ...] = ()
    drafter_gb: float | None = None  # size of the checkpoint, where it is not on this disk
    shape: dict[str, int] | None = None  # fields of its config.json, where that is not on this disk

    def __post_init__(self) -> None:
        where = f"arms: {self.name!r}"
        if self.algorithm is not None and self.algorithm not in ALGORITHMS:
            raise BenchConfigError(
                f"{where}: algorithm {self.algorithm!r}; allowed: {', '.join(ALGORITHMS)}, or "
                "leave it out for the target alone"
            )
        if self.algorithm in NEEDS_DRAFTER and not self.drafter:
            raise BenchConfigError(f"{where}: {self.algorithm} needs a `drafter`")
        if self.drafter and self.algorithm not in NEEDS_DRAFTER:
            raise BenchConfigError(f"{where}: drafter {self.drafter!r} without such an algorithm")


@dataclass(frozen=True)
class WorkloadSpec:
    """Where sessions come from and how they are played."""

    name: str
    kind: str
    path: str | None = None  # relative to the current directory
    sessions: int = 16  # the first that fit
    turns: int | None = None  # only the first; None: all (4 of a generated session)
    concurrency: tuple[int, ...] | None = None  # instead of the configuration's
    history: str = "first"
    max_tokens: int = 128  # longest reply
    max_context: int = 8192  # tokens; later turns of longer sessions are not played
    min_chars: int = 0  # shorter sessions are left out
    min_sessions: int = 2  # played at low concurrency, too
    cold: bool = False  # also play with the cache flushed before every turn, one user
    optional: bool = False  # left out, with its reason, where its data is absent
    seed: int = 0  # of generated sessions
    read_chars: int = 1500  # source shown per turn of generated sessions
    held_out: bool = True  # generated sessions read only what the shipped drafter has not seen
    expected_prompt_tokens: int = 500  # per turn, for the estimate of a dry run

    def __post_init__(self) -> None:
        from sglang_dlite.bench.workloads import known_kinds

        where = f"workloads: {self.name!r}"
        if self.kind not in known_kinds():
            raise BenchConfigError(
                f"{where}: kind {self.kind!r}; allowed: {', '.join(known_kinds())}"
            )
        if self.kind in ("messages", "swe-agent", "agentic-trace") and not self.path:
            raise BenchConfigError(f"{where}: kind {self.kind!r} needs a `path`")
        if self.history not in HISTORIES:
            raise BenchConfigError(
                f"{where}: history {self.history!r}; allowed: {', '.join(HISTORIES)}"
            )
        counts = {"sessions": self.sessions, "min_sessions": self.min_sessions}
        _at_least_one(where, **counts, max_tokens=self.max_tokens, turns=self.turns)
        _at_least_one(where, **{f"concurrency {c}": c for c in self.concurrency or ()})


@dataclass(frozen=True)
class SweepSpec:
    """An open-loop sweep by `python -m sglang.bench_serving` over a workload's sessions."""

    workload: str
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    output_tokens: int = 128
    prompts_per_user: int = 4

    def __post_init__(self) -> None:
        _at_least_one("sweep", output_tokens=self.output_tokens, prompts=self.prompts_per_user)
        _at_least_one("sweep", **{f"concurrency {c}": c for c in self.concurrency})


@dataclass(frozen=True)
class LabSpec:
    """Acceptance without a server: greedy replies of the target, played through drafters."""

    workload: str
    sessions: int = 6
    max_tokens: int = 96
    drafter: str = "shipped"
    teacher: str | None = None

    def __post_init__(self) -> None:
        _at_least_one("lab", sessions=self.sessions, max_tokens=self.max_tokens)


@dataclass(frozen=True)
class Published:
    """A figure from a publication, shown beside the measured one."""

    workload: str
    arm: str
    measure: str  # speedup | tau
    value: float
    concurrency: int = 1


@dataclass(frozen=True)
class Assumed:
    """What a dry run reckons with; printed beside the estimate."""

    start_s: float = 60.0
    tok_per_s: float = 50.0  # of one user
    tok_per_s_limit: float = 1000.0  # of all users together
    prefill_tok_per_s: float = 5000.0
    target_gb: float | None = None  # size of the target's checkpoint, where it is not on this disk


@dataclass(frozen=True)
class BenchConfig:
    name: str
    target: str  # directory, hub id, or `embedded`
    arms: tuple[ArmSpec, ...]
    workloads: tuple[WorkloadSpec, ...]
    title: str = ""
    target_shape: dict[str, int] | None = None  # fields of its config.json, where it is not here
    server_args: tuple[str, ...] = ()  # of every arm
    baseline: str = "target-only"
    placement: str = "alone"  # servers up together (an idle one sleeps), or one at a time
    concurrency: tuple[int, ...] = (1, 4, 16)
    repeats: int = 3
    temperature: float = 0.0
    request_fields: dict[str, Any] = field(default_factory=dict)  # added to every chat request
    memory_gib: float = 80.0  # for the arithmetic of sessions that fit
    sweep: SweepSpec | None = None
    lab: LabSpec | None = None
    published: tuple[Published, ...] = ()
    published_source: str = ""
    assumed: Assumed = field(default_factory=Assumed)

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise BenchConfigError(
                f"placement {self.placement!r}; allowed: {', '.join(PLACEMENTS)}"
            )
        for key, items in (("arms", self.arms), ("workloads", self.workloads)):
            names = [item.name for item in items]
            if not names or len(set(names)) != len(names):
                raise BenchConfigError(f"{key}: names must be there and differ, not {names}")
            for name in names:
                if "/" in name:
                    raise BenchConfigError(f"{key}: {name!r} must not contain '/'")
        arms = {arm.name for arm in self.arms}
        workloads = {item.name for item in self.workloads}
        if self.baseline not in arms:
            raise BenchConfigError(f"baseline {self.baseline!r} is none of the arms {sorted(arms)}")
        for part in (self.sweep, self.lab):
            if part is not None and part.workload not in workloads:
                raise BenchConfigError(
                    f"{type(part).__name__}: workload {part.workload!r} is none of "
                    f"{sorted(workloads)}"
                )
        for item in self.published:
            if item.arm not in arms or item.workload not in workloads:
                raise BenchConfigError(
                    f"published: {item.workload!r} / {item.arm!r} is not a workload and an arm"
                )
        _at_least_one("", repeats=self.repeats)
        _at_least_one("", **{f"concurrency {c}": c for c in self.concurrency})

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _at_least_one(where: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise BenchConfigError(f"{where + ': ' if where else ''}{name} must be 1 or more")


T = TypeVar("T")

_PARTS: dict[str, tuple[type, bool]] = {  # key -> (class, whether a list)
    "arms": (ArmSpec, True),
    "workloads": (WorkloadSpec, True),
    "published": (Published, True),
    "sweep": (SweepSpec, False),
    "lab": (LabSpec, False),
    "assumed": (Assumed, False),
}


def _build(kind: type[T], values: object, where: str) -> T:
    """One dataclass from a mapping; every key must be a field, every list becomes a tuple."""
    if not isinstance(values, dict):
        raise BenchConfigError(f"{where}: must be a mapping, not {values!r}")
    fields = {item.name: item for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise BenchConfigError(f"{where}: unknown key {key!r}; allowed: {', '.join(fields)}")
    made = {}
    for key, value in values.items():
        if kind is BenchConfig and key in _PARTS and value is not None:
            part, many = _PARTS[key]
            if many:
                if not isinstance(value, list):
                    raise BenchConfigError(f"{key}: must be a list, not {value!r}")
                value = tuple(_build(part, item, f"{key}[{i}]") for i, item in enumerate(value))
            else:
                value = _build(part, value, key)
        elif isinstance(value, list):
            value = tuple(str(v) if key in ("args", "server_args") else v for v in value)
        made[key] = value
    try:
        return kind(**made)
    except TypeError as error:
        raise BenchConfigError(f"{where}: {error}") from error


def config_from_dict(values: dict[str, Any]) -> BenchConfig:
    """The configuration that `as_dict` gave, or a mapping read from elsewhere.

    Raises:
        BenchConfigError: names the key, the value and what is allowed.
    """
    return _build(BenchConfig, values, "the configuration")


def shipped_configs() -> list[str]:
    """The names that `--config` knows."""
    folder = resources.files("sglang_dlite.bench") / "configs"
    return sorted(f.name.removesuffix(SUFFIX) for f in folder.iterdir() if f.name.endswith(SUFFIX))


def load_config(name_or_path: str) -> BenchConfig:
    """A shipped configuration by name, or a YAML file.

    Raises:
        BenchConfigError: names the file, the key, the value and what is allowed.
    """
    if name_or_path in shipped_configs():
        source = resources.files("sglang_dlite.bench") / "configs" / f"{name_or_path}{SUFFIX}"
        text = source.read_text(encoding="utf-8")
    elif Path(name_or_path).is_file():
        text = Path(name_or_path).read_text(encoding="utf-8")
    else:
        raise BenchConfigError(
            f"--config {name_or_path!r} is neither a file nor one of {', '.join(shipped_configs())}"
        )
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BenchConfigError(f"{name_or_path}: not YAML: {error}") from error
    try:
        return config_from_dict(values)
    except BenchConfigError as error:
        raise BenchConfigError(f"{name_or_path}: {error}") from error
