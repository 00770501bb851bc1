"""What a run will need, computed from shapes on the meta device before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, HistoryAwareDrafter
from sglang_dlite.training.cache_format import row_bytes
from sglang_dlite.training.config import TrainConfig
from sglang_dlite.training.losses import block_rows
from sglang_dlite.training.targets import TargetShape

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATE_BYTES = 12  # per parameter: fp32 weight and AdamW's two moments
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes unless said otherwise."""

    drafter_parameters: int
    teacher_parameters: int  # 0 without a teacher
    target_weights: int
    checkpoint: int  # of the exported drafter, bf16
    training_state: int  # of the model in training, the larger one: weights, gradients, moments
    run_checkpoint: int  # of the same model: weights and moments, without gradients
    run_folder: int  # all checkpoints of the run, one of them twice while it is replaced
    anchors: int  # in one forward pass
    activations: int  # kept for the backward pass of that many anchors
    loss_block: int  # the largest vocabulary-wide temporaries
    cached_per_anchor: int  # pivot states and laws
    cached_per_history_token: int  # the teacher's features
    states_per_token: int  # what caching the pivot states of every token would take

    def text(self) -> str:
        """One line per figure."""
        lines = [
            ("drafter", f"{self.drafter_parameters / 1e6:,.1f} M parameters"),
            ("  checkpoint, bf16", size_text(self.checkpoint)),
            ("target weights", f"at most {size_text(self.target_weights)}"),
            ("weights, gradients, AdamW moments (fp32)", size_text(self.training_state)),
            ("disk: checkpoint.pt", size_text(self.run_checkpoint)),
            ("  the run's folder, at most", size_text(self.run_folder)),
            (f"activations of {self.anchors:,} anchors, about", size_text(self.activations)),
            ("vocabulary-wide loss temporaries", size_text(self.loss_block)),
            ("state cache, per chosen anchor, at most", size_text(self.cached_per_anchor)),
            ("  a million anchors", size_text(1_000_000 * self.cached_per_anchor)),
            ("pivot states, per token", size_text(self.states_per_token)),
        ]
        if self.teacher_parameters:
            lines.insert(1, ("teacher", f"{self.teacher_parameters / 1e6:,.1f} M parameters"))
            lines.append(
                ("history, per token that a window sees", size_text(self.cached_per_history_token))
            )
        return "\n".join(f"{name:<44}{value:>18}" for name, value in lines)


def estimate(config: TrainConfig, target: TargetShape, drafter: DLiteConfig) -> Estimate:
    """Build the models on the meta device and add up. Allocates nothing."""
    with torch.device("meta"):
        drafter_size = _count(DLiteDrafter(drafter))
        trains_teacher = config.stages.teacher > 0
        teacher_size = (
            _count(HistoryAwareDrafter(drafter, config.model.window)) if config.uses_history else 0
        )
    anchors = config.optim.micro_replies * config.optim.anchors_per_reply
    window = config.model.window - 1 if config.uses_history else 0
    width = 4 if not config.run.bf16 else 2
    states = 2 * drafter.num_pivot_states * drafter.hidden_size
    cached_layers = len(config.data.cached_layer_ids) or drafter.num_pivot_states
    row = row_bytes(cached_layers, drafter.hidden_size, config.data.top_k or 48)
    law = row["topids"] + row["toplogp"]
    state_bytes = _STATE_BYTES + 4 * (config.optim.ema > 0)
    sizes = [drafter_size, teacher_size * trains_teacher]  # of what is trained
    device = "cpu" if config.run.device == "cpu" else "cuda"  # the larger blocks, if in doubt
    whole_law = not config.data.top_k
    block = drafter.vocab_size * block_rows(drafter.vocab_size, whole_law, device)
    return Estimate(
        drafter_parameters=drafter_size,
        teacher_parameters=teacher_size,
        target_weights=DTYPE_BYTES[config.target.dtype] * _target_size(target),
        checkpoint=2 * drafter_size,
        training_state=(state_bytes + _GRADIENT_BYTES) * max(sizes),
        run_checkpoint=state_bytes * max(sizes),
        # checkpoint.pt and best/ of both models, the export, and the larger file once more.
        run_folder=state_bytes * (sum(sizes) + max(sizes)) + 2 * (sum(sizes) + drafter_size),
        anchors=anchors,
        activations=width * anchors * _activations(drafter, window),
        # Logits and q, turned into the gradient; with the whole law also p, and temporaries.
        loss_block=block * (6 * width if whole_law else 2 * width),
        cached_per_anchor=row["states"] + drafter.num_drafts * law,
        cached_per_history_token=row["window"],
        states_per_token=states,
    )


def _activations(c: DLiteConfig, window: int) -> int:
    """Elements that autograd keeps per anchor, counted from the operations of backbone.py."""
    queries = c.anchor_group_size + c.num_drafts
    keys = window + c.num_pivot_states + queries
    heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    per_query = 10 * c.hidden_size + 6 * heads + 4 * c.intermediate_size
    per_key = c.hidden_size + 6 * kv + 2 * heads  # grouped heads are repeated for the product
    scores = 3 * c.num_attention_heads * queries * keys
    head = c.num_drafts * (c.hidden_size + 12 * c.sequential_rank)
    return c.num_hidden_layers * (queries * per_query + keys * per_key + scores) + head


def _target_size(t: TargetShape) -> int:
    heads, kv = t.num_attention_heads * t.head_dim, t.num_key_value_heads * t.head_dim
    layer = t.hidden_size * (2 * heads + 2 * kv + 3 * t.intermediate_size)
    return t.num_hidden_layers * layer + 2 * t.vocab_size * t.hidden_size


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def size_text(count: int) -> str:
    """Decimal units, three digits."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:,.3g} TB"
