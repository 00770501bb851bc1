"""The shipped drafter on the embedded model: text that makes sense, drafts that are kept.

One engine with the overlap scheduler plays every verify width (adaptive width, told what to take).
A verify pass rounds there as a single-token step does (see `exact_dtype`), so that token ids are
compared, and in the second half the drafts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from engines import engine
from identifiers import CONCURRENCY, WIDTHS, Echo, encode_chat
from recorded_drafts import RecordedEngine, recording_environment
from sglang_dlite.assets import shipped_drafter_dir
from sglang_dlite.demo.session import SESSION

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def recorded(
    embedded_model: Path,
    exact_dtype: str,
    echo: Echo,  # first: an engine that ends takes all children of this process with it
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RecordedEngine]:
    folder = tmp_path_factory.mktemp("recorded")
    with engine(
        embedded_model,
        shipped_drafter_dir(),
        env={"DLITE_CPU_OVERLAP": "1", **recording_environment(folder, WIDTHS[-1])},
        dtype=exact_dtype,
        max_running_requests=CONCURRENCY,
        speculative_adaptive=True,
    ) as running:
        yield RecordedEngine(running, folder)


# -- identifiers come out as they went in ----------------------------------------------------------


def test_the_target_echoes(echo: Echo) -> None:
    """Else the other tests hold nothing: most replies have identifiers of their prompt."""
    assert sum(map(bool, echo.copied())) > len(echo.prompts) / 2
    assert max(map(len, echo.prompts)) > 3 * min(map(len, echo.prompts))


@pytest.mark.parametrize(
    "width", [pytest.param(w, marks=[] if w in (5, 8) else pytest.mark.slow) for w in WIDTHS]
)
def test_identifiers_at_every_width(recorded: RecordedEngine, echo: Echo, width: int) -> None:
    recorded.set_width(width)
    answers = echo.play(recorded.engine)
    echo.check(answers)
    assert recorded.widths() == {width}
    assert sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers) > 0


# -- drafts do not depend on how the history got into the cache ------------------------------------

NUM_TURNS = 3
REPLY_TOKENS = 40


class Reply(NamedTuple):
    """What must not depend on the cache."""

    output_ids: list[int]
    histogram: list[int]
    drafts: list[list[int]]  # [verify passes, G + K]: the tokens each draft starts from, and it


def ask(running: RecordedEngine, prompt: Sequence[int]) -> tuple[Reply, int]:
    """The reply, and how many tokens of the prompt were found in the cache."""
    answer, drafts = running.ask(prompt, REPLY_TOKENS)
    meta = answer["meta_info"]
    reply = Reply(answer["output_ids"], meta["spec_correct_drafts_histogram"], drafts)
    return reply, meta["cached_tokens"]


@pytest.fixture(scope="module")
def cold(recorded: RecordedEngine, embedded_model: Path) -> list[tuple[list[int], Reply]]:
    """Prompt and reply of every turn of a session, each prefilled from its first token on."""
    recorded.set_width(WIDTHS[-1])
    turns: list[tuple[list[int], Reply]] = []
    history: list[int] = []
    for turn in SESSION[:NUM_TURNS]:
        prompt = [*history, *encode_chat(embedded_model, [turn.message()])[0]]
        recorded.engine.flush_cache()
        reply, cached = ask(recorded, prompt)
        assert cached == 0
        assert len(reply.drafts) == sum(reply.histogram)
        turns.append((prompt, reply))
        history = [*prompt, *reply.output_ids]
    return turns


def test_the_text_says_something(cold: list[tuple[list[int], Reply]]) -> None:
    """Else equality would say little: drafts that differ from step to step, many of them kept."""
    for prompt, reply in cold:
        assert len(prompt) > 300
        accepted = sum(n * count for n, count in enumerate(reply.histogram))
        assert accepted > len(reply.drafts) / 3
        assert len(set(map(tuple, reply.drafts))) > len(reply.drafts) / 2


def test_turn_by_turn(recorded: RecordedEngine, cold: list[tuple[list[int], Reply]]) -> None:
    """The history is in the cache: prompts by prefills, replies by verify passes."""
    recorded.engine.flush_cache()
    history = 0
    for prompt, expected in cold:
        reply, cached = ask(recorded, prompt)
        assert cached >= history
        assert reply == expected
        history = len(prompt) + REPLY_TOKENS - 1  # the last token's K/V is not written


def test_the_same_prompt_again(
    recorded: RecordedEngine, cold: list[tuple[list[int], Reply]]
) -> None:
    """All of it is cached but the last token, whose row gives the anchor."""
    prompt, expected = cold[-1]
    ask(recorded, prompt)
    reply, cached = ask(recorded, prompt)
    assert cached == len(prompt) - 1
    assert reply == expected


@pytest.mark.parametrize("share", [0.03, 0.3, 0.97])
def test_any_part_of_the_prompt(
    recorded: RecordedEngine, cold: list[tuple[list[int], Reply]], share: float
) -> None:
    prompt, expected = cold[-1]
    cut = int(share * len(prompt))
    recorded.engine.flush_cache()
    recorded.ask(prompt[:cut], 1)
    reply, cached = ask(recorded, prompt)
    assert cached == cut
    assert reply == expected
