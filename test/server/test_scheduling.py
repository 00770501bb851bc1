"""What the scheduler does to running requests changes no output: a pool that is too small, aborts,
preemption, pauses, flushes, new weights.

One engine whose K/V pool holds about half of what its requests want. The scheduler checks its
pools after every step and whenever it is idle, and dies of a leak; every test ends with a canary:
the same output and the same acceptance as ever.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from configurations import OVERLAP, Configuration, by_name
from greedy import greedy_with_transformers
from live import Live, finish_type, load_weights
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from references import References
from workloads import CHUNK, Request

pytestmark = pytest.mark.server

POOL = 1280  # tokens: one context of 1024, or some ten of the workload's requests at once
# More are admitted than fit: an admission counts one token of output. Not together with mixed
# chunks: decoding rows then take what a prompt's next chunk needs, and SGLang stops.
OVERCOMMIT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
CHUNKED = {"chunked_prefill_size": CHUNK}
SLOTS = 16  # --max-running-requests
URGENT = 100  # a priority; requests that state none have the lowest


CONFIGURATIONS = (
    # A control message reaches this scheduler between a verify pass and its result.
    Configuration("overlap", env=OVERLAP, server={**CHUNKED, "page_size": 16}, slow=False),
    Configuration("plain", server=CHUNKED),
    Configuration("wide", {"block_size": 16}, server=CHUNKED),
    Configuration(
        "overlap-page-64", env=OVERLAP, server={"chunked_prefill_size": 64, "page_size": 64}
    ),
    Configuration("overlap-wide-page-1", {"block_size": 16}, env=OVERLAP, server=CHUNKED),
    Configuration(
        "wide-page-64", {"block_size": 16}, server={"chunked_prefill_size": 64, "page_size": 64}
    ),
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
        {**STRICT, **OVERCOMMIT, **configuration.env},
        max_total_tokens=POOL,
        max_running_requests=SLOTS,
        enable_priority_scheduling=True,
        **configuration.server,
    ) as engine:
        assert engine.info["max_total_num_tokens"] == POOL
        yield engine


@pytest.fixture
def live(running: OracleEngine) -> Live:
    return Live(running)


@pytest.fixture(autouse=True)
def healthy_afterwards(running: OracleEngine, references: References) -> Iterator[None]:
    """Whatever a test did: the pools are whole, and the canary sings as predicted."""
    yield
    time.sleep(0.2)  # an idle scheduler checks its pools before it sleeps
    assert running.flush_when_idle()
    canary = [references.requests["lengths"][-1], references.requests["mixed"][40]]
    expected = [references.expected("lengths")[-1], references.expected("mixed")[40]]
    for flush in (True, False):
        answers = [running.play([request], "cycle", flush=flush)[0] for request in canary]
        assert output_ids(answers) == expected
        assert histograms(answers) == running.predicted(canary, "cycle")


# -- memory -------------------------------------------------------------------------------------


def test_retraction_under_a_tiny_pool(running: OracleEngine, references: References) -> None:
    """Two thirds of the requests that run want more than there is."""
    answers = running.play(references.requests["recorded"][:40], "mixed")
    assert output_ids(answers) == references.expected("recorded")[:40]
    assert any(answer["meta_info"]["num_retractions"] for answer in answers)  # else no test


def test_eviction_while_running(running: OracleEngine, references: References) -> None:
    """The prefix cache is full all the time; what was evicted in part is prefilled in part."""
    requests, expected = references.requests["mixed"][::2], references.expected("mixed")[::2]
    distinct = sum(len(r.prompt) + r.max_new_tokens - 1 for r in requests)
    assert distinct > 1.5 * POOL  # the cache cannot hold them all
    order = list(range(len(requests)))
    random.Random(12).shuffle(order)
    answers = running.play([requests[i] for i in order], "mixed")
    assert output_ids(answers) == [expected[i] for i in order]
    order.reverse()
    again = running.play([requests[i] for i in order], "mixed", flush=False)
    assert output_ids(again) == [expected[i] for i in order]
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in again)
    assert cached < sum(len(request.prompt) for request in requests)
    if running.info["page_size"] <= 16:  # few of the prompts fill a larger page
        assert cached > 0
    turns = running.play(references.requests["turns"], "right", flush=False)
    assert output_ids(turns) == references.expected("turns")


def one_token_before(ends: list[Request], expected: list[list[int]]) -> list[Request]:
    """The same requests, less one token of what the context has room for."""
    return [replace(r, max_new_tokens=len(ids) - 1) for r, ids in zip(ends, expected, strict=True)]


def test_chunk_boundaries_and_the_end_of_the_context(
    running: OracleEngine, references: References
) -> None:
    """At the context's end, and one token before it; a request for more is refused."""
    ends, expected = references.requests["context_end"], references.expected("context_end")
    requests = [*ends, *one_token_before(ends, expected)]
    answers = running.play(references.requests["boundary"], "wrong", flush=False)
    assert output_ids(answers) == references.expected("boundary")
    answers = running.play(requests, "right", flush=False)
    assert output_ids(answers) == [*expected, *(ids[:-1] for ids in expected)]
    beyond = replace(ends[0], max_new_tokens=ends[0].max_new_tokens + 1)
    with pytest.raises(ValueError, match="context length"):
        running.play([beyond], "right")


