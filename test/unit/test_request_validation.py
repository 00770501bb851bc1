"""Request options that DLITE does not serve: each refusal names option, value and remedy."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session
from sglang_dlite.speculative.request_validation import (
    check_request,
    check_threshold,
    number_error,
    processor_error,
    token_error,
)
from sglang_dlite.speculative.sessions import continue_what_was_returned

VOCABULARY = 50


def ask(
    params: dict[str, Any] | None = None,
    session: dict[str, Any] | None = None,
    input_ids: list[int] | None = None,
    **fields: Any,
) -> SimpleNamespace:
    """What leaves the tokenizer's process for such a request, or ValueError: upstream's own types
    behind `check_request`."""
    params = params or {}

    def create(manager: Any, obj: Any) -> SimpleNamespace:
        made = SamplingParams(**obj.sampling_params)
        made.normalize(SimpleNamespace(encode=lambda text, **_: [1]))
        made.verify(VOCABULARY)
        plain = {
            "custom_logit_processor": None,
            "token_indices_to_pool": None,
            "input_embeds": None,
            "positional_embed_overrides": None,
            "top_logprobs_num": 0,
            "return_logprob": False,
            "logprob_start_len": -1,
        }
        return SimpleNamespace(
            sampling_params=made,
            session_params=SessionParams(**session) if session else None,
            input_ids=array("q", input_ids or [1, 2]),
            **(plain | fields),
        )

    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    return check_request(create, manager, SimpleNamespace(sampling_params=params))


@pytest.fixture(autouse=True)
def spec(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A DLITE server's, in the tokenizer's process."""
    section = SimpleNamespace(speculative_algorithm="DLITE")
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: section)
    return section


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
    assert ask(params).sampling_params == ask(params).sampling_params
    assert ask(params, {"id": "s", "rid": None, "offset": 3, "replace": True}) is not None


def test_scores_at_chosen_positions_are_refused() -> None:
    """Upstream turns its prefill-only path off under speculation, and would score all positions."""
    with pytest.raises(ValueError, match=r"token_indices_to_pool = \[3\].*Leave it out"):
        ask(token_indices_to_pool=[3])


@pytest.mark.parametrize("name", ["input_embeds", "positional_embed_overrides"])
def test_embeddings_in_place_of_tokens_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} is not supported.*Send text or input_ids"):
        ask(**{name: [[0.5, 0.5]]})


@pytest.mark.parametrize(
    "params",
    [
        {"json_schema": {"type": "object"}},
        {"regex": ["a"]},
        {"stream_interval": "2"},
        {"skip_special_tokens": []},
        {"ignore_eos": "no"},
        {"max_new_tokens": 16.0},
        {"min_new_tokens": 1.5},
        {"top_k": 4.0},
        {"n": 2.0},
    ],
)
def test_options_of_another_type(params: dict[str, Any]) -> None:
    """Upstream compares, hashes or slices by them, in the scheduler or the detokenizer."""
    ((name, value),) = params.items()
    with pytest.raises(ValueError) as error:
        ask(params)
    assert f"{name} = {value!r}: Expected `" in str(error.value) and "leave it out" in str(error)


def test_a_mark_that_skips_upstreams_checks() -> None:
    with pytest.raises(ValueError, match=r"is_normalized.*allowed is false"):
        ask({"is_normalized": True, "stop_token_ids": ["a"]})


