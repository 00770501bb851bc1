"""Adaptive width is lossless: token ids equal plain decoding's while the width changes each step.

fp32, oracle drafts, a scripted policy (scripted_widths.py); then the real policy in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from configurations import MIXED_CHUNKS, OVERLAP, Configuration, by_name, check_retracted
from logprobs import check_logprobs
from option_workloads import OPTIONS
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from references import References
from scripted_widths import (
    SCRIPT,
    predict_histogram,
    settled_widths,
    widths_environment,
    write_script,
)

pytestmark = pytest.mark.server


CONFIGURATIONS = (
    Configuration("overlap", {"anchor_group_size": 3}, env=OVERLAP, slow=False),
    Configuration("no-overlap", {"anchor_group_size": 2}),
    Configuration(
        "overlap-chunked",
        env=OVERLAP,
        server={**MIXED_CHUNKS, "page_size": 16},
    ),
    Configuration("retracted", env={"SGLANG_TEST_RETRACT": "1"}),
    # The other rank's policy wants another width each time. A wait for ever is a failure.
    Configuration("two-ranks", server={"tp_size": 2, "watchdog_timeout": 120}),
)


@pytest.fixture(
    scope="module",
    params=by_name(CONFIGURATIONS),
)
def configuration(request: pytest.FixtureRequest) -> Configuration:
    return request.param


@pytest.fixture(scope="module")
def widths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the script and of the log of widths."""
    return tmp_path_factory.mktemp("widths")


@pytest.fixture(scope="module")
def running(
    configuration: Configuration, references: References, launch_oracle: LaunchOracle, widths: Path
) -> Iterator[OracleEngine]:
    with launch_oracle(
        references.target,
        references.table,
        configuration.drafter,
        {**configuration.env, **widths_environment(widths)},
        speculative_adaptive=True,
        enable_custom_logit_processor=True,
        **configuration.server,
    ) as engine:
        yield engine


@pytest.fixture(autouse=True)
def scripted(running: OracleEngine, widths: Path) -> None:
    write_script(widths, SCRIPT)


@pytest.mark.parametrize("pattern", ["mixed", "right", "wrong", "cycle"])
def test_concurrent_requests_at_changing_widths(
    running: OracleEngine,
    configuration: Configuration,
    references: References,
    widths: Path,
    pattern: str,
) -> None:
    requests = references.requests["mixed"]
    answers = running.play(requests, pattern)
    check_retracted(configuration, answers)
    assert output_ids(answers) == references.expected("mixed")
    assert set(settled_widths(widths)) == set(SCRIPT)  # else it tests nothing
    if pattern != "wrong":  # there, only token 0 in place of a draft that was not made can be right
        assert any(sum(histogram[1:]) for histogram in histograms(answers))


@pytest.mark.parametrize("script", [(1,), (1, 8), (8, 1, 1), SCRIPT], ids=str)
def test_acceptance_is_what_the_widths_allow(
    running: OracleEngine,
    configuration: Configuration,
    references: References,
    widths: Path,
    script: tuple[int, ...],
) -> None:
    """A lone request with right drafts keeps all but one row of every pass; no draft is lost where
    the drafter was skipped in between, and it is skipped exactly before passes of width 1."""
    request = references.requests["lengths"][-1]
    write_script(widths, script)
    answers = running.play([request], "right")
    assert output_ids(answers) == references.expected("lengths")[-1:]
    settled = settled_widths(widths)
    assert histograms(answers) == [predict_histogram(settled, request.max_new_tokens)]
    ranks = configuration.server.get("tp_size", 1)
    assert len(running.log()) == ranks * sum(width > 1 for width in settled)


@pytest.mark.parametrize("name", ["boundary", "lengths", "turns", "biased", "context_end"])
def test_other_workloads(running: OracleEngine, references: References, name: str) -> None:
    for pattern in ("right", "cycle"):
        answers = running.play(references.requests[name], pattern)
        assert output_ids(answers) == references.expected(name)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_options_that_depend_on_the_output_so_far(
    running: OracleEngine, references: References, name: str
) -> None:
    """Penalties, minimal lengths, grammars and processors, at rows of every width."""
    requests = [replace(request, logprobs=False) for request in references.requests[name]]
    answers = running.play([*requests, *references.requests["mixed"][:6]], "cycle")
    expected = output_ids(references.answers[name]) + references.expected("mixed")[:6]
    assert output_ids(answers) == expected


def test_stops_at_every_place_of_a_block(running: OracleEngine, references: References) -> None:
    answers, expected = (
        running.play(references.requests["stops"], "right"),
        references.answers["stops"],
    )
    assert output_ids(answers) == output_ids(expected)
    assert [a["meta_info"]["finish_reason"] for a in answers] == [
        a["meta_info"]["finish_reason"] for a in expected
    ]


def test_logprobs(running: OracleEngine, references: References) -> None:
    """One per token, each of its own row: the stride of the result follows the width."""
    requests = references.requests["logprobs"]
    answers = running.play(requests, "cycle")
    for played in zip(requests, answers, references.answers["logprobs"], strict=True):
        check_logprobs(*played)


def test_the_policy_stops_drafting_where_drafts_are_wrong(
    running: OracleEngine, references: References, widths: Path
) -> None:
    requests = references.requests["mixed"]
    write_script(widths, None)
    running.play(requests, "wrong")  # it learns
    learned = len(settled_widths(widths))
    answers = running.play(requests, "wrong")
    assert output_ids(answers) == references.expected("mixed")
    settled = settled_widths(widths)[learned:]
    assert settled.count(1) > 0.6 * len(settled)
    assert running.engine.get_server_info()["speculative_num_draft_tokens"] == running.width
