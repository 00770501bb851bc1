"""Both sampling rules through an engine: the law of the output is the target's.

Rejection sampling, and `match`, which is sample and match (the default).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from chi_square import p_value
from configurations import OVERLAP, REJECTION, Configuration, by_name
from engines import engine, play
from workloads import CHUNK, Request

pytestmark = pytest.mark.server

VOCAB = 16
PROMPT = (3, 9, 1, 12, 7)
LENGTH = 3  # token 1 is the prefill's; 2 and 3 are drafts, their replacements or a bonus
SAMPLES = 1500
# Chance of a sound server to fail one test; the seed is fixed, so that a pass is a pass.
SIGNIFICANCE = 1e-4

Filter = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_target(
        tmp_path_factory.mktemp("small"), vocab_size=VOCAB, eos_token_id=VOCAB - 1
    )


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


# Small chunks that cut prompts, and a request less after every verify pass. No mixed chunks: with
# requests as short as these hardly a row would be left to verify.
RETRACTED = {
    "chunked_prefill_size": CHUNK,
    "disable_radix_cache": True,  # else no prompt but the first is longer than a token
    "max_running_requests": 16,
}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "1"}
CONFIGURATIONS = (
    # Overlap: the head vectors go through upstream's relay. K * R is odd, which needs padding.
    Configuration("overlap", env=OVERLAP, server=REJECTION, slow=False),
    Configuration("match", env=OVERLAP, slow=False),
    Configuration("no-overlap-d3", server={**REJECTION, "speculative_num_draft_tokens": 3}),
    # Each rank has its own random numbers; a wait for ever is a failure.
    Configuration("two-ranks", env=OVERLAP, server={**REJECTION, "tp_size": 2}),
    Configuration("retracted", env={**OVERLAP, **RETRACTING}, server={**REJECTION, **RETRACTED}),
)


@pytest.fixture(scope="module", params=by_name(CONFIGURATIONS))
def configuration(request: pytest.FixtureRequest) -> Configuration:
    return request.param


@pytest.fixture(scope="module")
def running(
    target: Path, tmp_path_factory: pytest.TempPathFactory, configuration: Configuration
) -> Iterator[Any]:
    drafter = tiny_models.make_drafter(
        tmp_path_factory.mktemp("drafter"),
        vocab_size=VOCAB,
        block_size=4,
        anchor_group_size=3,
        dlite_config={"mask_token_id": VOCAB - 2, "sequential_rank": 15},
    )
    options = {"max_running_requests": 64, **configuration.server}
    with engine(
        target,
        drafter,
        env={"DLITE_DRAFTER_FACTORY": None, **configuration.env},
        skip_tokenizer_init=True,
        random_seed=5,
        watchdog_timeout=120,
        **options,
    ) as engine_:
        yield engine_


def keep_all(law: torch.Tensor) -> torch.Tensor:
    return law


def keep_top_k(law: torch.Tensor) -> torch.Tensor:
    return law * (law >= law.topk(4).values[-1])


def keep_top_p(law: torch.Tensor) -> torch.Tensor:
    """The fewest likeliest tokens whose sum reaches 0.7."""
    ordered, ids = law.sort(descending=True)
    count = int((ordered.cumsum(0) < 0.7).sum()) + 1
    return torch.zeros_like(law).scatter(0, ids[:count], ordered[:count])


def keep_min_p(law: torch.Tensor) -> torch.Tensor:
    return law * (law >= 0.2 * law.max())


CASES: dict[str, tuple[float, dict[str, Any], Filter]] = {
    "temperature": (6.0, {}, keep_all),
    "top-k": (8.0, {"top_k": 4}, keep_top_k),
    "top-p": (4.0, {"top_p": 0.7}, keep_top_p),
    "min-p": (5.0, {"min_p": 0.2}, keep_min_p),
}


def token_laws(model: Any, temperature: float, keep: Filter) -> torch.Tensor:
    """The law [V, V, V] of the first three tokens, from HF's logits and the filters above."""
    laws = []
    for length in range(LENGTH):
        rows = torch.tensor([PROMPT + p for p in product(range(VOCAB), repeat=length)])
        with torch.no_grad():
            logits = model(rows).logits[:, -1].double()
        kept = torch.stack([keep(row) for row in torch.softmax(logits / temperature, -1)])
        laws.append((kept / kept.sum(-1, keepdim=True)).view(*[VOCAB] * (length + 1)))
    return laws[0][:, None, None] * laws[1][:, :, None] * laws[2]


def sampled(case: str) -> Request:
    temperature, params, _ = CASES[case]
    return Request(PROMPT, -1, LENGTH, {"temperature": temperature, **params})


