"""Which arms can run here, and what a dry run says of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_dlite.bench import dry_run
from sglang_dlite.bench.arms import checkpoint_problem, resolve_arms, skip_reason
from sglang_dlite.bench.config import ArmSpec, BenchConfigError, config_from_dict, load_config
from sglang_dlite.bench.memory import Memory, kv_bytes_per_token, memory_of

QWEN3_4B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2560,
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *args, **kwargs: None, raising=True
    )


def test_checkpoints_that_are_absent_are_named(tmp_path: Path) -> None:
    assert "no such checkpoint" in str(checkpoint_problem(str(tmp_path / "absent")))
    assert "has no config.json" in str(checkpoint_problem(str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_problem(str(tmp_path)) is None
    assert "HF_HUB_OFFLINE" in str(checkpoint_problem("owner/model"))


def test_a_hub_that_may_be_asked_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert checkpoint_problem("owner/model") is None


def test_rivals_need_an_accelerator() -> None:
    for algorithm in ("NGRAM", "EAGLE3", "DSPARK", "DFLASH", "STANDALONE"):
        drafter = None if algorithm == "NGRAM" else "shipped"
        spec = ArmSpec("x", algorithm, drafter)
        assert "no accelerator" in str(skip_reason(spec, accelerator=False))
        assert skip_reason(spec, accelerator=True) is None
    assert skip_reason(ArmSpec("x", "DLITE", "shipped"), accelerator=False) is None
    assert skip_reason(ArmSpec("x"), accelerator=False) is None


def test_arms_share_all_flags_but_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config("cpu")
    arms = {arm.name: arm for arm in resolve_arms(config, str(tmp_path), accelerator=False)}
    common = config.server_args
    assert arms["target-only"].server_args == common
    assert arms["DLITE"].server_args[: len(common)] == common
    assert arms["DLITE"].server_args[len(common) :][:2] == ("--speculative-algorithm", "DLITE")
    assert arms["DLITE"].skipped is None and arms["NGRAM"].skipped
    absent = resolve_arms(config, str(tmp_path / "no"), accelerator=True)
    assert all("no such checkpoint" in str(arm.skipped) for arm in absent)


def test_kv_arithmetic() -> None:
    # Qwen3-4B: 2 x 36 layers x 8 heads x 128 x 2 bytes.
    assert kv_bytes_per_token(QWEN3_4B) == 147456
    assert kv_bytes_per_token({"num_hidden_layers": 30, "num_attention_heads": 9,
                               "num_key_value_heads": 3, "hidden_size": 576}) == 23040  # fmt: skip


def test_memory_of_the_methods() -> None:
    config = load_config("qwen3-4b-paper")
    found = {}
    for arm in resolve_arms(config, config.target, accelerator=True):
        memory = memory_of(config, arm)
        assert isinstance(memory, Memory)
        found[arm.name] = memory
    assert found["DSPARK"].draft_kv == found["DFLASH"].draft_kv == 20480
    assert found["EAGLE3"].draft_kv == 4096
    assert found["DLITE"].draft_kv == 0
    assert found["DLITE"].state == 14 * 2560 * 2 + 8 * 8
    free = 80 * 1024**3 - int(8.1e9)
    assert found["target-only"].sessions[32768] == free // (32768 * 147456)
    dspark = (free - int(2.7e9)) // (32768 * (147456 + 20480))
    assert found["DSPARK"].sessions[32768] == dspark


def test_memory_says_what_it_lacks() -> None:
    config = config_from_dict(
        {
            "name": "n",
            "target": "owner/model",
            "arms": [{"name": "target-only"}],
            "workloads": [{"name": "agent", "kind": "generated"}],
        }
    )
    (arm,) = resolve_arms(config, config.target, accelerator=True)
    assert memory_of(config, arm) == "no config.json of owner/model on this machine"


def test_dry_run_lists_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "known_flags", lambda: frozenset())
    text = "\n".join(dry_run.describe(load_config("qwen3-4b-paper"), accelerator=False))
    assert "--speculative-algorithm DLITE --speculative-draft-model-path" in text
    assert "deepseek-ai/dspark_qwen3_4b_block7" in text
    assert "HF_HUB_OFFLINE" in text  # why nothing would run here
    assert "13.6 GB of checkpoints to fetch" in text
    assert "time: about" in text and "180 tok/s" in text
    assert "concurrency 1, 2, 4, 8, 16, 32, 64" in text
    assert "memory, DSPARK: draft KV 20480 B/token" in text
    assert "38 published figures" in text


def test_dry_run_refuses_flags_that_sglang_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"--max-total-tokens", "--speculative-algorithm", "--speculative-draft-model-path"}
    monkeypatch.setattr(dry_run, "known_flags", lambda: frozenset(known))
    assert list(dry_run.describe(load_config("cpu"), accelerator=False))
    with pytest.raises(BenchConfigError, match="no such flag: target-only: --context-length"):
        list(dry_run.describe(load_config("qwen3-4b-paper"), accelerator=False))


@pytest.mark.slow
def test_flags_of_the_shipped_configurations_are_sglangs() -> None:
    assert len(dry_run.known_flags()) > 100
    for name in ("cpu", "qwen3-4b-paper", "qwen3-8b-paper"):
        assert dry_run.unknown_flags(load_config(name)) == []
