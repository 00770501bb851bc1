"""What is minimised: the drafter's and the teacher's losses on a batch of anchors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sglang_dlite.drafter import DLiteDrafter, HistoryAwareDrafter
from sglang_dlite.training.anchors import AnchorBatch, Pick, Reply, TopLaw
from sglang_dlite.training.config import DistillSection, LossSection
from sglang_dlite.training.losses import (
    LinearP,
    TopP,
    Weights,
    draft_losses,
    position_weights,
    sample_positions,
)
from sglang_dlite.training.schedule import Mixture, weight_sum

Embed = Callable[[Tensor], Tensor]


class Prediction(NamedTuple):
    """What a model says of a batch."""

    hidden: Tensor  # [n, K, h], the backbone's
    vectors: Tensor  # [n, K, R], the head's, teacher-forced


class Denominators(NamedTuple):
    """Sums of the position weights over all labelled drafts of a step."""

    target: float
    base: float
    distill: float


def predict(model: DLiteDrafter, batch: AnchorBatch, embed: Embed) -> Prediction:
    """Run the drafter, or the teacher with the batch's window. Differentiable."""
    if isinstance(model, HistoryAwareDrafter):
        assert batch.window is not None
        hidden = model.backbone_with_history(
            batch.pivot_states, batch.token_group, embed, batch.window
        )
    else:
        hidden = model.backbone(batch.pivot_states, batch.token_group, embed)
    return Prediction(hidden, model.head_vectors(hidden, batch.previous_tokens, batch.token_group))


class Objective:
    """The loss of one model; `teacher` is only asked where the mixture distils."""

    def __init__(
        self,
        loss: LossSection,
        distill: DistillSection,
        embed: Embed,
        lm_head: Tensor,
        bf16: bool,
        teacher: HistoryAwareDrafter | None = None,
    ) -> None:
        """embed and lm_head [V, h] are the target's, frozen."""
        self.section, self.distill = loss, distill
        self.embed, self.lm_head, self.bf16 = embed, lm_head, bf16
        self.teacher = None if teacher is None else teacher.requires_grad_(False).eval()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def denominators(
        self, batches: Sequence[Sequence[Pick]], replies: Sequence[Reply], num_drafts: int
    ) -> Denominators:
        """Of a whole step, over all processes."""
        gammas = (self.section.gamma, self.section.base_gamma, self.distill.gamma)
        return Denominators(
            *(weight_sum(batches, replies, position_weights(num_drafts, g).numpy()) for g in gammas)
        )

    def loss(
        self,
        model: DLiteDrafter,
        batch: AnchorBatch,
        mix: Mixture,
        below: Denominators,
        generator: torch.Generator,
    ) -> Tensor:
        """This batch's share of the step's scalar loss."""
        device = batch.labels.device
        # On a CPU the flash kernel's backward takes four times as long for sequences this short.
        attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()
        with self.autocast(device), attention, _one_lookup(model, batch):
            prediction = predict(model, batch, self.embed)
        total = torch.zeros((), device=device)
        if mix.target:
            total = total + mix.target * self._against_target(
                model, batch, prediction, below, generator
            )
        if mix.distill:
            total = total + mix.distill * self._against_teacher(
                model, batch, prediction, below, generator
            )
        return total

    def _against_target(
        self,
        model: DLiteDrafter,
        batch: AnchorBatch,
        prediction: Prediction,
        below: Denominators,
        generator: torch.Generator,
    ) -> Tensor:
        section, device = self.section, batch.labels.device
        keep = batch.labelled
        decay = position_weights(keep.shape[1], section.gamma)
        chance = torch.ones_like(decay)
        if section.sample_positions:
            keep = sample_positions(keep.cpu(), section.gamma, generator).to(device)
            chance = decay
        weights = (decay / chance).to(device).expand(keep.shape)[keep]
        if isinstance(batch.law, TopLaw):
            law: TopP | LinearP = TopP(batch.law.ids[keep], batch.law.logprobs[keep])
        else:
            law = LinearP(batch.law.hidden[keep], self.lm_head)
        total = draft_losses(
            prediction.vectors[keep].float(),
            model.sequential_head.output_proj.weight,
            batch.labels[keep],
            law,
            weights / below.target,
            Weights(section.w_ce, section.w_tv),
            self.dtype,
        ).total
        if section.w_base:
            base = position_weights(keep.shape[1], section.base_gamma)
            base_weights = (base / chance).to(device).expand(keep.shape)[keep]
            total = (
                total
                + draft_losses(
                    prediction.hidden[keep].float(),
                    self.lm_head,
                    batch.labels[keep],
                    None,
                    base_weights / below.base,
                    Weights(section.w_base, 0.0),
                    self.dtype,
                ).total
            )
        return total

    def _against_teacher(
        self,
        model: DLiteDrafter,
        batch: AnchorBatch,
        prediction: Prediction,
        below: Denominators,
        generator: torch.Generator,
    ) -> Tensor:
        assert self.teacher is not None
        keep, device, share = batch.labelled, batch.labels.device, self.distill.keep
        if share < 1:
            keep = keep & (torch.rand(keep.shape, generator=generator) < share).to(device)
        with torch.no_grad(), self.autocast(device):
            vectors = predict(self.teacher, batch, self.embed).vectors
        decay = position_weights(keep.shape[1], self.distill.gamma).to(device)
        return draft_losses(
            prediction.vectors[keep].float(),
            model.sequential_head.output_proj.weight,
            batch.labels[keep],
            LinearP(vectors[keep], self.teacher.sequential_head.output_proj.weight),
            decay.expand(keep.shape)[keep] / (share * below.distill),
            Weights(0.0, 0.0, self.distill.w_kl),
            self.dtype,
        ).total


@contextmanager
def _one_lookup(model: DLiteDrafter, batch: AnchorBatch) -> Iterator[None]:
    """Let the head's K+1 lookups share one gather from the big table.

    Each lookup of its own would make a dense [V, R] gradient, most of it zeros, and add them up.
    """
    embedding: nn.Embedding = model.sequential_head.prev_token_embedding
    tokens = torch.cat([batch.token_group.flatten(), batch.previous_tokens.flatten()]).unique()
    table = embedding(tokens)  # [U, R]; tokens is sorted
    embedding.forward = lambda ids: F.embedding(torch.searchsorted(tokens, ids.contiguous()), table)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del embedding.forward
