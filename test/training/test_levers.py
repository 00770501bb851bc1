"""Levers get equal times, their runs are ordinary ones, and what is finished is not run again."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from sglang_dlite.training import levers, trainer
from sglang_dlite.training.config import SHIPPED_CONFIGS, load_config
from sglang_dlite.training.divergence import TrainingDiverged
from sglang_dlite.training.targets import TargetShape, drafter_config

from .test_train_command import _write

SMOLLM2 = TargetShape("LlamaForCausalLM", 576, 30, 9, 3, 64, 1536, 49152, 1e-5, 1e5)


def test_the_shipped_levers_are_within_40_megabytes() -> None:
    import torch
    from sglang_dlite.drafter import DLiteDrafter

    base, common, found = levers.read_levers(Path("smollm2_135m"))
    assert len(found) > 20
    for name, overrides in found.items():
        config = load_config(Path(base), [*common, *overrides])
        with torch.device("meta"):
            drafter = DLiteDrafter(drafter_config(SMOLLM2, config.model))
        assert sum(p.numel() for p in drafter.parameters()) <= 20_000_000, name


def test_the_documented_cache_serves_every_lever() -> None:
    page = Path(__file__).parents[2] / "docs/training/ablations.md"
    (listed,) = re.findall(r"data\.cached_layer_ids=\[([0-9,]+)\]", page.read_text())
    base, common, found = levers.read_levers(Path("smollm2_135m"))
    needed: set[int] = set()
    for overrides in found.values():
        config = load_config(Path(base), [*common, *overrides])
        needed |= set(drafter_config(SMOLLM2, config.model).target_layer_ids)
    assert {int(i) for i in listed.split(",")} == needed


@pytest.fixture
def lever_file(target: Path, data_folder: Path, tmp_path: Path) -> Path:
    base = _write(
        tmp_path / "base.yaml",
        target,
        data_folder,
        tmp_path / "unused",
        eval={"folders": []},
        run={"log_every": 1, "eval_every": 1000},
    )
    two = {"teacher": 0.5, "warm_up": 0.25, "transition": 0, "stable": 0.25}
    raw = {
        "config": str(base),
        "all": ["optim.seed=3"],
        "levers": {"plain": None, "two": [f"stages.{k}={v}" for k, v in two.items()]},
    }
    path = tmp_path / "levers.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_every_lever_gets_its_time(lever_file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    clock = itertools.count(step=0.25)  # a quarter of a second between any two looks at it
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: next(clock))
    out = tmp_path / "out"
    arguments = [str(lever_file), "--minutes", "0.2", "--out", str(out)]  # 12 seconds
    assert levers.main(arguments) == 0
    plain, two = (json.loads((out / n / "result.json").read_text()) for n in ("plain", "two"))
    # Each model's first step compiles and is not counted.
    assert plain["steps"] == {"drafter": 1 + 4 * 12} and plain["seconds"] == 12
    assert two["steps"] == {"teacher": 1 + 4 * 6, "drafter": 1 + 4 * (3 + 3)}
    assert two["seconds"] == 12
    lines = [json.loads(x) for x in (out / "two/metrics.jsonl").read_text().splitlines()]
    stages = [line["stage"] for line in lines if line["kind"] == "train"]
    assert stages == ["warm_up"] * 13 + ["stable"] * 12
    rates = [line["learning_rate"] for line in lines if line["kind"] == "train"]
    assert rates[-1] < 0.02 * max(rates)  # the cosine came to its end
    assert plain["best"]["tau"]["mean"] >= 1 and "optim.seed=3" in plain["command"]
    page = (out / "levers.md").read_text()
    assert page.count("\n| ") == 3 and page.strip() in capsys.readouterr().out
    monkeypatch.setattr(levers, "run_lever", None)  # nothing is run again
    assert levers.main(arguments) == 0
    (out / "levers.md").unlink()
    assert levers.main([*arguments, "--only", "plain"]) == 0
    assert (out / "levers.md").read_text() == page  # all that are finished, not this call's
    assert levers.main([*arguments, "--only", "nope"]) == 1
    assert "the levers are plain, two" in capsys.readouterr().err


def test_a_lever_that_diverges_does_not_end_the_others(
    lever_file: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    ran = []

    def run(base: str, overrides: list[str], minutes: float, folder: Path) -> None:
        ran.append(folder.name)
        raise TrainingDiverged(f"step 3 of {folder.name}: loss is nan")

    monkeypatch.setattr(levers, "run_lever", run)
    assert levers.main([str(lever_file), "--out", str(tmp_path / "out")]) == 1
    assert ran == ["plain", "two"]
    assert "plain diverged: step 3 of plain: loss is nan" in capsys.readouterr().err


def test_a_malformed_file_is_named(tmp_path: Path, capsys) -> None:
    path = tmp_path / "l.yaml"
    path.write_text("levers: {}\n")
    assert levers.main([str(path)]) == 1
    assert "must hold config, levers" in capsys.readouterr().err
    assert (SHIPPED_CONFIGS / "levers").is_dir()
