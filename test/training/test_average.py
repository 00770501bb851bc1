"""The average of the weights follows its formula, survives a kill, and is what is kept."""

from __future__ import annotations

from pathlib import Path

import torch
from sglang_dlite.drafter import load_drafter
from sglang_dlite.training.average import WeightAverage
from torch import nn

from .conftest import make_trainer


def test_it_is_a_moving_average_over_a_tenth_of_the_steps_at_most() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    average = WeightAverage(model, 0.5)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for step in range(20):
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        for name, p in model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * p.detach().double()
    for name, value in average.weights.items():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-6, rtol=1e-6)


def test_the_average_is_evaluated_and_kept_and_a_resumed_run_repeats_it(
    config, tmp_path: Path
) -> None:
    def settings(folder: str):
        return config(tmp_path / folder, optim={"ema": 0.8}, run={"eval_every": 10})

    plain = make_trainer(config(tmp_path / "plain"))
    whole, broken = make_trainer(settings("whole")), make_trainer(settings("broken"))
    for trainer in (plain, whole):
        trainer.run()
    for _ in range(4):
        broken.train_step()
    broken.save()
    again = make_trainer(settings("broken"))
    again.run()
    assert whole.average and again.average
    best = load_drafter(whole.folder / "best").state_dict()
    for name, value in whole.average.weights.items():
        torch.testing.assert_close(again.average.weights[name], value, atol=0, rtol=0)
        assert torch.equal(best[name], value.bfloat16())
        trained = whole.model.state_dict()[name]
        assert torch.equal(trained, plain.model.state_dict()[name])  # training does not see it
        assert not torch.equal(trained, value)


def test_a_continued_run_goes_on_with_the_average(config, tmp_path: Path) -> None:
    first = make_trainer(config(tmp_path / "first", optim={"ema": 0.8}))
    first.run()
    run = {"init_from": str(first.folder)}
    second = make_trainer(config(tmp_path / "second", optim={"ema": 0.9}, run=run))
    assert first.average and second.average
    for name, value in first.average.weights.items():
        assert torch.equal(second.average.weights[name], value)
    make_trainer(config(tmp_path / "third", run=run)).run()
    # Where the earlier run had none, the average starts at the weights, with that run's steps.
    run = {"init_from": str(tmp_path / "third")}
    fourth = make_trainer(config(tmp_path / "fourth", optim={"ema": 0.9}, run=run))
    assert fourth.average
    start = {name: p.detach().clone() for name, p in fourth.model.named_parameters()}
    fourth.train_step()
    decay = min(0.9, (1 + 10) / (10 + 10))
    for name, p in fourth.model.named_parameters():
        expected = decay * start[name] + (1 - decay) * p.detach()
        torch.testing.assert_close(fourth.average.weights[name], expected, atol=1e-6, rtol=1e-5)
