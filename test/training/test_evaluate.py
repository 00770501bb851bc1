"""The evaluation's figures from given engine answers, and the real engine (slow)."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from pathlib import Path

import pytest
from sglang_dlite.training import evaluate as command
from sglang_dlite.training.eval_metrics import Measured, by_position, grouped, summarise

from .test_generate import FakeEngine


def _row(**changes) -> Measured:
    values = {
        "id": "x#0", "source": "s", "category": "c", "turn": 0, "temperature": 0.0,
        "prompt_tokens": 300, "cached_tokens": 0, "output_tokens": 20, "seconds": 2.0,
        "verify_passes": 10, "accepted": 9, "histogram": [4, 3, 3], "looping": False,
        "lookup_passes": 19, "lookup_accepted": 0, "alone_tokens": 20, "alone_seconds": 4.0,
    }  # fmt: skip
    return Measured(**(values | changes))


def test_groups_add_up_and_loops_stand_apart() -> None:
    rows = [
        _row(),
        _row(source="t", prompt_tokens=3000, turn=2, verify_passes=10, accepted=20),
        _row(accepted=70, histogram=[0] * 7 + [10], looping=True),
    ]
    found = summarise(rows, 7)
    assert found["by"]["source"]["s"]["tau"] == 1.9 and found["by"]["source"]["t"]["tau"] == 3
    assert found["mean_tau"] == pytest.approx(2.45)
    assert found["all"]["tau"] == pytest.approx(1 + 29 / 20) and found["all"]["replies"] == 2
    assert found["looping"]["tau"] == 8 and found["looping"]["replies"] == 1
    assert list(found["by"]["context"]) == ["00256-00511", "02048-04095"]
    assert list(found["by"]["turn"]) == ["001", "003"]
    assert found["all"]["tokens_per_second"] == 10 and found["all"]["speed_up"] == 2
    assert found["all"]["lookup_tau"] == 1
    assert "4-grams" in found["rules"]["looping"]
    assert summarise([], 7)["mean_tau"] is None


def test_positions_are_shares_of_passes() -> None:
    rates = by_position([4, 3, 3], 3)
    assert [r["accepted"] for r in rates] == [0.6, 0.3, 0.0]
    assert [r["given_before"] for r in rates] == pytest.approx([0.6, 0.5, 0.0])
    counts = grouped([_row(), _row(histogram=[0, 0, 0, 1])], lambda _: "all")["all"]
    assert counts.histogram == [4, 3, 3, 1]


class FakeServer(FakeEngine):
    """Also says what a speculative engine says."""

    def __init__(self, drafts: bool) -> None:
        super().__init__()
        self.drafts = drafts

    def get_server_info(self) -> dict:
        return {"speculative_num_draft_tokens": 8}

    def flush_cache(self) -> None:
        pass

    async def async_generate(self, input_ids, sampling_params):
        result = await super().async_generate(input_ids, sampling_params)
        result["meta_info"] |= {"completion_tokens": 21, "cached_tokens": 3}
        if self.drafts:
            result["meta_info"] |= {
                "spec_verify_ct": 10,
                "spec_num_correct_drafts": 10,
                "spec_correct_drafts_histogram": [4, 2, 4],
            }
        return result


def _args(target: Path, out: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--target", str(target), "--out", str(out), *more])


def test_the_report_holds_both_arms_and_every_grouping(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    started = []

    @contextmanager
    def engine(args, drafter=None):
        started.append(FakeServer(drafter is not None))
        yield started[-1]

    monkeypatch.setattr(command, "engine", engine)
    questions = tmp_path / "bench.jsonl"
    rows = [{"turns": [f"question {i}", "and then?"], "category": "ab"[i % 2]} for i in range(4)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--prompts", f"{questions}:turns", "--temperature", "0", "--temperature", "0.8")
    assert command.run(_args(target, tmp_path / "out", *more)) == 0
    with_drafts, alone = started
    assert len(with_drafts.asked) == 16 and len(alone.asked) == 16
    assert [ids for ids, _ in with_drafts.asked] == [ids for ids, _ in alone.asked]
    assert {params["temperature"] for _, params in alone.asked} == {0.0, 0.8}
    report = json.loads((tmp_path / "out/report.json").read_text())
    greedy = report["temperatures"]["0.0"]
    assert greedy["mean_tau"] == 2.0 and set(greedy["by"]["category"]) == {"a", "b"}
    assert set(greedy["by"]["turn"]) == {"001", "002"}
    assert greedy["all"]["speed_up"] > 0 and greedy["all"]["output_tokens"] == 8 * 21
    page = (tmp_path / "out/report.md").read_text()
    assert page in capsys.readouterr().out and "Mean tau over the prompt files: **2.000**" in page
    replies = (tmp_path / "out/replies.jsonl").read_text().splitlines()
    assert len(replies) == 16 and json.loads(replies[0])["cached_tokens"] == 3
    plots = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert plots == [
        "acceptance-by-position.png", "tau-by-category.png", "tau-by-context.png",
        "tau-by-source.png", "tau-by-turn.png",
    ]  # fmt: skip
    more = ("--prompts", f"{questions}:turns", "--no-baseline", "--min-prompt-tokens", "40")
    assert command.run(_args(target, tmp_path / "some", *more)) == 0
    assert len(started) == 3
    report = json.loads((tmp_path / "some/report.json").read_text())
    assert set(report["temperatures"]["0.0"]["by"]["turn"]) == {"002"}  # the first are shorter
    assert report["temperatures"]["0.0"]["all"]["speed_up"] is None


def test_no_prompts_is_an_error(target: Path, tmp_path: Path, capsys) -> None:
    assert command.run(_args(target, tmp_path)) == 1
    assert "no prompts" in capsys.readouterr().err
