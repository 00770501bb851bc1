from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from sglang_dlite.drafter import DLiteConfig, DrafterConfigError

MISSING = object()


def test_golden_config_round_trip(golden: Path) -> None:
    config = DLiteConfig.from_pretrained(golden)
    assert config.num_drafts == 7
    assert config.num_pivot_states == 4
    assert config.target_layer_ids == (0, 1, 4, 5)
    text = (golden / "config.json").read_text()
    assert config.to_dict() == json.loads(text)
    assert list(config.to_dict()) == list(json.loads(text))


def test_round_trip_keeps_unsorted_ids(make_drafter_config: Any) -> None:
    config = make_drafter_config(target_layer_ids=[5, 0, 3], architecture_version="dlite_v2")
    assert config.target_layer_ids == (5, 0, 3)
    assert DLiteConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 1e4, "type": "default"}},
        {"rope_theta": 1e4, "rope_scaling": None},
        {"rope_theta": 10000, "rope_parameters": {"rope_theta": 1e4}},
    ],
)
def test_rope_theta_in_every_place(make_drafter_config: Any, rope: dict[str, Any]) -> None:
    config = make_drafter_config()
    data = config.to_dict()
    del data["rope_theta"]
    assert DLiteConfig.from_dict(data | rope) == config


def test_config_written_by_transformers(make_drafter_config: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = make_drafter_config()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    auto = transformers.AutoConfig.from_pretrained(tmp_path)
    assert auto.dlite_config["sequential_rank"] == 7
    auto.save_pretrained(tmp_path / "again")
    assert DLiteConfig.from_pretrained(tmp_path / "again") == config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 0, "hidden_size = 0: must be an integer >= 1"),
        ("hidden_size", True, "hidden_size = True: must be an integer"),
        ("hidden_size", "16", "hidden_size = '16'"),
        ("num_hidden_layers", -1, "num_hidden_layers = -1"),
        ("num_target_layers", 2.0, "num_target_layers = 2.0"),
        ("vocab_size", None, "vocab_size = None"),
        ("intermediate_size", [], "intermediate_size = []"),
        ("head_dim", 7, "head_dim = 7: must be even"),
        ("num_attention_heads", 3, "num_attention_heads = 3: must be a multiple of"),
        ("num_key_value_heads", 0, "num_key_value_heads = 0"),
        ("rms_norm_eps", 0, "rms_norm_eps = 0: must be a finite number > 0"),
        ("rms_norm_eps", True, "rms_norm_eps = True"),
        ("rope_theta", float("nan"), "rope_theta = nan"),
        ("rope_theta", "1e6", "rope_theta = '1e6'"),
        ("rope_theta", 10**400, "rope_theta = 1000"),
        ("rope_theta", MISSING, "missing field(s): rope_theta"),
        ("block_size", 1, "block_size = 1: must be an integer >= 2"),
        ("block_size", MISSING, "missing field(s): block_size"),
        ("hidden_act", "gelu", "hidden_act = 'gelu': must be 'silu'"),
        ("attention_bias", True, "attention_bias = True: must be false"),
        ("architectures", ["Qwen3ForCausalLM"], "architectures = ['Qwen3ForCausalLM']: must"),
        ("architectures", None, "architectures = None"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling.rope_type = 'yarn'"),
        ("rope_parameters", {"type": "linear"}, "constant and tiny"),
        ("rope_parameters", {"rope_theta": 5.0}, "rope_parameters.rope_theta = 5.0: must be equal"),
        ("rope_parameters", 3, "rope_parameters = 3: must be an object"),
        ("dlite_config", MISSING, "dlite_config = None: must be an object"),
        ("dlite_config", [], "was the target model given by mistake?"),
        ("dlite.architecture_version", "dlite_v3", "'dlite_v1' or 'dlite_v2'"),
        ("dlite.architecture_version", [], "dlite_config.architecture_version = []"),
        ("dlite.model_role", "swa_teacher", "model_role = 'swa_teacher': must be 'pivot_q_st"),
        ("dlite.anchor_group_size", 0, "dlite_config.anchor_group_size = 0: must be"),
        ("dlite.anchor_group_size", MISSING, "missing field(s): dlite_config.anchor_group_size"),
        ("dlite.chs_num_layers", 2, "chs_num_layers = 2: must be 3, the length of"),
        ("dlite.chs_num_layers", MISSING, "missing field(s): dlite_config.chs_num_layers"),
        ("dlite.target_layer_ids", [], "target_layer_ids = []: must be a non-empty"),
        ("dlite.target_layer_ids", [0, 2, 6], "integers in [0, 5]; 6 is not"),
        ("dlite.target_layer_ids", [-1, 2, 3], "-1 is not"),
        ("dlite.target_layer_ids", [0, True, 3], "True is not"),
        ("dlite.target_layer_ids", [0, 2, 2], "repeated: [2]"),
        ("dlite.target_layer_ids", 3, "dlite_config.target_layer_ids = 3"),
        ("dlite.sequential_head", "gru", "sequential_head = 'gru': must be 'rnn'"),
        ("dlite.sequential_rank", 0, "dlite_config.sequential_rank = 0"),
        ("dlite.mask_token_id", 50, "mask_token_id = 50: must be an integer in [0, 49]"),
        ("dlite.mask_token_id", -1, "mask_token_id = -1"),
        ("dlite.mask_token_id", False, "mask_token_id = False"),
    ],
)
def test_errors_name_field_value_and_remedy(
    make_drafter_config: Any, field: str, value: object, message: str
) -> None:
    data = copy.deepcopy(make_drafter_config().to_dict())
    where = data
    if field.startswith("dlite."):
        where, field = data["dlite_config"], field.removeprefix("dlite.")
    if value is MISSING:
        del where[field]
    else:
        where[field] = value
    with pytest.raises(DrafterConfigError) as error:
        DLiteConfig.from_dict(data)
    assert message in str(error.value)


def test_all_missing_fields_are_listed_at_once() -> None:
    with pytest.raises(DrafterConfigError) as error:
        DLiteConfig.from_dict({"dlite_config": {}})
    for field in dataclasses.fields(DLiteConfig):
        assert field.name in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "Give the local folder of a DLite checkpoint"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "dlite_config"),
    ],
)
def test_unusable_file(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DrafterConfigError) as error:
        DLiteConfig.from_pretrained(tmp_path)
    assert message in str(error.value)
    assert str(tmp_path) in str(error.value)
