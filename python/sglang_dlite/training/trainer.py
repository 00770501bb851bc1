"""The training loop of one stage: direct training against the target, no teacher."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang_dlite.drafter import DLiteDrafter, save_drafter
from sglang_dlite.training.anchors import AnchorBatch, AnchorSet, split
from sglang_dlite.training.config import TrainConfig, TrainConfigError
from sglang_dlite.training.losses import draft_losses, sample_positions
from sglang_dlite.training.simulate import simulated_tau, teacher_forced_length


def learning_rate(step: int, steps: int, peak: float, warmup_ratio: float) -> float:
    """Linear warm-up, then cosine to zero; `step` counts from 0."""
    warmup = max(1, int(steps * warmup_ratio))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class RowSampler:
    """Every training row once per epoch, in an order that depends on (seed, epoch) only."""

    def __init__(self, rows: np.ndarray, batch: int, seed: int) -> None:
        if len(rows) == 0:
            raise TrainConfigError("no anchors to train on: the data sets hold no usable reply")
        self._rows, self._batch, self._seed = rows, min(batch, len(rows)), seed
        self._epoch, self._order = -1, rows

    def rows(self, step: int) -> np.ndarray:
        """The rows of step 0, 1, ...; a function of the step, so resuming needs no state."""
        per_epoch = len(self._rows) // self._batch
        epoch, index = divmod(step, per_epoch)
        if epoch != self._epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, generator.permutation(self._rows)
        return np.sort(self._order[index * self._batch : (index + 1) * self._batch])


class Trainer:
    """Owns the drafter, its optimiser and the run folder.

    The run folder holds `checkpoint.pt` (latest, replaced atomically), `metrics.jsonl` (one line
    per log and per evaluation) and `drafter/` (the latest evaluated drafter, official format).
    """

    def __init__(
        self, config: TrainConfig, drafter: DLiteDrafter, embed: nn.Embedding, anchors: AnchorSet
    ) -> None:
        self.config = config
        self.drafter = drafter.float().train()
        self.embed = embed
        self.anchors = anchors
        self.folder = Path(config.run.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        train, held = split(anchors.replies, config.data.held_out_percent)
        self.held_replies = _spread(held, config.run.eval_replies)
        self.held_rows = _spread(anchors.rows_of(held), 1024)
        rows = anchors.rows_of(train)
        self.num_train_rows = len(rows)
        self.sampler = RowSampler(rows, config.optim.batch_anchors, config.optim.seed)
        first, second = config.optim.betas
        self.optimizer = torch.optim.AdamW(
            self.drafter.parameters(), lr=0.0, betas=(first, second), weight_decay=0.0, fused=True
        )
        self.step = 0
        self.train_seconds = 0.0
        self.last_eval: dict[str, Any] = {}

    # ---- one step -------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.run.bf16)

    def loss(self, batch: AnchorBatch, generator: torch.Generator) -> Tensor:
        """The scalar loss, mean over the drafts that `sample_positions` keeps."""
        section, drafter = self.config.loss, self.drafter
        keep = sample_positions(batch.labelled, section.gamma, generator)
        # On CPU the flash kernel's backward takes four times as long for sequences this short.
        with self.autocast(), sdpa_kernel(SDPBackend.MATH):
            hidden = drafter.backbone(batch.pivot_states, batch.token_group, self.embed)
            with _one_lookup(drafter.sequential_head.prev_token_embedding, batch):
                vectors = drafter.head_vectors(hidden, batch.previous_tokens, batch.token_group)
        count = int(keep.sum())
        losses = draft_losses(
            vectors[keep].float(),
            drafter.sequential_head.output_proj.weight,
            batch.labels[keep],
            batch.top_ids[keep],
            batch.top_logprobs[keep],
            torch.full((count,), 1 / max(1, count)),
            section.w_ce,
            section.w_tv,
            torch.bfloat16 if self.config.run.bf16 else torch.float32,
        )
        return losses.total

    def train_step(self) -> float:
        """One optimiser step; returns the loss."""
        optim = self.config.optim
        rate = learning_rate(self.step, optim.steps, optim.lr, optim.warmup_ratio)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Seeded by the step: a resumed run draws what an unbroken one would have drawn.
        generator = torch.Generator().manual_seed(optim.seed * 1_000_003 + self.step)
        loss = self.loss(self.anchors.batch(self.sampler.rows(self.step)), generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), optim.clip)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    # ---- the run --------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the last step, evaluating and saving on the way; returns the last evaluation."""
        from tqdm import tqdm

        run, steps = self.config.run, self.config.optim.steps
        bar = tqdm(total=steps, initial=self.step, desc="train", unit="step", smoothing=0.02)
        loss_sum, summed = 0.0, 0
        while self.step < steps:
            began = time.perf_counter()
            loss = self.train_step()
            self.train_seconds += time.perf_counter() - began
            if not math.isfinite(loss):
                raise RuntimeError(
                    f"step {self.step}: loss is {loss}. Training diverged: lower optim.lr "
                    f"(now {self.config.optim.lr:g}) and start again in a new run.folder."
                )
            loss_sum, summed = loss_sum + loss, summed + 1
            bar.update()
            if self.step % run.log_every == 0:
                length = self.quick_length()
                mean = loss_sum / summed
                loss_sum, summed = 0.0, 0
                shown = {"loss": f"{mean:.3f}", "length": f"{length:.2f}"}
                bar.set_postfix(shown | self._brief())
                seconds = round(self.train_seconds, 1)
                self._log({"kind": "train", "loss": mean, "length": length, "seconds": seconds})
            if self.step % run.eval_every == 0 or self.step == steps:
                self.evaluate()
            if self.step % run.checkpoint_every == 0 or self.step == steps:
                self.save()
        bar.close()
        return self.last_eval or self.evaluate()

    def _brief(self) -> dict[str, str]:
        held = self.last_eval.get("held_out", {})
        return {"tau": f"{held['mean']:.2f}"} if "mean" in held else {}

    @torch.no_grad()
    def quick_length(self) -> float:
        """Expected acceptance length of the weights as they are, on a few held-out anchors."""
        with self.autocast():
            return teacher_forced_length(
                self.drafter, self.embed, self.anchors, _spread(self.held_rows, 128)
            )

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Measure a bf16 copy of the drafter (what will be served) and save it in `drafter/`."""
        drafter = self.bf16_copy()
        embed = nn.Embedding.from_pretrained(self.embed.weight.bfloat16())
        result = {
            "kind": "eval",
            "held_out": simulated_tau(drafter, embed, self.anchors, self.held_replies),
            "expected_length": teacher_forced_length(drafter, embed, self.anchors, self.held_rows),
            "anchors_seen": self.step * self.config.optim.batch_anchors,
            "seconds": round(self.train_seconds, 1),
        }
        self._log(result)
        self.last_eval = result
        save_drafter(drafter, self.folder / "drafter")
        print(f"\nstep {self.step}: {json.dumps(result)}", file=sys.stderr, flush=True)
        return result

    def bf16_copy(self) -> DLiteDrafter:
        copy = DLiteDrafter(self.drafter.config).bfloat16()
        copy.load_state_dict(self.drafter.state_dict())
        return copy.requires_grad_(False).eval()

    def _log(self, values: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.step, **values}) + "\n")

    # ---- resuming -------------------------------------------------------------------------

    def save(self) -> None:
        """Replace the run's checkpoint atomically."""
        path = self.folder / "checkpoint.pt"
        scratch = path.with_suffix(f".{os.getpid()}")
        torch.save(
            {
                "step": self.step,
                "config": self._identity(),
                "rows": self.num_train_rows,
                "drafter": self.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "train_seconds": self.train_seconds,
                "last_eval": self.last_eval,
            },
            scratch,
        )
        scratch.replace(path)

    def resume(self) -> bool:
        """Continue from the run's checkpoint, if there is one.

        Raises `TrainConfigError` when it was made with other settings or other data.
        """
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return False
        saved = torch.load(path, weights_only=True)
        mine = self._identity()
        differing = [key for key in mine if saved["config"].get(key) != mine[key]]
        if saved["rows"] != self.num_train_rows:
            differing.append(f"data ({saved['rows']} anchors then, {self.num_train_rows} now)")
        if differing:
            raise TrainConfigError(
                f"{path} was made with other settings: {', '.join(differing)}. "
                f"Set run.folder to a new folder, or restore the settings."
            )
        self.drafter.load_state_dict(saved["drafter"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.train_seconds = saved["step"], saved["train_seconds"]
        self.last_eval = saved["last_eval"]
        return True

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree on: everything that changes the weights' path."""
        whole = self.config.to_dict()
        sections = {"model": whole["model"], "loss": whole["loss"], "optim": whole["optim"]}
        return json.loads(json.dumps(sections))


@contextmanager
def _one_lookup(embedding: nn.Embedding, batch: AnchorBatch) -> Iterator[None]:
    """Let the head's K+1 lookups share one gather from the big table.

    Each lookup of its own would make a dense [V, R] gradient, most of it zeros, and add them up.
    """
    tokens = torch.cat([batch.token_group.flatten(), batch.previous_tokens.flatten()]).unique()
    table = embedding(tokens)  # [U, R]; tokens is sorted
    embedding.forward = lambda ids: F.embedding(torch.searchsorted(tokens, ids.contiguous()), table)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del embedding.forward


def _spread(items: Any, count: int) -> Any:
    """At most `count` of the items, evenly spread."""
    if len(items) <= count:
        return items
    picked = np.linspace(0, len(items) - 1, count).round().astype(int)
    return items[picked] if isinstance(items, np.ndarray) else [items[i] for i in picked]
