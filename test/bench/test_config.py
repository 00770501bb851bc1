"""Configurations: the shipped ones, and what the others may not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sglang_dlite.bench.config import (
    BenchConfigError,
    config_from_dict,
    load_config,
    shipped_configs,
)

SMALL = {
    "name": "small",
    "target": "embedded",
    "arms": [{"name": "target-only"}],
    "workloads": [{"name": "agent", "kind": "generated"}],
}


def test_shipped_configurations_are_sound_and_survive_a_round_trip() -> None:
    assert {"cpu", "cpu-smoke", "qwen3-4b-paper", "qwen3-8b-paper"} <= set(shipped_configs())
    for name in shipped_configs():
        config = load_config(name)
        assert config.name == name
        assert config_from_dict(yaml.safe_load(yaml.safe_dump(config.as_dict()))) == config


def test_paper_configurations_hold_what_the_paper_compares() -> None:
    for size in ("4b", "8b"):
        config = load_config(f"qwen3-{size}-paper")
        algorithms = {arm.algorithm for arm in config.arms}
        assert {None, "DLITE", "DSPARK", "DFLASH", "EAGLE3"} <= algorithms
        workloads = {spec.name: spec for spec in config.workloads}
        assert sum(spec.kind.startswith("longbench-v2/") for spec in config.workloads) == 4
        assert {"swe-bench", "bfcl-multi-turn", "gsm8k", "alpaca"} <= set(workloads)
        assert config.concurrency == (1, 2, 4, 8, 16, 32, 64)
        published = {(p.workload, p.arm, p.measure): p.value for p in config.published}
        best = {"4b": 2.68, "8b": 2.74}[size]
        assert published["swe-bench", "DLITE", "speedup"] == best
        assert len([p for p in config.published if p.measure == "speedup"]) >= 32


def test_numbers_among_flags_become_text() -> None:
    config = config_from_dict(SMALL | {"server_args": ["--max-total-tokens", 4096]})
    assert config.server_args == ("--max-total-tokens", "4096")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sped": 1}, "unknown key 'sped'"),
        ({"arms": [{"name": "a"}]}, "baseline 'target-only'"),
        ({"arms": {"name": "a"}}, "arms: must be a list"),
        ({"arms": [{"name": "target-only"}, {"name": "x", "algorithm": "NGARM"}]}, "'NGARM'"),
        ({"arms": [{"name": "target-only"}, {"name": "x", "algorithm": "EAGLE3"}]}, "a `drafter`"),
        ({"arms": [{"name": "target-only", "drafter": "d"}]}, "without such an algorithm"),
        ({"arms": [{"name": "target-only"}, {"name": "target-only"}]}, "must be there and differ"),
        ({"workloads": [{"name": "a/b", "kind": "generated"}]}, "must not contain '/'"),
        ({"workloads": [{"name": "a", "kind": "gsm9k"}]}, "kind 'gsm9k'; allowed: generated"),
        ({"workloads": [{"name": "a", "kind": "messages"}]}, "needs a `path`"),
        ({"workloads": [{"name": "a"}]}, r"workloads\[0\]: .*'kind'"),
        ({"workloads": [{"name": "a", "kind": "gsm8k", "history": "new"}]}, "history 'new'"),
        ({"workloads": [{"name": "a", "kind": "gsm8k", "sessions": 0}]}, "sessions must be 1"),
        ({"placement": "apart"}, "placement 'apart'; allowed: together, alone"),
        ({"concurrency": [1, 0]}, "concurrency 0 must be 1 or more"),
        ({"sweep": {"workload": "nope"}}, "SweepSpec: workload 'nope'"),
        (
            {"published": [{"workload": "agent", "arm": "?", "measure": "tau", "value": 1}]},
            "not a workload and an arm",
        ),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BenchConfigError, match=message):
        config_from_dict(SMALL | changes)


def test_files_are_named_in_messages(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("a: [")
    with pytest.raises(BenchConfigError, match=r"mine\.yaml: not YAML"):
        load_config(str(path))
    path.write_text("- 1")
    with pytest.raises(BenchConfigError, match=r"mine\.yaml: .*must be a mapping"):
        load_config(str(path))
    with pytest.raises(BenchConfigError, match="neither a file nor one of cpu"):
        load_config("cqu")
