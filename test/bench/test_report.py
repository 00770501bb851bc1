"""The report: self-contained, complete, and silent on what was not measured."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_dlite.bench.config import load_config
from sglang_dlite.bench.records import RoundResult, RunDirectory
from sglang_dlite.bench.report import html, markdown
from sglang_dlite.bench.report.content import Document, Items, Section, Table, Text, Token, TokenRun
from sglang_dlite.bench.report.formats import decimals, milliseconds, with_interval
from sglang_dlite.bench.report.write import write_report

MakeResult = Callable[..., RoundResult]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, make_result: MakeResult) -> RunDirectory:
    """The written report of two arms at concurrency 1 and 4, with cold rounds and step times."""
    tmp_path = tmp_path_factory.mktemp("run")
    directory = RunDirectory(tmp_path)
    directory.bind(load_config("cpu-smoke").as_dict())
    arms = {
        "target-only": {},
        "DLITE": {},
        "NGRAM": {"skipped": "it died; its log says:\n  Error: x\nmore"},
    }
    state = {"algorithm": None, "server_args": ["--x"], "skipped": None, "facts": {}}
    note = {"kind": "generated", "history": "first", "sessions": 1, "turns": 2, "text": "<text>"}
    directory.update_manifest(
        target=str(tmp_path / "target"),
        arms={name: state | changes for name, changes in arms.items()},
        workloads={"agent": note | {"rejected": ["f:2: not JSON"], "cut": []}},
        provenance={"versions": {"sglang": "0.5.23"}, "argv": ["bench"], "device": "a CPU"},
    )
    for concurrency, cache in ((1, "warm"), (4, "warm"), (1, "cold")):
        place: dict[str, Any] = {"concurrency": concurrency, "cache": cache}
        directory.write(make_result(**place))
        directory.write(make_result("target-only", plain=True, **place))
    (tmp_path / "steps").mkdir()
    step = {"t": 100.5, "kind": "decode", "n": 1, "context": 9, "target_s": 0.06, "draft_s": 0.0}
    for arm in ("DLITE", "target-only"):
        (tmp_path / "steps" / f"{arm}.jsonl").write_text(
            5 * (json.dumps(step | {"step_s": 0.1}) + "\n")
        )
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> str:
    return (run.path / "report.html").read_text()


def test_the_page_needs_nothing_else(page: str) -> None:
    assert not re.findall(r"<(?:script|link|img|iframe)\b", page)
    # The only addresses are names of XML vocabularies inside the drawings.
    addresses = set(re.findall(r"https?://[^\"'\s<>]+", page))
    assert all(
        re.search(r"w3\.org|purl\.org|matplotlib\.org|creativecommons", a) for a in addresses
    )
    assert "url(http" not in page and "@import" not in page
    assert page.count("<svg") == 6


def test_every_section_has_its_figures(page: str) -> None:
    for title in (
        "In short", "What was run", "Speed and latency", "Acceptance", "First token of turn n",
        "Time of a decode step", "Memory", "Provenance",
    ):  # fmt: skip
        assert f"<h2>{title}</h2>" in page
    assert "2.00" in page  # both speed-up and tau of the made-up records
    assert "skipped: it died; its log says: Error: x<" in page  # not the whole log
    assert "1 unusable rows" in page and "f:2: not JSON" in page
    assert "&lt;text&gt;" in page and "<text>" not in page.replace("<text ", "")


def test_markdown_and_pictures(run: RunDirectory) -> None:
    text = (run.path / "report.md").read_text()
    for name in re.findall(r"!\[[^]]*\]\((\w+\.png)\)", text):
        assert (run.path / name).read_bytes().startswith(b"\x89PNG")
    assert {"speedup.png", "tau.png", "steps.png"} <= {f.name for f in run.path.glob("*.png")}
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["acceptance"]["DLITE"]["tau"][0] == 2.0
    assert [load["arm"] for load in summary["loads"][:2]] == ["target-only", "DLITE"]


def test_drawings_are_xml(page: str) -> None:
    for drawing in re.findall(r"<svg.*?</svg>", page, flags=re.S):
        assert ET.fromstring(drawing).tag.endswith("svg")


def test_a_run_without_rounds_claims_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.bind(load_config("cpu-smoke").as_dict())
    page = write_report(directory).read_text()
    assert "Nothing was measured yet." in page and "<svg" not in page
    assert "not measured" in page and "In short" not in page


def test_a_run_without_its_baseline(tmp_path: Path, make_result: MakeResult) -> None:
    directory = RunDirectory(tmp_path)
    directory.bind(load_config("cpu-smoke").as_dict())
    directory.write(make_result())
    page = write_report(directory).read_text()
    assert "<h2>Acceptance</h2>" in page and ">nan<" not in page


def test_published_figures_stand_beside_measured_ones(
    tmp_path: Path, make_result: MakeResult
) -> None:
    directory = RunDirectory(tmp_path)
    directory.bind(load_config("qwen3-4b-paper").as_dict())
    directory.write(make_result(workload="swe-bench"))
    directory.write(make_result("target-only", plain=True, workload="swe-bench"))
    write_report(directory)
    text = (tmp_path / "report.md").read_text()
    assert re.search(r"\| swe-bench \| DLITE \| speedup \| 1 \| 2\.68 \| 2\.00 \|", text)
    assert re.search(r"\| swe-bench \| DLITE \| tau \| 1 \| 3\.15 \| 2\.00 \|", text)
    assert re.search(r"\| swe-bench \| DSPARK \| tau \| 1 \| 1\.89 \| not measured \|", text)


def test_tokens_are_coloured() -> None:
    tokens = (Token("a<", "prefill", "first"), Token("b\n", "draft", 'hint "1"'))
    runs = [TokenRun("turn 1", "prompt", tokens)] * 2
    document = Document("t", "s", [Section("view", [Text("x"), *runs])])
    page = html.page(document)
    assert '<span class="prefill" title="first">a&lt;</span>' in page
    assert '<span class="draft" title="hint &quot;1&quot;">b<span class="break">↵</span>\n' in page
    assert page.count('class="legend"') == 1
    assert "<b>b\n</b>" in markdown.text(document)


def test_markdown_of_tables_and_lists() -> None:
    table = Table(("a", "b"), [("x|y", "1")])
    assert markdown.table(table) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"
    document = Document("t", "s", [Section("x", [Items("2 things", ["one", "two\nlines"])])])
    assert "2 things:\n\n- one\n- two lines" in markdown.text(document)


def test_numbers() -> None:
    nan = float("nan")
    assert decimals(None, 1) == decimals(nan, 1) == "–"
    assert with_interval((1.234, 1.1, 1.4), 1) == "1.2 [1.1, 1.4]"
    assert with_interval((1.0, 1.0, 1.0), 1) == "1.0"
    assert with_interval((nan, nan, nan), 1) == "–"
    assert (milliseconds(0.0123), milliseconds(0.123), milliseconds(None)) == ("12.3", "123", "–")
