"""Greedy output with DLITE is token for token that of plain decoding, in every configuration.

The oracle's acceptance is known in advance, so that the number of verify passes is checked as
well: a drafter that silently stopped being right would otherwise go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from configurations import MIXED_CHUNKS, OVERLAP, Configuration, by_name, check_retracted
from logprobs import check_logprobs
from oracle import TOLERANCE
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from references import References
from workloads import CHUNK

pytestmark = pytest.mark.server

LAST = 5  # the tiny target's last layer


CONFIGURATIONS = (
    Configuration("plain", {"anchor_group_size": 2}, slow=False),
    Configuration(
        "overlap",
        {"anchor_group_size": 3, "target_layer_ids": (LAST, 0, 3, 2)},
        env=OVERLAP,
        slow=False,
    ),
    Configuration(
        "chunked",
        {"target_layer_ids": (LAST,)},
        server={**MIXED_CHUNKS, "page_size": 16},
        exact=False,
        slow=False,
    ),
    Configuration("wide", {"block_size": 16, "anchor_group_size": 1}, slow=False),
    Configuration("wide-paged", {"block_size": 16}, server={"page_size": 16}),
    Configuration("width-3", server={"speculative_num_draft_tokens": 3}),
    Configuration("width-2", {"block_size": 2}),
    Configuration(
        "overlap-chunked",
        {"block_size": 16},
        env=OVERLAP,
        server=MIXED_CHUNKS,
        exact=False,
    ),
    Configuration(
        "overlap-paged",
        {"target_layer_ids": (1, LAST)},
        env=OVERLAP,
        server={"page_size": 16, "chunked_prefill_size": CHUNK},
    ),
    # Requests are thrown out of the running batch time and again, and prefilled anew.
    Configuration("retracted", env={"SGLANG_TEST_RETRACT": "1"}, exact=False),
)


@pytest.fixture(
    scope="module",
    params=by_name(CONFIGURATIONS),
)
def configuration(request: pytest.FixtureRequest) -> Configuration:
    return request.param


@pytest.fixture(scope="module")
def running(
    configuration: Configuration, references: References, launch_oracle: LaunchOracle
) -> Iterator[OracleEngine]:
    with launch_oracle(
        references.target,
        references.table,
        configuration.drafter,
        configuration.env,
        **configuration.server,
    ) as engine:
        yield engine


@pytest.mark.parametrize("pattern", ["mixed", "right", "wrong", "cycle"])
def test_concurrent_requests_that_arrive_and_leave(
    running: OracleEngine, configuration: Configuration, references: References, pattern: str
) -> None:
    requests = references.requests["mixed"]
    answers = running.play(requests, pattern)
    assert output_ids(answers) == references.expected("mixed")
    check_retracted(configuration, answers)
    if configuration.exact:
        assert histograms(answers) == running.predicted(requests, pattern)
    elif pattern == "wrong":
        assert not any(sum(histogram[1:]) for histogram in histograms(answers))


def test_prefix_cache_hits_change_neither_output_nor_acceptance(
    running: OracleEngine, configuration: Configuration, references: References
) -> None:
    requests = references.requests["mixed"]
    cold = running.play(requests, "mixed")
    warm = running.play(requests, "mixed", flush=False)
    page = running.info["page_size"]
    assert output_ids(warm) == output_ids(cold) == references.expected("mixed")
    assert all(
        answer["meta_info"]["cached_tokens"] > 0
        for request, answer in zip(requests, warm, strict=True)
        if len(request.prompt) > page
    )
    if configuration.exact:
        assert histograms(warm) == histograms(cold)
    # The next turn finds its history, the output of verify passes included, in the cache.
    turns = references.requests["turns"]
    answers = running.play(turns, "right", flush=False)
    assert output_ids(answers) == references.expected("turns")
    for turn, first, answer in zip(turns, requests, answers, strict=False):
        history = len(first.prompt) + first.max_new_tokens - 1
        assert answer["meta_info"]["cached_tokens"] >= min(history, len(turn.prompt) - 1) - page
    if configuration.exact:
        assert histograms(answers) == running.predicted(turns, "right")


def test_prompts_at_the_chunk_boundaries(running: OracleEngine, references: References) -> None:
    requests = references.requests["boundary"]
    assert output_ids(running.play(requests, "right")) == references.expected("boundary")
    # One at a time no decode row shares a prefill batch, so that acceptance is exact everywhere.
    alone = [running.play([request], "cycle")[0] for request in requests]
    assert output_ids(alone) == references.expected("boundary")
    assert histograms(alone) == running.predicted(requests, "cycle")


@pytest.mark.parametrize("pattern", ["right", "cycle", "wrong"])
def test_every_output_length(running: OracleEngine, references: References, pattern: str) -> None:
    requests = references.requests["lengths"]
    answers = running.play(requests, pattern)
    assert output_ids(answers) == references.expected("lengths")
    for request, answer in zip(requests, answers, strict=True):
        assert answer["meta_info"]["completion_tokens"] == request.max_new_tokens
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
    alone = running.play(requests[-1:], pattern)
    assert histograms(alone) == running.predicted(requests[-1:], pattern)


@pytest.mark.parametrize("pattern", ["right", "cycle"])
def test_stops_at_every_place_of_a_block(
    running: OracleEngine, references: References, pattern: str
) -> None:
    requests, expected = references.requests["stops"], references.answers["stops"]
    reasons = [answer["meta_info"]["finish_reason"] for answer in expected]
    for kind in (int, str):  # else it tests nothing
        assert sum(isinstance(reason.get("matched"), kind) for reason in reasons) > 25
    answers = running.play(requests, pattern)
    assert output_ids(answers) == output_ids(expected)
    assert [answer["text"] for answer in answers] == [answer["text"] for answer in expected]
    for name in ("finish_reason", "completion_tokens"):
        assert [answer["meta_info"][name] for answer in answers] == [
            answer["meta_info"][name] for answer in expected
        ]


def test_generation_up_to_the_last_position_of_the_context(
    running: OracleEngine, references: References
) -> None:
    """Rows of the request table must have room for the verify rows beyond the context's end.

    Too short rows (upstream's, for D > 8 at page size 1) corrupt the neighbour's row or crash.
    """
    ends, neighbours = references.requests["context_end"], references.requests["mixed"][:10]
    expected = references.expected("context_end") + references.expected("mixed")[:10]
    for pattern in ("right", "wrong"):
        assert output_ids(running.play(ends + neighbours, pattern)) == expected
    # Slots lost at the context's end would show here, and as a leak report of the idle scheduler.
    again = running.play(ends + neighbours, "cycle", flush=False)
    assert output_ids(again) == expected


def test_logit_bias(running: OracleEngine, references: References) -> None:
    requests = references.requests["biased"]
    assert output_ids(running.play(requests, "right")) == references.expected("biased")
    mixed_in = requests + references.requests["mixed"][:4]
    expected = references.expected("biased") + references.expected("mixed")[:4]
    assert output_ids(running.play(mixed_in, "cycle")) == expected


def test_logprobs(
    running: OracleEngine, configuration: Configuration, references: References
) -> None:
    """Of input, at the chunk boundaries too, and of output."""
    requests = references.requests["logprobs"]
    for pattern in ("right", "cycle"):
        answers = running.play(requests, pattern)
        for played in zip(requests, answers, references.answers["logprobs"], strict=True):
            check_logprobs(*played)
        if configuration.exact:
            assert histograms(answers) == running.predicted(requests, pattern)


def test_pivot_states_are_those_of_transformers(
    running: OracleEngine, configuration: Configuration, references: References
) -> None:
    """Every state the drafter got, at prefills and verify rows, against HF's hidden_states.

    The last row of a middle chunk is drafted from as well, and thrown away: it is not recorded.
    """
    requests = references.requests["boundary"]
    chunk = configuration.server.get("chunked_prefill_size", 1 << 30)
    for request in requests:
        middle_chunks = (len(request.prompt) - 1) // chunk
        for flush in (True, False):  # the second time the prompt comes from the prefix cache
            running.play([request], "cycle", flush=flush)
            rows = [
                row
                for entry in running.log()
                for row in zip(entry["errors"], entry["group_right"], strict=True)
            ]
            unrecorded = [error for error, _ in rows if error >= TOLERANCE]
            assert len(unrecorded) == (middle_chunks if flush else 0)
            assert all(right for error, right in rows if error < TOLERANCE)
            assert len(rows) > request.max_new_tokens / running.width


def test_no_draft_kv(running: OracleEngine, references: References) -> None:
    """The K/V pool costs what it costs without speculation: the drafter keeps nothing there."""
    plain, ours = references.server_info, running.info
    assert ours["max_total_num_tokens"] == plain["max_total_num_tokens"]
    usage, plain_usage = (info["internal_states"][0]["memory_usage"] for info in (ours, plain))
    assert usage["kvcache"] == plain_usage["kvcache"] > 0
    assert usage["token_capacity"] == plain_usage["token_capacity"]
