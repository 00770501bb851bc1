"""The training loop of one model, the drafter or the teacher, over its stages."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sglang_dlite.drafter import DLiteDrafter, HistoryAwareDrafter
from sglang_dlite.training.anchors import AnchorBatch, AnchorSpec, Pick, to_device
from sglang_dlite.training.average import WeightAverage
from sglang_dlite.training.config import TrainConfig
from sglang_dlite.training.distributed import World
from sglang_dlite.training.divergence import TrainingDiverged, keep_evidence
from sglang_dlite.training.objective import Objective
from sglang_dlite.training.run_checkpoint import (
    has_checkpoint,
    read_checkpoint,
    require_same_settings,
    write_checkpoint,
)
from sglang_dlite.training.run_folder import copy_for_serving, save_model
from sglang_dlite.training.run_record import RunRecord
from sglang_dlite.training.schedule import Sampler, Stage, learning_rate, mixture, stage_at
from sglang_dlite.training.simulate import (
    EvalSet,
    selection_score,
    simulated_tau,
    spread,
    teacher_forced_length,
)
from sglang_dlite.training.states import StateSource

_QUICK_ROWS, _EVAL_ROWS = 128, 1024


class Trainer:
    """Owns a model, its optimiser and a run folder.

    The folder holds `checkpoint.pt` (latest, replaced atomically), `metrics.jsonl`, `tensorboard/`
    and `best/`, the model of the best evaluation in bf16.
    """

    def __init__(
        self,
        name: str,
        config: TrainConfig,
        model: DLiteDrafter,
        spec: AnchorSpec,
        source: StateSource,
        sampler: Sampler,
        stages: Sequence[Stage],
        objective: Objective,
        eval_set: EvalSet,
        folder: Path,
        peak_lr: float,
        world: World,
        identity: dict[str, Any],
    ) -> None:
        """identity: what a checkpoint must agree on to be continued. Raises `TrainConfigError`
        where the checkpoint in `folder` does not."""
        self.name, self.config, self.spec = name, config, spec
        self.model = model.float().train()
        self.device = model.norm.weight.device
        # Each process made its own: eigenvectors may differ in sign from one to the next.
        world.share(parameter.data for parameter in self.model.parameters())
        self.source, self.sampler, self.stages = source, sampler, stages
        self.objective, self.eval_set, self.folder = objective, eval_set, folder
        self.peak_lr, self.world, self.identity = peak_lr, world, identity
        self.length = stages[-1].start + stages[-1].length
        self.timed = config.stages.unit == "minutes"
        first, second = config.optim.betas
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(first, second), weight_decay=0.0, fused=True
        )
        decay = config.optim.ema
        self.average = WeightAverage(self.model, decay) if decay else None
        if config.run.compile:
            self._compile()
        self.record: RunRecord | None = None  # while the run is on
        self.step = 0
        self.steps_before = 0  # of the runs whose weights and moments this one took over
        self.train_seconds = 0.0
        self.anchors_seen = 0
        self.best: dict[str, Any] = {}
        self.losses: list[float] = []  # since the last line of the record
        self._resume()

    def _compile(self) -> None:
        # Only what is differentiated: evaluations run on copies. The reset keeps the models of
        # earlier trainers in this process from using up the compiler's limit of variants.
        torch._dynamo.reset()
        teacher = isinstance(self.model, HistoryAwareDrafter)
        name = "backbone_with_history" if teacher else "backbone"
        setattr(self.model, name, torch.compile(getattr(self.model, name), dynamic=True))

    @property
    def position(self) -> float:
        """Where the run is in its stages."""
        return self.train_seconds if self.timed else self.step

    # ---- one step -------------------------------------------------------------------------

    def train_step(self) -> float:
        """One optimiser step; returns the loss, the same in every process."""
        optim = self.config.optim
        mix = mixture(self.stages, self.position)
        self.model.sequential_head.requires_grad_(not mix.head_frozen)
        # Moments that were taken over are warm already.
        warmup = 0.0 if self.steps_before else optim.warmup_ratio
        rate = learning_rate(self.position, self.length, self.peak_lr, warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        place = self.steps_before + self.step  # goes on in the data where the earlier run stopped
        micro = self.sampler.micro_batches(place)
        below = self.objective.denominators(micro, self.source.replies, self.spec.num_drafts)
        spec = self.spec
        if not (mix.distill or isinstance(self.model, HistoryAwareDrafter)):
            spec = replace(spec, window=0)  # nobody looks at it
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        batch: AnchorBatch | None = None
        for index in range(self.world.rank, len(micro), self.world.size):
            batch = to_device(self.source.batch(micro[index], spec), self.device)
            # Seeded by the place in the run: a resumed run, or another number of processes,
            # draws what an unbroken one would have drawn.
            seed = (optim.seed * 1_000_003 + place) * 1_009 + index
            generator = torch.Generator().manual_seed(seed)
            loss = self.objective.loss(self.model, batch, mix, below, generator)
            loss.backward()
            total += loss.detach()
            if not math.isfinite(total.item()):
                break
        self.world.sum_gradients(self.model.parameters())
        value = self.world.sum(total).item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip)
        if not (math.isfinite(value) and math.isfinite(norm.item())):
            raise self._diverged(value, norm.item(), micro, batch)
        self.optimizer.step()
        if self.average:
            self.average.update()
        self.step += 1
        self.anchors_seen += sum(len(pick.places) for picks in micro for pick in picks)
        return value

    def _diverged(
        self, loss: float, norm: float, micro: list[list[Pick]], batch: AnchorBatch | None
    ) -> TrainingDiverged:
        path = self.folder / f"diverged-step{self.step}-rank{self.world.rank}.pt"
        picks = [pick for picks in micro for pick in picks]
        where = keep_evidence(path, self.step, loss, norm, picks, self.source.replies, batch)
        return TrainingDiverged(
            f"step {self.step}: loss is {loss}, gradient norm {norm}. {where} The last checkpoint "
            f"is from before. Lower the learning rate (now {self.peak_lr:g}) or leave the replies "
            "out, in a new run.folder."
        )

    # ---- the run --------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the best evaluation, whose model is in `best/`."""
        if self.world.is_main:
            unit = "s" if self.timed else "step"
            self.record = RunRecord(
                self.folder, self.name, self.step, self.position, self.length, unit
            )
        try:
            self._loop()
        finally:
            if self.record:
                self.record.close()
        return self.best

    def _loop(self) -> None:
        run = self.config.run
        first = True
        while self.position < self.length:
            began, stage = time.perf_counter(), stage_at(self.stages, self.position).name
            loss = self.train_step()
            if not first:
                seconds = time.perf_counter() - began
                self.train_seconds += self.world.of_main(seconds, self.device)
            first = False
            last = self.position >= self.length
            if self.record:
                self.losses.append(loss)
                self.record.advance(self.position)
                if self.step % run.log_every == 0:
                    self._log(stage)
                if self.step % run.eval_every == 0 or last:
                    self.evaluate()
                if self.step % run.checkpoint_every == 0 or last:
                    self.save()

    def _served(self) -> DLiteDrafter:
        """What would be served: the model, or its average, in bf16."""
        return copy_for_serving(self.model, self.average.weights if self.average else None)

    def _log(self, stage: str) -> None:
        assert self.record is not None
        loss, self.losses = sum(self.losses) / len(self.losses), []
        length = self._expected_length(self._served(), _QUICK_ROWS)
        values = {
            "stage": stage,
            "loss": loss,
            "expected_length": length,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "anchors": self.anchors_seen,
            "seconds": round(self.train_seconds, 1),
        }
        self.record.show(stage=stage, loss=f"{loss:.3f}", length=f"{length:.2f}")
        self.record.add(self.step, "train", values)

    def evaluate(self) -> dict[str, Any]:
        """Measure what would be served; keep it if it is the best."""
        model = self._served()
        embed, began = self.objective.embed, time.perf_counter()
        tau = simulated_tau(model, embed, self.eval_set) if self.eval_set.num_rows else {}
        expected = self._expected_length(model, _EVAL_ROWS)
        score = selection_score(tau, self.eval_set.replies)
        result = {
            "step": self.step,
            "tau": tau,
            "expected_length": expected,
            # Without any reply to walk (all of them loop, say) the expected length decides.
            "score": expected if math.isnan(score) else score,
            "anchors": self.anchors_seen,
            "train_seconds": round(self.train_seconds, 1),
            "eval_seconds": round(time.perf_counter() - began, 1),
        }
        # Not `>`: without any held-out reply the score is no number, and the latest is kept.
        if not (self.best and result["score"] <= self.best["score"]):
            self.best = result
            save_model(model, self.folder / "best")
        if self.record:
            shown = {"tau": f"{tau['mean']:.3f}"} if "mean" in tau else {}
            self.record.show(**shown)
            self.record.add(self.step, "eval", result)
        return result

    def _expected_length(self, model: DLiteDrafter, count: int) -> float:
        rows = np.array(spread(range(self.eval_set.num_rows), count), dtype=np.int64)
        return teacher_forced_length(
            model, self.objective.embed, self.objective.lm_head, self.eval_set, rows
        )

    # ---- resuming -------------------------------------------------------------------------

    def save(self) -> None:
        """Replace the run's checkpoint atomically. Raises `StorageError`, leaving the old one."""
        state = {
            "step": self.step,
            "steps_before": self.steps_before,
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "train_seconds": self.train_seconds,
            "anchors_seen": self.anchors_seen,
            "best": self.best,
            "losses": self.losses,
        }
        write_checkpoint(self.folder, state)

    def _resume(self) -> None:
        if not has_checkpoint(self.folder):
            return
        saved = read_checkpoint(self.folder, self.device)
        require_same_settings(self.folder, saved["identity"], self.identity)
        self._restore(saved)
        self.step, self.steps_before = saved["step"], saved["steps_before"]
        self.train_seconds, self.anchors_seen = saved["train_seconds"], saved["anchors_seen"]
        self.best, self.losses = saved["best"], saved["losses"]

    def take_over(self, folder: Path) -> None:
        """Start where another run of the same shape stopped: its fp32 weights and moments.

        The plan is this run's own, from its step 0 and without a warm-up; batches go on behind
        the earlier run's, so that the same data are not seen in the same order again.
        """
        saved = read_checkpoint(folder, self.device)
        self._restore(saved)
        # Checkpoints written before there was `take_over` have no runs before them.
        self.steps_before = saved.get("steps_before", 0) + saved["step"]

    def _restore(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # this run's betas, not the other's
        self.optimizer.load_state_dict({**saved["optimizer"], "param_groups": groups})
        if self.average:
            if saved.get("average"):
                self.average.load_state_dict(saved["average"])
            else:  # an earlier run that had none
                self.average.start_anew(saved["step"])
