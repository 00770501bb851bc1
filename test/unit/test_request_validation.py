"""Request options that DLITE does not serve: each refusal names option, value and remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session, SessionReqNode
from sglang_dlite.speculative.request_validation import (
    check_logprob_start,
    check_request,
    check_threshold,
    number_error,
    processor_error,
    request_error,
    token_error,
)


def request(params: dict[str, Any] | None = None, **fields: Any) -> SimpleNamespace:
    """What `request_error` reads of upstream's Req."""
    capture = bool(fields.pop("return_hidden_states", False))
    plain = {
        "custom_logit_processor": None,
        "origin_input_ids": [1, 2],
        "token_indices_to_pool": None,
        "logprob": SimpleNamespace(top_logprobs_num=0),
        "session": None,
    }
    return SimpleNamespace(
        sampling_params=SamplingParams(**(params or {})),
        return_hidden_states_mode=SimpleNamespace(need_capture=lambda: capture),
        **(plain | fields),
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
        {"max_new_tokens": 1, "stop": ["x"], "stop_token_ids": [1], "ignore_eos": True},
        {"logit_bias": {"1": 2.0}},
        {"n": 2},
        {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1},
        {"min_new_tokens": 3, "max_new_tokens": 9},
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"ebnf": "root ::= 'a'"},
        {"structural_tag": "{}"},
    ],
)
def test_served_options(params: dict[str, Any]) -> None:
    assert check_request(lambda scheduler, req: None, scheduler("DLITE"), request(params)) is None


def test_hidden_states_are_refused() -> None:
    error = request_error(request(return_hidden_states=True))
    assert error is not None
    assert "return_hidden_states = True" in error
    assert "allowed is" in error and "without speculation" in error


def test_scores_at_chosen_positions_are_refused() -> None:
    """Upstream turns its prefill-only path off under speculation, and would score all positions."""
    error = request_error(request(token_indices_to_pool=[3]))
    assert error is not None and "token_indices_to_pool = [3]" in error and "Leave it out" in error


def not_a_processor() -> str:
    import json

    import dill

    return json.dumps({"callable": dill.dumps(dict).hex()})


@pytest.mark.parametrize(
    "serialized", ["x", "[]", '{"callable": "00"}', '{"callable": "zz"}', not_a_processor()]
)
def test_a_processor_that_cannot_be_read(serialized: str) -> None:
    """Upstream would read it while it forms a batch, and end the scheduler."""
    error = request_error(request(custom_logit_processor=serialized))
    assert error is not None and "custom_logit_processor" in error
    assert "allowed is" in error and "to_str()" in error


def test_a_processor_that_can_be_read() -> None:
    assert processor_error(DisallowedTokensLogitsProcessor.to_str()) is None
    assert processor_error(None) is None


@pytest.mark.parametrize("bad", [-1, 50, 10**6])
def test_stop_tokens_that_no_output_holds_are_left_out(bad: int) -> None:
    """min_new_tokens, this request's or another's, could not mask them; they stop nothing."""
    asked = request({"stop_token_ids": [3, bad, 49], "max_new_tokens": 9})
    assert check_request(lambda scheduler, req: None, scheduler("DLITE"), asked) is None
    assert asked.sampling_params.stop_token_ids == {3, 49}
    alone = request({"stop_token_ids": [bad]})
    assert check_request(lambda scheduler, req: None, scheduler("DLITE"), alone) is None
    assert alone.sampling_params.stop_token_ids is None


@pytest.mark.parametrize(
    "params,top_logprobs_num,words",
    [
        ({"top_k": 2**31}, 0, "top_k = 2147483648"),
        ({"min_new_tokens": 2**31, "max_new_tokens": None}, 0, "min_new_tokens = 2147483648"),
        ({}, 51, "top_logprobs_num = 51; allowed are numbers up to 50"),
        ({"logit_bias": {"3": 1.0, "7": 1e39}}, 0, "logit_bias of token 7 is 1e+39"),
        ({"logit_bias": {"3": float("nan")}}, 0, "logit_bias of token 3 is nan"),
    ],
)
def test_numbers_that_would_end_the_scheduler(
    params: dict[str, Any], top_logprobs_num: int, words: str
) -> None:
    error = number_error(SamplingParams(**params), top_logprobs_num, 50)
    assert error is not None and words in error and "allowed" in error


@pytest.mark.parametrize("name", ["top_k", "min_new_tokens", "max_new_tokens"])
def test_lengths_that_are_no_whole_numbers(name: str) -> None:
    """Upstream slices the output by them: a float ends the scheduler at the request's end."""
    error = number_error(SamplingParams(**{name: 16.0}), 0, 50)
    assert error is not None and f"{name} = 16.0" in error and "whole numbers" in error


def test_options_of_another_type() -> None:
    """Nothing between the client and the scheduler checks these."""
    error = number_error(SamplingParams(), [0], 50)
    assert error is not None and "top_logprobs_num = [0]" in error
    error = number_error(SamplingParams(logit_bias={"1": "much"}), 0, 50)
    assert error is not None and "logit_bias of token 1 is 'much'" in error


