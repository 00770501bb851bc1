"""Levers get equal times, their runs are ordinary ones, and what is finished is not run again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from sglang_dlite.training import levers
from sglang_dlite.training.config import SHIPPED_CONFIGS, load_config
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
        tmp_path / "base.yaml", target, data_folder, tmp_path / "unused", eval={"folders": []}
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
    cost = {"teacher": 2.0, "warm_up": 1.5, "stable": 0.5}
    monkeypatch.setattr(levers, "seconds_per_step", lambda config, stage: cost[stage])
    out = tmp_path / "out"
    arguments = [str(lever_file), "--minutes", "0.1", "--out", str(out)]  # 6 seconds
    assert levers.main(arguments) == 0
    plain, two = (json.loads((out / n / "result.json").read_text()) for n in ("plain", "two"))
    assert plain["steps"] == {"stable": 12}
    assert two["steps"] == {"teacher": 2, "warm_up": 1, "stable": 3}
    assert plain["best"]["tau"]["mean"] >= 1 and "optim.seed=3" in plain["command"]
    page = (out / "levers.md").read_text()
    assert page.count("\n| ") == 3 and page.strip() in capsys.readouterr().out
    monkeypatch.setattr(levers, "seconds_per_step", None)  # nothing is run again
    assert levers.main(arguments) == 0
    (out / "levers.md").unlink()
    assert levers.main([*arguments, "--only", "plain"]) == 0
    assert (out / "levers.md").read_text() == page  # all that are finished, not this call's
    assert levers.main([*arguments, "--only", "nope"]) == 1
    assert "the levers are plain, two" in capsys.readouterr().err


@pytest.mark.parametrize("stage", levers.STAGES)
def test_steps_of_every_stage_can_be_timed(
    target: Path, data_folder: Path, tmp_path: Path, stage: str
) -> None:
    path = _write(tmp_path / "c.yaml", target, data_folder, tmp_path / "run")
    assert 0 < levers.seconds_per_step(load_config(path, []), stage) < 10
    assert not (tmp_path / "run").exists()


def test_a_malformed_file_is_named(tmp_path: Path, capsys) -> None:
    path = tmp_path / "l.yaml"
    path.write_text("levers: {}\n")
    assert levers.main([str(path)]) == 1
    assert "must hold config, levers" in capsys.readouterr().err
    assert (SHIPPED_CONFIGS / "levers").is_dir()
