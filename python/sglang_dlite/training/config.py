"""The trainer's configuration: typed sections, read from YAML, overridable on the command line."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

SHIPPED_CONFIGS = Path(__file__).parent / "configs"


class TrainConfigError(ValueError):
    """A configuration key or value cannot be used; the message names it."""


@dataclass(frozen=True)
class TargetSection:
    """The frozen target. The shape keys let `--dry-run` do without the target's files."""

    path: str | None = None  # HF directory or name; None is the embedded model
    dtype: str = "bfloat16"  # float32, bfloat16 or float16
    architecture: str | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    rms_norm_eps: float | None = None
    rope_theta: float | None = None


@dataclass(frozen=True)
class DataSection:
    replies: tuple[str, ...] = ()  # data sets written by `generate`
    held_out_percent: float = 3.0  # share of the sessions that is only evaluated on
    max_tokens: int = 8192  # prompt + reply; longer ones are left out
    min_reply_tokens: int = 2  # an anchor needs a label
    drop_looping: bool = False  # leave out replies that repeat themselves (reply_kinds.py)
    # Keep the anchors before a reply's third round of the same only (reply_kinds.loop_start).
    cut_loops: bool = False
    # How often an epoch visits a source's replies, by source; once where none is named.
    weights: dict[str, float] = field(default_factory=dict)
    states: str = "online"  # online: a target forward per batch; cache: written by `cache-states`
    cache: str = "work/states"  # folder of the cache
    cached_anchors_per_reply: int = 256
    cached_layer_ids: tuple[int, ...] = ()  # more than the drafter's, for drafters to come
    top_k: int = 0  # target law on its likeliest top_k tokens, renormalised; 0: all of it


@dataclass(frozen=True)
class ModelSection:
    """The drafter. Symbols as in drafter/config.py."""

    num_layers: int = 2  # D
    block_size: int = 8  # B = K + 1
    rank: int = 128  # R
    group_size: int = 2  # G
    pivot_states: int = 8  # S, placed by the release's rule
    target_layer_ids: tuple[int, ...] = ()  # instead of the rule
    intermediate_size: int | None = None  # of the MLPs; None: the target's
    mask_token_id: int | None = None  # a row that text never produces; None: the embedded model's
    warm_start: bool = True  # from the target's weights
    window: int = 32  # W of the teacher


@dataclass(frozen=True)
class StagesSection:
    """How long each stage lasts; 0 switches it off. Direct training has only `stable`."""

    # epochs (fractions allowed), steps, or minutes: of training, evaluations and the first step
    # after a start (which compiles) not counted. Minutes do not give the same run twice.
    unit: str = "epochs"
    teacher: float = 0.0  # the history-aware teacher, against the target
    warm_up: float = 0.0  # drafter against the teacher's law; head copied and frozen
    transition: float = 0.0  # cosine from the warm-up's loss to the stable one; head free
    stable: float = 6.0  # drafter against the target


@dataclass(frozen=True)
class LossSection:
    """Weights against the target's law; draft j = 0..K-1 weighs exp(-j/gamma)."""

    w_ce: float = 0.1
    w_tv: float = 1.0  # L1 distance of the laws, without the half
    w_base: float = 0.0  # CE of the target's lm_head on the backbone's hiddens
    gamma: float = 4.0
    base_gamma: float = 12.0
    # Keep draft j with probability exp(-j/gamma) instead of weighing it: the same in expectation,
    # for about half of the vocabulary work.
    sample_positions: bool = False


@dataclass(frozen=True)
class DistillSection:
    """Warm-up: forward KL(teacher || drafter) on the head's logits."""

    w_kl: float = 1.0
    gamma: float = 0.0  # 0: no decay over the drafts
    keep: float = 1.0  # share of the drafts to compare, at random: the same in expectation


@dataclass(frozen=True)
class OptimSection:
    batch_replies: int = 8  # replies per optimiser step, over all processes
    anchors_per_reply: int = 16  # random anchors of each, drawn anew at each visit
    micro_replies: int = 8  # replies per forward pass; the rest is accumulation and processes
    lr: float = 6e-4
    teacher_lr: float = 4e-4
    warmup_ratio: float = 0.04
    clip: float = 1.0
    betas: tuple[float, ...] = (0.9, 0.95)
    # Decay per step of a moving average of the weights, which is then what is evaluated, kept and
    # exported (average.py); 0: none.
    ema: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class EvalSection:
    replies: int = 60  # held-out replies walked through at each evaluation, kept in memory
    max_tokens: int = 4096  # longer ones are not picked for it
    folders: tuple[str, ...] = ()  # greedy replies to evaluation prompts, walked through at the end


@dataclass(frozen=True)
class RunSection:
    folder: str = "work/run"
    device: str = "auto"  # auto, cpu, cuda; meta with --dry-run only
    # What to go on from, instead of a fresh or warm start: a run's folder (fp32 weights, AdamW's
    # moments, no warm-up), or a drafter's (bf16 weights alone).
    init_from: str | None = None
    teacher_from: str | None = None  # a trained teacher, instead of the teacher stage
    export: str | None = None  # where the finished drafter goes; None: <folder>/drafter
    threads: int = 0  # 0 leaves torch's choice
    bf16: bool = True  # autocast; master weights are fp32
    compile: bool = False  # torch.compile the layers: a minute or two at first, faster steps then
    log_every: int = 25  # steps, as are the next two
    eval_every: int = 250
    checkpoint_every: int = 250


