"""The drafter against reference vectors and a naive reference written from the equations."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, load_drafter
from torch import Tensor


def test_golden_vectors(golden: Path) -> None:
    drafter = load_drafter(golden)
    vectors = load_file(golden / "vectors.safetensors")
    embed, pivot, group = vectors["embed_tokens"], vectors["pivot_hidden"], vectors["token_group"]

    hidden = drafter.backbone(pivot, group, lambda ids: embed[ids])
    block = drafter.draft(pivot, group, lambda ids: embed[ids])

    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(hidden, vectors["prediction_hidden"], **close)
    logits = drafter.draft_logits(block.head_vectors)
    torch.testing.assert_close(logits, vectors["draft_logits"], **close)
    assert torch.equal(block.token_ids, vectors["draft_tokens"])


# --- A reference per request, position and head, written from the equations, in fp64 ---


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / math.sqrt(sum(float(v) ** 2 for v in x) / len(x) + eps) * weight


def _rope(x: Tensor, position: int, theta: float) -> Tensor:
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def _reference_layer(
    w: dict[str, Tensor], p: str, c: DLiteConfig, xs: list[Tensor], context: list[Tensor]
) -> list[Tensor]:
    d, repeat, eps = (
        c.head_dim,
        c.num_attention_heads // c.num_key_value_heads,
        c.rms_norm_eps,
    )
    normed = [_norm(x, w[p + "input_layernorm.weight"], eps) for x in xs]
    slot_position = 0 if c.anchor_group_size == 1 else c.anchor_group_size - 2
    keys_from = [(x, slot_position) for x in context] + [(x, t) for t, x in enumerate(normed)]
    outs = []
    for t, (x, x1) in enumerate(zip(xs, normed, strict=True)):
        heads = []
        for head in range(c.num_attention_heads):
            rows, kv = slice(head * d, (head + 1) * d), head // repeat
            kv_rows = slice(kv * d, (kv + 1) * d)
            q = w[p + "self_attn.q_proj.weight"][rows] @ x1
            q = _rope(_norm(q, w[p + "self_attn.q_norm.weight"], eps), t, c.rope_theta)
            scores, values = [], []
            for source, position in keys_from:
                k = w[p + "self_attn.k_proj.weight"][kv_rows] @ source
                k = _rope(_norm(k, w[p + "self_attn.k_norm.weight"], eps), position, c.rope_theta)
                scores.append(float(q @ k) / math.sqrt(d))
                values.append(w[p + "self_attn.v_proj.weight"][kv_rows] @ source)
            exps = [math.exp(s - max(scores)) for s in scores]
            heads.append(sum(e / sum(exps) * v for e, v in zip(exps, values, strict=True)))
        x = x + w[p + "self_attn.o_proj.weight"] @ torch.cat(heads)
        x2 = _norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate = w[p + "mlp.gate_proj.weight"] @ x2
        inner = gate / (1 + torch.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ x2)
        outs.append(x + w[p + "mlp.down_proj.weight"] @ inner)
    return outs


def _reference_state(w: dict[str, Tensor], state: Tensor, token: int) -> Tensor:
    rank, p = len(state), "sequential_head."
    both = torch.cat([state, w[p + "prev_token_embedding.weight"][token]])
    raw = w[p + "state_proj.weight"] @ both + w[p + "state_proj.bias"]
    gate = 1 / (1 + torch.exp(-raw[:rank]))
    return gate * state + (1 - gate) * torch.tanh(raw[rank:])


def _reference_draft(
    w: dict[str, Tensor], c: DLiteConfig, pivot: Tensor, group: list[int], table: Tensor
) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """One request: tokens, head vectors and prediction hiddens of its block."""
    context = [
        _norm(h + w["layer_depth_embedding.weight"][i], w["context_norm.weight"], c.rms_norm_eps)
        for h, i in zip(pivot, c.target_layer_ids, strict=True)
    ]
    xs = [table[t] for t in group] + [table[c.mask_token_id]] * (c.block_size - 1)
    for layer in range(c.num_hidden_layers):
        xs = _reference_layer(w, f"layers.{layer}.", c, xs, context)
    hiddens = [_norm(x, w["norm.weight"], c.rms_norm_eps) for x in xs[len(group) :]]
    state = torch.zeros(c.sequential_rank, dtype=torch.float64)
    if len(group) > 1:
        state = _reference_state(w, state, group[-2])
    tokens, vectors, token = [], [], group[-1]
    for h in hiddens:
        state = _reference_state(w, state, token)
        u = w["sequential_head.state_hidden_mlp.weight"] @ torch.cat([state, h])
        vectors.append(u + w["sequential_head.state_hidden_mlp.bias"])
        token = int((w["sequential_head.output_proj.weight"] @ vectors[-1]).argmax())
        tokens.append(token)
    return tokens, vectors, hiddens


def _random_drafter(config: DLiteConfig, seed: int) -> tuple[DLiteDrafter, Tensor]:
    """A drafter whose every tensor (norms and biases too) is random, and an embedding table."""
    generator = torch.Generator().manual_seed(seed)
    drafter = DLiteDrafter(config).eval()
    for name, p in drafter.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        p.data = 1 + 0.3 * noise if "norm" in name else 0.4 * noise
    return drafter, torch.randn(config.vocab_size, config.hidden_size, generator=generator)


def _inputs(config: DLiteConfig, n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pivot = torch.randn(n, config.num_pivot_states, config.hidden_size, generator=generator)
    group = torch.randint(config.vocab_size, (n, config.anchor_group_size), generator=generator)
    return pivot, group


# G, S, B, D, (query heads, kv heads), R, n: each value of interest at least once, not the product.
SHAPES = [
    (1, 1, 2, 1, (2, 2), 1, 5),
    (1, 14, 8, 2, (4, 1), 7, 1),
    (2, 3, 9, 1, (4, 2), 8, 5),
    (2, 2, 4, 3, (6, 2), 5, 1),
    (3, 2, 5, 2, (2, 1), 9, 5),
    (3, 14, 3, 1, (3, 3), 3, 1),
    (1, 3, 3, 3, (1, 1), 16, 5),
    (2, 1, 2, 2, (8, 2), 11, 1),
]


@pytest.mark.parametrize(("g", "s", "b", "d", "heads", "r", "n"), SHAPES)
def test_brute_force(
    make_drafter_config: Any, g: int, s: int, b: int, d: int, heads: tuple[int, int], r: int, n: int
) -> None:
    seed = 1000 * g + 10 * s + b
    ids = random.Random(seed).sample(range(16), s)  # unsorted on purpose
    config = make_drafter_config(
        anchor_group_size=g,
        num_target_layers=16,
        target_layer_ids=tuple(ids),
        block_size=b,
        num_hidden_layers=d,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=6,
        sequential_rank=r,
        rope_theta=50.0,
    )
    drafter, table = _random_drafter(config, seed)
    pivot, group = _inputs(config, n, seed)
    hidden = drafter.backbone(pivot, group, lambda t: table[t])
    block = drafter.draft(pivot, group, lambda t: table[t])

    w = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    for i in range(n):
        tokens, vectors, hiddens = _reference_draft(
            w, config, pivot[i].double(), group[i].tolist(), table.double()
        )
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(hidden[i].double(), torch.stack(hiddens), **close)
        torch.testing.assert_close(block.head_vectors[i].double(), torch.stack(vectors), **close)
        assert block.token_ids[i].tolist() == tokens


@pytest.mark.parametrize("g", [1, 2, 3])
def test_empty_batch(make_drafter_config: Any, g: int) -> None:
    config = make_drafter_config(anchor_group_size=g)
    drafter, table = _random_drafter(config, 0)
    pivot, group = _inputs(config, 0, 0)
    block = drafter.draft(pivot, group, lambda t: table[t])
    assert block.token_ids.shape == (0, 4)
    assert block.token_ids.dtype == torch.int64
    assert block.head_vectors.shape == (0, 4, 7)
    hidden = drafter.backbone(pivot, group, lambda t: table[t])
    assert drafter.head_vectors(hidden, block.token_ids, group).shape == (0, 4, 7)


def test_a_row_does_not_depend_on_the_others(make_drafter_config: Any) -> None:
    config = make_drafter_config(anchor_group_size=2)
    drafter, table = _random_drafter(config, 1)
    pivot, group = _inputs(config, 5, 1)
    whole = drafter.draft(pivot, group, lambda t: table[t])
    poisoned = pivot.clone()
    poisoned[[0, 1, 3, 4]] = float("nan")
    among_nan = drafter.draft(poisoned, group, lambda t: table[t])
    alone = drafter.draft(pivot[2:3], group[2:3], lambda t: table[t])
    for other, row in ((among_nan, 2), (alone, 0)):
        assert torch.equal(whole.token_ids[2], other.token_ids[row])
        torch.testing.assert_close(whole.head_vectors[2], other.head_vectors[row])


@pytest.mark.parametrize("g", [1, 2, 3])
def test_draft_reads_every_input(make_drafter_config: Any, g: int) -> None:
    """History-free, yet each pivot state and each real token counts: none is dropped on the way."""
    config = make_drafter_config(anchor_group_size=g)
    drafter, table = _random_drafter(config, 2)
    pivot, group = _inputs(config, 1, 2)
    base = drafter.backbone(pivot, group, lambda t: table[t])
    for s in range(config.num_pivot_states):
        changed = pivot.clone()
        changed[0, s] += 1
        assert not torch.allclose(base, drafter.backbone(changed, group, lambda t: table[t]))
    for i in range(g):
        changed = group.clone()
        changed[0, i] = (changed[0, i] + 1) % config.vocab_size
        assert not torch.allclose(base, drafter.backbone(pivot, changed, lambda t: table[t]))


@pytest.mark.parametrize("g", [1, 2, 3])
def test_teacher_forcing_equals_drafting(make_drafter_config: Any, g: int) -> None:
    config = make_drafter_config(anchor_group_size=g)
    drafter, table = _random_drafter(config, 3)
    pivot, group = _inputs(config, 5, 3)
    block = drafter.draft(pivot, group, lambda t: table[t])
    hidden = drafter.backbone(pivot, group, lambda t: table[t])
    previous = torch.cat([group[:, -1:], block.token_ids[:, :-1]], dim=1)
    forced = drafter.head_vectors(hidden, previous, group)
    torch.testing.assert_close(forced, block.head_vectors)
    assert torch.equal(drafter.draft_logits(forced).argmax(-1), block.token_ids)

    drafter.draft_logits(forced).logsumexp(-1).sum().backward()
    without = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    assert not block.head_vectors.requires_grad


def test_inputs_of_wrong_shape_or_dtype_are_named(make_drafter_config: Any) -> None:
    config = make_drafter_config()
    drafter, table = _random_drafter(config, 4)
    pivot, group = _inputs(config, 2, 4)
    with pytest.raises(ValueError, match=r"pivot_states has shape \[2, 2, 16\], must be \[2, 3, "):
        drafter.draft(pivot[:, :2], group, lambda t: table[t])
    with pytest.raises(ValueError, match=r"token_group has shape"):
        drafter.draft(pivot, group.repeat(1, 2), lambda t: table[t])
    with pytest.raises(ValueError, match=r"token_group is torch.int32, must be torch.int64"):
        drafter.draft(pivot, group.int(), lambda t: table[t])
