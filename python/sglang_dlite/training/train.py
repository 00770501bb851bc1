"""`sglang-dlite train CONFIG.yaml [section.key=value ...]`: train a drafter, resumably."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from sglang_dlite.training.config import TrainConfig, TrainConfigError, load_config
from sglang_dlite.training.replies import ReplyStoreError

SHIPPED_CONFIGS = Path(__file__).parent / "configs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, help="YAML file, or the name of a shipped one (smollm2_135m)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="write the initialised drafter to <run.folder>/drafter and stop",
    )


def run(args: argparse.Namespace) -> int:
    path = args.config
    if not path.exists() and (SHIPPED_CONFIGS / f"{path.name}.yaml").exists():
        path = SHIPPED_CONFIGS / f"{path.name}.yaml"
    try:
        config = load_config(path, args.overrides)
        folder = train(config, dry_run=args.dry_run)
    except (TrainConfigError, ReplyStoreError) as error:
        print(f"train: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def train(config: TrainConfig, dry_run: bool = False) -> Path:
    """Run the whole training; returns the folder of the exported drafter."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from sglang_dlite.drafter import DLiteDrafter, load_drafter, save_drafter
    from sglang_dlite.embedded_model import prepare_embedded_model
    from sglang_dlite.training.anchors import AnchorSet, split
    from sglang_dlite.training.simulate import simulate_folders
    from sglang_dlite.training.trainer import Trainer
    from sglang_dlite.training.warm_start import drafter_config, warm_start

    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.optim.seed)
    model = config.model
    target = AutoModelForCausalLM.from_pretrained(
        model.target or prepare_embedded_model(), dtype=torch.bfloat16
    )
    folders = [Path(folder) for folder in config.data.folders]
    anchors = AnchorSet(folders, model.group_size, model.block_size - 1)
    shape = drafter_config(
        target.config,
        anchors.format.target_layer_ids,
        model.num_layers,
        model.block_size,
        model.rank,
        model.group_size,
        model.mask_token_id,
    )
    drafter = DLiteDrafter(shape)
    if config.run.init_from:
        earlier = load_drafter(config.run.init_from, dtype=torch.float32)
        if earlier.config != shape:
            raise TrainConfigError(
                f"run.init_from: {config.run.init_from} has another shape than the model section: "
                f"{earlier.config} instead of {shape}"
            )
        drafter.load_state_dict(earlier.state_dict())
    elif model.warm_start:
        training, _ = split(anchors.replies, config.data.held_out_percent)
        rows = anchors.rows_of(training)
        last = shape.target_layer_ids.index(shape.num_target_layers - 1)
        warm_start(drafter, target, anchors.states(rows[:: max(1, len(rows) // 20000)])[:, last])
    embed = nn.Embedding.from_pretrained(target.get_input_embeddings().weight.detach())
    trainer = Trainer(config, drafter, embed, anchors)
    export = Path(config.run.export or trainer.folder / "drafter")
    if dry_run:
        save_drafter(trainer.bf16_copy(), export)
        return export
    if trainer.resume():
        print(f"train: continuing {trainer.folder} at step {trainer.step}", file=sys.stderr)
    size = sum(p.numel() for p in drafter.parameters())
    print(
        f"train: {size / 1e6:.1f} M parameters, {trainer.num_train_rows} anchors "
        f"in {len(anchors.replies)} replies, {len(trainer.held_replies)} replies held out",
        file=sys.stderr,
    )
    result = trainer.run()
    final = trainer.bf16_copy()
    save_drafter(final, export)
    if config.data.eval_folders:
        tau = simulate_folders(final, embed, [Path(f) for f in config.data.eval_folders])
        result = result | {"simulated_tau": tau}
        print(f"train: simulated greedy tau {json.dumps(tau)}", file=sys.stderr)
    write_provenance(export, config, anchors, result)
    return export


def write_provenance(export: Path, config: TrainConfig, anchors: Any, result: Any) -> None:
    """`provenance.json` beside the weights: command, settings, versions, data and metrics."""
    import hashlib
    from importlib.metadata import version

    counts: dict[str, dict[str, int]] = {}
    for reply in anchors.replies:
        entry = counts.setdefault(reply.source, {"replies": 0, "tokens": 0})
        entry["replies"] += 1
        entry["tokens"] += reply.length
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in config.data.folders
        for path in sorted(Path(folder).glob("*.jsonl"))
    }
    value = {
        "command": ["sglang-dlite", "train", *sys.argv[2:]],
        "config": config.to_dict(),
        "versions": {
            n: version(n) for n in ("sglang-dlite", "torch", "transformers", "safetensors", "numpy")
        },
        "data": {"sources": counts, "sha256": hashes, "target": anchors.format.target},
        "metrics": result,
    }
    (export / "provenance.json").write_text(json.dumps(value, indent=2) + "\n")