@pytest.fixture(scope="module")
def answers(running: Any) -> dict[str, list[dict[str, Any]]]:
    """All cases in the same batches, with longer greedy requests among them."""
    requests = []
    for i in range(SAMPLES):
        requests += map(sampled, CASES)
        if i % 10 == 0:
            requests.append(Request(PROMPT, -1, 24))
    played = play(running, requests)
    by_case: dict[str, list[dict[str, Any]]] = {name: [] for name in [*CASES, "greedy"]}
    names = {str(sampled(case).params): case for case in CASES}
    for request, answer in zip(requests, played, strict=True):
        by_case[names.get(str(request.params), "greedy")].append(answer)
    return by_case


def passes_by_kept_drafts(answers: Sequence[dict[str, Any]]) -> Counter[int]:
    """How many verify passes kept so many drafts; a request may have had none."""
    passes: Counter[int] = Counter()
    for answer in answers:
        histogram = answer["meta_info"].get("spec_correct_drafts_histogram", ())
        passes.update(dict(enumerate(histogram)))
    return passes


@pytest.mark.parametrize("case", CASES)
def test_the_law_of_three_tokens(
    answers: dict[str, list[dict[str, Any]]], model: Any, case: str
) -> None:
    counts = torch.zeros(VOCAB, VOCAB, VOCAB)
    for answer in answers[case]:
        counts[tuple(answer["output_ids"])] += 1
    assert counts.sum() == SAMPLES
    temperature, _, keep = CASES[case]
    law = token_laws(model, temperature, keep)
    assert not counts[law == 0].any()  # nothing that the parameters exclude
    # Each token by itself and each pair of neighbours: all three have too many cells.
    for others in ((1, 2), (0, 2), (0, 1), (2,), (0,)):
        assert p_value(counts.sum(others), law.sum(others)) > SIGNIFICANCE


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_kept_and_rejected(answers: dict[str, list[dict[str, Any]]], case: str) -> None:
    """Else the law above tests one half of the rule."""
    passes = passes_by_kept_drafts(answers[case])
    assert passes[0] > SAMPLES / 20
    assert passes.total() - passes[0] > SAMPLES / 20


def test_what_the_configuration_is_for(
    answers: dict[str, list[dict[str, Any]]], configuration: Configuration
) -> None:
    """Requests were retracted; or all but the first ones found their prompt in the cache."""
    meta = [answer["meta_info"] for case in CASES for answer in answers[case]]
    if configuration.name == "retracted":
        assert sum(each["num_retractions"] > 0 for each in meta) > len(meta) / 20
    else:
        assert sum(each["cached_tokens"] > 0 for each in meta) > len(meta) * 0.9


def test_greedy_requests_beside_sampling_ones(
    answers: dict[str, list[dict[str, Any]]], model: Any
) -> None:
    ids = list(PROMPT)
    for _ in range(24):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert len(answers["greedy"]) > SAMPLES / 20
    assert {tuple(a["output_ids"]) for a in answers["greedy"]} == {tuple(ids[len(PROMPT) :])}


def test_logprobs_are_those_of_the_tokens_that_come_out(running: Any, model: Any) -> None:
    """One per token, and as upstream defines them: after the temperature."""
    request = Request(PROMPT, -1, 12, {"temperature": 4.0}, logprobs=True)
    for answer in play(running, [request] * 8):
        output = answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *output]])).logits[0].double()
        laws = torch.log_softmax(logits[len(PROMPT) - 1 : -1] / 4.0, dim=-1)
        reported = answer["meta_info"]["output_token_logprobs"]
        assert [token for _, token, *_ in reported] == output
        expected = laws.gather(1, torch.tensor(output)[:, None]).squeeze(1)
        torch.testing.assert_close(
            torch.tensor([lp for lp, *_ in reported]).double(), expected, atol=1e-4, rtol=0
        )


def test_samples_of_one_prompt_are_independent(running: Any, model: Any) -> None:
    """n = 3: each has the law, and each pair of them its square, token by token."""
    prompts, temperature = 400, 2.0
    params = {"temperature": temperature, "n": 3, "max_new_tokens": LENGTH, "ignore_eos": True}
    answers = running.generate(input_ids=[list(PROMPT)] * prompts, sampling_params=params)
    tokens = torch.tensor([answer["output_ids"] for answer in answers]).view(prompts, 3, LENGTH)
    law = token_laws(model, temperature, keep_all)
    for place in range(LENGTH):
        own = law.sum([other for other in range(LENGTH) if other != place])
        for i, j in combinations(range(3), 2):
            pairs = tokens[:, i, place] * VOCAB + tokens[:, j, place]
            counts = pairs.bincount(minlength=VOCAB**2).view(VOCAB, VOCAB)
            assert p_value(counts, own[:, None] * own) > SIGNIFICANCE
            assert p_value(counts.sum(1), own) > SIGNIFICANCE
            assert p_value(counts.sum(0), own) > SIGNIFICANCE
