"""One training run: the target, its replies, and the stages that follow each other."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sglang_dlite.drafter import DLiteDrafter, HistoryAwareDrafter, load_drafter
from sglang_dlite.training.anchors import AnchorSpec, Pick
from sglang_dlite.training.config import ModelSection, TrainConfig, TrainConfigError
from sglang_dlite.training.dataset import DatasetError, fingerprint, load_replies
from sglang_dlite.training.distributed import World
from sglang_dlite.training.identity import (
    digest_of_places,
    digest_of_texts,
    digest_of_weights,
    run_identity,
)
from sglang_dlite.training.objective import Objective
from sglang_dlite.training.provenance import read_metrics, write_provenance
from sglang_dlite.training.run_checkpoint import has_checkpoint, read_checkpoint
from sglang_dlite.training.run_folder import copy_for_serving, load_teacher, save_model
from sglang_dlite.training.schedule import Sampler, plan_stages
from sglang_dlite.training.selection import learned_places, split_replies
from sglang_dlite.training.simulate import EvalSet, choose_evenly, simulate_folders
from sglang_dlite.training.state_cache import CachedStates
from sglang_dlite.training.states import OnlineStates, StateSource
from sglang_dlite.training.targets import FrozenTarget, drafter_config
from sglang_dlite.training.trainer import Trainer
from sglang_dlite.training.warm_start import warm_start

_WARM_START_REPLIES, _WARM_START_TOKENS = 48, 1024


def pick_device(name: str) -> str:
    """The torch device of `run.device`. Raises `TrainConfigError` where it is absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise TrainConfigError("run.device = 'cuda': torch sees no CUDA device; use cpu or auto")
    if name == "meta":
        raise TrainConfigError("run.device = 'meta' builds shapes only: use it with --dry-run")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