def test_memory_is_not_released_on_a_cpu(running: OracleEngine, references: References) -> None:
    """Upstream's calls would end the scheduler: refused, and the server serves on."""
    for call in ("release_memory_occupation", "resume_memory_occupation"):
        with pytest.raises(ValueError, match=f"{call} is not available on a CPU"):
            getattr(running.engine, call)()
    requests = references.requests["mixed"][50:52]
    assert output_ids(running.play(requests, "right")) == references.expected("mixed")[50:52]


def test_flush_is_refused_while_busy(live: Live, references: References) -> None:
    request, expected = references.requests["mixed"][50], references.expected("mixed")[50]
    live.running.prepare("wrong")

    async def scenario() -> list[dict[str, Any]]:
        for i in range(6):
            live.start(f"busy-{i}", request)
        await live.until(lambda: live.answers)
        assert not (await live.manager.flush_cache()).success
        return await live.finish()

    assert output_ids(live.run(scenario())) == [expected] * 6
    assert live.running.flush_when_idle()
    (answer,) = live.running.play([request], "right", flush=False)
    assert answer["meta_info"]["cached_tokens"] == 0


# -- aborts -------------------------------------------------------------------------------------


def check_aborted(answer: dict[str, Any], recorded: list[int]) -> None:
    """An aborted reply is the beginning of what plain decoding gives.

    SGLang trims no block that is aborted: it may reach beyond max_new_tokens.
    """
    assert finish_type(answer) == "abort"
    assert answer["output_ids"] == recorded[: len(answer["output_ids"])]


def test_abort_while_waiting(live: Live, references: References) -> None:
    requests, expected = references.requests["mixed"], references.expected("mixed")
    live.running.prepare("wrong")
    waiting = range(SLOTS + 8, SLOTS + 24)

    async def scenario() -> list[dict[str, Any]]:
        for i in range(SLOTS + 24):
            live.start(f"w-{i:02d}", requests[i])
        await live.until(lambda: live.answers)
        for i in waiting[::2]:
            live.abort(f"w-{i:02d}")
        return await live.finish()

    for i, answer in enumerate(live.run(scenario())):
        if i in waiting[::2]:
            check_aborted(answer, expected[i])
            assert answer["output_ids"] == []
        else:
            assert answer["output_ids"] == expected[i]


def test_abort_during_a_chunked_prefill(live: Live, references: References) -> None:
    """A lone prompt of many chunks, aborted after the drafter has seen two of them."""
    request = references.requests["context_end"][0]
    live.running.prepare("right")

    async def scenario() -> list[dict[str, Any]]:
        live.start("chunked", request)
        await live.until(lambda: len(live.running.log()) >= 2)
        live.abort("chunked")
        return await live.finish()

    (answer,) = live.run(scenario())
    check_aborted(answer, references.expected("context_end")[0])
    assert answer["output_ids"] == []
    assert (
        len(live.running.log()) < len(request.prompt) // live.running.info["chunked_prefill_size"]
    )


@pytest.mark.parametrize("pattern", ["right", "wrong"])
def test_abort_while_decoding(live: Live, references: References, pattern: str) -> None:
    """Some of many requests that share batches, each at another length of its output."""
    requests, expected = references.requests["mixed"], references.expected("mixed")
    live.running.prepare(pattern)
    rng = random.Random(13)
    after = {f"d-{i:02d}": rng.randrange(1, r.max_new_tokens) for i, r in enumerate(requests[::2])}

    async def scenario() -> list[dict[str, Any]]:
        for i, request in enumerate(requests[::2]):
            live.start(f"d-{i:02d}", request)
        left = {rid for i, rid in enumerate(after) if i % 2}
        while left:
            await live.until(
                lambda: any(live.done(r) or len(live.output(r)) >= after[r] for r in left)
            )
            for rid in [r for r in left if live.done(r) or len(live.output(r)) >= after[r]]:
                live.abort(rid)
                left.remove(rid)
        return await live.finish()

    answers = live.run(scenario())
    aborted = 0
    recorded = references.expected("recorded")[::2]
    for i, (answer, ids) in enumerate(zip(answers, expected[::2], strict=True)):
        if i % 2 and finish_type(answer) == "abort":
            check_aborted(answer, recorded[i])
            aborted += bool(answer["output_ids"])
        else:  # the whole output may have been on its way already
            assert answer["output_ids"] == ids
    assert aborted >= 4


