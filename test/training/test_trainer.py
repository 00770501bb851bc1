"""The trainer: learns, resumes exactly, exports what the server loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sglang_dlite.drafter import DLiteConfig, DLiteDrafter, load_drafter
from sglang_dlite.training.anchors import AnchorSet
from sglang_dlite.training.config import TrainConfig, TrainConfigError, from_dict
from sglang_dlite.training.simulate import simulate_greedy
from sglang_dlite.training.trainer import RowSampler, Trainer, learning_rate
from torch import nn

from .conftest import HIDDEN, LAYERS, VOCAB, write_replies


def _drafter() -> DLiteDrafter:
    torch.manual_seed(1)
    return DLiteDrafter(
        DLiteConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            num_target_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=24,
            vocab_size=VOCAB,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            block_size=4,
            architecture_version="dlite_v2",
            model_role="pivot_q_student",
            anchor_group_size=2,
            target_layer_ids=LAYERS,
            sequential_head="rnn",
            sequential_rank=8,
            mask_token_id=3,
        )
    )


def _config(folder: Path, **optim) -> TrainConfig:
    settings = {"steps": 12, "batch_anchors": 8, "lr": 3e-3, "seed": 5} | optim
    return from_dict(
        {
            "data": {"held_out_percent": 20},
            "optim": settings,
            "run": {
                "folder": str(folder),
                "bf16": False,
                "log_every": 1,
                "eval_every": 100,
                "checkpoint_every": 5,
            },
        }
    )


def _trainer(data: Path, config: TrainConfig) -> Trainer:
    torch.manual_seed(2)
    embed = nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)
    return Trainer(config, _drafter(), embed, AnchorSet([data], 2, 3))


def _losses(folder: Path) -> list[float]:
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def test_a_resumed_run_repeats_the_unbroken_one(data_folder: Path, tmp_path: Path) -> None:
    whole = _trainer(data_folder, _config(tmp_path / "whole"))
    whole.run()
    broken = _trainer(data_folder, _config(tmp_path / "broken"))
    for _ in range(5):
        broken.train_step()
    broken.save()
    for _ in range(2):
        broken.train_step()  # lost with the kill
    again = _trainer(data_folder, _config(tmp_path / "broken"))
    assert again.resume() and again.step == 5
    again.run()
    expected = _losses(tmp_path / "whole")[5:]
    assert _losses(tmp_path / "broken") == pytest.approx(expected, abs=1e-6)
    for name, weight in whole.drafter.state_dict().items():
        torch.testing.assert_close(again.drafter.state_dict()[name], weight, atol=1e-6, rtol=0)


def test_resuming_with_other_settings_is_refused(data_folder: Path, tmp_path: Path) -> None:
    trainer = _trainer(data_folder, _config(tmp_path))
    trainer.save()
    with pytest.raises(TrainConfigError, match=r"other settings: optim"):
        _trainer(data_folder, _config(tmp_path, lr=1e-3)).resume()
    write_replies(data_folder, "part-2", [5])
    with pytest.raises(TrainConfigError, match=r"data \("):
        _trainer(data_folder, _config(tmp_path)).resume()


def test_training_lowers_the_loss_and_exports(data_folder: Path, tmp_path: Path) -> None:
    trainer = _trainer(data_folder, _config(tmp_path / "run", steps=60, lr=1e-2))
    result = trainer.run()
    losses = _losses(tmp_path / "run")
    assert sum(losses[-10:]) < 0.97 * sum(losses[:10])
    assert result["expected_length"] >= 1
    loaded = load_drafter(tmp_path / "run" / "drafter")
    assert loaded.dtype == torch.bfloat16 and loaded.config == trainer.drafter.config


def test_simulated_acceptance_equals_a_walk_reply_by_reply(data_folder: Path) -> None:
    anchors = AnchorSet([data_folder], 2, 3)
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB, (anchors.num_rows, 3))
    for row in range(anchors.num_rows):  # make many drafts right
        labels, _ = anchors.labels(torch.tensor([row]).numpy())
        right = int(torch.randint(0, 4, ()))
        tokens[row, :right] = labels[0, :right]

    class Oracle:
        def draft(self, states, group, embed):
            ids = [next(i for i in range(anchors.num_rows) if _same(i, s)) for s in states]
            return type("Block", (), {"token_ids": tokens[ids]})

    def _same(row: int, states: torch.Tensor) -> bool:
        return torch.equal(anchors.states(torch.tensor([row]).numpy())[0], states)

    got = simulate_greedy(Oracle(), None, anchors, anchors.replies)
    for reply, count in zip(anchors.replies, got, strict=True):
        place = passes = accepted = 0
        while place < reply.length - 1:
            labels, labelled = anchors.labels(torch.tensor([reply.row + place]).numpy())
            n = 0
            while n < 3 and labelled[0, n] and tokens[reply.row + place, n] == labels[0, n]:
                n += 1
            passes, accepted, place = passes + 1, accepted + n, place + n + 1
        assert (count.passes, count.accepted) == (passes, accepted)


def test_each_epoch_visits_every_row_once() -> None:
    import numpy as np

    sampler = RowSampler(np.arange(100, 124), batch=6, seed=0)
    epochs = [[*map(tuple, (sampler.rows(4 * e + i) for i in range(4)))] for e in range(2)]
    for epoch in epochs:
        assert sorted(x for rows in epoch for x in rows) == list(range(100, 124))
    assert epochs[0] != epochs[1]


def test_learning_rate_warms_up_and_decays() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.04) for step in range(100)]
    assert rates[0] == 0.25 and max(rates) == 1.0 == rates[4]
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] < 0.01
