"""Stops inside a block: a step of several tokens ends a request where single tokens would."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_dlite.speculative.stop_strings import check_token_by_token

EOS = 25


class Letters:
    """Token i is the letter i; the last one ends a text."""

    eos_token_id = EOS
    additional_stop_token_ids = None

    def decode(self, ids: Any) -> str:
        return "".join(chr(ord("a") + i) for i in ids)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    spec = SimpleNamespace(speculative_algorithm="DLITE")
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    return spec


def upstream() -> Callable[..., None]:
    return inspect.unwrap(Req.update_finish_state)


def request(grammar: Any = None, **params: Any) -> Req:
    tokenizer = Letters()
    sampling = SamplingParams(**{"max_new_tokens": 40, **params})
    sampling.normalize(tokenizer)
    req = Req("r", "", [1, 2], sampling, eos_token_ids={EOS}, vocab_size=26)
    req.tokenizer, req.grammar = tokenizer, grammar
    return req


def play(req: Req, steps: list[str], check: Callable[..., None]) -> tuple[Any, int | None]:
    """Why and after how many tokens it ended; each step's letters are output at once."""
    for step in steps:
        req.output_ids.extend(Letters().encode(step))
        check(req, len(step))
        if req.finished():
            assert (
                req.output_ids.tolist() == Letters().encode("".join(steps))[: len(req.output_ids)]
            )
            return req.finished_reason.to_json(), req.finished_len
    return None, None


def check(req: Req, num_tokens: int) -> None:
    check_token_by_token(upstream(), req, num_tokens)


@pytest.mark.parametrize(
    "stops,block,length",
    [
        (["d", "b"], "abcde", 2),  # the later string comes first in the request
        (["de", "bc"], "abcde", 3),
        (["c"], "azbcd", 2),  # behind the end of the text
        (["c"], "abcz", 3),
    ],
)
def test_the_first_stop_of_a_block_wins(stops: list[str], block: str, length: int) -> None:
    reason, finished_len = play(request(stop=stops), [block], check)
    assert finished_len == length
    plain = play(request(stop=stops), list(block), upstream())
    assert (reason, finished_len) == plain


def text(rng: random.Random, longest: int) -> str:
    return "".join(rng.choice("abcdez") for _ in range(rng.randrange(1, longest + 1)))


def test_any_stops_in_any_blocks() -> None:
    reasons, rng = set(), random.Random(0)
    for _ in range(400):
        params = {
            "stop": [text(rng, 3).replace("z", "a") for _ in range(3)],
            "stop_regex": rng.choice([None, ["d[ab]", "ee$"]]),
            "stop_token_ids": rng.choice([None, [4]]),
            "ignore_eos": rng.random() < 0.5,
            "max_new_tokens": rng.randrange(3, 12),
        }
        steps = [text(rng, 8) for _ in range(4)]
        plain = play(request(**params), list("".join(steps)), upstream())
        assert play(request(**params), steps, check) == plain, (params, steps)
        reasons.add(str(plain[0] and (plain[0]["type"], type(plain[0].get("matched")))))
    assert len(reasons) >= 3  # strings, tokens and lengths


def test_a_grammar_ends_with_the_step_that_it_has_read() -> None:
    ended = SimpleNamespace(is_terminated=lambda: True)
    reason, finished_len = play(request(ended, stop=["x"]), ["abc"], check)
    assert (reason, finished_len) == ({"type": "stop", "matched": 2}, 3)
    req = request(ended, stop=["b"])
    reason, finished_len = play(req, ["abc"], check)
    assert (reason, finished_len) == ({"type": "stop", "matched": "b"}, 2)
    assert req.grammar is ended


def test_other_algorithms_and_plain_requests_are_left_alone(served: SimpleNamespace) -> None:
    calls: list[int] = []

    def record(req: Any, num_tokens: int) -> None:
        calls.append(num_tokens)

    check_token_by_token(record, request(), 5)
    check_token_by_token(record, request(stop=["a"]), 1)
    served.speculative_algorithm = "NGRAM"
    ended = request(stop=["a"])
    ended.finished_len, ended.reasoning_tokens = 2, 4
    check_token_by_token(record, ended, 4)
    assert calls == [5, 1, 4] and ended.reasoning_tokens == 4


@pytest.mark.parametrize("stop", [{"stop": ["c"]}, {"stop_token_ids": [2]}, {"max_new_tokens": 3}])
def test_tokens_behind_the_end_are_no_reasoning(stop: dict[str, Any]) -> None:
    """Upstream counts a step's tokens before it knows where in the step the reply ends."""
    req = request(**stop)
    req.output_ids.extend([0, 1, 2, 3, 4])
    req.update_reasoning_tokens([0, 1, 2, 3, 4], think_end_ids=[9])
    check_token_by_token(upstream(), req, 5)
    assert req.finished() and req.finished_len == 3
    assert req.reasoning_tokens == 3