@pytest.mark.parametrize("params", [{"temperature": 1e39}, {"repetition_penalty": 1e-40}])
def test_numbers_beyond_fp32(params: dict[str, float]) -> None:
    """Infinite or 0 there: an option that masks tokens then makes NaN of their logits."""
    ((name, value),) = params.items()
    error = number_error(SamplingParams(**params), 0, 50)
    assert error is not None and f"{name} = {value!r}" in error and "fp32" in error


def test_numbers_at_their_limits() -> None:
    params = {"top_k": 2**31 - 1, "min_new_tokens": 2**31 - 1, "max_new_tokens": None}
    bias = {"1": 1e30, "2": float("-inf"), "3": -1e39}
    assert number_error(SamplingParams(**params, logit_bias=bias), 50, 50) is None
    assert number_error(SamplingParams(top_k=-1), -1, 50) is None
    extreme = SamplingParams(temperature=1e30, repetition_penalty=1e-30, top_k=np.int64(4))
    assert number_error(extreme, 0, 50) is None


@pytest.mark.parametrize("ids,bad", [([0, 50], 50), ([-1, 3], -1), ([10**6], 10**6)])
def test_token_ids_outside_the_vocabulary(ids: list[int], bad: int) -> None:
    """Such an id would end the scheduler, and every other request with it."""
    error = token_error(ids, 50)
    assert error is not None and f"input_ids holds {bad}" in error and "0..49" in error


def test_token_ids_inside_the_vocabulary() -> None:
    assert token_error([0, 49], 50) is None
    assert token_error([], 50) is None


def scheduler(algorithm: str) -> SimpleNamespace:
    return SimpleNamespace(
        spec_algorithm=SimpleNamespace(name=algorithm), model_config=SimpleNamespace(vocab_size=50)
    )


def test_upstreams_answer_comes_first_and_other_algorithms_are_left_alone() -> None:
    refused = request(return_hidden_states=True)
    assert check_request(lambda scheduler, req: "no", scheduler("DLITE"), refused) == "no"
    assert check_request(lambda scheduler, req: None, scheduler("EAGLE"), refused) is None
    for bad, word in ((refused, "return_hidden_states"), (request(origin_input_ids=[60]), "60")):
        error = check_request(lambda scheduler, req: None, scheduler("DLITE"), bad)
        assert error is not None and word in error
    assert check_request(lambda scheduler, req: None, scheduler("DLITE"), request()) is None


def test_where_log_probabilities_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(speculative_algorithm="DLITE")
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    seen: list[int] = []

    def check(start: int, wanted: bool = True) -> None:
        obj = SimpleNamespace(return_logprob=wanted, logprob_start_len=start)
        check_logprob_start(lambda _, obj: seen.append(obj.logprob_start_len), None, obj)

    for start in (-1, 0, 7):
        check(start)
    check(-5, wanted=False)
    with pytest.raises(ValueError, match=r"logprob_start_len = -5; allowed.*Leave it out"):
        check(-5)
    spec.speculative_algorithm = None
    check(-5)
    assert seen == [-1, 0, 7, -5, -5, -5]


def session_with(*rids: str, streaming: bool) -> Session:
    """A session in which each request follows the one before; the last one is running."""
    session = Session(100, "s", streaming)
    node = None
    for rid in rids:
        node = SessionReqNode(SimpleNamespace(rid=rid), node)
        session.req_nodes[rid] = node
    session._inflight = streaming
    return session


@pytest.mark.parametrize("streaming", [False, True])
def test_a_refused_request_leaves_its_session(streaming: bool) -> None:
    """Else a streaming session waits for its end for ever."""
    session = session_with("a", "b", streaming=streaming)
    bad = request(origin_input_ids=[60], session=session, rid="b")
    assert check_request(lambda scheduler, req: None, scheduler("DLITE"), bad)
    assert not session._inflight
    if not streaming:  # upstream's streaming sessions enter a turn when it is over
        assert list(session.req_nodes) == ["a"] and not session.req_nodes["a"].children


def test_a_served_request_stays_in_its_session() -> None:
    session = session_with("a", streaming=True)
    good = request(session=session, rid="a")
    assert check_request(lambda scheduler, req: None, scheduler("DLITE"), good) is None
    assert session._inflight


@pytest.mark.parametrize("value,refused", [(0.5, True), (0, True), (1.0, False), (1, False)])
def test_a_threshold_of_acceptance_cannot_be_set(value: float, refused: bool) -> None:
    seen: list[float] = []

    def change(algorithm: str) -> None:
        controller = SimpleNamespace(scheduler=scheduler(algorithm))
        check_threshold(lambda c, key, value: seen.append(value), controller, "acc", value)

    change("EAGLE")
    if refused:
        with pytest.raises(UpdateRejected, match=r"acc = .* is not supported.*allowed is 1\.0"):
            change("DLITE")
    else:
        change("DLITE")
    assert seen == [value] * (1 if refused else 2)
