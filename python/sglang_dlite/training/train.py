"""`sglang-dlite train CONFIG.yaml [section.key=value ...]`: train a drafter, resumably."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, DrafterConfigError
from sglang_dlite.drafter.checkpoint import CheckpointError
from sglang_dlite.training.config import TrainConfig, TrainConfigError, load_config
from sglang_dlite.training.dataset import DatasetError, load_replies
from sglang_dlite.training.state_cache import CacheError
from sglang_dlite.training.storage import StorageError, locked
from sglang_dlite.training.targets import TargetError, TargetShape, drafter_config, read_shape

ERRORS = (
    TrainConfigError, DatasetError, CacheError, StorageError, TargetError, DrafterConfigError,
    CheckpointError,
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="YAML file, or the name of a shipped config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the run needs, write the initialised drafter (not with run.device=meta) "
        "and stop",
    )


def run(args: argparse.Namespace) -> int:
    from sglang_dlite.training.divergence import TrainingDiverged

    try:
        config = load_config(args.config, args.overrides)
        folder = dry_run(config) if args.dry_run else train(config)
    except (*ERRORS, TrainingDiverged) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    if folder:
        print(folder)
    return 0


def announce(config: TrainConfig) -> DLiteConfig:
    """Print what the run needs; returns the drafter's config."""
    from sglang_dlite.training.estimate import estimate

    shape = TargetShape.from_section(config.target) or read_shape(config.target)
    drafter = drafter_config(shape, config.model)
    if _is_main():
        print(estimate(config, shape, drafter).text(), file=sys.stderr)
    return drafter


def announce_data(config: TrainConfig, drafter: DLiteConfig) -> bool:
    """Print what the configured replies need; returns whether they are at hand."""
    from sglang_dlite.training.data_estimate import estimate_data

    folders = [Path(folder) for folder in config.data.replies]
    if not (folders and all(folder.exists() for folder in folders)):
        print(
            "data.replies: not there yet, so no estimate for them, and no start from the target's "
            "weights (model.warm_start) or run.init_from: that looks at replies",
            file=sys.stderr,
        )
        return False
    replies = load_replies(folders, drafter.vocab_size)
    print(estimate_data(config, drafter, replies).text(), file=sys.stderr)
    return True


def dry_run(config: TrainConfig) -> Path | None:
    """Estimate, and on a real device an initialised checkpoint that can be served."""
    import torch

    from sglang_dlite.training.run_checkpoint import has_checkpoint
    from sglang_dlite.training.run_folder import save_model
    from sglang_dlite.training.session import Session, pick_device

    shape = announce(config)
    has_replies = announce_data(config, shape)
    if config.run.device == "meta":
        return None
    export = config.export_folder
    if has_checkpoint(Path(config.run.folder)) or (export / "provenance.json").exists():
        print(
            f"train: no drafter written, {export} is a training run's. For an initialised one name "
            "another run.folder, and another run.export if that is set",
            file=sys.stderr,
        )
        return None
    pick_device(config.run.device)
    torch.manual_seed(config.optim.seed)
    if has_replies and (config.model.warm_start or config.run.init_from):
        drafter = Session(config).fresh_drafter()
    else:
        drafter = DLiteDrafter(shape)
    save_model(drafter.bfloat16(), export)
    return export


def train(config: TrainConfig) -> Path:
    """Run all stages; returns the folder of the exported drafter (or of the teacher alone)."""
    from sglang_dlite.training.cache_format import check_cache
    from sglang_dlite.training.selection import usable
    from sglang_dlite.training.session import Session

    announce(config)
    with locked(Path(config.run.folder), "run") if _is_main() else nullcontext():
        session = Session(config)
        try:
            if config.data.states == "cache":
                used = [reply for reply in session.replies if usable(reply, config.data)]
                check_cache(Path(config.data.cache), session.target, used)
            return session.run()
        finally:
            session.world.close()


def _is_main() -> bool:
    """Whether this is the process that writes: known before the processes have met."""
    return os.environ.get("RANK", "0") == "0"
