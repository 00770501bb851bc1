"""The drawings of the ablations: what is read from a run's folder, and a file that opens."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sglang_dlite.training.figures import learning_curve, main


def _run(folder: Path, *points: tuple[float, float]) -> Path:
    folder.mkdir(parents=True)
    lines = [{"kind": "eval", "train_seconds": s, "tau": {"mean": tau}} for s, tau in points]
    lines.insert(0, {"kind": "train", "seconds": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_curve_starts_after_its_teacher(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", (60, 1.2), (120, 1.4))
    assert learning_curve(run) == [(1, 1.2), (2, 1.4)]
    _run(run / "teacher", (120, 1.1), (180, 1.2))
    assert learning_curve(run) == [(4, 1.2), (5, 1.4)]


def test_a_teacher_alone_has_its_own_curve(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    _run(tmp_path / "run" / "teacher", (60, 1.1))
    assert learning_curve(tmp_path / "run") == [(1, 1.1)]


def test_drawings_are_svg(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", (60, 1.2), (120, 1.4))
    taus = tmp_path / "tau.json"
    taus.write_text('{"00256-00511": 1.5, "02048-04095": 1.7, "mean": 1.6, "looping": 1.4}')
    for drawing, path in (("curves", run), ("contexts", taus)):
        out = tmp_path / f"{drawing}.svg"
        assert main([drawing, str(out), f"one={path}"]) == 0
        text = "".join(ElementTree.parse(out).getroot().itertext())
        assert "one" in text
        assert ("256-511" in text) == (drawing == "contexts") and "looping" not in text


@pytest.mark.parametrize("item", ["nothing", "one=/nowhere"])
def test_what_cannot_be_drawn_is_named(
    tmp_path: Path, item: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["curves", str(tmp_path / "x.svg"), item])
    assert item in capsys.readouterr().err


def test_runs_that_cannot_be_drawn_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, run = str(tmp_path / "x.svg"), _run(tmp_path / "new")
    with pytest.raises(SystemExit):
        main(["curves", out, f"new={run}"])
    assert f"new={run}: holds no evaluation" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["curves", out, *(f"run{number}={run}" for number in range(8))])
    assert "8 curves: at most 7" in capsys.readouterr().err
