"""The trainer: learns, resumes exactly, adds up over processes, stops cleanly."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang_dlite.drafter import HistoryAwareDrafter, load_drafter
from sglang_dlite.training.config import TrainConfigError, from_dict
from sglang_dlite.training.divergence import TrainingDiverged
from sglang_dlite.training.objective import Objective
from sglang_dlite.training.session import Session
from sglang_dlite.training.storage import StorageError

from .conftest import MODEL, make_trainer, train_settings


def _lines(folder: Path, kind: str) -> list[dict]:
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("log_every", [1, 3])
def test_a_resumed_run_repeats_the_unbroken_one(config, tmp_path: Path, log_every: int) -> None:
    every = {"log_every": log_every}
    whole = make_trainer(config(tmp_path / "whole", run=every))
    whole.run()
    losses = {x["step"]: x["loss"] for x in _lines(tmp_path / "whole", "train")}
    assert list(losses) == list(range(log_every, 11, log_every))

    class Killed(Exception):
        pass

    broken = make_trainer(config(tmp_path / "broken", run=every))
    step, count = broken.train_step, 0

    def killed() -> float:
        nonlocal count
        count += 1
        if count > 6:  # the last checkpoint is of step 4
            raise Killed
        return step()

    broken.train_step = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        broken.run()
    again = make_trainer(config(tmp_path / "broken", run=every))
    assert again.step == 4
    again.run()
    resumed = {x["step"]: x["loss"] for x in _lines(tmp_path / "broken", "train")}
    assert resumed == pytest.approx(losses, abs=1e-6)
    assert len(_lines(tmp_path / "broken", "train")) == len(losses)  # no step twice
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_does_not_change_the_step(config, tmp_path: Path, micro: int) -> None:
    loss = {"w_base": 0.06, "sample_positions": False}
    one = make_trainer(config(tmp_path / "one", loss=loss))
    many = make_trainer(config(tmp_path / "many", loss=loss, optim={"micro_replies": micro}))
    assert many.train_step() == pytest.approx(one.train_step(), abs=1e-5)
    for a, b in zip(one.model.parameters(), many.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-3)


_WORKER = """
import sys, torch
from pathlib import Path
from sglang_dlite.training.config import load_config
from sglang_dlite.training.session import Session
session = Session(load_config(Path(sys.argv[1]), sys.argv[2:]))
drafter = session.fresh_drafter()
if not session.world.is_main:  # eigenvectors of a warm start may differ between machines
    drafter.norm.weight.data.neg_()
trainer = session.trainer("drafter", drafter, None)
losses = [trainer.train_step() for _ in range(3)]
if session.world.is_main:
    torch.save((losses, trainer.model.state_dict()), trainer.folder / "result.pt")
