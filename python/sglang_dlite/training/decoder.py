"""Batched decoding with transformers that also records what a drafter is trained on.

Requests move through slots: a finished row is replaced at once, so that short replies do not wait
for long ones. For each reply token the pivot states and the largest target log-probabilities come
from the very forward pass that produced the token: nothing is computed twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

_ATTENTION = "dlite_slots"
# Sampling looks at the likeliest tokens only: drawing from 50 thousand costs more than the model.
_SAMPLED_FROM = 256


@dataclass
class Request:
    """Token ids to continue, and what was made of them. Rows are those of the reply's tokens:
    row r is the target's row that produced reply token r (row 0 is the last prompt row)."""

    key: Any
    prompt_ids: list[int]
    reply_ids: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)  # per row [S, h], the model's dtype
    top_ids: list[torch.Tensor] = field(default_factory=list)  # per row [M] int32
    top_logprobs: list[torch.Tensor] = field(default_factory=list)  # per row [M] float16


def _attention(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """SDPA for both phases; in decode the query heads of one KV head act as its queries, which
    spares the copy of K and V that grouped heads otherwise need."""
    batch, heads, length, dim = q.shape
    if length > 1:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=heads != k.shape[1]
        )
        return out.transpose(1, 2), None
    grouped = q.reshape(batch, k.shape[1], -1, dim)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(batch, 1, heads, dim), None


class _SlotCache:
    """KV of `slots` rows of fixed capacity; looks like a transformers cache to the model."""

    is_compileable = False

    def __init__(self, config: Any, slots: int, capacity: int, dtype: torch.dtype) -> None:
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(slots, heads, capacity, dim, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(slots, heads, capacity, dim, dtype=dtype) for _ in layers]
        self.lengths = torch.zeros(slots, dtype=torch.long)  # tokens held, per slot
        self.active = 0  # slots 0..active-1 are in use
        self.span = 0  # columns that the current step looks at

    def get_seq_length(self, *_: Any) -> int:
        return self.span

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = torch.arange(self.active), self.lengths[: self.active]
        self.keys[layer][rows, :, columns] = key[:, :, 0]
        self.values[layer][rows, :, columns] = value[:, :, 0]
        return (
            self.keys[layer][: self.active, :, : self.span],
            self.values[layer][: self.active, :, : self.span],
        )

    def copy_slot(self, source: int, target: int) -> None:
        length = int(self.lengths[source])
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]
        self.lengths[target] = self.lengths[source]


