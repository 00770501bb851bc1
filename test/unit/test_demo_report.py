"""The demo's numbers, its table and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from sglang_dlite.demo.player import Played, Reply
from sglang_dlite.demo.report import DLITE, PLAIN, summarise, table, write_json


def _played() -> list[Played]:
    """Two turns, three repeats: DLITE takes 1, 2, 9 s per turn, the target alone 4 s."""
    played = []
    for repeat, seconds in enumerate((1.0, 2.0, 9.0)):
        for turn in (1, 2):
            fast = Reply("same", 100 * turn, 50 * (turn - 1), 20, seconds, 12, 8)
            slow = Reply("same" if turn == 1 else "other", 100 * turn, 0, 20, 4.0)
            played += [Played(DLITE, repeat, turn, fast), Played(PLAIN, repeat, turn, slow)]
    return played


def test_medians_and_speedup() -> None:
    report = summarise(_played())
    assert [(row.turn, row.arm) for row in report.rows] == [
        (1, DLITE), (1, PLAIN), (2, DLITE), (2, PLAIN),
    ]  # fmt: skip
    first = report.rows[0]
    assert (first.seconds, first.tok_per_s) == (2.0, 10.0)
    assert first.accept_length == 1 + 12 / 8
    assert report.rows[1].accept_length is None
    assert report.speedup == pytest.approx(2.0)
    assert report.accept_length == pytest.approx(2.5)
    assert report.same_replies == 1


def test_json_has_one_object_per_turn_and_arm(tmp_path: Path) -> None:
    path = tmp_path / "new" / "demo.json"
    write_json(summarise(_played()), path)
    data = json.loads(path.read_text())
    assert set(data) == {"turns", "speedup", "accept_length"}
    assert len(data["turns"]) == 4
    assert set(data["turns"][0]) == {
        "arm", "turn", "prompt_tokens", "cached_tokens", "output_tokens", "seconds",
        "tok_per_s", "accept_length", "reply",
    }  # fmt: skip
    assert [entry.name for entry in path.parent.iterdir()] == ["demo.json"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    path.mkdir()
    with pytest.raises(OSError):
        write_json(summarise(_played()), path)
    assert list(tmp_path.iterdir()) == [path]


def test_table_shows_every_turn() -> None:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(summarise(_played())))
    text = console.export_text()
    assert "2.50" in text and "2.00x" in text and "all" in text
