"""A target or drafter that is not there is named by every command, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_dlite.assets import shipped_drafter_dir
from sglang_dlite.cli import main
from sglang_dlite.training import simulate

from .test_train_command import _write


@pytest.mark.parametrize(
    "command", ["train", "dry-run", "cache-states", "generate", "eval", "simulate"]
)
def test_a_target_that_is_not_there_is_named(
    data_folder: Path, tmp_path: Path, command: str, capsys
) -> None:
    nowhere = tmp_path / "nowhere"
    config = str(_write(tmp_path / "c.yaml", nowhere, data_folder, tmp_path / "run"))
    drafter = str(shipped_drafter_dir())
    asked = ["--target", str(nowhere), "--out", str(tmp_path / "out")]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Hello"}\n')
    status = {
        "train": lambda: main(["train", config]),
        "dry-run": lambda: main(["train", config, "--dry-run"]),
        "cache-states": lambda: main(["cache-states", config, "data.cache=" + str(tmp_path / "k")]),
        "generate": lambda: main(["generate", *asked, "--builtin", "chat=1"]),
        "eval": lambda: main(["eval", *asked, "--prompts", f"{prompts}:prompt"]),
        "simulate": lambda: simulate.main([drafter, str(data_folder), *asked[:2]]),
    }[command]()
    assert status == 1
    assert f"target '{nowhere}' cannot be read" in capsys.readouterr().err


def test_simulate_names_what_it_cannot_play(
    target: Path, data_folder: Path, tmp_path: Path, capsys
) -> None:
    drafter = str(shipped_drafter_dir())
    for arguments, message in (
        ([str(tmp_path / "none"), str(data_folder)], "none"),
        ([drafter, str(tmp_path / "none"), "--target", str(target)], "is no data set"),
    ):
        assert simulate.main(arguments) == 1
        assert message in capsys.readouterr().err
