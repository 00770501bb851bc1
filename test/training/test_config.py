"""Configuration errors name the key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_dlite.training.config import TrainConfigError, from_dict, load_config
from sglang_dlite.training.train import SHIPPED_CONFIGS


def test_the_shipped_config_loads_and_takes_overrides() -> None:
    path = SHIPPED_CONFIGS / "smollm2_135m.yaml"
    config = load_config(path, ["optim.lr=5e-4", "data.folders=[a, b]", "run.export=x"])
    assert config.optim.lr == 5e-4
    assert config.data.folders == ("a", "b")
    assert config.run.export == "x"


@pytest.mark.parametrize(
    "raw,message",
    [
        ({"optim": {"learning_rate": 1}}, "unknown key optim.learning_rate; known in optim: steps"),
        ({"optimizer": {}}, "unknown section 'optimizer'; known: data, model"),
        ({"optim": {"steps": "many"}}, "optim.steps = 'many': must be int"),
        ({"optim": {"steps": True}}, "optim.steps = True: must be int"),
        ({"optim": {"lr": 0}}, "optim.lr = 0.0: must be above 0"),
        ({"data": {"folders": "work"}}, "data.folders = 'work'"),
        ({"model": 3}, "section 'model' must hold keys"),
    ],
)
def test_bad_settings_are_named(raw: dict, message: str) -> None:
    with pytest.raises(TrainConfigError) as error:
        from_dict(raw)
    assert message in str(error.value)


@pytest.mark.parametrize("override", ["lr=1", "optim.lr", "optim=3", "optim.=3"])
def test_malformed_overrides_are_named(override: str) -> None:
    with pytest.raises(TrainConfigError, match=r"section\.key=value"):
        load_config(SHIPPED_CONFIGS / "smollm2_135m.yaml", [override])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainConfigError, match=r"cannot read .*none\.yaml"):
        load_config(tmp_path / "none.yaml", [])
