"""Arms: from a specification to a launch line, and whether it can run on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from sglang_dlite.assets import shipped_drafter_dir
from sglang_dlite.bench.config import ArmSpec, BenchConfig
from sglang_dlite.embedded_model import prepare_embedded_model

EMBEDDED, SHIPPED = "embedded", "shipped"

# Why sglang 0.5.23 from PyPI does not run an algorithm on a CPU. NGRAM is accepted by the
# command line there, but dies when its scheduler imports an operator library built for CUDA.
_NEEDS_ACCELERATOR = {
    "NGRAM": "sglang's wheel has its tree operators (sgl_kernel) for CUDA only",
    "EAGLE": "sglang serves it on accelerators only",
    "EAGLE3": "sglang serves it on accelerators only",
    "STANDALONE": "sglang serves it on accelerators only",
    "DFLASH": "sglang serves it on CUDA, NPU and XPU only",
    "DSPARK": "sglang serves it on CUDA, NPU and XPU only",
}


@dataclass(frozen=True)
class Arm:
    """An arm with its models resolved; `skipped` says why it cannot run here, if it cannot."""

    spec: ArmSpec
    target: str
    server_args: tuple[str, ...]
    skipped: str | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    def without(self, reason: str) -> Arm:
        """The same arm, skipped for this reason."""
        return replace(self, skipped=reason)


def resolve_target(name: str) -> str:
    """The target's directory or hub id; the embedded one is unpacked on first use."""
    return str(prepare_embedded_model()) if name == EMBEDDED else name


def resolve_drafter(name: str) -> str:
    return str(shipped_drafter_dir()) if name == SHIPPED else name


def speculative_args(spec: ArmSpec) -> tuple[str, ...]:
    """The launch flags that distinguish an arm from the target alone."""
    args: list[str] = []
    if spec.algorithm is not None:
        args += ["--speculative-algorithm", spec.algorithm]
    if spec.drafter is not None:
        args += ["--speculative-draft-model-path", resolve_drafter(spec.drafter)]
    return (*args, *spec.args)


def checkpoint_problem(name: str) -> str | None:
    """Why a checkpoint cannot be loaded, as far as can be told without loading or asking a hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        return None if (path / "config.json").is_file() else f"{name} has no config.json"
    if not _is_hub_id(name):
        return f"no such checkpoint: {name}"
    if hub_is_offline() and cached_snapshot(name) is None:
        return (
            f"{name} is not in the local Hugging Face cache and the hub is switched off "
            "(HF_HUB_OFFLINE=1)"
        )
    return None


def _is_hub_id(name: str) -> bool:
    """`owner/model`, as opposed to a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def hub_is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")


def cached_snapshot(name: str) -> Path | None:
    """The local directory of a model: itself, or its snapshot in the hub's cache."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json") if _is_hub_id(name) else None
    return Path(found).parent if isinstance(found, str) else None


def skip_reason(spec: ArmSpec, accelerator: bool) -> str | None:
    """Why an arm cannot run here, by checks that take no time; None if it may."""
    if spec.algorithm in _NEEDS_ACCELERATOR and not accelerator:
        return f"no accelerator: {_NEEDS_ACCELERATOR[spec.algorithm]}"
    if spec.drafter is not None:
        return checkpoint_problem(resolve_drafter(spec.drafter))
    return None


def resolve_arms(config: BenchConfig, target: str, accelerator: bool) -> list[Arm]:
    """Every arm of a configuration, with the reason where it cannot run on this machine."""
    missing = checkpoint_problem(target)
    arms = []
    for spec in config.arms:
        arm = Arm(spec, target, (*config.server_args, *speculative_args(spec)))
        reason = f"target: {missing}" if missing else skip_reason(spec, accelerator)
        arms.append(arm if reason is None else arm.without(reason))
    return arms
