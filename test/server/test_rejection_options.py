"""Both sampling rules with options that depend on the output: the law is still the target's.

All options meet in the same batches, with greedy requests among them. The law is computed prefix by
prefix from HF's logits, in SGLang's order: penalties, minimal length, repetition, grammar, bias,
temperature, filters.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from chi_square import p_value
from configurations import OVERLAP, REJECTION, Configuration, by_name
from engines import engine, play
from test_rejection import (
    SIGNIFICANCE,
    keep_all,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    passes_by_kept_drafts,
)
from workloads import Request

pytestmark = [pytest.mark.server, pytest.mark.slow]

VOCAB = 16
EOS = VOCAB - 1  # the others are the letters a to o
ENDED = VOCAB  # in a law: the output has ended
PROMPT = (3, 9, 1, 12, 7)
LENGTH = 4  # token 1 is the prefill's; a block is 4 tokens wide
SAMPLES = 1000
WORDS = "[a-f]([g-k][a-d]?|l[h-o]|b)"


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


LANGUAGE = frozenset(
    ids
    for length in range(1, LENGTH)
    for ids in product(range(EOS), repeat=length)
    if re.fullmatch(WORDS, text_of(ids))
)


@dataclass(frozen=True)
class Case:
    """Request parameters; `keep` filters a law [V] as top-k, top-p and min-p do."""

    temperature: float
    params: dict[str, Any] = field(default_factory=dict)
    keep: Callable[[torch.Tensor], torch.Tensor] = keep_all

    @property
    def request(self) -> Request:
        return Request(PROMPT, -1, LENGTH, {"temperature": self.temperature, **self.params})


def keep_mixed(law: torch.Tensor) -> torch.Tensor:
    """What all three filters keep; each looks at the whole law."""
    kept = (keep_top_k(law) > 0) & (keep_top_p(law) > 0) & (keep_min_p(law) > 0)
    return law * kept


MIXED = {"top_k": 4, "top_p": 0.7, "min_p": 0.2}
BIAS = {"2": 3.0, "5": -4.0, "8": 2.0}
STOPS = list(range(0, EOS, 2))
GRAMMAR = {"regex": WORDS, "ignore_eos": False}
CASES = {
    "frequency": Case(2.0, {"frequency_penalty": -2.0}),
    "presence": Case(2.0, {"presence_penalty": 2.0, "frequency_penalty": 1.0}),
    "repetition, bias": Case(3.0, {"repetition_penalty": 2.0, "logit_bias": BIAS}),
    "minimal length": Case(4.0, {"min_new_tokens": 3, "stop_token_ids": STOPS}),
    "filters": Case(4.0, {**MIXED, "frequency_penalty": 2.0}, keep_mixed),
    "grammar": Case(4.0, GRAMMAR),
    "grammar, penalty, bias": Case(3.0, {**GRAMMAR, "presence_penalty": -2.0, "logit_bias": BIAS}),
    "grammar, filters": Case(5.0, {**GRAMMAR, **MIXED}, keep_mixed),
}


def next_law(case: Case, logits: torch.Tensor, output: tuple[int, ...]) -> torch.Tensor:
    """The law [V] of the token after `output`; the model's logits [V] stay."""
    params, logits = case.params, logits.clone()
    for token, count in Counter(output).items():
        logits[token] -= params.get("frequency_penalty", 0.0) * count
        logits[token] -= params.get("presence_penalty", 0.0)
    if len(output) < params.get("min_new_tokens", 0):
        logits[[EOS, *params["stop_token_ids"]]] = -torch.inf
    for token in set(output):
        scale = params.get("repetition_penalty", 1.0)
        logits[token] *= scale if logits[token] < 0 else 1 / scale
    if "regex" in params:
        longer = {
            word[len(output)]
            for word in LANGUAGE
            if word[: len(output)] == output[:] and len(word) > len(output)
        }
        allowed = longer | ({EOS} if output in LANGUAGE else set())
        forbidden = sorted(set(range(VOCAB)) - allowed)
        logits[forbidden] = -torch.inf
    for token, bias in params.get("logit_bias", {}).items():
        logits[int(token)] += bias
    law = case.keep(torch.softmax(logits / case.temperature, -1))
    return law / law.sum()