@dataclass(frozen=True)
class TrainConfig:
    target: TargetSection = field(default_factory=TargetSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    stages: StagesSection = field(default_factory=StagesSection)
    loss: LossSection = field(default_factory=LossSection)
    teacher_loss: LossSection = field(default_factory=LossSection)
    distill: DistillSection = field(default_factory=DistillSection)
    optim: OptimSection = field(default_factory=OptimSection)
    eval: EvalSection = field(default_factory=EvalSection)
    run: RunSection = field(default_factory=RunSection)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def export_folder(self) -> Path:
        """Where the finished drafter goes."""
        return Path(self.run.export or Path(self.run.folder) / "drafter")

    @property
    def has_teacher(self) -> bool:
        """Whether there is one; the drafter then starts with its head."""
        return bool(self.stages.teacher or self.run.teacher_from)

    @property
    def needs_teacher(self) -> bool:
        return self.stages.warm_up > 0 or self.stages.transition > 0

    @property
    def uses_history(self) -> bool:
        """Whether a teacher looks at a window: one that is trained, or that the drafter learns
        from."""
        return self.stages.teacher > 0 or self.needs_teacher

    def __post_init__(self) -> None:
        positive = (
            *("optim.batch_replies", "optim.anchors_per_reply", "optim.micro_replies"),
            *("optim.lr", "optim.teacher_lr", "optim.clip"),
            *("loss.gamma", "loss.base_gamma", "teacher_loss.gamma", "teacher_loss.base_gamma"),
            *("run.log_every", "run.eval_every", "run.checkpoint_every"),
            *("data.cached_anchors_per_reply", "data.max_tokens"),
        )
        not_negative = (
            *("stages.teacher", "stages.warm_up", "stages.transition", "stages.stable"),
            *("data.top_k", "distill.gamma", "eval.replies", "run.threads"),
        )
        for name in positive:
            if self._get(name) <= 0:
                raise TrainConfigError(f"{name} = {self._get(name)}: must be above 0")
        for name in not_negative:
            if self._get(name) < 0:
                raise TrainConfigError(f"{name} = {self._get(name)}: must be 0 or above")
        for name, allowed in (
            ("stages.unit", ("epochs", "steps", "minutes")),
            ("data.states", ("online", "cache")),
            ("target.dtype", ("float32", "bfloat16", "float16")),
            ("run.device", ("auto", "cpu", "cuda", "meta")),
        ):
            if self._get(name) not in allowed:
                value = self._get(name)
                raise TrainConfigError(f"{name} = {value!r}: must be {' or '.join(allowed)}")
        for source, weight in self.data.weights.items():
            if not 0 <= weight < math.inf:
                raise TrainConfigError(
                    f"data.weights: {source} = {weight}: must be 0 (leave it out) or above"
                )
        stages = self.stages
        trains_teacher = stages.teacher and not self.run.teacher_from
        if not (stages.stable or stages.transition or stages.warm_up or trains_teacher):
            raise TrainConfigError(
                "stages: nothing would be trained. Set stages.stable, or stages.teacher without "
                "run.teacher_from"
            )
        if not 0 <= self.optim.warmup_ratio < 1:
            raise TrainConfigError(f"optim.warmup_ratio = {self.optim.warmup_ratio}: must be 0..1")
        if not 0 <= self.optim.ema < 1:
            raise TrainConfigError(f"optim.ema = {self.optim.ema}: must be 0..1, 1 left out")
        if not 0 < self.distill.keep <= 1:
            raise TrainConfigError(f"distill.keep = {self.distill.keep}: must be above 0, up to 1")
        if len(self.optim.betas) != 2:
            raise TrainConfigError(f"optim.betas = {self.optim.betas}: must be two numbers")
        if self.data.states == "cache" and not self.data.top_k:
            raise TrainConfigError(
                "data.top_k = 0 with data.states = cache: the cache keeps the likeliest tokens "
                "only. Set data.top_k (48, say), or data.states=online."
            )
        if self.target.path and self.model.mask_token_id is None:
            raise TrainConfigError(
                f"model.mask_token_id is not set for {self.target.path}: give a row of its "
                "vocabulary that text never produces (Qwen3: 151669)"
            )
        if self.model.window < 2:
            raise TrainConfigError(f"model.window = {self.model.window}: must be 2 or above")
        if self.needs_teacher and not self.has_teacher:
            raise TrainConfigError(
                "stages.warm_up and stages.transition need a teacher: set stages.teacher, or "
                "run.teacher_from to the folder of a trained one"
            )

    def _get(self, name: str) -> Any:
        section, key = name.split(".")
        return getattr(getattr(self, section), key)


def load_config(path: Path, overrides: list[str]) -> TrainConfig:
    """Read a YAML file, or a shipped config by its name, and apply `section.key=value` overrides.

    Values on the command line are YAML too. Raises `TrainConfigError`.
    """
    shipped = SHIPPED_CONFIGS / f"{path.name}.yaml"
    if not path.exists() and shipped.exists():
        path = shipped
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        names = ", ".join(sorted(file.stem for file in SHIPPED_CONFIGS.glob("*.yaml")))
        raise TrainConfigError(
            f"cannot read {path}: {error.strerror}; shipped configs are {names}"
        ) from error
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
        try:
            raw[section][key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise TrainConfigError(f"override {item!r} is not YAML: {error}") from error
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
    "int | None": ((int, type(None)), lambda value: value),
    "float | None": (
        (int, float, str, type(None)),
        lambda value: None if value is None else float(value),
    ),
    "dict[str, float]": ((dict,), lambda value: {str(k): float(v) for k, v in value.items()}),
    "tuple[str, ...]": ((list,), lambda value: tuple(str(item) for item in value)),
    "tuple[int, ...]": ((list,), lambda value: tuple(int(item) for item in value)),
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