class SlotDecoder:
    """Continuous batching over a transformers model with full attention in every layer.

    target_layer_ids: whose block outputs to record (the last layer's: after the final norm).
    top_count: M, how many log-probabilities to record per row; 0 records neither these nor states.
    temperature: 0 is greedy; otherwise samples (from the likeliest 256 tokens) with `seed`.
    """

    def __init__(
        self,
        model: Any,
        target_layer_ids: Sequence[int],
        eos_ids: Sequence[int],
        slots: int,
        top_count: int = 48,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_ATTENTION, _attention)
        model.set_attn_implementation(_ATTENTION)
        self.model = model.eval()
        self.layer_ids = list(target_layer_ids)
        self.eos = set(eos_ids)
        self.slots = slots
        self.top_count = top_count
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)
        self._captured: dict[int, torch.Tensor] = {}
        last = model.config.num_hidden_layers - 1
        for index in self.layer_ids:
            module = model.model.norm if index == last else model.model.layers[index]
            module.register_forward_hook(self._capture(index))

    def _capture(self, index: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self._captured[index] = output[0] if isinstance(output, tuple) else output

        return hook

    @torch.inference_mode()
    def decode(
        self,
        requests: Sequence[Request],
        max_new_tokens: int,
        on_finish: Callable[[Request], None],
    ) -> None:
        """Continue every request; `on_finish` gets each one once, in the order of finishing."""
        if not requests:
            return
        pending = deque(sorted(requests, key=lambda r: -len(r.prompt_ids)))
        longest = len(pending[0].prompt_ids)
        capacity = longest + max_new_tokens
        slots = min(self.slots, len(pending))
        cache = _SlotCache(self.model.config, slots, capacity, self.model.dtype)
        running: list[Request] = []
        while pending or running:
            room = slots - len(running)
            if pending and (room >= max(1, slots // 8) or not running):
                self._prefill(pending, room, cache, running)
            self._retire(running, cache, max_new_tokens, on_finish)
            if running:
                self._step(cache, running)
                self._retire(running, cache, max_new_tokens, on_finish)

    def _prefill(
        self, pending: deque[Request], room: int, cache: _SlotCache, running: list[Request]
    ) -> None:
        from transformers import DynamicCache

        group = [pending.popleft()]
        widest = len(group[0].prompt_ids)
        while pending and len(group) < room and (len(group) + 1) * widest <= 4096:
            group.append(pending.popleft())  # sorted: none is wider than the first
        ids = torch.zeros(len(group), widest, dtype=torch.long)
        for row, request in enumerate(group):
            ids[row, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        fresh = DynamicCache()
        # Padding is on the right, after every real token: causal attention never sees it.
        hidden = self.model.model(
            input_ids=ids, past_key_values=fresh, use_cache=True
        ).last_hidden_state
        rows = torch.arange(len(group))
        last = torch.tensor([len(r.prompt_ids) - 1 for r in group])
        for layer in range(len(cache.keys)):
            key, value = fresh.layers[layer].keys, fresh.layers[layer].values
            first = len(running)
            cache.keys[layer][first : first + len(group), :, :widest] = key
            cache.values[layer][first : first + len(group), :, :widest] = value
        cache.lengths[len(running) : len(running) + len(group)] = last + 1
        running.extend(group)
        self._emit(group, hidden[rows, last], {i: s[rows, last] for i, s in self._captured.items()})

    def _step(self, cache: _SlotCache, running: list[Request]) -> None:
        cache.active = len(running)
        lengths = cache.lengths[: cache.active]
        cache.span = int(lengths.max()) + 1
        columns = torch.arange(cache.span)
        visible = columns[None, :] <= lengths[:, None]
        mask = torch.zeros(visible.shape, dtype=self.model.dtype)
        mask = mask.masked_fill(~visible, float("-inf"))[:, None, None, :]
        ids = torch.tensor([[request.reply_ids[-1]] for request in running])
        hidden = self.model.model(
            input_ids=ids,
            position_ids=lengths[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        cache.lengths[: cache.active] += 1
        self._emit(running, hidden[:, 0], {i: s[:, 0] for i, s in self._captured.items()})

    def _emit(
        self, group: list[Request], hidden: torch.Tensor, states: dict[int, torch.Tensor]
    ) -> None:
        """Append one token (and its row's record) to each request; hidden [n, h]."""
        logits = self.model.lm_head(hidden)
        if self.temperature > 0:
            top, choices = logits.topk(min(_SAMPLED_FROM, logits.shape[-1]), dim=-1)
            probs = torch.softmax(top.float() / self.temperature, -1)
            picked = torch.multinomial(probs, 1, generator=self.generator)
            tokens = choices.gather(-1, picked)[:, 0]
            ids = logprobs = None
        else:
            top, ids = logits.topk(
                max(self.top_count, 1), dim=-1
            )  # sorted: the first is the argmax
            tokens = ids[:, 0]
            scaled = logits.float()
            total = scaled.sub_(top[:, :1].float()).exp_().sum(-1, keepdim=True)
            logprobs = (top.float() - top[:, :1].float() - total.log()).to(torch.float16)
            ids = ids.to(torch.int32)
        stacked = torch.stack([states[i] for i in self.layer_ids], 1) if self.top_count else None
        for row, (request, token) in enumerate(zip(group, tokens.tolist(), strict=True)):
            request.reply_ids.append(token)
            if stacked is not None and ids is not None and logprobs is not None:
                request.states.append(stacked[row])
                request.top_ids.append(ids[row])
                request.top_logprobs.append(logprobs[row])

    def _retire(
        self,
        running: list[Request],
        cache: _SlotCache,
        max_new_tokens: int,
        on_finish: Callable[[Request], None],
    ) -> None:
        """Hand over finished requests and close the gaps, so that slots 0..n-1 stay in use."""
        slot = 0
        while slot < len(running):
            request = running[slot]
            ended = request.reply_ids[-1] in self.eos
            if not ended and len(request.reply_ids) < max_new_tokens:
                slot += 1
                continue
            last = len(running) - 1
            if slot != last:
                cache.copy_slot(last, slot)
                running[slot] = running[last]
            running.pop()
            on_finish(request)