def output_law(model: Any, case: Case) -> torch.Tensor:
    """The law [V + 1] * LENGTH of the output, which may end early."""
    stops = set(case.params.get("stop_token_ids", ()))
    if stops or "regex" in case.params:
        stops.add(EOS)
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        running = [ids for ids in law if not ids or ids[-1] not in {*stops, ENDED}]
        for ids in law.keys() - set(running):
            longer[(*ids, ENDED)] = law[ids]
        with torch.no_grad():
            rows = model(torch.tensor([PROMPT + ids for ids in running])).logits[:, -1].double()
        for ids, logits in zip(running, rows, strict=True):
            for token, p in enumerate(next_law(case, logits, ids).tolist()):
                if p:
                    longer[(*ids, token)] = law[ids] * p
        law = longer
    table = torch.zeros([VOCAB + 1] * LENGTH, dtype=torch.float64)
    for ids, p in law.items():
        table[ids] = p
    return table


def letters_tokenizer() -> Any:
    """One letter per token; the last id ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text_of((token,)): token for token in range(EOS)} | {"<end>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_models.make_target(
        tmp_path_factory.mktemp("small"), vocab_size=VOCAB, eos_token_id=EOS
    )
    letters_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


# Most random drafters' likeliest tokens are hardly ever what the grammars allow.
FITTING = {"seed": 18}
CONFIGURATIONS = (
    Configuration("overlap", env=OVERLAP, server=REJECTION),
    Configuration("no-overlap", server=REJECTION),
    Configuration("match", FITTING, env=OVERLAP),
    Configuration("match-no-overlap", FITTING),
)


@pytest.fixture(scope="module", params=by_name(CONFIGURATIONS))
def answers(
    target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    """Each case's samples, all of them in the same batches, and greedy requests' replies."""
    drafter = tiny_models.make_drafter(
        tmp_path_factory.mktemp("drafter"),
        vocab_size=VOCAB,
        block_size=4,
        dlite_config={"mask_token_id": VOCAB - 2, "sequential_rank": 15},
        **request.param.drafter,
    )
    names = [*CASES, "greedy", "greedy grammar"]
    requests = [case.request for case in CASES.values()]
    requests += [Request(PROMPT, -1, 24), Request(PROMPT, -1, 24, GRAMMAR)]
    with engine(
        target,
        drafter,
        env={"DLITE_DRAFTER_FACTORY": None, **request.param.env},
        max_running_requests=64,
        random_seed=7,
        **request.param.server,
    ) as running:
        played = play(running, requests * SAMPLES)
    return {name: played[i :: len(names)] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
def test_the_law_of_the_output(
    answers: dict[str, list[dict[str, Any]]], model: Any, name: str
) -> None:
    counts = torch.zeros([VOCAB + 1] * LENGTH)
    for answer in answers[name]:
        ids = answer["output_ids"]
        counts[tuple(ids + [ENDED] * (LENGTH - len(ids)))] += 1
    assert counts.sum() == SAMPLES
    law = output_law(model, CASES[name])
    assert not counts[law == 0].any()  # nothing that the options exclude
    places = set(range(LENGTH))
    for kept in ({0}, {1}, {2}, {3}, {0, 1}, {1, 2}, {2, 3}):
        others = tuple(places - kept)
        observed, expected = counts.sum(others), law.sum(others)
        if (expected > 0).sum() > 1:
            assert p_value(observed, expected) > SIGNIFICANCE
    # Another law than without what depends on the output: else this would test nothing new.
    plain = Case(CASES[name].temperature, {}, CASES[name].keep)
    assert (output_law(model, plain) - law).abs().sum() / 2 > 0.1


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_kept_and_rejected(answers: dict[str, list[dict[str, Any]]], name: str) -> None:
    passes = passes_by_kept_drafts(answers[name])
    assert passes[0] > SAMPLES / 20
    assert passes.total() - passes[0] > SAMPLES / 20


def test_grammars_are_obeyed(answers: dict[str, list[dict[str, Any]]]) -> None:
    for name in ("grammar", "grammar, penalty, bias", "grammar, filters", "greedy grammar"):
        for answer in answers[name]:
            ids = answer["output_ids"]
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            assert ids[-1] == EOS and tuple(ids[:-1]) in LANGUAGE


def test_greedy_requests_beside_them(answers: dict[str, list[dict[str, Any]]], model: Any) -> None:
    for name, case in (("greedy", Case(1.0)), ("greedy grammar", Case(1.0, GRAMMAR))):
        output: tuple[int, ...] = ()
        while len(output) < 24 and not ("grammar" in name and EOS in output):
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + output])).logits[0, -1].double()
            output += (int(next_law(case, logits, output).argmax()),)
        assert {tuple(answer["output_ids"]) for answer in answers[name]} == {output}