# -- preemption and pauses ----------------------------------------------------------------------


def test_preemption_by_urgent_requests(live: Live, references: References) -> None:
    """All slots are taken; the pool has room, so that only who is urgent throws a request out."""
    if live.running.info["page_size"] > 16:
        pytest.skip("the pool has no room for a request per slot at this page size")
    requests, expected = references.requests["recorded"], references.expected("recorded")
    by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt))
    patient, urgent = by_length[:SLOTS], by_length[SLOTS : SLOTS + 6]

    async def scenario(priority: int | None) -> list[dict[str, Any]]:
        live.tasks.clear()
        live.answers.clear()
        for i in patient:
            live.start(f"{priority}-patient-{i}", replace(requests[i], max_new_tokens=32))
        await live.until(lambda: len(live.answers) == SLOTS)
        for i in urgent:
            live.start(f"{priority}-urgent-{i}", replace(requests[i], max_new_tokens=8), priority)
        return await live.finish()

    retractions = {}
    for priority in (None, URGENT):
        live.running.prepare("wrong")
        answers = live.run(scenario(priority))
        ours = [expected[i][:32] for i in patient] + [expected[i][:8] for i in urgent]
        assert output_ids(answers) == ours
        retractions[priority] = sum(a["meta_info"]["num_retractions"] for a in answers[:SLOTS])
    assert retractions[None] == 0 < retractions[URGENT]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(live: Live, references: References, mode: str) -> None:
    """In the midst of everything; meanwhile one request is aborted that waits, one that has output
    already, and one arrives."""
    requests, expected = references.requests["mixed"][:30], references.expected("mixed")[:31]
    live.running.prepare("cycle")

    def done(i: int) -> bool:
        return live.done(f"{mode}-{i:02d}")

    async def scenario() -> tuple[int, list[dict[str, Any]]]:
        for i, request in enumerate(requests):
            live.start(f"{mode}-{i:02d}", request)
        await live.until(lambda: len(live.answers) >= 4)
        await live.pause(mode)
        flushed = (await live.manager.flush_cache()).success
        assert flushed == (mode == "retract")
        paused = len(live.running.log())
        begun = next(i for i in range(29) if live.output(f"{mode}-{i:02d}") and not done(i))
        for i in (29, begun):
            live.abort(f"{mode}-{i:02d}")
        time.sleep(0.3)
        assert len(live.running.log()) == paused  # nothing runs
        await live.resume()
        live.start(f"{mode}-30", references.requests["mixed"][30])
        return begun, await live.finish()

    begun, answers = live.run(scenario())
    recorded = references.expected("recorded")
    for i, answer in enumerate(answers):
        if i in (29, begun):
            check_aborted(answer, recorded[i])
            assert bool(answer["output_ids"]) == (i == begun)
        else:
            assert answer["output_ids"] == expected[i]


def test_pause_that_aborts(live: Live, references: References) -> None:
    requests, expected = references.requests["mixed"][:24], references.expected("mixed")
    live.running.prepare("cycle")

    async def scenario() -> list[dict[str, Any]]:
        for i, request in enumerate(requests):
            live.start(f"a-{i}", request)
        await live.until(lambda: len(live.answers) >= 4)
        await live.pause("abort")
        answers = await live.finish()
        await live.resume()
        return answers

    answers = live.run(scenario())
    aborted = [finish_type(answer) == "abort" for answer in answers]
    assert sum(aborted) >= 8
    for i, answer in enumerate(answers):
        if aborted[i]:
            check_aborted(answer, references.expected("recorded")[i])
        else:
            assert answer["output_ids"] == expected[i]


# -- new weights --------------------------------------------------------------------------------


def test_new_weights_and_back(live: Live, references: References, tmp_path: Path) -> None:
    """In a pause: what a running request outputs from then on is the new weights' choice."""
    other = tiny_models.make_target(tmp_path / "other", seed=5)
    expected = max(references.expected("mixed"), key=len)
    request = references.requests["mixed"][references.expected("mixed").index(expected)]
    live.running.prepare("wrong")

    async def scenario() -> tuple[list[int], list[int]]:
        live.start("across", request)
        await live.until(lambda: len(live.output("across")) >= 3)
        await live.pause("retract")
        await live.load_weights(other)
        before = live.output("across")
        await live.resume()
        await live.finish()
        return before, live.output("across")

    try:
        before, output = live.run(scenario())
        assert before == expected[: len(before)]
        assert output != expected
        left = len(expected) - len(before)
        after = greedy_with_transformers(other, [*request.prompt, *before], left)
        assert output == [*before, *after]
        (answer,) = live.running.play([request], "right", flush=False)
        anew = greedy_with_transformers(other, request.prompt, len(expected))
        assert answer["output_ids"] == anew
    finally:
        load_weights(live.running.engine, references.target)
