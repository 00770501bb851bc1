"""Sessions: a turn continues what the one before returned, although a block accepted more.

And the end of the K/V pool, which these small engines reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from configurations import OVERLAP, Configuration, by_name
from greedy import greedy_with_transformers
from oracle_engine import LaunchOracle, OracleEngine
from workloads import first_places, random_prompts

pytestmark = pytest.mark.server

POOL = 512  # half of a context
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
ANSWER = 20  # tokens of a second turn

CONFIGURATIONS = (
    Configuration("plain", slow=False),
    Configuration("overlap", env=OVERLAP),
    Configuration("overlap-page-16", env=OVERLAP, server={"page_size": 16}),
    Configuration("wide", {"block_size": 16}),
)


@dataclass(frozen=True)
class Turns:
    """A first turn that ends somewhere, and the second one after it."""

    first: list[int]
    ending: dict[str, Any]  # sampling parameters
    returned: list[int]
    more: list[int]  # the second turn's input
    answer: list[int]

    @property
    def history(self) -> list[int]:
        return [*self.first, *self.returned, *self.more]


@dataclass(frozen=True)
class Known:
    """What plain decoding does, and the oracle's table of it."""

    turns: list[Turns]
    table: Path


@pytest.fixture(scope="module")
def known(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Known:
    (first,), (more,) = (
        [list(p) for p in random_prompts(seed, [n])] for seed, n in ((31, 40), (32, 7))
    )
    output = greedy_with_transformers(target, first, 60)
    stops = first_places(output, 20)[1:]
    endings = [
        ({"stop_token_ids": [output[place]], "ignore_eos": False}, place + 1)
        for place in stops[::4]
    ]
    endings += [({"max_new_tokens": count}, count) for count in (1, 2, 9, 14)]
    turns, sequences, prompt_lens = [], [[*first, *output]], [len(first)]
    for ending, count in endings:
        history = [*first, *output[:count], *more]
        answer = greedy_with_transformers(target, history, ANSWER + oracle.RECORDED)
        turns.append(Turns(first, ending, output[:count], more, answer[:ANSWER]))
        sequences.append([*history, *answer])
        prompt_lens.append(len(history))
    folder = tmp_path_factory.mktemp("sessions")
    table = oracle.record(folder / "table.safetensors", target, sequences, prompt_lens)
    return Known(turns, table)


@pytest.fixture(scope="module", params=by_name(CONFIGURATIONS))
def running(
    request: pytest.FixtureRequest, target: Path, known: Known, launch_oracle: LaunchOracle
) -> Iterator[OracleEngine]:
    configuration: Configuration = request.param
    with launch_oracle(
        target,
        known.table,
        configuration.drafter,
        {**STRICT, **configuration.env},
        max_total_tokens=POOL,
        enable_streaming_session=True,
        **configuration.server,
    ) as engine:
        yield engine


def say(
    running: OracleEngine,
    session: str,
    after: str | None,
    ids: list[int],
    *,
    replace: bool = False,
    **params: Any,
) -> dict[str, Any]:
    """One turn of a session, with log-probabilities."""
    return running.engine.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True, **params},
        session_params={"id": session, "rid": after, "replace": replace},
        return_logprob=True,
    )


def logprobs(target: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Of each output token, by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        law = model(torch.tensor([[*prompt, *output]])).logits[0].log_softmax(-1)
    return law[len(prompt) - 1 : -1].gather(-1, torch.tensor(output)[:, None]).squeeze(1)


@pytest.mark.parametrize("pattern", ["right", "wrong", "cycle"])
@pytest.mark.parametrize("streaming", [False, True], ids=["kept", "streaming"])
def test_a_turn_continues_what_was_returned(
    running: OracleEngine, known: Known, target: Path, streaming: bool, pattern: str
) -> None:
    running.prepare(pattern)
    for turns in known.turns:
        session = running.engine.open_session(4096, streaming=streaming)
        one = say(running, session, None, turns.first, **turns.ending)
        assert one["output_ids"] == turns.returned
        two = say(running, session, one["meta_info"]["id"], turns.more)
        assert two["meta_info"]["prompt_tokens"] == len(turns.history)
        assert two["output_ids"] == turns.answer
        got = torch.tensor([entry[0] for entry in two["meta_info"]["output_token_logprobs"]])
        expected = logprobs(target, turns.history, turns.answer)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        running.engine.close_session(session)
    assert running.flush_when_idle()


@pytest.mark.parametrize("streaming", [False, True], ids=["kept", "streaming"])
def test_a_refused_turn_leaves_its_session_as_it_was(
    running: OracleEngine, known: Known, streaming: bool
) -> None:
    running.prepare("right")
    turns = known.turns[0]
    session = running.engine.open_session(4096, streaming=streaming)
    one = say(running, session, None, turns.first, **turns.ending)
    for _ in range(2):
        for after in (one["meta_info"]["id"], "no such turn"):
            with pytest.raises(ValueError, match=r"logit_bias of token 3 is 1e\+31"):
                say(running, session, after, turns.more, logit_bias={"3": 1e31})
        if not streaming:
            with pytest.raises(ValueError, match=r"logit_bias of token 3 is 1e\+31"):
                say(running, session, None, turns.more, replace=True, logit_bias={"3": 1e31})
    two = say(running, session, one["meta_info"]["id"], turns.more)
    assert two["output_ids"] == turns.answer
    running.engine.close_session(session)
    assert running.flush_when_idle()


def test_a_turn_that_replaces_the_whole_session(running: OracleEngine, known: Known) -> None:
    """Upstream deletes the session's turns while it walks over them."""
    running.prepare("right")
    turns = known.turns[0]
    session = running.engine.open_session(4096)
    one = say(running, session, None, turns.first, **turns.ending)
    say(running, session, one["meta_info"]["id"], turns.more)
    anew = say(running, session, None, turns.first, replace=True, **turns.ending)
    assert anew["output_ids"] == turns.returned
    two = say(running, session, anew["meta_info"]["id"], turns.more)
    assert two["output_ids"] == turns.answer
    running.engine.close_session(session)
    assert running.flush_when_idle()


def test_a_reply_ends_where_the_pool_does(running: OracleEngine, target: Path) -> None:
    """It ends by length, a verify pass or two before plain decoding would; it is not aborted."""
    running.prepare("wrong")
    (prompt,) = random_prompts(33, [400])
    answer = running.engine.generate(
        input_ids=list(prompt),
        sampling_params={"temperature": 0, "max_new_tokens": 500, "ignore_eos": True},
    )
    output, page = answer["output_ids"], running.info["page_size"]
    plain = POOL - len(prompt) - page - 1
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert plain - 2 * running.width <= len(output) <= plain
    assert output == greedy_with_transformers(target, list(prompt), len(output))