@pytest.mark.parametrize("wrong", [{"id": ["s"]}, {"rid": ["x"]}, {"offset": "1"}, {"replace": 3}])
def test_session_parameters_of_another_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} = .*Expected `"):
        ask(session={"id": "s", **wrong})


def not_a_processor() -> str:
    import json

    import dill

    return json.dumps({"callable": dill.dumps(dict).hex()})


@pytest.mark.parametrize(
    "serialized", ["x", "[]", '{"callable": "00"}', '{"callable": "zz"}', not_a_processor()]
)
def test_a_processor_that_cannot_be_read(serialized: str) -> None:
    """Upstream would read it while it forms a batch, and end the scheduler."""
    with pytest.raises(ValueError, match=r"custom_logit_processor.*allowed is .*to_str\(\)"):
        ask(custom_logit_processor=serialized)


def test_a_processor_that_can_be_read() -> None:
    assert processor_error(DisallowedTokensLogitsProcessor.to_str()) is None
    assert processor_error(None) is None


@pytest.mark.parametrize("bad", [-1, 50, 10**6])
def test_stop_tokens_that_no_output_holds_are_left_out(bad: int) -> None:
    """min_new_tokens, this request's or another's, could not mask them; they stop nothing."""
    asked = ask({"stop_token_ids": [3, bad, 49], "max_new_tokens": 9})
    assert asked.sampling_params.stop_token_ids == {3, 49}
    assert ask({"stop_token_ids": [bad]}).sampling_params.stop_token_ids is None


@pytest.mark.parametrize(
    "params,top_logprobs_num,words",
    [
        ({"top_k": 2**31}, 0, "top_k = 2147483648"),
        ({"min_new_tokens": 2**31, "max_new_tokens": None}, 0, "min_new_tokens = 2147483648"),
        ({}, 51, "top_logprobs_num = 51; allowed are numbers up to 50"),
        ({"logit_bias": {"3": 1.0, "7": 1e39}}, 0, "logit_bias of token 7 is 1e+39"),
        ({"logit_bias": {"3": float("nan")}}, 0, "logit_bias of token 3 is nan"),
        ({"logit_bias": {"3": -(10**400)}}, 0, "logit_bias of token 3 is -1000"),
    ],
)
def test_numbers_that_would_end_the_scheduler(
    params: dict[str, Any], top_logprobs_num: int, words: str
) -> None:
    error = number_error(SamplingParams(**params), top_logprobs_num, 50)
    assert error is not None and words in error and "allowed" in error


def test_numbers_of_another_type() -> None:
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


def test_upstreams_answer_comes_first_and_other_algorithms_are_left_alone(
    spec: SimpleNamespace,
) -> None:
    with pytest.raises(ValueError, match="top_p"):
        ask({"top_p": 2.0, "top_k": 2**31})
    for bad in ({"input_ids": [60]}, {"params": {"top_k": 2**31}}):
        with pytest.raises(ValueError, match=r"60|2147483648"):
            ask(**bad)
    spec.speculative_algorithm = None
    assert list(ask(input_ids=[60]).input_ids) == [60]


def test_where_log_probabilities_begin(spec: SimpleNamespace) -> None:
    for start in (-1, 0, 7):
        ask(return_logprob=True, logprob_start_len=start)
    ask(return_logprob=False, logprob_start_len=-5)
    for start in (-5, "1"):
        with pytest.raises(ValueError, match=r"logprob_start_len = .*; allowed.*Leave it out"):
            ask(return_logprob=True, logprob_start_len=start)


def create_turn(session: Session, own: str, refused: bool = False, **params: Any) -> Any:
    """Upstream's create_req behind our hook: the turn `own`, or one that it refuses itself."""
    made = []

    def factory(**fields: Any) -> SimpleNamespace:
        made.append(
            SimpleNamespace(
                rid=fields["rid"],
                session=session,
                origin_input_ids=fields["origin_input_ids"],
                origin_input_ids_unpadded=fields["origin_input_ids_unpadded"],
                output_ids=[],
                sampling_params=SamplingParams(max_new_tokens=4),
                finished_reason="stop",
                finished_len=None,
                to_finish=None,
                multimodal_inputs=None,
                finished=lambda: True,
                inherit_mm_token_counts=lambda last: None,
                set_finish_with_abort=lambda message: setattr(made[0], "to_finish", message),
            )
        )
        return made[0]

    names = TokenizedGenerateReqInput.__struct_fields__
    given = {"rid": own, "input_ids": [1, 2], "session_params": SessionParams(id="s", **params)}
    asked = SimpleNamespace(**(dict.fromkeys(names) | given))
    turn = continue_what_was_returned(
        Session.create_req, session, asked, None, VOCABULARY, req_factory=factory
    )
    assert (turn.to_finish is not None) == refused
    return turn


@pytest.mark.parametrize("rids", [("a", "b", "c"), ("x", "a", "a"), ("a", "a")])
@pytest.mark.parametrize("replaced", [None, 0])
def test_a_replaced_session_whatever_its_ids(rids: tuple[str, ...], replaced: int | None) -> None:
    """An id may be used again once its turn is over; upstream deletes such turns twice."""
    session, before = Session(100, "s"), None
    for rid in rids:
        create_turn(session, rid, rid=before)
        before = rid
    of = None if replaced is None else rids[replaced]
    create_turn(session, "new", replace=True, rid=of)
    assert "new" in session.req_nodes
    if of is None:
        assert list(session.req_nodes) == ["new"]
    create_turn(session, "next", rid="new")


def test_a_turn_that_a_streaming_session_refuses_does_not_end_the_running_one() -> None:
    """Its end would be taken for the other's, and a third turn be lent K/V that is written to."""
    session = Session(100, "s", streaming=True)
    running = create_turn(session, "a")
    refused = create_turn(session, "b", refused=True)
    assert running.session is session and refused.session is None and session._inflight


@pytest.mark.parametrize(
    "value,refused",
    [(0.5, True), (0, True), (None, True), ("abc", True), (1.0, False), (1, False)],
)
def test_a_threshold_of_acceptance_cannot_be_set(value: float, refused: bool) -> None:
    seen: list[float] = []

    def change(algorithm: str) -> None:
        scheduler = SimpleNamespace(spec_algorithm=SimpleNamespace(name=algorithm))
        controller = SimpleNamespace(scheduler=scheduler)
        check_threshold(lambda c, key, value: seen.append(value), controller, "acc", value)

    change("EAGLE")
    if refused:
        with pytest.raises(UpdateRejected, match=r"acc = .* is not supported.*allowed is 1\.0"):
            change("DLITE")
    else:
        change("DLITE")
    assert seen == [value] * (1 if refused else 2)
