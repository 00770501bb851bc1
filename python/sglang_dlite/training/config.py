"""The trainer's configuration: typed sections, read from YAML, overridable on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


class TrainConfigError(ValueError):
    """A configuration key or value cannot be used; the message names it."""


@dataclass(frozen=True)
class DataSection:
    folders: tuple[str, ...] = ()  # data sets written by `generate`
    held_out_percent: float = 3.0  # share of the prompts that is only evaluated on
    eval_folders: tuple[str, ...] = ()  # greedy replies to evaluation prompts, only simulated on


@dataclass(frozen=True)
class ModelSection:
    target: str | None = None  # HF directory; None is the embedded model
    num_layers: int = 2  # D
    block_size: int = 8  # B = K + 1
    rank: int = 128  # R
    group_size: int = 2  # G
    mask_token_id: int = 4  # a vocabulary row that text never produces
    warm_start: bool = True


@dataclass(frozen=True)
class LossSection:
    w_ce: float = 0.1
    w_tv: float = 1.0
    gamma: float = 4.0


@dataclass(frozen=True)
class OptimSection:
    steps: int = 4000
    batch_anchors: int = 128
    lr: float = 6e-4
    warmup_ratio: float = 0.04
    clip: float = 1.0
    betas: tuple[float, ...] = (0.9, 0.95)
    seed: int = 0


@dataclass(frozen=True)
class RunSection:
    folder: str = "work/run"
    init_from: str | None = None  # a drafter to go on from, instead of a warm start
    export: str | None = None  # where the finished drafter goes; None: <folder>/drafter
    threads: int = 0  # 0 leaves torch's choice
    bf16: bool = True
    log_every: int = 25
    eval_every: int = 250
    checkpoint_every: int = 250
    eval_replies: int = 96  # held-out replies per evaluation


@dataclass(frozen=True)
class TrainConfig:
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    loss: LossSection = field(default_factory=LossSection)
    optim: OptimSection = field(default_factory=OptimSection)
    run: RunSection = field(default_factory=RunSection)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __post_init__(self) -> None:
        for name, value in (
            ("optim.steps", self.optim.steps),
            ("optim.batch_anchors", self.optim.batch_anchors),
            ("optim.lr", self.optim.lr),
            ("loss.gamma", self.loss.gamma),
            ("run.log_every", self.run.log_every),
            ("run.eval_every", self.run.eval_every),
            ("run.checkpoint_every", self.run.checkpoint_every),
        ):
            if value <= 0:
                raise TrainConfigError(f"{name} = {value}: must be above 0")
        if not 0 <= self.optim.warmup_ratio < 1:
            raise TrainConfigError(f"optim.warmup_ratio = {self.optim.warmup_ratio}: must be 0..1")


def load_config(path: Path, overrides: list[str]) -> TrainConfig:
    """Read a YAML file and apply `section.key=value` overrides (values are YAML too)."""
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise TrainConfigError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise TrainConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise TrainConfigError(f"{path}: must hold sections, not {type(raw).__name__}")
    for item in overrides:
        name, equals, text = item.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise TrainConfigError(f"override {item!r}: must be section.key=value")
        raw.setdefault(section, {})
        if not isinstance(raw[section], dict):
            raise TrainConfigError(f"section {section!r} must hold keys")
        raw[section][key] = yaml.safe_load(text)
    return from_dict(raw)


def from_dict(raw: dict[str, Any]) -> TrainConfig:
    """Build and check a config. `TrainConfigError` names an unknown key or a mistyped value."""
    sections = {f.name: f.default_factory for f in dataclasses.fields(TrainConfig)}
    built: dict[str, Any] = {}
    for name, values in raw.items():
        if name not in sections:
            raise TrainConfigError(f"unknown section {name!r}; known: {', '.join(sections)}")
        if not isinstance(values, dict):
            raise TrainConfigError(f"section {name!r} must hold keys, not {values!r}")
        built[name] = _section(sections[name], name, values)
    return TrainConfig(**built)


def _section(kind: Any, section: str, values: dict[str, Any]) -> Any:
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            raise TrainConfigError(
                f"unknown key {section}.{key}; known in {section}: {', '.join(known)}"
            )
    return kind(**{key: _value(f"{section}.{key}", known[key], v) for key, v in values.items()})


# Declared type -> the YAML types it takes and how to convert. bool is checked apart: it is an int.
_CONVERT: dict[str, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
    "float": ((int, float, str), float),  # YAML reads 6e-4 as a string
    "int": ((int,), int),
    "bool": ((bool,), bool),
    "str": ((str,), str),
    "str | None": ((str, type(None)), lambda value: value),
    "tuple[str, ...]": ((list,), lambda value: tuple(str(item) for item in value)),
    "tuple[float, ...]": ((list,), lambda value: tuple(float(item) for item in value)),
}


def _value(name: str, declared: dataclasses.Field[Any], value: Any) -> Any:
    """Check a YAML value against the declared type (a string, as annotations are postponed)."""
    kind = str(declared.type)
    accepted, convert = _CONVERT[kind]
    if isinstance(value, accepted) and (isinstance(value, bool) == (kind == "bool")):
        try:
            return convert(value)
        except (TypeError, ValueError):
            pass
    raise TrainConfigError(f"{name} = {value!r}: must be {kind}")
