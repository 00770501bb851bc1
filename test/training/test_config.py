"""Configuration errors name the key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_dlite.training.config import SHIPPED_CONFIGS, TrainConfigError, from_dict, load_config


@pytest.mark.parametrize("path", sorted(SHIPPED_CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_config_loads_by_its_name(path: Path) -> None:
    config = load_config(Path(path.stem), ["optim.lr=5e-4", "data.replies=[a, b]", "run.export=x"])
    assert config.optim.lr == 5e-4
    assert config.data.replies == ("a", "b")
    assert config.run.export == "x"


@pytest.mark.parametrize(
    "raw,message",
    [
        (
            {"optim": {"learning_rate": 1}},
            "unknown key optim.learning_rate; known in optim: batch_replies, anchors_per_reply",
        ),
        ({"optimizer": {}}, "unknown section 'optimizer'; known: target, data, model, stages"),
        ({"optim": {"batch_replies": "many"}}, "optim.batch_replies = 'many': must be int"),
        ({"optim": {"batch_replies": True}}, "optim.batch_replies = True: must be int"),
        ({"optim": {"lr": 0}}, "optim.lr = 0.0: must be above 0"),
        ({"stages": {"stable": -1}}, "stages.stable = -1.0: must be 0 or above"),
        (
            {"stages": {"unit": "hours"}},
            "stages.unit = 'hours': must be epochs or steps or minutes",
        ),
        ({"data": {"replies": "work"}}, "data.replies = 'work'"),
        ({"data": {"states": "cache"}}, "data.top_k = 0 with data.states = cache"),
        ({"stages": {"warm_up": 1}}, "need a teacher: set stages.teacher, or run.teacher_from"),
        (
            {"data": {"weights": {"chat": -1}}},
            "data.weights: chat = -1.0: must be 0 (leave it out)",
        ),
        ({"data": {"weights": ["chat"]}}, "data.weights = ['chat']: must be dict[str, float]"),
        ({"optim": {"ema": 1}}, "optim.ema = 1.0: must be 0..1, 1 left out"),
        ({"target": {"path": "x"}}, "model.mask_token_id is not set for x: give a row"),
        ({"model": {"window": 1}}, "model.window = 1: must be 2 or above"),
        ({"target": {"dtype": "int8"}}, "must be float32 or bfloat16 or float16"),
        ({"model": 3}, "section 'model' must hold keys"),
        ({"stages": {"stable": 0}}, "stages: nothing would be trained"),
        (
            {"stages": {"stable": 0, "teacher": 1}, "run": {"teacher_from": "x"}},
            "stages: nothing would be trained",
        ),
    ],
)
def test_bad_settings_are_named(raw: dict, message: str) -> None:
    with pytest.raises(TrainConfigError) as error:
        from_dict(raw)
    assert message in str(error.value)


@pytest.mark.parametrize("override", ["lr=1", "optim.lr", "optim=3", "optim.=3"])
def test_malformed_overrides_are_named(override: str) -> None:
    with pytest.raises(TrainConfigError, match=r"section\.key=value"):
        load_config(Path("smollm2_135m"), [override])


def test_an_override_that_is_not_yaml_is_named() -> None:
    with pytest.raises(TrainConfigError, match=r"override 'data\.replies=\[a' is not YAML"):
        load_config(Path("smollm2_135m"), ["data.replies=[a"])


def test_null_stands_for_the_targets_own_value() -> None:
    config = load_config(Path("smollm2_135m"), ["target.rope_theta=null", "target.vocab_size=null"])
    assert config.target.rope_theta is None and config.target.vocab_size is None


def test_a_missing_file_is_named_with_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(TrainConfigError, match=r"cannot read .*none\.yaml.*qwen3_4b, qwen3_8b"):
        load_config(tmp_path / "none.yaml", [])


def test_stages_can_be_switched_off_one_by_one() -> None:
    assert not from_dict({}).needs_teacher  # direct training is the default
    two = from_dict({"stages": {"teacher": 1, "warm_up": 1, "transition": 1, "stable": 5}})
    assert two.needs_teacher
    given = from_dict({"stages": {"transition": 1}, "run": {"teacher_from": "x"}})
    assert given.needs_teacher and not given.stages.teacher