session.world.close()
"""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_processes_give_the_result_of_one(
    target: Path, data_folder: Path, tmp_path: Path
) -> None:
    raw = train_settings(target, data_folder, tmp_path)
    raw["optim"]["micro_replies"] = 2  # three micro-batches: one process gets two of them
    (tmp_path / "config.yaml").write_text(json.dumps(raw))
    port = str(_free_port())
    workers = []
    for rank in range(2):
        env = os.environ | {
            "WORLD_SIZE": "2", "RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", _WORKER, str(tmp_path / "config.yaml")]
        workers.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    losses, weights = torch.load(tmp_path / "result.pt")
    alone = make_trainer(from_dict(raw))
    assert losses == pytest.approx([alone.train_step() for _ in range(3)], abs=1e-6)
    for name, weight in alone.model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, atol=2e-6, rtol=1e-5)


def test_processes_that_would_idle_are_refused(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(config(tmp_path, optim={"micro_replies": 2}))
    session.world.size = 4
    with pytest.raises(TrainConfigError, match=r"4 processes for 3 forward passes.*micro_replies"):
        session.trainer("drafter", session.fresh_drafter(), None)


def test_a_loss_that_is_no_number_stops_and_saves_the_batch(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(config(tmp_path))
    trainer.save()
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    loss = Objective.loss
    monkeypatch.setattr(Objective, "loss", lambda *args: loss(*args) * float("nan"))
    with pytest.raises(TrainingDiverged, match=r"loss is nan.*diverged-step0-rank0\.pt"):
        trainer.run()
    saved = torch.load(tmp_path / "diverged-step0-rank0.pt")
    assert saved["step"] == 0 and len(saved["picks"]) == 6 and saved["batch"]["window"] is None
    rows = sum(len(places) for _, places in saved["picks"])
    assert saved["batch"]["labels"].shape == (rows, 4)
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, before[name])
    monkeypatch.undo()
    assert make_trainer(config(tmp_path)).run()  # from the checkpoint before


def test_a_teachers_diverged_batch_has_its_window(
    config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(config(tmp_path, stages={"teacher": 3}))
    teacher = HistoryAwareDrafter(session.shape, MODEL["window"])
    trainer = session.trainer("teacher", teacher, None)
    assert trainer is not None
    loss = Objective.loss
    monkeypatch.setattr(Objective, "loss", lambda *args: loss(*args) * float("nan"))
    with pytest.raises(TrainingDiverged):
        trainer.train_step()
    batch = torch.load(tmp_path / "teacher/diverged-step0-rank0.pt")["batch"]
    features, index, valid, position = batch["window"]
    assert features.shape[1:] == (3, 32) and index.shape == valid.shape
    assert len(position) == len(batch["labels"])


def test_a_full_disk_names_the_best_drafter(config, tmp_path: Path, file_size_limit) -> None:
    trainer = make_trainer(config(tmp_path))
    with file_size_limit(20_000), pytest.raises(StorageError, match=r"best.*Free some space"):
        trainer.evaluate()
    assert not (tmp_path / "best").exists()
    trainer.best = {}
    trainer.evaluate()
    assert load_drafter(tmp_path / "best").config == trainer.model.config


def test_a_full_disk_leaves_the_checkpoint_and_resuming_works(
    config, tmp_path: Path, file_size_limit
) -> None:
    trainer = make_trainer(config(tmp_path))
    trainer.train_step()
    trainer.save()
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    trainer.train_step()
    with file_size_limit(20_000), pytest.raises(StorageError, match=r"checkpoint\.pt.*intact"):
        trainer.save()
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    again = make_trainer(config(tmp_path))
    assert again.step == 1
    assert again.run()


def test_resuming_with_other_settings_is_refused(config, tmp_path: Path) -> None:
    make_trainer(config(tmp_path)).save()
    with pytest.raises(TrainConfigError, match=r"other settings: optim was .*'lr': 0\.003"):
        make_trainer(config(tmp_path, optim={"lr": 1e-3}))
    with pytest.raises(TrainConfigError, match="other settings: stages"):
        make_trainer(config(tmp_path, stages={"stable": 11}))
    with pytest.raises(TrainConfigError, match="other settings: data"):
        make_trainer(config(tmp_path, data={"held_out_percent": 30}))
    # A best score on other replies is on another scale.
    with pytest.raises(TrainConfigError, match=r"other settings: eval was .*'replies': 60"):
        make_trainer(config(tmp_path, eval={"replies": 3}))
    with pytest.raises(TrainConfigError, match=r"other settings: target was .*'float32'"):
        make_trainer(config(tmp_path, target={"dtype": "bfloat16"}))
    with pytest.raises(TrainConfigError, match=r"other settings: stages\.unit was 'steps'"):
        make_trainer(config(tmp_path, stages={"unit": "minutes", "stable": 1 / 6}))
    session = Session(config(tmp_path))
    teacher = HistoryAwareDrafter(session.shape, MODEL["window"])
    with pytest.raises(TrainConfigError, match="other settings: teacher was None"):
        session.trainer("drafter", session.fresh_drafter(), teacher)


def test_resuming_with_other_weights_of_the_target_is_refused(
    config, target: Path, tmp_path: Path
) -> None:
    first = make_trainer(config(tmp_path / "run"))
    first.train_step()
    first.save()
    moved = shutil.copytree(target, tmp_path / "moved" / "renamed")
    assert make_trainer(config(tmp_path / "run", target={"path": str(moved)})).step == 1
    tuned = shutil.copytree(target, tmp_path / "tuned" / target.name)
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"] *= 1.01
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    other = config(tmp_path / "run", target={"path": str(tuned)})
    with pytest.raises(TrainConfigError, match=r"other settings: target was .*'weights': '\w+'"):
        make_trainer(other)
    # A checkpoint of before has the name in their place: it can still be resumed.
    del first.identity["target"]["weights"]
    first.identity["target"]["name"] = target.name
    first.save()
    assert make_trainer(other).step == 1
    with pytest.raises(TrainConfigError, match=r"other settings: target was .*'dtype'"):
        make_trainer(config(tmp_path / "run", target={"dtype": "bfloat16"}))


def test_training_lowers_the_loss_and_keeps_the_best(config, tmp_path: Path) -> None:
    trainer = make_trainer(
        config(tmp_path, stages={"stable": 60}, optim={"lr": 1e-2}, run={"eval_every": 15})
    )
    best = trainer.run()
    losses = [line["loss"] for line in _lines(tmp_path, "train")]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    evaluations = _lines(tmp_path, "eval")
    assert [line["step"] for line in evaluations] == [15, 30, 45, 60]
    assert best["score"] == max(line["score"] for line in evaluations)
    loaded = load_drafter(tmp_path / "best")
    assert loaded.dtype == torch.bfloat16 and loaded.config == trainer.model.config
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_without_held_out_replies_the_latest_is_kept(config, tmp_path: Path) -> None:
    every = {"eval_every": 2}
    trainer = make_trainer(config(tmp_path, data={"held_out_percent": 0}, run=every))
    assert trainer.run()["step"] == 10
    assert (tmp_path / "best/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drafter", "teacher"])
def test_compiled_steps_are_the_eager_ones(config, tmp_path: Path, name: str) -> None:
    losses = []
    for compiled in (False, True):
        settings = config(
            tmp_path / str(compiled), run={"compile": compiled}, stages={"teacher": 4}
        )
        session = Session(settings)
        model = session.fresh_drafter()
        if name == "teacher":
            torch.manual_seed(0)
            model = HistoryAwareDrafter(session.shape, settings.model.window)
        trainer = session.trainer(name, model, None)
        assert trainer is not None
        losses.append([trainer.train_step() for _ in range(4)])
        trainer.evaluate()
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_bf16_compute_keeps_fp32_master_weights(config, tmp_path: Path) -> None:
    trainer = make_trainer(config(tmp_path, run={"bf16": True}))
    whole = make_trainer(config(tmp_path))
    assert trainer.train_step() == pytest.approx(whole.train_step(), rel=0.02)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    moments = [v for s in trainer.optimizer.state.values() for v in s.values() if v.dim()]
    assert {moment.dtype for moment in moments} == {torch.float32}
