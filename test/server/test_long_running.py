"""Slow checks of an engine or two each: thousands of steps, every width at the context's end,
packed weights that are replaced."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_models
from configurations import OVERLAP
from engines import engine, play, scheduler_memory_mb
from live import Live, load_weights
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from references import References
from safetensors.torch import load_file
from scripted_widths import settled_widths, widths_environment, write_script
from test_scheduling import STRICT, one_token_before
from tiny_models import MAX_POSITIONS
from workloads import CHUNK, Request, random_prompts

pytestmark = [pytest.mark.server, pytest.mark.slow]

STEPS = 20_000
MEMORY_ROUNDS = 40  # of some 200 steps
# Of the scheduler process, over the second half of the rounds; seen: 0.1. A token id kept per step
# and request would be some 4 MB.
ALLOWED_GROWTH_MB = 2.0


def test_thousands_of_steps(references: References, launch_oracle: LaunchOracle) -> None:
    """Half of them with wrong drafts, which makes the most passes; requests come and go."""
    requests, expected = references.requests["mixed"], references.expected("mixed")
    canary = [references.requests["lengths"][-1]]

    def sing(running: OracleEngine) -> None:
        answers = running.play(canary, "cycle")
        assert output_ids(answers) == references.expected("lengths")[-1:]
        assert histograms(answers) == running.predicted(canary, "cycle")

    with launch_oracle(
        references.target,
        references.table,
        env={**STRICT, **OVERLAP},
        max_total_tokens=2048,
        page_size=16,
        chunked_prefill_size=CHUNK,
    ) as running:
        sing(running)
        steps, patterns = 0, itertools.cycle(["wrong", "mixed"])
        while steps < STEPS:
            answers = running.play(requests, next(patterns), flush=False)
            assert output_ids(answers) == expected
            # A pass drafts for requests that have output something already; a prefill's have not,
            # and the states of a prompt's middle chunk are no recorded ones.
            steps += sum(
                any(known and step > 0 for known, step in zip(*places, strict=True))
                for places in ((entry["known"], entry["steps"]) for entry in running.log())
            )
        time.sleep(1.0)  # the idle scheduler checks its pools
        sing(running)


def test_memory_stays_as_it_is(references: References, tmp_path: Path) -> None:
    """With the checkpoint's own drafter: the oracle itself takes some MB in this time."""
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    requests, expected = references.requests["mixed"], references.expected("mixed")
    memory = []
    with engine(
        references.target,
        drafter,
        env={**STRICT, **OVERLAP},
        max_total_tokens=2048,
        page_size=16,
        chunked_prefill_size=CHUNK,
    ) as running:
        for _ in range(MEMORY_ROUNDS):
            assert output_ids(play(running, requests)) == expected
            memory.append(scheduler_memory_mb())
    growth = memory[-1] - memory[MEMORY_ROUNDS // 2]
    print(f"growth of the second half {growth:.2f} MB")
    assert growth < ALLOWED_GROWTH_MB


def test_every_width_at_the_end_of_the_context(
    references: References, launch_oracle: LaunchOracle, tmp_path: Path
) -> None:
    """D = 1 .. 16 on one engine; the last position, and one token before it."""
    ends, expected = references.requests["context_end"], references.expected("context_end")
    requests = [*ends, *one_token_before(ends, expected)]
    assert all(len(r.prompt) + r.max_new_tokens == MAX_POSITIONS for r in ends)
    with launch_oracle(
        references.target,
        references.table,
        {"block_size": 16},
        {**STRICT, **widths_environment(tmp_path)},
        speculative_adaptive=True,
    ) as running:
        for width in range(1, 17):
            write_script(tmp_path, (width,))
            for pattern in ("right", "wrong"):
                answers = running.play(requests, pattern, flush=False)
                assert output_ids(answers) == [*expected, *(ids[:-1] for ids in expected)]
            assert set(settled_widths(tmp_path)) == {width}


@pytest.mark.parametrize("width", [4, 9, 12])
def test_a_fixed_width_at_the_end_of_the_context(
    references: References, launch_oracle: LaunchOracle, width: int
) -> None:
    """The rows of the request table are as wide as this D asks for, under the overlap scheduler."""
    ends, expected = references.requests["context_end"], references.expected("context_end")
    with launch_oracle(
        references.target, references.table, {"block_size": width}, {**STRICT, **OVERLAP}
    ) as running:
        assert running.info["speculative_num_draft_tokens"] == width
        for pattern in ("right", "wrong"):
            answers = running.play([*ends, *one_token_before(ends, expected)], pattern)
            assert output_ids(answers) == [*expected, *(ids[:-1] for ids in expected)]


def test_packed_weights_follow_an_update_and_go_back(tmp_path: Path) -> None:
    """bf16, whose packed copies are what is multiplied by: outputs are those of a fresh engine.

    From disk and as tensors, idle and in a pause of a running request.
    """
    first = tiny_models.make_target(tmp_path / "first", seed=0)
    second = tiny_models.make_target(tmp_path / "second", seed=5)
    drafter = tiny_models.make_drafter(tmp_path / "drafter")
    requests = [Request(p, -1, 24) for p in random_prompts(31, [3, 17, 40, 90])]

    def answers(running: Any) -> list[list[int]]:
        return output_ids(play(running, requests))

    long = replace(requests[0], max_new_tokens=200)
    with engine(first, drafter, dtype="bfloat16", env=STRICT) as running:
        before = answers(running)
        load_weights(running, second)
        changed = answers(running)
        load_weights(running, first)
        assert answers(running) == before
        for checkpoint, expected in ((second, changed), (first, before)):
            tensors = load_file(checkpoint / "model.safetensors")
            running.begin_weight_update()
            done, message = running.update_weights_from_tensor(list(tensors.items()))
            assert done, message
            running.end_weight_update()
            assert answers(running) == expected
        old, new = in_a_pause(running, long, second)
    assert changed != before
    with engine(second, drafter, dtype="bfloat16", env=STRICT) as fresh:
        assert answers(fresh) == changed
        rest = Request((*long.prompt, *old), -1, len(new))
        assert output_ids(play(fresh, [rest])) == [new]


def in_a_pause(running: Any, request: Request, checkpoint: Path) -> tuple[list[int], list[int]]:
    """Load weights while a request is paused: its output before and after that."""
    live = Live(SimpleNamespace(engine=running))

    async def scenario() -> int:
        live.start("across", request)
        await live.until(lambda: len(live.output("across")) >= 3)
        await live.pause("retract")
        await live.load_weights(checkpoint)
        paused_at = len(live.output("across"))
        await live.resume()
        await live.finish()
        return paused_at

    paused_at, output = live.run(scenario()), live.output("across")
    assert 0 < paused_at < len(output) == request.max_new_tokens
    return output[:paused_at], output[paused_at:]
