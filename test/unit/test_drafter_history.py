"""The history-aware teacher against equations written out head by head, key by key."""

from __future__ import annotations

import pytest
import torch
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, HistoryAwareDrafter, HistoryWindow

H, D, HQ, HKV, W, S, K = 16, 8, 4, 2, 5, 3, 3


def _config(group: int) -> DLiteConfig:
    return DLiteConfig(
        hidden_size=H, num_hidden_layers=2, num_target_layers=6, num_attention_heads=HQ,
        num_key_value_heads=HKV, head_dim=D, intermediate_size=24, vocab_size=40,
        rms_norm_eps=1e-6, rope_theta=100.0, block_size=K + 1,
        architecture_version="dlite_v1" if group == 1 else "dlite_v2",
        model_role="pivot_q_student", anchor_group_size=group, target_layer_ids=(0, 3, 5),
        sequential_head="rnn", sequential_rank=8, mask_token_id=39,
    )  # fmt: skip


def _inputs(group: int, positions: list[int]):
    """States of every token of one sequence of 20, and anchors at these positions."""
    torch.manual_seed(0)
    embed = torch.nn.Embedding(40, H).requires_grad_(False)
    tokens = torch.randint(0, 39, (20,))
    features, states = torch.randn(20, 3, H), torch.randn(20, S, H)
    a = torch.tensor(positions)
    index = a[:, None] + torch.arange(-W, -1)
    history = HistoryWindow(features, index.clamp_min(0), index >= 0, a)
    groups = torch.stack([tokens[p - group + 1 : p + 1] for p in positions])
    return embed, states[a - 1], groups, history


def _norm(x, module):
    return x / (x.square().mean() + module.eps).sqrt() * module.weight


def _rotated(x, position: int):
    half = D // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = torch.tensor(position / 100.0 ** (2 * i / D))
        out[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
        out[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
    return out


def _naive(model, embed, states, group, features, position: int):
    """Prediction hiddens [K, h] of one anchor."""
    keys = []  # (position, vector) of the context
    for p in range(position - W, position - 1):
        if p >= 0:
            fused = model.history_fuse.weight @ torch.cat(list(features[p]))
            keys.append((p, _norm(fused, model.history_norm)))
    for s, layer in enumerate(model.config.target_layer_ids):
        slot = states[s] + model.layer_depth_embedding.weight[layer]
        keys.append((position - 1, _norm(slot, model.context_norm)))
    ids = [*group.tolist(), *[39] * K]
    places = range(position - len(group) + 1, position + K + 1)
    x = [embed.weight[i] for i in ids]
    for layer in model.layers:
        att = layer.self_attn
        normed = [_norm(v, layer.input_layernorm) for v in x]
        source = keys + list(zip(places, normed, strict=True))
        new = []
        for place, v, residual in zip(places, normed, x, strict=True):
            heads = []
            for head in range(HQ):
                rows = slice(head * D, (head + 1) * D)
                q = _rotated(_norm(att.q_proj.weight[rows] @ v, att.q_norm), place)
                kv = head // (HQ // HKV)
                part = slice(kv * D, (kv + 1) * D)
                scores, values = [], []
                for p, c in source:
                    k = _rotated(_norm(att.k_proj.weight[part] @ c, att.k_norm), p)
                    scores.append((q @ k) / D**0.5)
                    values.append(att.v_proj.weight[part] @ c)
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            y = residual + att.o_proj.weight @ torch.cat(heads)
            z = _norm(y, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(layer.mlp.gate_proj.weight @ z)
            new.append(y + layer.mlp.down_proj.weight @ (gate * (layer.mlp.up_proj.weight @ z)))
        x = new
    return torch.stack([_norm(v, model.norm) for v in x[-K:]])


@pytest.mark.parametrize("group", [1, 2, 3])
def test_it_equals_equations_written_out(group: int) -> None:
    model = HistoryAwareDrafter(_config(group), W)
    positions = [3, 4, 17, 12]  # the first two lack a part of their window
    embed, states, groups, history = _inputs(group, positions)
    with torch.no_grad():
        got = model.backbone_with_history(states, groups, embed, history)
        for row, position in enumerate(positions):
            expected = _naive(model, embed, states[row], groups[row], history.features, position)
            torch.testing.assert_close(got[row], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("group", [2, 3])
def test_without_history_it_is_the_drafter(group: int) -> None:
    """The same weights and an empty window: positions shift by a constant, which RoPE ignores."""
    teacher = HistoryAwareDrafter(_config(group), W)
    drafter = DLiteDrafter(_config(group))
    shared = {n: t for n, t in teacher.state_dict().items() if not n.startswith("history_")}
    drafter.load_state_dict(shared)
    embed, states, groups, history = _inputs(group, [9, 15])
    empty = history._replace(valid=torch.zeros_like(history.valid))
    with torch.no_grad():
        mine = teacher.backbone_with_history(states, groups, embed, empty)
        theirs = drafter.backbone(states, groups, embed)
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
        block = teacher.draft_with_history(states, groups, embed, empty)
        assert torch.equal(block.token_ids, drafter.draft(states, groups, embed).token_ids)
        seeing = teacher.backbone_with_history(states, groups, embed, history)
    assert (seeing - mine).abs().max() > 1e-3


def test_its_parameters_are_the_drafters_and_the_projection() -> None:
    teacher = HistoryAwareDrafter(_config(1), W)
    extra = teacher.state_dict().keys() - DLiteDrafter(_config(1)).state_dict().keys()
    assert extra == {"history_fuse.weight", "history_norm.weight"}
    with pytest.raises(ValueError, match="window = 1"):
        HistoryAwareDrafter(_config(1), 1)
