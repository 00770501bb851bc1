"""Options that depend on the output so far: with DLITE they give what plain decoding gives.

The oracle drafts the recorded output as far as its pattern allows, so that every number of
accepted drafts occurs, and with it every place in a block where a penalty changes, a minimal
length is reached or a grammar ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from configurations import MIXED_CHUNKS, OVERLAP, Configuration, by_name, check_retracted
from logprobs import check_logprobs
from option_workloads import OPTIONS, PROCESSOR
from oracle_engine import LaunchOracle, OracleEngine, histograms, output_ids
from references import References
from test_sampling import SIGNIFICANCE, chi_square_p
from workloads import Request

pytestmark = pytest.mark.server


CONFIGURATIONS = (
    # Overlap is the case with a step that the host has not read yet: the harder one is the default.
    Configuration("overlap", env=OVERLAP, slow=False),
    Configuration("plain"),
    Configuration("overlap-mixed", env=OVERLAP, server=MIXED_CHUNKS, exact=False),
    Configuration("overlap-retracted", env={**OVERLAP, "SGLANG_TEST_RETRACT": "1"}, exact=False),
    Configuration("llguidance", env=OVERLAP, server={"grammar_backend": "llguidance"}),
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
        env=configuration.env,
        enable_custom_logit_processor=True,
        **configuration.server,
    ) as engine:
        yield engine


def without_logprobs(requests: Sequence[Request]) -> list[Request]:
    """Upstream mixes no batch that returns log-probabilities."""
    return [replace(request, logprobs=False) for request in requests]


def check_finish(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [answer["text"] for answer in answers] == [answer["text"] for answer in expected]
    for name in ("finish_reason", "completion_tokens"):
        assert [answer["meta_info"][name] for answer in answers] == [
            answer["meta_info"][name] for answer in expected
        ]


@pytest.mark.parametrize("pattern", ["right", "cycle", "wrong"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_output_is_that_of_plain_decoding(
    running: OracleEngine,
    configuration: Configuration,
    references: References,
    name: str,
    pattern: str,
) -> None:
    if name == "grammars" and configuration.name == "llguidance":
        pytest.skip("its masks differ from xgrammar's; see the test of whole grammars")
    # Requests without options among them, some of which end in between.
    others = references.requests["mixed"][:6]
    requests = without_logprobs([*references.requests[name], *others])
    answers = running.play(requests, pattern)
    expected = references.answers[name]
    count = len(expected)
    assert output_ids(answers[:count]) == output_ids(expected)
    assert output_ids(answers[count:]) == references.expected("mixed")[:6]
    check_finish(answers[:count], expected)
    check_retracted(configuration, answers)
    if pattern != "wrong" and configuration.exact:
        accepted = [sum(row[1:]) for row in histograms(answers[:count])]
        assert sum(map(bool, accepted)) > count / 2  # else only first rows were tested


def test_the_references_themselves(references: References) -> None:
    """Each option changed the output, each minimum was reached, each grammar came to its end."""
    for name, answers in references.answers.items():
        if name in OPTIONS:
            assert len({tuple(answer["output_ids"]) for answer in answers}) == len(answers)
    for options, answer in zip(
        OPTIONS["min_new_tokens"], references.answers["min_new_tokens"], strict=True
    ):
        assert answer["meta_info"]["completion_tokens"] > options["min_new_tokens"] - 1
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    for answer in references.answers["grammars"]:
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    # Without speculation the end is seen a token late, which the text does not show.
    late, ended = references.answers["unended_grammars"], references.answers["grammars"]
    assert [answer["text"] for answer in late] == [answer["text"] for answer in ended]
    assert [ids[:-1] for ids in output_ids(late)] == output_ids(ended)


@pytest.mark.parametrize("pattern", ["right", "cycle"])
def test_logprobs_are_taken_after_the_options(
    running: OracleEngine, configuration: Configuration, references: References, pattern: str
) -> None:
    if configuration.name == "llguidance":
        pytest.skip("its masks differ from xgrammar's")
    for name in OPTIONS:
        answers = running.play(references.requests[name], pattern)
        for played in zip(
            references.requests[name], answers, references.answers[name], strict=True
        ):
            # With a request that is retracted before its prefill's result is read, SGLang takes
            # the input's log-probabilities of those behind it in the batch from the wrong rows.
            retracted = configuration.name == "overlap-retracted"
            check_logprobs(*played, kinds=("output",) if retracted else ("input", "output"))


@pytest.mark.parametrize("pattern", ["right", "cycle", "wrong"])
def test_a_grammars_end_is_the_last_token_where_end_of_text_is_ignored(
    running: OracleEngine, configuration: Configuration, references: References, pattern: str
) -> None:
    if configuration.name == "llguidance":
        pytest.skip("its masks differ from xgrammar's")
    expected = references.answers["grammars"]
    answers = running.play(references.requests["unended_grammars"], pattern)
    if configuration.exact:
        assert output_ids(answers) == output_ids(expected)
        check_finish(answers, expected)
    else:
        # Prefills see the end late, as does SGLang without speculation: here any step may be one.
        assert all(
            answer["output_ids"][: len(ids)] == ids and len(answer["output_ids"]) <= len(ids) + 1
            for answer, ids in zip(answers, output_ids(expected), strict=True)
        )
        assert [answer["text"] for answer in answers] == [answer["text"] for answer in expected]


def test_whole_grammars(
    running: OracleEngine, configuration: Configuration, references: References
) -> None:
    """Whatever is drafted, the output is a sentence of the grammar; by either backend."""
    import json
    import re

    requests = without_logprobs(references.requests["grammars"])
    # llguidance compiles neither this ebnf nor xgrammar's kind of structural tag.
    left_out = {"ebnf", "structural_tag"} if configuration.name == "llguidance" else {"ebnf"}
    kept = [request for request in requests if not left_out & request.params.keys()]
    for pattern in ("right", "cycle"):
        for request, answer in zip(kept, running.play(kept, pattern), strict=True):
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            text = answer["text"]
            if "json_schema" in request.params:
                assert set(json.loads(text)) == {"name", "kind", "size"}
            elif "regex" in request.params:
                assert re.fullmatch(request.params["regex"], text)
            else:
                assert re.fullmatch("<f>[0-9]{2,5}</f>", text)


def penalised_law(
    references: References, request: Request, length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation under temperature, top_k and the frequency penalty."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        references.target, dtype=torch.float32
    )
    params = request.params
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for ids, probability in law.items():
            with torch.no_grad():
                logits = model(torch.tensor([[*request.prompt, *ids]])).logits[0, -1]
            for token in ids:
                logits[token] -= params["frequency_penalty"]
            top = (logits / params["temperature"]).topk(params["top_k"])
            for token, p in zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True):
                longer[(*ids, token)] = probability * p
        law = longer
    return law


def test_the_law_of_sampled_tokens_with_a_penalty(
    running: OracleEngine, configuration: Configuration, references: References
) -> None:
    """Temperature above 0: the first token is the prefill's, the others come of verify rows.

    Without the penalty the law would be another by a total variation of 0.43.
    """
    samples, length = 800, 4
    params = {"temperature": 2.0, "top_k": 2, "frequency_penalty": -1.2}
    recorded = references.requests["penalties"][2]
    assert recorded.params["frequency_penalty"] == params["frequency_penalty"]
    request = Request(recorded.prompt, recorded.sequence, length, params)
    answers = running.play([request] * samples, "right")
    observed = Counter(tuple(answer["output_ids"]) for answer in answers)
    law = penalised_law(references, request, length)
    assert set(observed) <= set(law)
    if configuration.exact:  # a request whose tokens all come of mixed batches verifies nothing
        kept = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
        assert kept > samples / 20
    assert chi_square_p(observed, law) > SIGNIFICANCE


def test_several_samples_of_one_prompt(running: OracleEngine, references: References) -> None:
    """n > 1: each sample has penalties of its own output."""
    request = references.requests["penalties"][5]
    params = {**request.sampling_params, "n": 3}
    answers = running.engine.generate(input_ids=list(request.prompt), sampling_params=params)
    assert output_ids(answers) == references.expected("penalties")[5:6] * 3


def test_a_broken_processor_is_refused_and_the_server_goes_on(
    running: OracleEngine, references: References
) -> None:
    request = references.requests["processors"][0]
    for bad in ("x", '{"callable": "00"}'):
        with pytest.raises(Exception, match="custom_logit_processor"):
            running.engine.generate(
                input_ids=list(request.prompt),
                sampling_params=request.sampling_params,
                custom_logit_processor=bad,
            )
    assert request.processor == PROCESSOR
    assert (
        output_ids(running.play([replace(request, logprobs=False)], "right"))
        == (references.expected("processors")[:1])
    )
