"""The soak's judgement: what is wrong is found, what may differ is let pass."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from option_workloads import SCHEMA
from soak_cases import KINDS, Case, make_requests
from soak_checks import greedy_error, sampled_error
from soak_report import NEEDED, Leg, Summary
from tiny_models import EOS_ID, MAX_POSITIONS, VOCAB_SIZE
from workloads import Request


def answer_of(
    ids: list[int], finish: dict[str, Any], text: str = "", prompt_tokens: int = 2
) -> dict[str, Any]:
    logprobs = [[-0.5 - 0.01 * i, token, None] for i, token in enumerate(ids)]
    return {
        "output_ids": ids,
        "text": text,
        "meta_info": {
            "finish_reason": finish,
            "output_token_logprobs": logprobs,
            "prompt_tokens": prompt_tokens,
        },
    }


LENGTH = {"type": "length", "length": 6}
STOP = {"type": "stop", "matched": 9}
ABORT = {"type": "abort", "message": "Abort"}
IDS = [5, 4, 3, 2, 1, 9]


def greedy_case(finish: dict[str, Any], count: int = 6) -> Case:
    request = Request((1, 2), 0, count, logprobs=True)
    return Case("logprobs", request, answer_of(IDS, finish, "abcdef"), emptied=(8,))


def test_the_targets_own_reply_passes() -> None:
    for finish in (LENGTH, STOP):
        case = greedy_case(finish)
        assert greedy_error(case, copy.deepcopy(case.answer), 6) is None
    shortened = answer_of(IDS[:4], {"type": "length", "length": 4}, "abcd")
    assert greedy_error(greedy_case(STOP), shortened, 4) is None
    assert greedy_error(greedy_case(LENGTH), answer_of(IDS[:2], ABORT), 6, aborted=True) is None
    assert greedy_error(greedy_case(LENGTH), answer_of([], ABORT), 6, aborted=True) is None
    # SGLang trims no block that is aborted.
    assert greedy_error(greedy_case(STOP), answer_of([*IDS, 7], ABORT), 6, aborted=True) is None
    assert greedy_error(greedy_case(STOP), answer_of(IDS, ABORT), 3, aborted=True) is None
    # SGLang took its prompt.
    emptied = answer_of([8], ABORT, prompt_tokens=1)
    assert greedy_error(greedy_case(STOP), emptied, 6, aborted=True) is None


@pytest.mark.parametrize(
    ("answer", "limit", "aborted", "named"),
    [
        (answer_of([5, 4, 3, 2, 0, 9], STOP, "abcdef"), 6, False, "output_ids"),
        (answer_of(IDS[:5], STOP, "abcdef"), 6, False, "output_ids"),
        (answer_of([*IDS, 7], STOP, "abcdef"), 6, False, "output_ids"),
        (answer_of(IDS, LENGTH, "abcdef"), 6, False, "finish_reason"),
        (answer_of(IDS, STOP, "abcdeg"), 6, False, "text"),
        (answer_of(IDS[:4], STOP, "abcd"), 4, False, "finish_reason"),
        (answer_of(IDS[:4], ABORT), 6, False, "nobody aborted"),
        (answer_of(IDS, ABORT), 6, False, "nobody aborted"),
        (answer_of([5, 4, 0], ABORT), 6, True, "output_ids"),
        (answer_of([8], ABORT), 6, True, "output_ids"),
        (answer_of([5], ABORT, prompt_tokens=1), 6, True, "output_ids"),
        (answer_of([8], ABORT, prompt_tokens=1), 6, False, "nobody aborted"),
        (answer_of(IDS[:4], STOP, "abcd"), 6, True, "output_ids"),
        (answer_of([*IDS, *range(8)], ABORT), 6, True, "output_ids"),
    ],
)
def test_a_wrong_greedy_reply_is_found(
    answer: dict[str, Any], limit: int, aborted: bool, named: str
) -> None:
    error = greedy_error(greedy_case(STOP), answer, limit, aborted)
    assert error is not None and named in error


def test_wrong_log_probabilities_are_found() -> None:
    case = greedy_case(STOP)
    for change in ("value", "token", "missing"):
        answer = copy.deepcopy(case.answer)
        entries = answer["meta_info"]["output_token_logprobs"]
        if change == "value":
            entries[3][0] += 2e-4
        elif change == "token":
            entries[3][1] += 1
        else:
            entries.pop()
        assert "log-probabilit" in (greedy_error(case, answer, 6) or "")


def sampled(
    params: dict[str, Any], ids: list[int], finish: dict[str, Any], text: str = "", limit: int = 6
) -> str | None:
    case = Case("any", Request((1, 2), 0, 6, params), {})
    return sampled_error(case, answer_of(ids, finish, text), limit)


STOPS = {"stop_token_ids": [9], "min_new_tokens": 3}


def test_sampled_replies_that_keep_to_their_options_pass() -> None:
    assert sampled({}, [1, 2, 3, 4, 5, 6], LENGTH) is None
    assert sampled(STOPS, [1, 2, 3, 9], STOP) is None
    assert sampled(STOPS, [1, 2], LENGTH, limit=2) is None
    assert sampled({"stop": [">", "7"]}, [1, 379], STOP, "a<x379") is None
    assert sampled({"regex": "[ab]{2}"}, [1, 2], STOP, "ab") is None
    text = '{"name": "abc", "kind": "one", "size": 12}'
    assert sampled({"json_schema": SCHEMA}, [1, 2], STOP, text) is None


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (sampled({}, [1, VOCAB_SIZE], LENGTH, limit=2), "vocabulary"),
        (sampled({}, [1, 2], LENGTH), "length"),
        (sampled({}, [1, 2], ABORT), "abort"),
        (sampled({}, [1, 2, 3], STOP, limit=2), "max_new_tokens"),
        (sampled(STOPS, [1, 2], STOP), "min_new_tokens"),
        (sampled(STOPS, [1, 2, 9, 4], STOP), "within min_new_tokens"),
        (sampled(STOPS, [1, 2, 3, 9, 4], STOP), "behind a stop token"),
        (sampled({"ignore_eos": False}, [1, EOS_ID, 4], STOP), "behind a stop token"),
        (sampled({"stop": ["x"]}, [1, 2], STOP, "axb"), "stop string"),
        (sampled({"stop": ["7"]}, [1, 379], STOP, "7<x3"), "stop string"),
        (sampled({"stop": [">", "7"]}, [1, 9], STOP, "<x379"), "stop string"),
        (sampled({"regex": "[ab]{2}"}, [1, 2], STOP, "abc"), "none of"),
        (sampled({"json_schema": SCHEMA}, [1, 2], STOP, '{"name": '), "not JSON"),
        (sampled({"json_schema": SCHEMA}, [1, 2], STOP, "{}"), "schema"),
    ],
)
def test_a_sampled_reply_against_its_options_is_found(error: str | None, named: str) -> None:
    assert error is not None and named in error


def test_requests_repeat_for_a_seed_and_cover_all_kinds() -> None:
    made = make_requests(3)
    assert made == make_requests(3) != make_requests(4)
    prompts = [request.prompt for _, request in made]
    assert len(set(prompts)) == len(prompts)
    assert min(Counter(kind for kind, _ in made).values()) >= 5
    assert {kind for kind, _ in made} == set(KINDS)
    assert all(len(r.prompt) + r.max_new_tokens < MAX_POSITIONS for _, r in made)


def leg(**changes: Any) -> Leg:
    fields = {"canary": {"start": 2.5, "end": 2.5}, "healthy": True}
    made = Leg("x", **{**fields, **changes})
    made.counts.update(dict.fromkeys((*NEEDED, "retractions"), 3))
    return made


def test_the_verdict(tmp_path: Path) -> None:
    assert Summary(1, 0, [leg(), leg()]).passed
    assert not Summary(1, 0).passed
    assert not leg(healthy=False).passed
    assert not leg(canary={"start": 2.5, "end": 1.0}).passed
    assert not leg(canary={"start": 2.5}).passed
    for name in NEEDED:
        idle = leg()
        idle.counts[name] = 0
        assert idle.not_met == [name] and not idle.passed
    roomy = leg()
    roomy.counts["retractions"] = 0
    assert Summary(1, 0, [leg(), roomy]).passed and not Summary(1, 0, [roomy, roomy]).passed
    leaking = leg()
    leaking.read_log("a\nValueError: token_to_kv_pool memory leak detected! 3\nb\n")
    assert len(leaking.leaks) == 1 and not leaking.passed
    wrong = leg()
    for i in range(50):
        wrong.problem("mismatch", f"reply {i}")
    assert not wrong.passed
    summary = Summary(1, 0, [leg(), wrong, leaking])
    summary.write(tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["passed"] is False
    assert (written["mismatches"], written["leaks"]) == (50, 1)
    assert "FAILED" in summary.text() and "reply 3" in summary.text()