class Session:
    """What the stages of one run share: target, replies, their states, the processes."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, run = config, config.run
        self.device = pick_device(run.device)
        self.world = World(self.device)
        if run.threads:
            torch.set_num_threads(run.threads)
        torch.manual_seed(config.optim.seed)
        self.target = FrozenTarget.load(config.target, self.device)
        self.shape = drafter_config(self.target.shape, config.model)
        self.embed = nn.Embedding.from_pretrained(self.target.embedding.detach())
        folders = [Path(folder) for folder in config.data.replies]
        self.replies = load_replies(folders, self.target.shape.vocab_size)
        self.training, self.held_out = split_replies(self.replies, config)
        self.data_digest = digest_of_texts(sorted(fingerprint(folders).values()))
        self.folder = Path(run.folder)
        if config.eval.folders:  # read at the end of the run: be sure of them now
            try:
                load_replies([Path(f) for f in config.eval.folders], self.target.shape.vocab_size)
            except DatasetError as error:
                raise TrainConfigError(f"eval.folders: {error}") from error

    # ---- models ---------------------------------------------------------------------------

    def fresh_drafter(self) -> DLiteDrafter:
        """A drafter from `run.init_from`, the target's weights, or nothing."""
        drafter = DLiteDrafter(self.shape)
        if has_checkpoint(self.folder):
            return drafter  # the trainer takes the weights from there
        if self.config.run.init_from:
            self._load_earlier(drafter, Path(self.config.run.init_from))
        else:
            self._warm_start(drafter, self.folder)
        return drafter

    def _load_earlier(self, drafter: DLiteDrafter, folder: Path) -> None:
        """The weights of a training run's folder, or of a drafter's."""
        if has_checkpoint(folder):
            saved = read_checkpoint(folder, torch.device("cpu"))
            weights = saved["model"]
            shape = drafter_config(self.target.shape, ModelSection(**saved["identity"]["model"]))
        else:
            earlier = load_drafter(folder)
            weights, shape = earlier.state_dict(), earlier.config
        if shape != self.shape:
            raise TrainConfigError(
                f"run.init_from: {folder} has another shape than the model section: {shape} "
                f"instead of {self.shape}"
            )
        foreign = sorted(weights.keys() ^ drafter.state_dict().keys())
        if foreign:
            raise TrainConfigError(
                f"run.init_from: {folder} holds no drafter: {', '.join(foreign)} differ. A teacher "
                "is given by run.teacher_from=<run.folder>/teacher/best; run.init_from takes "
                "<run.folder>, or a drafter's folder"
            )
        drafter.load_state_dict(weights)

    def _warm_start(self, model: DLiteDrafter, folder: Path) -> None:
        if not self.config.model.warm_start or has_checkpoint(folder):
            return
        if not self.training:
            data = self.config.data
            raise TrainConfigError(
                f"no reply to train on: of {len(self.replies)} in data.replies none is left by "
                f"data.min_reply_tokens = {data.min_reply_tokens}, data.max_tokens = "
                f"{data.max_tokens}, data.held_out_percent = {data.held_out_percent:g} and "
                f"data.drop_looping = {data.drop_looping}. Change these, or generate more replies"
            )
        last = self.shape.num_target_layers - 1
        layers = self.shape.target_layer_ids
        spec = AnchorSpec((*layers, last), 1, 1, 1)
        source = OnlineStates(self.target, self.replies)
        short = [
            i for i in self.training
            if len(self.replies[i].prompt_ids) + self.replies[i].length <= _WARM_START_TOKENS
        ] or self.training  # fmt: skip
        hiddens, sums = [], torch.zeros(len(layers), self.shape.hidden_size)
        for i in short[:: -(-len(short) // _WARM_START_REPLIES)]:
            states = source.batch([Pick(i, self.replies[i].places)], spec).pivot_states
            hiddens.append(states[:, -1])
            sums += states[:, :-1].float().sum(0)
        seen = torch.cat(hiddens)
        warm_start(model, self.target.model, seen, sums / len(seen))

    def teacher(self) -> HistoryAwareDrafter | None:
        """The teacher that the drafter's stages need, trained first if need be."""
        config = self.config
        if config.run.teacher_from:
            teacher = load_teacher(Path(config.run.teacher_from))
            if teacher.config != self.shape:
                raise TrainConfigError(
                    f"run.teacher_from: {config.run.teacher_from} has another shape than the model "
                    f"section: {teacher.config} instead of {self.shape}"
                )
            if teacher.window != config.model.window:
                raise TrainConfigError(
                    f"run.teacher_from: {config.run.teacher_from} has a window of "
                    f"{teacher.window}, model.window is {config.model.window}: set "
                    f"model.window={teacher.window}"
                )
        elif config.stages.teacher:
            fresh = HistoryAwareDrafter(self.shape, config.model.window)
            self._warm_start(fresh, self.folder / "teacher")
            trainer = self.trainer("teacher", fresh, None)
            assert trainer is not None
            best = trainer.run()
            self.world.wait()  # the main process has written the best one
            teacher = load_teacher(trainer.folder / "best")
            if read_metrics(trainer.folder / "best").get("best") != best:
                self._record(trainer.folder / "best", teacher, best)
        else:
            return None
        return teacher.to(self.device)

    # ---- training -------------------------------------------------------------------------

    def trainer(
        self, name: str, model: DLiteDrafter, teacher: HistoryAwareDrafter | None
    ) -> Trainer | None:
        """The trainer of `teacher` or `drafter`, at its last checkpoint; None without a stage."""
        config, is_teacher = self.config, name == "teacher"
        windowed = is_teacher or teacher is not None
        spec = AnchorSpec.of(self.shape, config.data.top_k, config.model.window * windowed)
        source: StateSource
        if config.data.states == "cache":
            cached = source = CachedStates(Path(config.data.cache), self.replies, spec)
            places = [cached.places(reply) for reply in self.replies]
            held_out = [i for i in self.held_out if len(places[i]) == len(self.replies[i].places)]
        else:
            source = OnlineStates(self.target, self.replies)
            places = [reply.places for reply in self.replies]
            held_out = self.held_out
        trained = set(self.training)
        places = [
            learned_places(self.replies[i], some, config.data) if i in trained else some[:0]
            for i, some in enumerate(places)
        ]
        sources = [reply.source for reply in self.replies]
        sampler = Sampler(places, config.optim, sources, config.data.weights)
        if self.world.size > sampler.passes_per_step:
            raise TrainConfigError(
                f"{self.world.size} processes for {sampler.passes_per_step} forward passes per "
                f"step: the others would idle. Lower optim.micro_replies (it is "
                f"{config.optim.micro_replies}), raise optim.batch_replies, or start fewer"
            )
        names = ("teacher",) if is_teacher else ("warm_up", "transition", "stable")
        stages = plan_stages(config.stages, names, sampler.steps_per_epoch)
        if not stages:
            return None
        folder = self.folder / "teacher" if is_teacher else self.folder
        loss = config.teacher_loss if is_teacher else config.loss
        eval_spec = AnchorSpec.of(self.shape, config.data.top_k, config.model.window * is_teacher)
        chosen = choose_evenly(held_out, sources, config.eval.replies)
        unit = "seconds" if config.stages.unit == "minutes" else "steps"
        with_places = sum(len(some) > 0 for some in places)
        announcement = (
            f"train: {name}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters; "
            f"{with_places} replies, {sum(map(len, places))} anchors; {len(chosen)} replies held "
            f"out; {', '.join(f'{s.name} {s.length} {unit}' for s in stages)}"
        )
        if self.world.is_main:
            print(announcement, file=sys.stderr)
        content = {
            "replies": self.data_digest,
            "anchors": digest_of_places(places),
            "eval": {
                "replies": config.eval.replies,
                "chosen": digest_of_texts(self.replies[i].id for i in chosen),
            },
            # Two caches of the same anchors differ in precision and in the layers they hold.
            "cache": asdict(source.format) if isinstance(source, CachedStates) else None,
            "teacher": None if teacher is None else digest_of_weights(teacher.state_dict()),
        }
        trainer = Trainer(
            name,
            config,
            model.to(self.device),
            spec,
            source,
            sampler,
            stages,
            Objective(
                loss, config.distill, self.embed, self.target.lm_head, config.run.bf16, teacher
            ),
            EvalSet(source, chosen if self.world.is_main else [], eval_spec, self.device),
            folder,
            config.optim.teacher_lr if is_teacher else config.optim.lr,
            self.world,
            run_identity(config, name, stages, self.target, content),
        )
        if not is_teacher and not has_checkpoint(folder):
            self._take_over(trainer)
        return trainer

    def _take_over(self, trainer: Trainer) -> None:
        """Go on with the moments of `run.init_from`, where that is a training run's folder."""
        run = self.config.run
        # With a teacher the head is the teacher's, and the earlier head's moments are not its own.
        if not run.init_from or self.config.has_teacher or not has_checkpoint(Path(run.init_from)):
            return
        trainer.take_over(Path(run.init_from))
        if self.world.is_main:
            steps = f"{trainer.steps_before} steps of {run.init_from}"
            print(f"train: goes on behind {steps}, without a warm-up", file=sys.stderr)

    def run(self) -> Path:
        """All stages, then the export of the best drafter with its provenance."""
        config = self.config
        teacher = self.teacher()
        drafter = self.fresh_drafter()
        if teacher is not None:
            drafter.sequential_head.load_state_dict(teacher.sequential_head.state_dict())
        trainer = self.trainer("drafter", drafter, teacher if config.needs_teacher else None)
        if trainer is None:
            return self.folder / "teacher" / "best"
        best = trainer.run()
        export = config.export_folder
        if self.world.is_main:
            final = load_drafter(self.folder / "best")
            save_model(copy_for_serving(final), export)
            self._record(export, final, best)
        return export

    def _record(self, export: Path, model: DLiteDrafter, best: dict[str, Any]) -> None:
        """Write provenance.json with what the model reaches."""
        if self.world.is_main:
            metrics = {"best": best, "simulated_tau": self.final_tau(model)}
            write_provenance(export, self.config, self.replies, metrics)

    def final_tau(self, drafter: DLiteDrafter) -> dict[str, float]:
        """Simulated tau on the replies to evaluation prompts, `eval.folders`."""
        folders = [Path(folder) for folder in self.config.eval.folders]
        if not folders:
            return {}
        tau = simulate_folders(drafter.to(self.device), self.target, folders)
        print(f"train: simulated greedy tau {json.dumps(tau)}", file=sys.stderr)
        return tau
