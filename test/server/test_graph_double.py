"""Served text is that of plain decoding when verify and draft run in graphs.

Upstream's decode graph runner runs on the CPU with doubles for graphs (graph_engine.py): static
memory is spoilt after every step, while the overlap scheduler still holds the step's results.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from graph_engine import replay_counts
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from references import References
from scripted_widths import SCRIPT, settled_widths, widths_environment, write_script
from sglang_dlite.speculative.adaptive import width_choices
from sglang_dlite.speculative.cuda_graph import TAIL_VARIANT

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def running(references: References, launch_oracle: LaunchOracle) -> Iterator[OracleEngine]:
    with launch_oracle(
        references.target,
        references.table,
        {"anchor_group_size": 3},
        {"DLITE_DRAFTER_FACTORY": "graph_engine:make", "DLITE_CPU_OVERLAP": "1"},
    ) as engine:
        yield engine


@pytest.mark.parametrize("pattern", ["mixed", "cycle"])
def test_concurrent_greedy_requests_are_one_replay_per_step(
    running: OracleEngine, references: References, pattern: str
) -> None:
    """Up to 16 requests, so that batches above the largest captured size occur as well."""
    requests = references.requests["mixed"]
    answers = running.play(requests, pattern)
    assert output_ids(answers) == references.expected("mixed")
    assert histograms(answers) == running.predicted(requests, pattern)
    counts = replay_counts(running.folder)
    assert counts[TAIL_VARIANT] > 0 and counts["draft"] > 0 and counts["verify"] == 0


def test_requests_with_options_take_the_steps_one_by_one(
    running: OracleEngine, references: References
) -> None:
    before = replay_counts(running.folder)
    for name in ("logprobs", "biased"):
        requests = references.requests[name]
        answers = running.play(requests, "right")
        assert output_ids(answers) == references.expected(name)
        if name == "logprobs":
            assert histograms(answers) == running.predicted(requests, "right")
    after = replay_counts(running.folder)
    assert after["verify"] > before["verify"] and after["draft"] > before["draft"]
    assert after[TAIL_VARIANT] == before[TAIL_VARIANT]


def test_stops_inside_a_block(running: OracleEngine, references: References) -> None:
    requests = references.requests["stops"]
    assert output_ids(running.play(requests, "cycle")) == references.expected("stops")


@pytest.fixture(scope="module")
def widths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the adaptive engine's script and of its log of widths."""
    return tmp_path_factory.mktemp("widths")


@pytest.fixture(scope="module")
def adaptive(
    references: References, launch_oracle: LaunchOracle, widths: Path
) -> Iterator[OracleEngine]:
    environment = {
        **widths_environment(widths),
        "DLITE_DRAFTER_FACTORY": "graph_engine:make_scripted",
        "DLITE_CPU_OVERLAP": "1",
    }
    with launch_oracle(
        references.target, references.table, env=environment, speculative_adaptive=True
    ) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "boundary", "logprobs", "biased", "context_end"])
def test_each_width_has_its_graphs_and_attention(
    adaptive: OracleEngine, references: References, widths: Path, name: str
) -> None:
    """Another width each step: it is replayed on what was captured for that width alone."""
    captured = width_choices(adaptive.info["speculative_num_draft_tokens"])
    script = tuple(width for width in SCRIPT if width in captured)  # as a policy would
    before = replay_counts(adaptive.folder)
    for pattern in ("cycle", "right"):
        write_script(widths, script)
        answers = adaptive.play(references.requests[name], pattern)
        assert output_ids(answers) == references.expected(name)
        assert set(settled_widths(widths)) <= set(captured)
    counts = replay_counts(adaptive.folder) - before
    assert not any(kind.startswith(TAIL_VARIANT) for kind in counts)
    if name == "mixed":  # the others are short, or of more requests at once than are captured
        assert all(counts[f"verify {width}"] for width in captured) and counts["draft"]
